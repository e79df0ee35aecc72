// The row algorithms of layer norm (centred) and RMS norm (not centred) on jets, one row at a time
// (docs/how_it_works.md, norm).
//
// Forward: one sweep for the streams' means (layer norm), one for the mean square's jet, one to
// write; backward: one sweep for the row's sums, one to write. The row stays in L1/L2. Vectors of
// 64 bytes (two registers of x86-64-v3) give the sums two chains of additions; what is the same for
// the whole row lies in local arrays, which no store can alias.
#pragma once

#include "simd.h"

namespace jachess {

template <bool centred, int S, typename V, typename T>
JACHESS_HD void load_centred(V* out, Window<const T> x, const V* mean, int64_t i) {
  load_jet<S>(out, x, i);
  if constexpr (centred) {
    JACHESS_UNROLL
    for (int s = 0; s < S; ++s) out[s] -= mean[s];
  }
}

template <int S, typename V, typename T>
JACHESS_HD void broadcast(V* out, const T* from) {
  JACHESS_UNROLL
  for (int s = 0; s < S; ++s) out[s] = V{} + from[s];
}

template <int S, typename T>
JACHESS_HD void row_means(Window<const T> x, int64_t n, T* mean) {
  using V = typename VectorOf<T>::type;
  constexpr int64_t width = sizeof(V) / sizeof(T);
  V lanes[S] = {};
  T tail[S] = {};
  int64_t i = 0;
  for (; i + width <= n; i += width) {
    V v[S];
    load_jet<S>(v, x, i);
    JACHESS_UNROLL
    for (int s = 0; s < S; ++s) lanes[s] += v[s];
  }
  for (; i < n; ++i) {
    JACHESS_UNROLL
    for (int s = 0; s < S; ++s) tail[s] += x.p[s * x.stride + i];
  }
  JACHESS_UNROLL
  for (int s = 0; s < S; ++s) mean[s] = total(lanes[s], tail[s]) / static_cast<T>(n);
}

// The jet of rstd of one row.
template <bool centred, int q, int P, typename T>
JACHESS_HD void row_rstd(Window<const T> x, int64_t n, const T* mean, T eps, T* rstd) {
  using V = typename VectorOf<T>::type;
  constexpr int64_t width = sizeof(V) / sizeof(T);
  constexpr int S = 1 + q + P;
  V lanes[S] = {}, m[S];
  T tail[S] = {};
  broadcast<S>(m, mean);
  int64_t i = 0;
  for (; i + width <= n; i += width) {
    V c[S];
    load_centred<centred, S>(c, x, m, i);
    square_jet_add<q, P>(c, lanes);
  }
  for (; i < n; ++i) {
    T c[S];
    load_centred<centred, S>(c, x, mean, i);
    square_jet_add<q, P>(c, tail);
  }
  T sums[S], v[S];
  JACHESS_UNROLL
  for (int s = 0; s < S; ++s) sums[s] = total(lanes[s], tail[s]);
  square_jet_finish<q, P>(sums, static_cast<T>(n), v);
  rsqrt_jet<q, P>(v, eps, centred, rstd);
}

template <bool centred, int q, int P, typename V, typename T>
JACHESS_HD void normalise_at(Window<const T> x, const V* mean, const V* rstd, const T* weight,
                             const T* bias, Window<T> y, int64_t i) {
  constexpr int S = 1 + q + P;
  V c[S], z[S], w;
  load_centred<centred, S>(c, x, mean, i);
  product_jet<q, P>(c, rstd, z);
  load(w, weight + i);
  JACHESS_UNROLL
  for (int s = 0; s < S; ++s) z[s] *= w;
  if constexpr (centred) {
    V b;
    load(b, bias + i);
    z[0] += b;
  }
  store_jet<S>(y, z, i);
}

// Writes y, and the row's mean (where centred) and rstd. bias is read only where centred.
template <bool centred, int q, int P, typename T>
JACHESS_CLONES void norm_row(Window<const T> x, int64_t n, const T* weight, const T* bias, T eps,
                             Window<T> y, T* mean, T* rstd) {
  using V = typename VectorOf<T>::type;
  constexpr int64_t width = sizeof(V) / sizeof(T);
  constexpr int S = 1 + q + P;
  T own_mean[S] = {}, own_rstd[S];
  if constexpr (centred) row_means<S>(x, n, own_mean);
  row_rstd<centred, q, P>(x, n, own_mean, eps, own_rstd);
  V m[S], r[S];
  broadcast<S>(m, own_mean);
  broadcast<S>(r, own_rstd);
  int64_t i = 0;
  for (; i + width <= n; i += width) normalise_at<centred, q, P, V>(x, m, r, weight, bias, y, i);
  for (; i < n; ++i) normalise_at<centred, q, P, T>(x, own_mean, own_rstd, weight, bias, y, i);
  JACHESS_UNROLL
  for (int s = 0; s < S; ++s) {
    if constexpr (centred) mean[s] = own_mean[s];
    rstd[s] = own_rstd[s];
  }
}

// Sums over the row: of the scaled gradients gz = w gy, and of the gradient in rstd's streams.
template <bool centred, int q, int P, typename V, typename T>
JACHESS_HD void sum_gradients_at(Window<const T> x, Window<const T> gy, const V* mean,
                                 const T* weight, V* gz_sum, V* gr_sum, int64_t i) {
  constexpr int S = 1 + q + P;
  V c[S], g[S], gr[S] = {}, w;
  load_centred<centred, S>(c, x, mean, i);
  load_jet<S>(g, gy, i);
  load(w, weight + i);
  JACHESS_UNROLL
  for (int s = 0; s < S; ++s) {
    g[s] *= w;
    if constexpr (centred) gz_sum[s] += g[s];
  }
  // Apart from the sums, which then wait for one addition a step, not for S multiply-adds.
  product_jet_backward_add<q, P>(c, g, gr);
  JACHESS_UNROLL
  for (int s = 0; s < S; ++s) gr_sum[s] += gr[s];
}

// Numbers of a whole row in the backward; V is a scalar, or a vector of equal lanes.
template <typename V, int S>
struct RowGradients {
  V mean[S], rstd[S];
  V square[S];    // gradient in the jet of the mean square, times 2 / n
  V centring[S];  // mean over the row of the gradient in the centred streams, negated
};

// The tensors of one row in the backward; gsum, gweight and gbias may be null.
template <typename T>
struct NormBackwardRow {
  Window<const T> gy, gsum, x;
  const T* weight;
  Window<T> gx;
  T *gweight, *gbias;
};

template <bool centred, int q, int P, typename V, typename T>
JACHESS_HD void add_weight_gradients_at(const V* c, const V* g, const V* rstd, T* gweight, T* gbias,
                                        int64_t i) {
  constexpr int S = 1 + q + P;
  V z[S], gw;
  product_jet<q, P>(c, rstd, z);
  load(gw, gweight + i);
  JACHESS_UNROLL
  for (int s = 0; s < S; ++s) gw += g[s] * z[s];
  store(gweight + i, gw);
  if constexpr (centred) {
    V gb;
    load(gb, gbias + i);
    store(gbias + i, V(gb + g[0]));
  }
}

template <bool centred, int q, int P, typename V, typename T>
JACHESS_HD void write_gradient_at(const NormBackwardRow<T>& row,
                                  const RowGradients<V, 1 + q + P>& shared, int64_t i) {
  constexpr int S = 1 + q + P;
  V c[S], g[S], gc[S], w;
  load_centred<centred, S>(c, row.x, shared.mean, i);
  load_jet<S>(g, row.gy, i);
  if (row.gweight != nullptr)
    add_weight_gradients_at<centred, q, P>(c, g, shared.rstd, row.gweight, row.gbias, i);
  load(w, row.weight + i);
  JACHESS_UNROLL
  for (int s = 0; s < S; ++s) {
    g[s] *= w;
    if constexpr (centred) {
      gc[s] = shared.centring[s];
    } else {
      gc[s] = V{};
    }
  }
  if (row.gsum.p != nullptr) {
    V residual[S];
    load_jet<S>(residual, row.gsum, i);
    JACHESS_UNROLL
    for (int s = 0; s < S; ++s) gc[s] += residual[s];
  }
  product_jet_backward_add<q, P>(shared.rstd, g, gc);
  product_jet_backward_add<q, P>(c, shared.square, gc);
  store_jet<S>(row.gx, gc, i);
}

// Writes gx = gradient through the norm (+ gsum) and adds the row's weight gradients.
template <bool centred, int q, int P, typename T>
JACHESS_CLONES void norm_row_backward(const NormBackwardRow<T>& given, int64_t n, const T* mean,
                                      const T* rstd) {
  using V = typename VectorOf<T>::type;
  constexpr int64_t width = sizeof(V) / sizeof(T);
  constexpr int S = 1 + q + P;
  const NormBackwardRow<T> row = given;  // a local that no store can alias
  RowGradients<T, S> scalar = {};
  RowGradients<V, S> lanes;
  JACHESS_UNROLL
  for (int s = 0; s < S; ++s) {
    if constexpr (centred) scalar.mean[s] = mean[s];
    scalar.rstd[s] = rstd[s];
  }
  broadcast<S>(lanes.mean, scalar.mean);
  broadcast<S>(lanes.rstd, scalar.rstd);
  V gz_lanes[S] = {}, gr_lanes[S] = {};
  T gz[S] = {}, gr[S] = {};
  int64_t i = 0;
  for (; i + width <= n; i += width)
    sum_gradients_at<centred, q, P>(row.x, row.gy, lanes.mean, row.weight, gz_lanes, gr_lanes, i);
  for (; i < n; ++i)
    sum_gradients_at<centred, q, P>(row.x, row.gy, scalar.mean, row.weight, gz, gr, i);
  JACHESS_UNROLL
  for (int s = 0; s < S; ++s) {
    if constexpr (centred) gz[s] = total(gz_lanes[s], gz[s]);
    gr[s] = total(gr_lanes[s], gr[s]);
  }
  rsqrt_jet_backward<q, P>(scalar.rstd, gr, scalar.square);
  if constexpr (centred) product_jet_backward_add<q, P>(scalar.rstd, gz, scalar.centring);
  JACHESS_UNROLL
  for (int s = 0; s < S; ++s) {
    scalar.square[s] *= T(2) / static_cast<T>(n);
    scalar.centring[s] *= T(-1) / static_cast<T>(n);
  }
  broadcast<S>(lanes.square, scalar.square);
  broadcast<S>(lanes.centring, scalar.centring);
  i = 0;
  for (; i + width <= n; i += width) write_gradient_at<centred, q, P>(row, lanes, i);
  for (; i < n; ++i) write_gradient_at<centred, q, P>(row, scalar, i);
}

}  // namespace jachess
