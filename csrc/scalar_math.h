// Scalar functions the jet formulas need, for float and double, on host and device.
//
// The float versions are branch-free polynomials so that host compilers vectorise the loops they
// stand in; every coefficient was fitted for this project (relative minimax, weighted least
// squares with Lawson's iteration). The double versions call the standard library: they serve
// checks, where accuracy matters and speed does not. NaN passes through all of them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#define JACHESS_INLINE __attribute__((always_inline))
#if defined(__CUDACC__)
#define JACHESS_HD __host__ __device__ __forceinline__
#else
#define JACHESS_HD inline JACHESS_INLINE
#endif

namespace jachess {

constexpr double kInvSqrt2Pi = 0.398942280401432677939946059934;
constexpr double kSqrtHalf = 0.707106781186547524400844362105;
constexpr double kSqrt2OverPi = 0.797884560802865355879892119869;

// Comparisons are ordered so that a NaN argument is returned, never replaced by a bound.
template <typename T>
JACHESS_HD T clamp_magnitude(T x, T bound) {
  T low = x < -bound ? -bound : x;
  return low > bound ? bound : low;
}

template <typename T>
JACHESS_HD T magnitude(T x) {
  return x < T(0) ? -x : x;
}

// exp(x) for x <= 0; below -87.3 (float) the result is exactly 0. Relative error 1.5e-7 (float).
JACHESS_HD float exp_nonpositive(float x) {
#if defined(__CUDA_ARCH__)
  return expf(x);
#else
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest integer
  const float bounded = x < -87.3f ? -87.3f : x;
  const float shifted = bounded * 1.44269504f + magic;
  const float n = shifted - magic;
  // ln 2 in two parts: n * hi is exact for |n| < 2^9.
  const float r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.3814433477818966e-3f;
  p = p * r + 8.368798531591892e-3f;
  p = p * r + 4.1668396443128586e-2f;
  p = p * r + 1.666651964187622e-1f;
  p = p * r + 4.999999403953552e-1f;
  const float mantissa = (p * r) * r + r + 1.0f;
  int32_t bits;
  std::memcpy(&bits, &shifted, sizeof(bits));
  bits = static_cast<int32_t>((static_cast<uint32_t>(bits) - 0x4B400000u + 127u) << 23);
  float scale;
  std::memcpy(&scale, &bits, sizeof(scale));
  const float value = mantissa * scale;
  return x < -87.3f ? 0.0f : value;
#endif
}
JACHESS_HD double exp_nonpositive(double x) { return ::exp(x); }

// Upper tail of the standard normal at |x|: Phi(-|x|), given gauss = exp(-x^2/2).
// Float: gauss * t * P(t), t = 1 / (1 + 0.27 |x|), relative error of the fit 2.4e-8 on |x| <= 15.
JACHESS_HD float normal_tail(float x, float gauss) {
  const float t = 1.0f / (1.0f + 0.27f * magnitude(x));
  float p = 2.8995472937822342e-2f;
  p = p * t - 1.2665855884552002e-1f;
  p = p * t + 1.7015600204467773e-1f;
  p = p * t - 6.965066492557526e-2f;
  p = p * t + 1.0814266651868820e-1f;
  p = p * t + 7.190825790166855e-2f;
  p = p * t + 1.0184858739376068e-1f;
  p = p * t + 1.0753726959228516e-1f;
  p = p * t + 1.0772100090980530e-1f;
  return gauss * (p * t);
}
JACHESS_HD double normal_tail(double x, double /*gauss*/) {
  return 0.5 * ::erfc(magnitude(x) * kSqrtHalf);
}

// tanh(x), given e = exp(-2|x|). Float: an odd polynomial near 0, where 1 - e would cancel.
JACHESS_HD float tanh_from_exp(float x, float e) {
  const float a = magnitude(x);
  const float far = (1.0f - e) / (1.0f + e);
  const float near_x = a < 0.55f ? a : 0.55f;
  const float z = near_x * near_x;
  float p = -6.274193059653044e-3f;
  p = p * z + 2.1071648225188255e-2f;
  p = p * z - 5.3852301090955734e-2f;
  p = p * z + 1.3332585990428925e-1f;
  p = p * z - 3.3333316445350647e-1f;
  const float near = near_x + near_x * (z * p);
  const float value = a < 0.55f ? near : far;
  return x < 0.0f ? -value : value;
}
JACHESS_HD double tanh_from_exp(double x, double /*e*/) { return ::tanh(x); }

}  // namespace jachess
