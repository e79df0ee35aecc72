// Layer norm (centred) and RMS norm of one row of a jet of any number of directions, whose last
// stream may be the sum of the squares of some (docs/how_it_works.md, norm): stream by stream, the
// row in L1 or L2. With c and r the jets of the centred row and of rstd, of what is summed
//     y_s = w (r_0 c_s + r_s c_0 + 2 Σ r_i c_i).
#pragma once

#include "norm_rows.h"

namespace jachess {

// `bent` [n] is scratch.
template <bool centred, typename T>
JACHESS_CLONES void norm_row_sum(const JetStreams& jet, Window<const T> x, int64_t n,
                                 const T* weight, const T* bias, T eps, Window<T> y, T* mean,
                                 T* rstd, T* bent) {
  const int64_t last = jet.q + jet.pairs;
  for (int64_t s = 0; s <= last; ++s) {
    const T* from = x.p + s * x.stride;
    T sum = T(0);
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; ++i) sum += centred ? from[i] : T(0);
    mean[s] = sum / static_cast<T>(n);
  }
  const T *x0 = x.p, m0 = mean[0];
  T square = T(0), squares = T(0), slopes = T(0);
#pragma omp simd reduction(+ : square)
  for (int64_t i = 0; i < n; ++i) square += (x0[i] - m0) * (x0[i] - m0);
  const T shifted = square / static_cast<T>(n) + eps, root = inverse_root(shifted, centred);
  rstd[0] = root;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    y.p[i] = weight[i] * ((x0[i] - m0) * root) + (centred ? bias[i] : T(0));
    bent[i] = T(0);
  }
  for (int64_t s = 1; s <= last; ++s) {
    const bool second = s > jet.q;
    const T *from = x.p + s * x.stride, m = mean[s];
    T product = T(0), own = T(0);
#pragma omp simd reduction(+ : product, own)
    for (int64_t i = 0; i < n; ++i) {
      const T c = from[i] - m;
      product += (x0[i] - m0) * c;
      own += c * c;
    }
    if (second) product += squares;
    const T slope = T(2) * product / static_cast<T>(n) / shifted;
    const T r = root * (T(-0.5) * slope + (second ? T(0.75) * slopes : T(0)));
    rstd[s] = r;
    T* to = y.p + s * y.stride;
    if (s <= jet.summed) {
      squares += own;
      slopes += slope * slope;
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) bent[i] += T(2) * r * (from[i] - m);
    }
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      const T linear = (from[i] - m) * root + (x0[i] - m0) * r;
      to[i] = weight[i] * (second ? linear + bent[i] : linear);
    }
  }
}

// Writes gx = gradient through the norm (+ gsum) and adds the row's weight gradients, as
// norm_row_backward. `numbers` [4 S] is scratch.
template <bool centred, typename T>
JACHESS_CLONES void norm_row_sum_backward(const JetStreams& jet, const NormBackwardRow<T>& row,
                                          int64_t n, const T* mean, const T* rstd, T* numbers) {
  const int64_t last = jet.q + jet.pairs;
  T *gr = numbers, *gz = gr + last + 1, *gv = gz + last + 1, *centring = gv + last + 1;
  const T *x0 = row.x.p, *w = row.weight, *g_last = row.gy.p + last * row.gy.stride;
  const T m0 = mean[0], r0 = rstd[0];
  gr[0] = T(0);
  for (int64_t s = 0; s <= last; ++s) {
    const T *from = row.x.p + s * row.x.stride, *g = row.gy.p + s * row.gy.stride, m = mean[s];
    T sum = T(0), own = T(0), primal = T(0), bent = T(0);
#pragma omp simd reduction(+ : sum, own, primal)
    for (int64_t i = 0; i < n; ++i) {
      const T scaled = w[i] * g[i];
      sum += scaled;
      own += (from[i] - m) * scaled;
      primal += (x0[i] - m0) * scaled;
    }
    if (s > 0 && s <= jet.summed) {
#pragma omp simd reduction(+ : bent)
      for (int64_t i = 0; i < n; ++i) bent += (from[i] - m) * (w[i] * g_last[i]);
    }
    gz[s] = sum;
    gr[0] += own;
    if (s > 0) gr[s] = primal + T(2) * bent;
  }
  // The gradient of rsqrt_jet, with the scale-free streams a of rstd, times 2 / n.
  const T scale = T(2) * r0 / static_cast<T>(n), square = r0 * r0;
  const auto a = [&](int64_t s) { return T(-2) * (rstd[s] / r0); };
  const T h = jet.summed > 0 ? gr[last] : T(0);
  T slopes = T(0), second = T(0);
  for (int64_t s = 1; s <= jet.summed; ++s) slopes += a(s) * a(s);
  for (int64_t s = 1; s <= last; ++s) {
    const bool summed = s <= jet.summed;
    second += (s > jet.q ? a(s) + T(1.5) * slopes : a(s)) * gr[s];
    gv[s] = square * (scale * (T(-0.5) * gr[s] + (summed ? T(1.5) * a(s) * h : T(0))));
    centring[s] = r0 * gz[s] + (summed ? T(2) * rstd[s] * gz[last] : T(0));
  }
  gv[0] = square * (scale * (T(-0.5) * gr[0] + T(0.75) * second - T(1.875) * slopes * h));
  centring[0] = T(0);
  for (int64_t s = 0; s <= last; ++s) centring[0] += rstd[s] * gz[s];

  const T gv_last = gv[last];
  const auto each = [&](int64_t s, const auto& f) JACHESS_INLINE {
    const T shift = centred ? centring[s] / static_cast<T>(-n) : T(0);
    T* to = row.gx.p + s * row.gx.stride;
    const T* direct = row.gsum.p == nullptr ? nullptr : row.gsum.p + s * row.gsum.stride;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) to[i] = f(i) + shift;
    if (direct == nullptr) return;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) to[i] += direct[i];
  };
  const T* g0 = row.gy.p;
  each(0, [&](int64_t i) JACHESS_INLINE { return r0 * (w[i] * g0[i]) + gv[0] * (x0[i] - m0); });
  if (row.gweight != nullptr) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) row.gweight[i] += g0[i] * (r0 * (x0[i] - m0));
  }
  if (row.gbias != nullptr) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) row.gbias[i] += g0[i];
  }
  T* gx0 = row.gx.p;
  for (int64_t s = 1; s <= last; ++s) {
    const T *from = row.x.p + s * row.x.stride, *g = row.gy.p + s * row.gy.stride;
    const T m = mean[s], r = rstd[s], v = gv[s];
    const bool summed = s <= jet.summed;
    each(s, [&](int64_t i) JACHESS_INLINE {
      const T linear = r0 * (w[i] * g[i]) + v * (x0[i] - m0);
      return summed ? linear + T(2) * (r * (w[i] * g_last[i]) + gv_last * (from[i] - m)) : linear;
    });
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) gx0[i] += r * (w[i] * g[i]) + v * (from[i] - m);
    if (row.gweight == nullptr) continue;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      const T c = from[i] - m, z = g[i] * (c * r0 + (x0[i] - m0) * r);
      row.gweight[i] += summed ? z + g_last[i] * (T(2) * r * c) : z;
    }
  }
}

}  // namespace jachess
