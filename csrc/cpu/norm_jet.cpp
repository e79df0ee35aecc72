// The bodies of jachess::layer_norm_jet (centred) and jachess::rms_norm_jet on the CPU: rows over
// threads, storage types, residual and weight gradients around the row algorithms of norm_rows.h.
//
// Weight gradients are summed over fixed chunks of rows, then over the chunks in order: the same
// bits whatever the number of threads.
#include <algorithm>
#include <vector>

#include "../norm_arguments.h"
#include "norm_rows.h"
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
};

template <bool centred, int q, int P, typename T>
void norm_rows(const NormForwardData<T>& data, double eps, int64_t begin, int64_t end) {
  using A = accumulate_t<T>;
  constexpr int S = 1 + q + P;
  const int64_t n = data.shape.n, rows = data.shape.rows, stride = rows * n;
  std::vector<A> in = scratch_of<T>(S * n), out = scratch_of<T>(S * n);
  for (int64_t r = begin; r < end; ++r) {
    const int64_t at = r * n;
    const T* from = data.x + at;
    if (data.residual != nullptr) {
      for (int64_t s = 0; s < S; ++s)
        add_arrays(from + s * stride, data.residual + at + s * stride, data.sum + at + s * stride,
                   n);
      from = data.sum + at;
    }
    const Window<const A> x = read_streams(from, stride, S, n, in.data(), n);
    const Window<A> y = output_streams(data.y + at, stride, out.data(), n);
    A mean[S], rstd[S];
    norm_row<centred, q, P, A>(x, n, data.weight, data.bias, static_cast<A>(eps), y, mean, rstd);
    write_streams(y, data.y + at, stride, S, n);
    for (int s = 0; s < S; ++s) {
      if constexpr (centred) data.mean[s * rows + r] = mean[s];
      data.rstd[s * rows + r] = rstd[s];
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
};

// The rows [begin, end); their weight gradients are added to gweight and gbias, which may be null.
template <bool centred, int q, int P, typename T>
void norm_rows_backward(const NormBackwardData<T>& data, accumulate_t<T>* gweight,
                        accumulate_t<T>* gbias, int64_t begin, int64_t end) {
  using A = accumulate_t<T>;
  constexpr int S = 1 + q + P;
  const int64_t n = data.shape.n, rows = data.shape.rows, stride = rows * n;
  std::vector<A> in = scratch_of<T>(S * n), grad = scratch_of<T>(S * n);
  std::vector<A> grad_sum = scratch_of<T>(S * n), out = scratch_of<T>(S * n);
  for (int64_t r = begin; r < end; ++r) {
    const int64_t at = r * n;
    NormBackwardRow<A> row = {};
    row.x = read_streams(data.x + at, stride, S, n, in.data(), n);
    row.gy = read_streams(data.gy + at, stride, S, n, grad.data(), n);
    if (data.gsum != nullptr)
      row.gsum = read_streams(data.gsum + at, stride, S, n, grad_sum.data(), n);
    row.gx = output_streams(data.gx + at, stride, out.data(), n);
    row.weight = data.weight;
    row.gweight = gweight;
    row.gbias = gbias;
    A mean[S], rstd[S];
    for (int s = 0; s < S; ++s) {
      if constexpr (centred) mean[s] = data.mean[s * rows + r];
      rstd[s] = data.rstd[s * rows + r];
    }
    norm_row_backward<centred, q, P, A>(row, n, mean, rstd);
    write_streams(row.gx, data.gx + at, stride, S, n);
  }
}

// Adds the chunks' weight gradients in order.
template <typename A>
void add_chunks(const std::vector<A>& partial, int64_t chunks, int64_t n, A* gweight, A* gbias) {
  const int64_t per_chunk = gbias != nullptr ? 2 * n : n;
  for (int64_t c = 0; c < chunks; ++c) {
    const A* chunk = &partial[static_cast<size_t>(c * per_chunk)];
    for (int64_t i = 0; i < n; ++i) gweight[i] = c == 0 ? chunk[i] : gweight[i] + chunk[i];
    if (gbias == nullptr) continue;
    for (int64_t i = 0; i < n; ++i) gbias[i] = c == 0 ? chunk[n + i] : gbias[i] + chunk[n + i];
  }
}

struct Cpu {
  using Guard = NoGuard;

  template <bool centred>
  static void forward(const char* /*op*/, const NormForward& norm,
                      const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                      double eps, int64_t q) {
    dispatch_dtype(norm.x.scalar_type(), [&](auto* typed) {
      using T = std::remove_pointer_t<decltype(typed)>;
      using A = accumulate_t<T>;
      const int64_t n = norm.shape.n;
      const std::vector<A> w = channels(weight, n, A(1)), b = channels(bias, n, A(0));
      NormForwardData<T> pointers = {};
      pointers.x = input<T>(norm.x);
      pointers.weight = w.data();
      pointers.bias = b.data();
      pointers.y = data<T>(norm.y);
      pointers.rstd = data<A>(norm.rstd);
      pointers.shape = norm.shape;
      if (centred) pointers.mean = data<A>(*norm.mean);
      if (norm.residual.has_value()) {
        pointers.residual = input<T>(*norm.residual);
        pointers.sum = data<T>(norm.sum);
      }
      const int64_t grain = std::max<int64_t>(1, 8192 / (n * norm.x.size(0)));
      dispatch_streams(q, norm.pairs, [&](auto q_, auto P_) {
        torch::stable::parallel_for(0, norm.shape.rows, grain, [&](int64_t begin, int64_t end) {
          norm_rows<centred, decltype(q_)::value, decltype(P_)::value, T>(pointers, eps, begin,
                                                                          end);
        });
      });
    });
  }

  template <bool centred>
  static void backward(const char* /*op*/, const NormBackward& norm,
                       const std::optional<Tensor>& weight, int64_t q, bool need_weight) {
    const int64_t n = norm.shape.n, rows = norm.shape.rows;
    const int64_t per_chunk = std::max(kMinRowsPerChunk, (rows + kMaxChunks - 1) / kMaxChunks);
    const int64_t chunks = (rows + per_chunk - 1) / per_chunk;
    dispatch_dtype(norm.x.scalar_type(), [&](auto* typed) {
      using T = std::remove_pointer_t<decltype(typed)>;
      using A = accumulate_t<T>;
      const std::vector<A> w = channels(weight, n, A(1));
      const NormBackwardData<T> pointers = {input<T>(norm.gy),
                                            norm.gsum.has_value() ? input<T>(*norm.gsum) : nullptr,
                                            input<T>(norm.x),
                                            w.data(),
                                            centred ? input<A>(*norm.mean) : nullptr,
                                            input<A>(norm.rstd),
                                            data<T>(norm.gx),
                                            norm.shape};
      const int64_t wide = centred ? 2 * n : n;
      std::vector<A> partial(need_weight ? static_cast<size_t>(chunks * wide) : 0, A(0));
      dispatch_streams(q, norm.pairs, [&](auto q_, auto P_) {
        torch::stable::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
          for (int64_t c = begin; c < end; ++c) {
            A* gw = need_weight ? partial.data() + c * wide : nullptr;
            A* gb = need_weight && centred ? gw + n : nullptr;
            norm_rows_backward<centred, decltype(q_)::value, decltype(P_)::value, T>(
                pointers, gw, gb, c * per_chunk, std::min(rows, (c + 1) * per_chunk));
          }
        });
      });
      if (need_weight)
        add_chunks(partial, chunks, n, data<A>(norm.gweight),
                   centred ? data<A>(*norm.gbias) : nullptr);
    });
  }
};

}  // namespace
}  // namespace jachess

STABLE_TORCH_LIBRARY_IMPL(jachess, CPU, m) { jachess::NormOperators<jachess::Cpu>::add_to(m); }
