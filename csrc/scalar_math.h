// Scalar functions the jet formulas need, for float and double, on host and device.
//
// They are branch-free polynomials so that host compilers vectorise the loops they stand in; every
// coefficient was fitted for this project: relative minimax, in float by weighted least squares
// with Lawson's iteration, in double by Remez' exchange in 50 digits, then rounded. On the device
// the double versions call CUDA's library. NaN passes through all of them.
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

// exp(x) = first_scale second_scale (1 + fraction), |fraction| < 0.42. The scales are powers of two
// of half the exponent each, so that results round but once where they are subnormal.
struct ScaledExp {
  double fraction, first_scale, second_scale;
};

// The parts of exp(x + rest), |rest| < 1e-4, for every x: beyond the bounds the scales make 0 and
// infinity. The fraction's error is 3e-17 of it, and its roundings.
JACHESS_HD ScaledExp scaled_exp(double x, double rest) {
  const double magic = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to the nearest integer
  const double above = x < -746.0 ? -746.0 : x;
  const double bounded = above > 710.0 ? 710.0 : above;
  const double shifted = bounded * 1.4426950408889634 + magic;
  const double n = shifted - magic;
  // ln 2 in two parts: n * the first is exact for |n| < 2^12.
  const double r = (bounded - n * 0x1.62e42fefa4p-1) + (rest + n * 0x1.8432a1b0e2634p-43);
  double p = 2.5045888525129863e-08;
  p = p * r + 2.762222070370735e-07;
  p = p * r + 2.7557425114404824e-06;
  p = p * r + 2.480151636231361e-05;
  p = p * r + 0.0001984126970930063;
  p = p * r + 0.001388888892049901;
  p = p * r + 0.008333333333388402;
  p = p * r + 0.04166666666662;
  p = p * r + 0.16666666666666602;
  p = p * r + 0.5;
  uint64_t bits;
  std::memcpy(&bits, &shifted, sizeof(bits));
  const uint64_t twice_biased = bits - 0x4338000000000000u + 2 * 1023u;
  const uint64_t first = (twice_biased >> 1) << 52, second = (twice_biased << 52) - first;
  ScaledExp e;
  e.fraction = (p * r) * r + r;
  std::memcpy(&e.first_scale, &first, sizeof(first));
  std::memcpy(&e.second_scale, &second, sizeof(second));
  return e;
}

// exp(x) for x <= 0. Float: exactly 0 below -87.3, relative error 1.5e-7. Double: any x, subnormal
// results and infinity included, less than one unit of the last place off.
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
JACHESS_HD double exp_nonpositive(double x) {
#if defined(__CUDA_ARCH__)
  return ::exp(x);
#else
  const ScaledExp e = scaled_exp(x, 0.0);
  return (e.first_scale + e.first_scale * e.fraction) * e.second_scale;
#endif
}

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
