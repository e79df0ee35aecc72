// jachess::layer_norm_jet and its backward on the CPU: the norm rule (spec 03), row by row.
//
// Forward: one sweep for the streams' means, one for the mean square's jet, one to write; the row
// stays in L1/L2. It saves per row the means [S] and the jet of rstd [S], so that the backward
// needs two sweeps. Weight gradients are summed over fixed chunks of rows, then over the chunks
// in order: the same bits whatever the number of threads.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "../norm_arguments.h"
#include "rows.h"

namespace jachess {
namespace {

constexpr int64_t kMaxChunks = 64;
constexpr int64_t kMinRowsPerChunk = 8;

template <int S, typename V, typename T>
JACHESS_HD void load_jet(V* out, const T* p, int64_t stride, int64_t i) {
  JACHESS_UNROLL
  for (int s = 0; s < S; ++s) load(out[s], p + s * stride + i);
}

template <int S, typename V, typename T>
JACHESS_HD void load_centered(V* out, const T* p, int64_t stride, const T* mean, int64_t i) {
  load_jet<S>(out, p, stride, i);
  JACHESS_UNROLL
  for (int s = 0; s < S; ++s) out[s] -= mean[s];
}

// Sums of every stream of one row.
template <int S, typename T>
JACHESS_HD void row_means(const T* x, int64_t stride, int64_t n, T* mean) {
  using V = typename VectorOf<T>::type;
  constexpr int64_t width = sizeof(V) / sizeof(T);
  V lanes[S] = {};
  T tail[S] = {};
  int64_t i = 0;
  for (; i + width <= n; i += width) {
    V v[S];
    load_jet<S>(v, x, stride, i);
    JACHESS_UNROLL
    for (int s = 0; s < S; ++s) lanes[s] += v[s];
  }
  for (; i < n; ++i) {
    for (int s = 0; s < S; ++s) tail[s] += x[s * stride + i];
  }
  for (int s = 0; s < S; ++s) mean[s] = total(lanes[s], tail[s]) / static_cast<T>(n);
}

// The jet of rstd of one row.
template <int q, int P, typename T>
JACHESS_HD void row_rstd(const T* x, int64_t stride, int64_t n, const T* mean, T eps, T* rstd) {
  using V = typename VectorOf<T>::type;
  constexpr int64_t width = sizeof(V) / sizeof(T);
  constexpr int S = 1 + q + P;
  V lanes[S] = {};
  T tail[S] = {};
  int64_t i = 0;
  for (; i + width <= n; i += width) {
    V c[S];
    load_centered<S>(c, x, stride, mean, i);
    square_jet_add<q, P>(c, lanes);
  }
  for (; i < n; ++i) {
    T c[S];
    load_centered<S>(c, x, stride, mean, i);
    square_jet_add<q, P>(c, tail);
  }
  T sums[S], v[S];
  for (int s = 0; s < S; ++s) sums[s] = total(lanes[s], tail[s]);
  square_jet_finish<q, P>(sums, static_cast<T>(n), v);
  rsqrt_jet<q, P>(v, eps, rstd);
}

template <int q, int P, typename V, typename T>
JACHESS_HD void write_at(const T* x, int64_t stride, const T* mean, const T* rstd, const T* weight,
                         const T* bias, T* y, int64_t y_stride, int64_t i) {
  constexpr int S = 1 + q + P;
  V c[S], z[S], w, b;
  load_centered<S>(c, x, stride, mean, i);
  load(w, weight + i);
  load(b, bias + i);
  product_jet<q, P>(c, rstd, z);
  store(y + i, V(z[0] * w + b));
  JACHESS_UNROLL
  for (int s = 1; s < S; ++s) store(y + s * y_stride + i, V(z[s] * w));
}

template <int q, int P, typename T>
JACHESS_CLONES void forward_row(const T* x, int64_t stride, int64_t n, const T* weight,
                                const T* bias, T eps, T* y, int64_t y_stride, T* mean, T* rstd) {
  using V = typename VectorOf<T>::type;
  constexpr int64_t width = sizeof(V) / sizeof(T);
  row_means<1 + q + P>(x, stride, n, mean);
  row_rstd<q, P>(x, stride, n, mean, eps, rstd);
  int64_t i = 0;
  for (; i + width <= n; i += width)
    write_at<q, P, V>(x, stride, mean, rstd, weight, bias, y, y_stride, i);
  for (; i < n; ++i) write_at<q, P, T>(x, stride, mean, rstd, weight, bias, y, y_stride, i);
}

// Gradient sums of one row: of the scaled gradients gz = w gy, and in the rstd streams.
template <int q, int P, typename V, typename T>
JACHESS_HD void reduce_at(const T* x, int64_t stride, const T* gy, int64_t gy_stride, const T* mean,
                          const T* weight, V* gz_sum, V* gr_sum, int64_t i) {
  constexpr int S = 1 + q + P;
  V c[S], g[S], w;
  load_centered<S>(c, x, stride, mean, i);
  load_jet<S>(g, gy, gy_stride, i);
  load(w, weight + i);
  JACHESS_UNROLL
  for (int s = 0; s < S; ++s) {
    g[s] *= w;
    gz_sum[s] += g[s];
  }
  product_jet_backward_add<q, P>(c, g, gr_sum);
}

template <typename T, int S>
struct RowGradients {
  T rstd[S];      // the saved jet
  T square[S];    // gradient in the jet of the mean square, times 2 / n
  T centring[S];  // mean over the row of the gradient in the centred streams
};

template <int q, int P, typename V, typename T>
JACHESS_HD void gradient_at(const T* x, int64_t stride, const T* gy, int64_t gy_stride,
                            const T* mean, const RowGradients<T, 1 + q + P>& row, const T* weight,
                            T* gx, int64_t gx_stride, T* gweight, T* gbias, int64_t i) {
  constexpr int S = 1 + q + P;
  V c[S], g[S], z[S], gc[S], w;
  load_centered<S>(c, x, stride, mean, i);
  load_jet<S>(g, gy, gy_stride, i);
  load(w, weight + i);
  if (gweight != nullptr) {
    V gw, gb;
    load(gw, gweight + i);
    load(gb, gbias + i);
    product_jet<q, P>(c, row.rstd, z);
    JACHESS_UNROLL
    for (int s = 0; s < S; ++s) gw += g[s] * z[s];
    store(gweight + i, gw);
    store(gbias + i, V(gb + g[0]));
  }
  JACHESS_UNROLL
  for (int s = 0; s < S; ++s) {
    g[s] *= w;
    gc[s] = V{} - row.centring[s];
  }
  product_jet_backward_add<q, P>(row.rstd, g, gc);
  product_jet_backward_add<q, P>(c, row.square, gc);
  JACHESS_UNROLL
  for (int s = 0; s < S; ++s) store(gx + s * gx_stride + i, gc[s]);
}

template <int q, int P, typename T>
JACHESS_CLONES void backward_row(const T* gy, int64_t gy_stride, const T* x, int64_t stride,
                                 int64_t n, const T* weight, const T* mean, const T* rstd, T* gx,
                                 int64_t gx_stride, T* gweight, T* gbias) {
  using V = typename VectorOf<T>::type;
  constexpr int64_t width = sizeof(V) / sizeof(T);
  constexpr int S = 1 + q + P;
  V gz_lanes[S] = {}, gr_lanes[S] = {};
  T gz[S] = {}, gr[S] = {};
  int64_t i = 0;
  for (; i + width <= n; i += width)
    reduce_at<q, P>(x, stride, gy, gy_stride, mean, weight, gz_lanes, gr_lanes, i);
  for (; i < n; ++i) reduce_at<q, P>(x, stride, gy, gy_stride, mean, weight, gz, gr, i);

  RowGradients<T, S> row = {};
  for (int s = 0; s < S; ++s) {
    gz[s] = total(gz_lanes[s], gz[s]);
    gr[s] = total(gr_lanes[s], gr[s]);
    row.rstd[s] = rstd[s];
  }
  rsqrt_jet_backward<q, P>(row.rstd, gr, row.square);
  product_jet_backward_add<q, P>(row.rstd, gz, row.centring);
  for (int s = 0; s < S; ++s) {
    row.square[s] *= T(2) / static_cast<T>(n);
    row.centring[s] /= static_cast<T>(n);
  }
  i = 0;
  for (; i + width <= n; i += width)
    gradient_at<q, P, V>(x, stride, gy, gy_stride, mean, row, weight, gx, gx_stride, gweight, gbias,
                         i);
  for (; i < n; ++i)
    gradient_at<q, P, T>(x, stride, gy, gy_stride, mean, row, weight, gx, gx_stride, gweight, gbias,
                         i);
}

template <int q, int P, typename T>
void forward_rows(const T* x, T* y, RowShape shape, const accumulate_t<T>* weight,
                  const accumulate_t<T>* bias, double eps, accumulate_t<T>* mean,
                  accumulate_t<T>* rstd, int64_t begin, int64_t end) {
  using A = accumulate_t<T>;
  constexpr int S = 1 + q + P;
  const int64_t stride = shape.rows * shape.n;
  std::vector<A> in, out;
  int64_t x_stride, y_stride;
  for (int64_t r = begin; r < end; ++r) {
    const A* row = read_row(x + r * shape.n, stride, S, shape.n, in, x_stride);
    A* to = output_row(y + r * shape.n, stride, S, shape.n, out, y_stride);
    A row_mean[S], row_rstd[S];
    forward_row<q, P, A>(row, x_stride, shape.n, weight, bias, static_cast<A>(eps), to, y_stride,
                         row_mean, row_rstd);
    write_row(to, y + r * shape.n, stride, S, shape.n);
    for (int s = 0; s < S; ++s) {
      mean[s * shape.rows + r] = row_mean[s];
      rstd[s * shape.rows + r] = row_rstd[s];
    }
  }
}

template <int q, int P, typename T>
void backward_rows(const T* gy, const T* x, T* gx, RowShape shape, const accumulate_t<T>* weight,
                   const accumulate_t<T>* mean, const accumulate_t<T>* rstd,
                   accumulate_t<T>* gweight, accumulate_t<T>* gbias, int64_t begin, int64_t end) {
  using A = accumulate_t<T>;
  constexpr int S = 1 + q + P;
  const int64_t stride = shape.rows * shape.n;
  std::vector<A> in, grad, out;
  int64_t x_stride, gy_stride, gx_stride;
  for (int64_t r = begin; r < end; ++r) {
    const int64_t at = r * shape.n;
    const A* row = read_row(x + at, stride, S, shape.n, in, x_stride);
    const A* g = read_row(gy + at, stride, S, shape.n, grad, gy_stride);
    A* to = output_row(gx + at, stride, S, shape.n, out, gx_stride);
    A row_mean[S], row_rstd[S];
    for (int s = 0; s < S; ++s) {
      row_mean[s] = mean[s * shape.rows + r];
      row_rstd[s] = rstd[s * shape.rows + r];
    }
    backward_row<q, P, A>(g, gy_stride, row, x_stride, shape.n, weight, row_mean, row_rstd, to,
                          gx_stride, gweight, gbias);
    write_row(to, gx + at, stride, S, shape.n);
  }
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_jet(const Tensor& x,
                                                  const std::optional<Tensor>& weight,
                                                  const std::optional<Tensor>& bias, double eps,
                                                  int64_t q) {
  const char* op = "layer_norm_jet";
  const int P = check_jet(op, "x", x, q);
  const RowShape shape = row_shape(op, x);
  check_channels(op, "weight", weight, x, shape.n);
  check_channels(op, "bias", bias, x, shape.n);
  const Tensor dense = torch::stable::contiguous(x);
  Tensor y = torch::stable::empty_like(dense);
  Tensor mean = new_statistics(dense), rstd = new_statistics(dense);
  if (shape.rows == 0 || shape.n == 0) return {y, mean, rstd};
  dispatch_dtype(dense.scalar_type(), [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    using A = accumulate_t<T>;
    const std::vector<A> w = channels(weight, shape.n, A(1)), b = channels(bias, shape.n, A(0));
    const T* from = input<T>(dense);
    T* to = data<T>(y);
    A *mean_to = data<A>(mean), *rstd_to = data<A>(rstd);
    const int64_t grain = std::max<int64_t>(1, 8192 / (shape.n * dense.size(0)));
    dispatch_streams(q, P, [&](auto q_, auto P_) {
      torch::stable::parallel_for(0, shape.rows, grain, [&](int64_t begin, int64_t end) {
        forward_rows<decltype(q_)::value, decltype(P_)::value>(from, to, shape, w.data(), b.data(),
                                                               eps, mean_to, rstd_to, begin, end);
      });
    });
  });
  return {y, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_jet_backward(const Tensor& gy, const Tensor& x,
                                                           const std::optional<Tensor>& weight,
                                                           double /*eps*/, int64_t q,
                                                           const Tensor& mean, const Tensor& rstd,
                                                           bool need_weight) {
  const char* op = "layer_norm_jet_backward";
  const int P = check_jet(op, "x", x, q);
  const RowShape shape = row_shape(op, x);
  check_same(op, "gy", gy, x);
  check_channels(op, "weight", weight, x, shape.n);
  check_statistics(op, mean, x, shape.rows);
  check_statistics(op, rstd, x, shape.rows);
  const Tensor dense = torch::stable::contiguous(x), grad = torch::stable::contiguous(gy);
  const Tensor means = torch::stable::contiguous(mean), rstds = torch::stable::contiguous(rstd);
  Tensor gx = torch::stable::empty_like(dense);
  const std::vector<int64_t> channel_shape = {need_weight ? shape.n : 0};
  Tensor gweight = new_wide_zeros(dense, channel_shape);
  Tensor gbias = new_wide_zeros(dense, channel_shape);
  if (shape.rows == 0 || shape.n == 0) return {gx, gweight, gbias};
  const int64_t per_chunk = std::max(kMinRowsPerChunk, (shape.rows + kMaxChunks - 1) / kMaxChunks);
  const int64_t chunks = (shape.rows + per_chunk - 1) / per_chunk;
  dispatch_dtype(dense.scalar_type(), [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    using A = accumulate_t<T>;
    const std::vector<A> w = channels(weight, shape.n, A(1));
    const T *from = input<T>(dense), *g = input<T>(grad);
    const A *m = input<A>(means), *r = input<A>(rstds);
    T* to = data<T>(gx);
    std::vector<A> partial(need_weight ? static_cast<size_t>(2 * chunks * shape.n) : 0, A(0));
    dispatch_streams(q, P, [&](auto q_, auto P_) {
      torch::stable::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
        for (int64_t c = begin; c < end; ++c) {
          A* gw = need_weight ? &partial[2 * c * shape.n] : nullptr;
          A* gb = need_weight ? gw + shape.n : nullptr;
          backward_rows<decltype(q_)::value, decltype(P_)::value>(
              g, from, to, shape, w.data(), m, r, gw, gb, c * per_chunk,
              std::min(shape.rows, (c + 1) * per_chunk));
        }
      });
    });
    if (!need_weight) return;
    A *gw = data<A>(gweight), *gb = data<A>(gbias);
    for (int64_t c = 0; c < chunks; ++c) {
      const A* chunk = &partial[2 * c * shape.n];
      for (int64_t i = 0; i < shape.n; ++i) {
        gw[i] += chunk[i];
        gb[i] += chunk[shape.n + i];
      }
    }
  });
  return {gx, gweight, gbias};
}

}  // namespace
}  // namespace jachess

STABLE_TORCH_LIBRARY_IMPL(jachess, CPU, m) {
  m.impl("layer_norm_jet", TORCH_BOX(&jachess::layer_norm_jet));
  m.impl("layer_norm_jet_backward", TORCH_BOX(&jachess::layer_norm_jet_backward));
}
