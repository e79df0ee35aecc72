// The bodies of jachess::layer_norm_jet (centred) and jachess::rms_norm_jet on the CPU: rows over
// threads, storage types, residual and weight gradients around the row algorithms of norm_rows.h.
//
// Weight gradients are summed over fixed chunks of rows, then over the chunks in order: the same
// bits whatever the number of threads.
#include <algorithm>
#include <numeric>
#include <vector>

#include "../norm_arguments.h"
#include "norm_rows.h"
#include "norm_sum.h"
#include "streams.h"
#include "tensors.h"

namespace jachess {
namespace {

constexpr int64_t kMaxChunks = 64;
constexpr int64_t kMinRowsPerChunk = 8;

// a + b in the accumulation type, rounded to the storage type.
template <typename T>
JACHESS_CLONES void add_arrays(const T* __restrict a, const T* __restrict b, T* __restrict to,
                               int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    accumulate_t<T> left, right;
    convert(a[i], left);
    convert(b[i], right);
    convert(left + right, to[i]);
  }
}

// A pointer per tensor of the forward; residual, sum and mean may be null.
template <typename T>
struct NormForwardData {
  using A = accumulate_t<T>;
  const T *x, *residual;
  const A *weight, *bias;
  T *y, *sum;
  A *mean, *rstd;
  RowShape shape;
  int64_t streams, classes;
};

// Calls run(x, weight, bias, y, mean, rstd) for every row, with room for its statistics.
template <typename T, typename Run>
void norm_rows(const NormForwardData<T>& data, int64_t begin, int64_t end, const Run& run) {
  using A = accumulate_t<T>;
  const int64_t S = data.streams;
  const int64_t n = data.shape.n, rows = data.shape.rows, stride = rows * n;
  std::vector<A> in = scratch_of<T>(S * n), out = scratch_of<T>(S * n);
  std::vector<A> mean(static_cast<size_t>(S)), rstd(static_cast<size_t>(S));
  for (int64_t r = begin; r < end; ++r) {
    const int64_t at = r * n, parameters = r % data.classes * n;
    const T* from = data.x + at;
    if (data.residual != nullptr) {
      for (int64_t s = 0; s < S; ++s)
        add_arrays(from + s * stride, data.residual + at + s * stride, data.sum + at + s * stride,
                   n);
      from = data.sum + at;
    }
    const Window<const A> x = read_streams(from, stride, S, n, in.data(), n);
    const Window<A> y = output_streams(data.y + at, stride, out.data(), n);
    run(x, data.weight + parameters, data.bias + parameters, y, mean.data(), rstd.data());
    write_streams(y, data.y + at, stride, S, n);
    for (int64_t s = 0; s < S; ++s) {
      if (data.mean != nullptr) data.mean[s * rows + r] = mean[static_cast<size_t>(s)];
      data.rstd[s * rows + r] = rstd[static_cast<size_t>(s)];
    }
  }
}

// A pointer per tensor of the backward; gsum and mean may be null.
template <typename T>
struct NormBackwardData {
  using A = accumulate_t<T>;
  const T *gy, *gsum, *x;
  const A *weight, *mean, *rstd;
  T* gx;
  RowShape shape;
  int64_t streams, classes;
};

// Calls run(row, mean, rstd) for the rows [begin, end) of one class of parameters, counted within
// it; their weight gradients are added to gweight and gbias, which may be null.
template <typename T, typename Run>
void norm_rows_backward(const NormBackwardData<T>& data, accumulate_t<T>* gweight,
                        accumulate_t<T>* gbias, int64_t of_class, int64_t begin, int64_t end,
                        const Run& run) {
  using A = accumulate_t<T>;
  const int64_t S = data.streams;
  const int64_t n = data.shape.n, rows = data.shape.rows, stride = rows * n;
  std::vector<A> in = scratch_of<T>(S * n), grad = scratch_of<T>(S * n);
  std::vector<A> grad_sum = scratch_of<T>(S * n), out = scratch_of<T>(S * n);
  std::vector<A> mean(static_cast<size_t>(S)), rstd(static_cast<size_t>(S));
  for (int64_t number = begin; number < end; ++number) {
    const int64_t r = number * data.classes + of_class;
    const int64_t at = r * n;
    NormBackwardRow<A> row = {};
    row.x = read_streams(data.x + at, stride, S, n, in.data(), n);
    row.gy = read_streams(data.gy + at, stride, S, n, grad.data(), n);
    if (data.gsum != nullptr)
      row.gsum = read_streams(data.gsum + at, stride, S, n, grad_sum.data(), n);
    row.gx = output_streams(data.gx + at, stride, out.data(), n);
    row.weight = data.weight + of_class * n;
    row.gweight = gweight;
    row.gbias = gbias;
    for (int64_t s = 0; s < S; ++s) {
      if (data.mean != nullptr) mean[static_cast<size_t>(s)] = data.mean[s * rows + r];
      rstd[static_cast<size_t>(s)] = data.rstd[s * rows + r];
    }
    run(row, mean.data(), rstd.data());
    write_streams(row.gx, data.gx + at, stride, S, n);
  }
}

// Adds the weight gradients of a class's chunks, in the first of them, in order, then those of the
// positions that share an entry.
template <typename A>
void add_chunks(A* partial, int64_t chunks, int64_t wide, int64_t positions, int64_t entries,
                A* gweight, A* gbias) {
  for (int64_t c = 1; c < chunks; ++c)
    for (int64_t i = 0; i < wide; ++i) partial[i] += partial[c * wide + i];
  for (int64_t i = 0; i < wide / positions; ++i) {
    const A* first = partial + i * positions;
    (i < entries ? gweight + i : gbias + i - entries)[0] =
        static_cast<A>(std::accumulate(first, first + positions, 0.0));
  }
}

struct Cpu {
  using Guard = NoGuard;
  static constexpr bool sums = true;

