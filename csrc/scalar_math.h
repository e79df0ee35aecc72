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
  return std::fabs(x);
}

template <typename To, typename From>
JACHESS_HD To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// 2^exponent, negative exponents in two's complement; the result has to be a normal number.
JACHESS_HD float power_of_two(uint32_t exponent) { return bits_as<float>((exponent + 127u) << 23); }
JACHESS_HD double power_of_two(uint64_t exponent) {
  return bits_as<double>((exponent + 1023u) << 52);
}

// value * 2^exponent in two steps of half the exponent, so that nothing overflows before the result
// does, and subnormal results are right.
template <typename T, typename Bits>
JACHESS_HD T scaled(T value, Bits exponent) {
  constexpr Bits even = 1u << 12;  // makes the exponent positive
  const Bits half = ((exponent + even) >> 1) - even / 2;
  return (value * power_of_two(half)) * power_of_two(exponent - half);
}

// exp(x) = 2^exponent (1 + fraction), |fraction| < 0.42, for |x| < 1400 (float: 170).
template <typename T, typename Bits>
struct ExpParts {
  T fraction;
  Bits exponent;
};

JACHESS_HD ExpParts<float, uint32_t> exp_parts(float x) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest integer
  const float shifted = x * 1.44269504f + magic;
  const float n = shifted - magic;
  // ln 2 in two parts: n * the first is exact for |n| < 2^9.
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.3814433477818966e-3f;
  p = p * r + 8.368798531591892e-3f;
  p = p * r + 4.1668396443128586e-2f;
  p = p * r + 1.666651964187622e-1f;
  p = p * r + 4.999999403953552e-1f;
  return {(p * r) * r + r, bits_as<uint32_t>(shifted) - 0x4B400000u};
}

// The parts of exp(x + rest), |rest| < 1e-4. The fraction's error is 3e-17 of it, and roundings.
JACHESS_HD ExpParts<double, uint64_t> exp_parts(double x, double rest = 0.0) {
  const double magic = 6755399441055744.0;  // 1.5 * 2^52
  const double shifted = x * 1.4426950408889634 + magic;
  const double n = shifted - magic;
  // Here n * the first part is exact for |n| < 2^12.
  const double r = (x - n * 0x1.62e42fefa4p-1) + (rest + n * 0x1.8432a1b0e2634p-43);
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
  return {(p * r) * r + r, bits_as<uint64_t>(shifted) - 0x4338000000000000u};
}

// Beyond these bounds exp is 0 or infinite.
JACHESS_HD float exp_bounded(float x) {
  const float above = x < -104.0f ? -104.0f : x;
  return above > 89.0f ? 89.0f : above;
}
JACHESS_HD double exp_bounded(double x) {
  const double above = x < -746.0 ? -746.0 : x;
  return above > 710.0 ? 710.0 : above;
}

// exp(x) for every x. Double: less than one unit of the last place off. Float: 1.5e-7.
template <typename T>
JACHESS_HD T exp_of(T x) {
#if defined(__CUDA_ARCH__)
  return ::exp(x);
#else
  const auto e = exp_parts(exp_bounded(x));
  return scaled(T(1) + e.fraction, e.exponent);
#endif
}

// exp(x) - 1 for x <= 0, without cancellation. Double: less than 1.5 units off.
template <typename T>
JACHESS_HD T expm1_nonpositive(T x) {
#if defined(__CUDA_ARCH__)
  return ::expm1(x);
#else
  const auto e = exp_parts(exp_bounded(x));
  const T scale = scaled(T(1), e.exponent);
  return scale * e.fraction + (scale - T(1));
#endif
}

// exp(x) for x <= 0. In float, below -87.3 it is exactly 0, which spares the second step of
// scaling.
JACHESS_HD float exp_nonpositive(float x) {
#if defined(__CUDA_ARCH__)
  return expf(x);
#else
  const auto e = exp_parts(x < -87.3f ? -87.3f : x);
  const float value = (1.0f + e.fraction) * power_of_two(e.exponent);
  return x < -87.3f ? 0.0f : value;
#endif
}
JACHESS_HD double exp_nonpositive(double x) { return exp_of(x); }

