// The arithmetic of truncated 2-jets, for host and device, in one place; the formulas are in
// docs/how_it_works.md.
//
// A jet has S = 1 + q + P streams: primal x[0], first order x[1..q], and either no (P = 0) or all
// (P = q(q-1)/2) mixed second-order streams, pairs i < j in lexicographic order. Functions here
// work on one element: arrays of S values, where a value is a scalar or a SIMD vector.
#pragma once

#include "scalar_math.h"

#if defined(__CUDACC__)
#define JACHESS_UNROLL _Pragma("unroll")
#else
#define JACHESS_UNROLL _Pragma("GCC unroll 16")
#endif

namespace jachess {

constexpr int kMaxDirections = 4;
constexpr int kMaxStreams = 1 + kMaxDirections + kMaxDirections * (kMaxDirections - 1) / 2;

JACHESS_HD constexpr int pair_count(int q) { return q * (q - 1) / 2; }

// Stream of the mixed derivative along directions i < j (both counted from 0).
template <int q>
JACHESS_HD constexpr int pair_stream(int i, int j) {
  return 1 + q + i * (q - 1) - i * (i - 1) / 2 + (j - i - 1);
}

// Calls f(i, j, stream) for every pair of directions i < j, unrolled; for none with P = 0. Mark the
// lambda JACHESS_INLINE, so that each clone of a kernel compiles it for its own instruction set.
template <int q, int P, typename F>
JACHESS_HD void for_each_pair(const F& f) {
  if constexpr (P > 0) {
    JACHESS_UNROLL
    for (int i = 0; i < q; ++i) {
      JACHESS_UNROLL
      for (int j = i + 1; j < q; ++j) f(i, j, pair_stream<q>(i, j));
    }
  }
}

// ---- pointwise functions: f, f', f'', f''' -------------------------------------------------

template <typename T>
struct Derivatives {
  T f0, f1, f2, f3;
};

enum class Activation : int {
  gelu,
  gelu_tanh,
  relu,
  silu,
  tanh,
  sigmoid,
  quick_gelu,
  softplus,
  elu,
  mish,
  sin,
  cos,
  exp
};

// Expanded by every place that must know all kinds. To add a kind, add it to the enum and to this
// list, and specialise ActivationOf below.
#define JACHESS_FOR_EACH_ACTIVATION(DO) \
  DO(gelu)                              \
  DO(gelu_tanh)                         \
  DO(relu)                              \
  DO(silu) DO(tanh) DO(sigmoid) DO(quick_gelu) DO(softplus) DO(elu) DO(mish) DO(sin) DO(cos) DO(exp)

// sigma(v) and its first three derivatives in v, given e = exp(-|v|), without cancellation for
// either sign of v.
template <typename T>
JACHESS_HD Derivatives<T> sigmoid_derivatives(T v, T e) {
  const T inverse = T(1) / (T(1) + e);
  const T s = v < T(0) ? e * inverse : inverse;
  const T one_minus_2s = (v < T(0) ? T(1) - e : e - T(1)) * inverse;
  const T s1 = e * inverse * inverse;
  return {s, s1, s1 * one_minus_2s, s1 * (T(1) - T(6) * s1)};
}

template <typename T>
JACHESS_HD Derivatives<T> sigmoid_derivatives(T v) {
  return sigmoid_derivatives(v, exp_nonpositive(-magnitude(v)));
}

// x w(x), for w and its derivatives at `x_bounded`, beyond which w is saturated to the last bit:
// unbounded powers of x would turn 0 * inf into NaN there.
template <typename T>
JACHESS_HD Derivatives<T> times_x(T x, T x_bounded, const Derivatives<T>& w) {
  return {x * w.f0, w.f0 + x_bounded * w.f1, T(2) * w.f1 + x_bounded * w.f2,
          T(3) * w.f2 + x_bounded * w.f3};
}

template <Activation kind, typename T>
struct ActivationOf;

template <typename T>
struct ActivationOf<Activation::gelu, T> {  // x Phi(x)
  static JACHESS_HD Derivatives<T> at(T x) {
    const T b = clamp_magnitude(x, T(40));  // exp(-40^2/2) is 0 in double
    const Normal<T> normal = normal_at(b);
    const T cdf = b < T(0) ? normal.tail : T(1) - normal.tail;
    const T pdf = T(kInvSqrt2Pi) * normal.gauss;
    return times_x(x, b, {cdf, pdf, -b * pdf, (b * b - T(1)) * pdf});
  }
};

template <typename T>
struct ActivationOf<Activation::gelu_tanh, T> {  // x (1 + tanh u) / 2 = x sigma(2u)
  static JACHESS_HD Derivatives<T> at(T x) {
    const T c = T(2 * kSqrt2OverPi), a = T(0.044715);
    const T b = clamp_magnitude(x, T(22));  // sigma(2u) is 0 or 1 to the last bit in double
    const Derivatives<T> s = sigmoid_derivatives(c * (b + a * b * b * b));
    const T v1 = c * (T(1) + T(3) * a * b * b), v2 = T(6) * c * a * b, v3 = T(6) * c * a;
    return times_x(x, b,
                   {s.f0, s.f1 * v1, s.f2 * v1 * v1 + s.f1 * v2,
                    s.f3 * v1 * v1 * v1 + T(3) * s.f2 * v1 * v2 + s.f1 * v3});
  }
};

template <typename T>
struct ActivationOf<Activation::relu, T> {  // f'(0) = 0, as torch has it
  static JACHESS_HD Derivatives<T> at(T x) {
    return {x < T(0) ? T(0) : x, x > T(0) ? T(1) : T(0), T(0), T(0)};
  }
};

template <typename T>
struct ActivationOf<Activation::silu, T> {  // x sigma(x)
  static JACHESS_HD Derivatives<T> at(T x) {
    const T b = clamp_magnitude(x, T(800));
    return times_x(x, b, sigmoid_derivatives(b));
  }
};

template <typename T>
struct ActivationOf<Activation::quick_gelu, T> {  // x sigma(1.702 x)
  static JACHESS_HD Derivatives<T> at(T x) {
    const T b = clamp_magnitude(x, T(500)), c = T(1.702);
    const Derivatives<T> s = sigmoid_derivatives(c * b);
    return times_x(x, b, {s.f0, c * s.f1, c * c * s.f2, c * c * c * s.f3});
  }
};

template <typename T>
struct ActivationOf<Activation::sigmoid, T> {
  static JACHESS_HD Derivatives<T> at(T x) { return sigmoid_derivatives(x); }
};

template <typename T>
struct ActivationOf<Activation::tanh, T> {  // tanh x = 2 sigma(2x) - 1
  static JACHESS_HD Derivatives<T> at(T x) {
    const T e = exp_nonpositive(T(-2) * magnitude(x));
    const T inverse = T(1) / (T(1) + e);
    const T value = tanh_from_share(x, e * inverse);
    const T f1 = T(4) * (e * inverse) * inverse;
    return {value, f1, T(-2) * value * f1, f1 * (T(4) - T(6) * f1)};
  }
};

template <typename T>
struct ActivationOf<Activation::softplus, T> {  // log(1 + exp x), and x beyond 20, as torch has it
  static JACHESS_HD Derivatives<T> at(T x) {
    const T e = exp_nonpositive(-magnitude(x));
    const Derivatives<T> s = sigmoid_derivatives(x, e);
    const bool linear = x > T(20);
    return {linear ? x : (x < T(0) ? T(0) : x) + log1p_unit(e), linear ? T(1) : s.f0,
            linear ? T(0) : s.f1, linear ? T(0) : s.f2};
  }
};

template <typename T>
struct ActivationOf<Activation::elu, T> {  // x or exp(x) - 1
  static JACHESS_HD Derivatives<T> at(T x) {
    const T below = x > T(0) ? T(0) : x;
    const bool linear = x > T(0);
    const T e = exp_of(below), bent = linear ? T(0) : e;
    return {linear ? x : expm1_nonpositive(below), e, bent, bent};
  }
};

template <typename T>
struct ActivationOf<Activation::mish, T> {  // x t, t = tanh(softplus(x)): t' = (1 - t^2) sigma(x)
  static JACHESS_HD Derivatives<T> at(T x) {
    const T b = clamp_magnitude(x, T(800));  // t' is 0 there
    const T e = exp_nonpositive(-magnitude(b));
    const Derivatives<T> s = sigmoid_derivatives(b, e);
    // t = n / d and 1 - t = m / d, with powers of exp(-|x|), none of which overflows
    const bool negative = b < T(0);
    const T n = negative ? e * (T(2) + e) : T(1) + (e + e);
    const T m = negative ? T(2) : T(2) * e * e;
    const T inverse = T(1) / (n + m);
    const T t = n * inverse, w = (m * inverse) * (T(1) + t);
    const T t1 = w * s.f0, t2 = w * s.f1 - T(2) * t * t1 * s.f0;
    const T t3 = w * s.f2 - T(4) * t * t1 * s.f1 - T(2) * s.f0 * (t1 * t1 + t * t2);
    return times_x(x, b, {t, t1, t2, t3});
  }
};

template <typename T>
struct ActivationOf<Activation::sin, T> {
  static JACHESS_HD Derivatives<T> of(const SinCos<T>& v) { return {v.sin, v.cos, -v.sin, -v.cos}; }
  static JACHESS_HD Derivatives<T> at(T x) { return of(sin_cos(x)); }
};

template <typename T>
struct ActivationOf<Activation::cos, T> {
  static JACHESS_HD Derivatives<T> of(const SinCos<T>& v) { return {v.cos, -v.sin, -v.cos, v.sin}; }
  static JACHESS_HD Derivatives<T> at(T x) { return of(sin_cos(x)); }
};

template <typename T>
struct ActivationOf<Activation::exp, T> {
  static JACHESS_HD Derivatives<T> at(T x) {
    const T e = exp_of(x);
    return {e, e, e, e};
  }
};

// ---- jet rules and their reverse -------------------------------------------------------------

// y_i = f' x_i;  y_ij = f' x_ij + f'' x_i x_j.  y[0] is left alone: f itself is the caller's.
template <int q, int P, typename T, typename F>
JACHESS_HD void pointwise_jet(const F& f1, const F& f2, const T* x, T* y) {
  JACHESS_UNROLL
  for (int i = 0; i < q; ++i) y[1 + i] = f1 * x[1 + i];
  for_each_pair<q, P>([&](int i, int j, int ij) JACHESS_INLINE {
    const T product = x[1 + i] * x[1 + j];
    y[ij] = f1 * x[ij] + f2 * product;
  });
}

// The gradient of pointwise_jet (with y_0 = f) in every stream of x:
//   gx_0  = f' gy_0 + f'' (sum x_i gy_i + sum x_ij gy_ij) + f''' sum x_i x_j gy_ij
//   gx_i  = f' gy_i + f'' sum_j x_j gy_ij;   gx_ij = f' gy_ij
template <int q, int P, typename T, typename F>
JACHESS_HD void pointwise_jet_backward(const F& f1, const F& f2, const F& f3, const T* x,
                                       const T* gy, T* gx) {
  T second = x[1] * gy[1];
  JACHESS_UNROLL
  for (int i = 1; i < q; ++i) second += x[1 + i] * gy[1 + i];
  JACHESS_UNROLL
  for (int i = 0; i < q; ++i) gx[1 + i] = f1 * gy[1 + i];
  T primal = f1 * gy[0];
  T third{};
  for_each_pair<q, P>([&](int i, int j, int ij) JACHESS_INLINE {
    const T scaled = f2 * gy[ij];
    second += x[ij] * gy[ij];
    third += (x[1 + i] * x[1 + j]) * gy[ij];
    gx[1 + i] += scaled * x[1 + j];
    gx[1 + j] += scaled * x[1 + i];
    gx[ij] = f1 * gy[ij];
  });
  if constexpr (P > 0) primal += f3 * third;
  gx[0] = primal + f2 * second;
}

// Leibniz: y = a b.  y_i = a_i b_0 + a_0 b_i;  y_ij = a_ij b_0 + a_i b_j + a_j b_i + a_0 b_ij.
template <int q, int P, typename T, typename B>
JACHESS_HD void product_jet(const T* a, const B* b, T* y) {
  y[0] = a[0] * b[0];
  JACHESS_UNROLL
  for (int i = 0; i < q; ++i) y[1 + i] = a[1 + i] * b[0] + a[0] * b[1 + i];
  for_each_pair<q, P>([&](int i, int j, int ij) JACHESS_INLINE {
    y[ij] = a[ij] * b[0] + a[1 + i] * b[1 + j] + a[1 + j] * b[1 + i] + a[0] * b[ij];
  });
}

// Gradient of y = a b in a, given gy and the other factor b, added to ga:
//   ga_0 += sum_s b_s gy_s;  ga_i += b_0 gy_i + sum_j b_j gy_ij;  ga_ij += b_0 gy_ij.
template <int q, int P, typename T, typename B, typename G>
JACHESS_HD void product_jet_backward_add(const B* b, const G* gy, T* ga) {
  ga[0] += b[0] * gy[0];
  JACHESS_UNROLL
  for (int i = 0; i < q; ++i) {
    ga[0] += b[1 + i] * gy[1 + i];
    ga[1 + i] += b[0] * gy[1 + i];
  }
  for_each_pair<q, P>([&](int i, int j, int ij) JACHESS_INLINE {
    ga[0] += b[ij] * gy[ij];
    ga[1 + i] += b[1 + j] * gy[ij];
    ga[1 + j] += b[1 + i] * gy[ij];
    ga[ij] += b[0] * gy[ij];
  });
}

// Gated activation y = f(g) u: the streams h of f(g) by the pointwise rule, then Leibniz with u.
template <int q, int P, typename T>
JACHESS_HD void gated_jet(const T& f0, const T& f1, const T& f2, const T* g, const T* u, T* y) {
  T h[1 + q + P];
  pointwise_jet<q, P>(f1, f2, g, h);
  h[0] = f0;
  product_jet<q, P>(h, u, y);
}

// The gradient of gated_jet in every stream of g and of u: the two rules in reverse.
template <int q, int P, typename T>
JACHESS_HD void gated_jet_backward(const Derivatives<T>& f, const T* g, const T* u, const T* gy,
                                   T* gg, T* gu) {
  T h[1 + q + P], gh[1 + q + P];
  pointwise_jet<q, P>(f.f1, f.f2, g, h);
  h[0] = f.f0;
  JACHESS_UNROLL
  for (int s = 0; s < 1 + q + P; ++s) gh[s] = gu[s] = T{};
  product_jet_backward_add<q, P>(h, gy, gu);
  product_jet_backward_add<q, P>(u, gy, gh);
  pointwise_jet_backward<q, P>(f.f1, f.f2, f.f3, g, gh, gg);
}

// Adds half the jet of c^2 in its off-primal streams (the halves are restored by
// square_jet_finish):
//   acc_0 += c_0^2;  acc_i += c_0 c_i;  acc_ij += c_0 c_ij + c_i c_j.
template <int q, int P, typename T>
JACHESS_HD void square_jet_add(const T* c, T* acc) {
  acc[0] += c[0] * c[0];
  JACHESS_UNROLL
  for (int i = 0; i < q; ++i) acc[1 + i] += c[0] * c[1 + i];
  for_each_pair<q, P>([&](int i, int j, int ij) JACHESS_INLINE {
    const T product = c[1 + i] * c[1 + j];
    acc[ij] += c[0] * c[ij] + product;
  });
}

// Sums of square_jet_add over n elements -> the jet of the mean square.
template <int q, int P, typename T>
JACHESS_HD void square_jet_finish(const T* acc, T n, T* v) {
  v[0] = acc[0] / n;
  JACHESS_UNROLL
  for (int s = 1; s < 1 + q + P; ++s) v[s] = T(2) * acc[s] / n;
}

// v^(-1/2). A variance (centred) that has overflowed gives NaN, as torch's layer and group norm do:
// with 0 a diverged model would look finite. Of a mean square torch's RMS norm makes 0.
template <typename T>
JACHESS_HD T inverse_root(T v, bool centred) {
  return T(1) / ::sqrt(v) + (centred ? v - v : T(0));
}

// Jet of r = (v + eps)^(-1/2), with a = v / v^ so that no power of v can overflow
// (docs/how_it_works.md, norm):
//   r_i = -1/2 r a_i;  r_ij = r (-1/2 a_ij + 3/4 a_i a_j).
template <int q, int P, typename T>
JACHESS_HD void rsqrt_jet(const T* v, T eps, bool centred, T* r) {
  const T shifted = v[0] + eps;
  const T root = inverse_root(shifted, centred);
  T a[1 + q + P];
  JACHESS_UNROLL
  for (int s = 1; s < 1 + q + P; ++s) a[s] = v[s] / shifted;
  pointwise_jet<q, P>(T(-0.5) * root, T(0.75) * root, a, r);
  r[0] = root;
}

// Gradient of rsqrt_jet in v, given its result r: the same rule as pointwise_jet_backward, with
// f', f'', f''' = -1/2, 3/4, -15/8 in the scale-free streams a.
template <int q, int P, typename T>
JACHESS_HD void rsqrt_jet_backward(const T* r, const T* gr, T* gv) {
  T a[1 + q + P], scaled[1 + q + P];
  JACHESS_UNROLL
  for (int s = 0; s < 1 + q + P; ++s) scaled[s] = gr[s] * r[0];
  a[0] = T(0);
  JACHESS_UNROLL
  for (int i = 0; i < q; ++i) a[1 + i] = T(-2) * (r[1 + i] / r[0]);
  for_each_pair<q, P>([&](int i, int j, int ij) JACHESS_INLINE {
    a[ij] = T(-2) * (r[ij] / r[0] - T(0.75) * a[1 + i] * a[1 + j]);
  });
  pointwise_jet_backward<q, P>(T(-0.5), T(0.75), T(-1.875), a, scaled, gv);
  const T square = r[0] * r[0];
  JACHESS_UNROLL
  for (int s = 0; s < 1 + q + P; ++s) gv[s] *= square;
}

}  // namespace jachess