  template <bool centred>
  static void forward(const char* /*op*/, const NormForward& norm,
                      const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                      double eps) {
    dispatch_dtype(norm.x.scalar_type(), [&](auto* typed) {
      using T = std::remove_pointer_t<decltype(typed)>;
      using A = accumulate_t<T>;
      const int64_t n = norm.shape.n, all = norm.parameters.classes * n;
      const int64_t positions = norm.parameters.positions;
      const std::vector<A> w = channels(weight, all, positions, A(1));
      const std::vector<A> b = channels(bias, all, positions, A(0));
      NormForwardData<T> pointers = {};
      pointers.x = input<T>(norm.x);
      pointers.weight = w.data();
      pointers.bias = b.data();
      pointers.y = data<T>(norm.y);
      pointers.rstd = data<A>(norm.rstd);
      pointers.shape = norm.shape;
      pointers.streams = norm.x.size(0);
      pointers.classes = norm.parameters.classes;
      if (centred) pointers.mean = data<A>(*norm.mean);
      if (norm.residual.has_value()) {
        pointers.residual = input<T>(*norm.residual);
        pointers.sum = data<T>(norm.sum);
      }
      const A shift = static_cast<A>(eps);
      const auto in_parallel = [&](const auto& run_rows) {
        const int64_t grain = std::max<int64_t>(1, 8192 / (n * norm.x.size(0)));
        torch::stable::parallel_for(0, norm.shape.rows, grain, run_rows);
      };
      if (norm.streams.any) {
        return in_parallel([&](int64_t begin, int64_t end) {
          std::vector<A> bent(static_cast<size_t>(n));
          norm_rows(pointers, begin, end, [&](auto x, auto* w, auto* b, auto y, A* mean, A* rstd) {
            norm_row_sum<centred, A>(norm.streams, x, n, w, b, shift, y, mean, rstd, bent.data());
          });
        });
      }
      dispatch_streams(norm.streams.q, norm.streams.pairs, [&](auto q_, auto P_) {
        in_parallel([&](int64_t begin, int64_t end) {
          norm_rows(pointers, begin, end, [&](auto x, auto* w, auto* b, auto y, A* mean, A* rstd) {
            norm_row<centred, decltype(q_)::value, decltype(P_)::value, A>(x, n, w, b, shift, y,
                                                                           mean, rstd);
          });
        });
      });
    });
  }

  template <bool centred>
  static void backward(const char* /*op*/, const NormBackward& norm,
                       const std::optional<Tensor>& weight, bool need_weight) {
    // Chunks are of rows that share parameters.
    const int64_t classes = norm.parameters.classes, positions = norm.parameters.positions;
    const int64_t n = norm.shape.n, entries = n / positions, rows = norm.shape.rows / classes;
    const int64_t per_chunk = std::max(kMinRowsPerChunk, (rows + kMaxChunks - 1) / kMaxChunks);
    const int64_t chunks = (rows + per_chunk - 1) / per_chunk;
    dispatch_dtype(norm.x.scalar_type(), [&](auto* typed) {
      using T = std::remove_pointer_t<decltype(typed)>;
      using A = accumulate_t<T>;
      const std::vector<A> w = channels(weight, classes * n, positions, A(1));
      const NormBackwardData<T> pointers = {input<T>(norm.gy),
                                            norm.gsum.has_value() ? input<T>(*norm.gsum) : nullptr,
                                            input<T>(norm.x),
                                            w.data(),
                                            centred ? input<A>(*norm.mean) : nullptr,
                                            input<A>(norm.rstd),
                                            data<T>(norm.gx),
                                            norm.shape,
                                            norm.x.size(0),
                                            classes};
      const int64_t wide = centred ? 2 * n : n;
      std::vector<A> partial(need_weight ? static_cast<size_t>(classes * chunks * wide) : 0, A(0));
      const auto in_parallel = [&](const auto& run) {
        torch::stable::parallel_for(0, classes * chunks, 1, [&](int64_t begin, int64_t end) {
          for (int64_t c = begin; c < end; ++c) {
            A* gw = need_weight ? partial.data() + c * wide : nullptr;
            A* gb = need_weight && centred ? gw + n : nullptr;
            const int64_t first = c % chunks * per_chunk;
            norm_rows_backward(pointers, gw, gb, c / chunks, first,
                               std::min(rows, first + per_chunk), run);
          }
        });
      };
      if (norm.streams.any) {
        in_parallel([&](const NormBackwardRow<A>& row, const A* mean, const A* rstd) {
          std::vector<A> numbers(static_cast<size_t>(4 * norm.x.size(0)));
          norm_row_sum_backward<centred, A>(norm.streams, row, n, mean, rstd, numbers.data());
        });
      } else {
        dispatch_streams(norm.streams.q, norm.streams.pairs, [&](auto q_, auto P_) {
          in_parallel([&](const NormBackwardRow<A>& row, const A* mean, const A* rstd) {
            norm_row_backward<centred, decltype(q_)::value, decltype(P_)::value, A>(row, n, mean,
                                                                                    rstd);
          });
        });
      }
      for (int64_t k = 0; need_weight && k < classes; ++k)
        add_chunks(partial.data() + k * chunks * wide, chunks, wide, positions, entries,
                   data<A>(norm.gweight) + k * entries,
                   centred ? data<A>(*norm.gbias) + k * entries : nullptr);
    });
  }
};

}  // namespace
}  // namespace jachess

STABLE_TORCH_LIBRARY_IMPL(jachess, CPU, m) { jachess::NormOperators<jachess::Cpu>::add_to(m); }