// log(1 + e) for 0 <= e <= 1, as 2 atanh(s / 2), s = 2 e / (2 + e). Double: less than 2 units off.
JACHESS_HD float log1p_unit(float e) {
#if defined(__CUDA_ARCH__)
  return ::log1pf(e);
#else
  const float s = (e + e) / (2.0f + e), z = 0.25f * s * s;
  float p = 0.14006756f;
  p = p * z + 0.14000751f;
  p = p * z + 0.20010772f;
  p = p * z + 0.33333208f;
  return s + s * (z * p);
#endif
}
JACHESS_HD double log1p_unit(double e) {
#if defined(__CUDA_ARCH__)
  return ::log1p(e);
#else
  const double s = (e + e) / (2.0 + e), z = 0.25 * s * s;
  double p = 0.08505681229932835;
  p = p * z + 0.04172058793046228;
  p = p * z + 0.06052568619822264;
  p = p * z + 0.06650548747449073;
  p = p * z + 0.07693275087598418;
  p = p * z + 0.09090872198685476;
  p = p * z + 0.11111111977949703;
  p = p * z + 0.14285714274041525;
  p = p * z + 0.2000000000007769;
  p = p * z + 0.33333333333333154;
  return s + s * (z * p);
#endif
}

// The standard normal at x: exp(-x^2/2), and the upper tail at |x|, Phi(-|x|).
template <typename T>
struct Normal {
  T gauss, tail;
};

// tail = gauss * t * P(t), t = 1 / (1 + 0.27 |x|), relative error of the fit 2.4e-8 on |x| <= 15.
JACHESS_HD Normal<float> normal_at(float x) {
  const float gauss = exp_nonpositive(-0.5f * x * x);
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
  return {gauss, gauss * (p * t)};
}

// tail = gauss P(u) / (1 + |x|/4), u = (1 - |x|/4) / (1 + |x|/4), for |x| <= 40.
JACHESS_HD Normal<double> normal_at(double x) {
#if defined(__CUDA_ARCH__)
  return {::exp(-0.5 * x * x), 0.5 * ::erfc(magnitude(x) * kSqrtHalf)};
#else
  // x^2 = high^2 + (x - high)(x + high): 26 bits of x have an exact square.
  const double high = bits_as<double>(bits_as<uint64_t>(x) & ~((uint64_t{1} << 27) - 1));
  const auto e = exp_parts(-0.5 * (high * high), -0.5 * ((x - high) * (x + high)));
  const double a = magnitude(x), u = (5.0 - a) / (5.0 + a);
  // The higher powers, even and odd ones apart: two short chains of operations, not a long one.
  const double z = u * u;
  double p = -3.705084371233783e-09;
  p = p * z + 3.000651536078235e-08;
  p = p * z - 1.877934461406662e-07;
  p = p * z + 1.2447909423784227e-06;
  p = p * z - 8.723571085293314e-06;
  p = p * z + 5.3352610256536724e-05;
  p = p * z - 4.345896227576478e-05;
  p = p * z - 0.005890120125814271;
  p = p * z - 0.018317645927295675;
  p = p * z + 0.011482427513074945;
  double q = 6.331956749031637e-10;
  q = q * z + 9.691943943155325e-10;
  q = q * z - 2.485716161815504e-08;
  q = q * z + 1.4497684272988509e-07;
  q = q * z - 2.480430673371367e-07;
  q = q * z - 8.131666680295188e-06;
  q = q * z + 0.00016628318970786447;
  q = q * z - 0.0016177541908878879;
  q = q * z - 0.01278208259930366;
  q = q * z - 0.013689465015846954;
  p = p + u * q;
  p = p * u + 0.06186114658318353;
  p = p * u + 0.12965819495101202;
  const double w = p * u;
  // What the roundings of P and of the divisor lost is added in the end.
  const double rounded_p = 0.4819475202340238 + w, below = 1.265625 + a;
  const double lost_p = w - (rounded_p - 0.4819475202340238), lost_below = a - (below - 1.265625);
  const double inverse = (0.25 * u + 0.38) * u + 0.16;  // 1 / below, roughly
  const double ratio = rounded_p / below;
  const double rest = ratio * e.fraction + (lost_p - ratio * lost_below) * inverse;
  return {scaled(1.0 + e.fraction, e.exponent), scaled(ratio + rest, e.exponent)};
#endif
}

