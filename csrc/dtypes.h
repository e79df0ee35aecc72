// The storage types of the operators and their conversions, for host and device. The 16-bit types
// are plain bit patterns, so that no CUDA or torch header is needed, and a kernel that reads them
// runs unchanged under the CPU shim.
#pragma once

#include <cstdint>
#include <cstring>

#include "scalar_math.h"

namespace jachess {

enum class Storage : int { f64, f32, bf16, f16 };

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

template <typename T>
struct AccumulateOf {
  using type = float;
};
template <>
struct AccumulateOf<double> {
  using type = double;
};
template <typename T>
using accumulate_t = typename AccumulateOf<T>::type;

JACHESS_HD float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
JACHESS_HD uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

template <typename A, typename T>
JACHESS_HD void convert(T from, A& to) {
  to = static_cast<A>(from);
}
JACHESS_HD void convert(BFloat16 from, float& to) {
  to = bits_to_float(static_cast<uint32_t>(from.bits) << 16);
}
JACHESS_HD void convert(float from, BFloat16& to) {  // round to nearest, ties to even; NaN stays
#if defined(__CUDA_ARCH__)
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to.bits) : "f"(from));
#else
  const uint32_t bits = float_to_bits(from);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  to.bits = static_cast<uint16_t>(from != from ? 0x7FC0u : rounded);
#endif
}
JACHESS_HD void convert(Half from, float& to) {
#if defined(__CUDA_ARCH__)
  asm("cvt.f32.f16 %0, %1;" : "=f"(to) : "h"(from.bits));
#else
  const uint32_t half = from.bits;
  const uint32_t sign = (half & 0x8000u) << 16;
  const uint32_t rest = (half & 0x7FFFu) << 13;
  // Multiplying by 2^112 moves the exponent's bias and makes subnormals normal.
  const uint32_t finite = float_to_bits(bits_to_float(rest) * bits_to_float(0x77800000u));
  const uint32_t special = rest | 0x7F800000u;
  to = bits_to_float(sign | ((half & 0x7C00u) == 0x7C00u ? special : finite));
#endif
}
JACHESS_HD void convert(float from, Half& to) {  // round to nearest, ties to even
#if defined(__CUDA_ARCH__)
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(from));
#else
  const uint32_t bits = float_to_bits(from), sign = (bits >> 16) & 0x8000u;
  const uint32_t a = bits & 0x7FFFFFFFu;
  const uint32_t normal = (a - 0x38000000u + 0xFFFu + ((a >> 13) & 1u)) >> 13;
  // Below 2^-14: adding 1/2 leaves the half's subnormal bits, correctly rounded, in the mantissa.
  const uint32_t tiny = float_to_bits(bits_to_float(a) + 0.5f) - 0x3F000000u;
  uint32_t out = a < 0x38800000u ? tiny : normal;
  out = a >= 0x477FF000u ? 0x7C00u : out;
  out = a > 0x7F800000u ? 0x7E00u : out;
  to.bits = static_cast<uint16_t>(sign | out);
#endif
}

}  // namespace jachess