// tanh(x), given share = sigma(-2|x|); near 0, where 1 - 2 share would cancel, an odd polynomial.
JACHESS_HD float tanh_from_share(float x, float share) {
  const float a = magnitude(x);
  const float far = 1.0f - 2.0f * share;
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
JACHESS_HD double tanh_from_share(double x, double share) {
#if defined(__CUDA_ARCH__)
  return ::tanh(x);
#else
  const double a = magnitude(x);
  const double far = 1.0 - 2.0 * share;
  const double near_x = a < 0.55 ? a : 0.55;
  const double z = near_x * near_x;
  double p = 5.100970635719611e-05;
  p = p * z - 0.0002102855266217261;
  p = p * z + 0.0005791267750916836;
  p = p * z - 0.001453213330801996;
  p = p * z + 0.0035917190086963815;
  p = p * z - 0.00886319441899899;
  p = p * z + 0.02186948596846947;
  p = p * z - 0.05396825387581317;
  p = p * z + 0.1333333333316816;
  p = p * z - 0.3333333333333231;
  const double near = near_x + near_x * (z * p);
  const double value = a < 0.55 ? near : far;
  return x < 0.0 ? -value : value;
#endif
}

template <typename T>
struct SinCos {
  T sin, cos;
};

// Up to which |x| sin_cos is right on the host; beyond it, take the standard library.
constexpr double kSinCosBound = 1e6;

// x less n quarter turns is within [-pi/4, pi/4]; n chooses function and sign.
JACHESS_HD SinCos<double> sin_cos(double x) {
#if defined(__CUDA_ARCH__)
  SinCos<double> result;
  ::sincos(x, &result.sin, &result.cos);
  return result;
#else
  const double magic = 6755399441055744.0;
  const double a = magnitude(x);
  const double shifted = a * 0.6366197723675814 + magic;
  const double n = shifted - magic;
  // pi/2 in four parts. Three times n, n < 2^20, they are exact; what the differences lose to
  // rounding, and the fourth, are in `low`.
  const double once = a - n * 0x1.921fb544p+0;
  const double second = n * 0x1.0b4611a6p-34, twice = once - second;
  const double third = n * 0x1.3198a2ep-69, thrice = twice - third;
  const double low =
      ((once - twice) - second) + (((twice - thrice) - third) - n * 0x1.b839a252049c1p-104);
  const double r = thrice + low, rest = (thrice - r) + low, z = r * r;
  double p = 1.5896505749263533e-10;
  p = p * z - 2.50507532789131e-08;
  p = p * z + 2.7557313662153816e-06;
  p = p * z - 0.00019841269829725503;
  p = p * z + 0.008333333333322316;
  p = p * z - 0.16666666666666632;
  const double sin = r + (r * (z * p) + rest);
  double w = -1.1359448536884533e-11;
  w = w * z + 2.0875719555591615e-09;
  w = w * z - 2.755731432600568e-07;
  w = w * z + 2.4801587289394835e-05;
  w = w * z - 0.001388888888887399;
  w = w * z + 0.0416666666666666;
  const double cos = 1.0 - (0.5 * z - (z * (z * w) - r * rest));
  const uint64_t turns = bits_as<uint64_t>(shifted), sign = uint64_t{1} << 63;
  const uint64_t sin_bits = bits_as<uint64_t>(sin), cos_bits = bits_as<uint64_t>(cos);
  const uint64_t swap = (sin_bits ^ cos_bits) & (uint64_t{0} - (turns & 1));
  const uint64_t sin_sign = (turns << 62) ^ bits_as<uint64_t>(x), cos_sign = (turns + 1) << 62;
  return {bits_as<double>((sin_bits ^ swap) ^ (sin_sign & sign)),
          bits_as<double>((cos_bits ^ swap) ^ (cos_sign & sign))};
#endif
}
JACHESS_HD SinCos<float> sin_cos(float x) {
#if defined(__CUDA_ARCH__)
  SinCos<float> result;
  ::sincosf(x, &result.sin, &result.cos);
  return result;
#else
  const SinCos<double> wide = sin_cos(static_cast<double>(x));
  return {static_cast<float>(wide.sin), static_cast<float>(wide.cos)};
#endif
}

}  // namespace jachess
