// What the CPU kernels share: function clones per instruction set, SIMD vectors, conversion of
// 16-bit floats, and dispatch over dtype and stream counts. No torch header here.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../jet_math.h"

// One binary for every x86-64 machine: the loader picks the best clone of each kernel.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(JACHESS_NO_CLONES)
#define JACHESS_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define JACHESS_CLONES
#endif

namespace jachess {

// 32 bytes: one register of x86-64-v3, and what GCC prefers on v4.
template <typename T>
struct VectorOf {
  typedef T type __attribute__((vector_size(32)));
  typedef T unaligned __attribute__((vector_size(32), aligned(alignof(T)), may_alias));
};

// load/store for a whole vector (V = VectorOf<T>::type) or one element (V = T).
template <typename V, typename T>
JACHESS_HD void load(V& out, const T* p) {
  if constexpr (sizeof(V) == sizeof(T)) {
    out = *p;
  } else {
    out = *reinterpret_cast<const typename VectorOf<T>::unaligned*>(p);
  }
}

template <typename V, typename T>
JACHESS_HD void store(T* p, const V& value) {
  if constexpr (sizeof(V) == sizeof(T)) {
    *p = value;
  } else {
    *reinterpret_cast<typename VectorOf<T>::unaligned*>(p) = value;
  }
}

// Sum of a vector accumulator and of the scalar one that took the row's tail.
template <typename V, typename T>
JACHESS_HD T total(const V& lanes, T tail) {
  for (unsigned l = 0; l < sizeof(V) / sizeof(T); ++l) tail += lanes[l];
  return tail;
}

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
  const uint32_t bits = float_to_bits(from);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  to.bits = static_cast<uint16_t>(from != from ? 0x7FC0u : rounded);
}
JACHESS_HD void convert(Half from, float& to) {
  const uint32_t half = from.bits;
  const uint32_t sign = (half & 0x8000u) << 16;
  const uint32_t rest = (half & 0x7FFFu) << 13;
  // Multiplying by 2^112 moves the exponent's bias and makes subnormals normal.
  const uint32_t finite = float_to_bits(bits_to_float(rest) * bits_to_float(0x77800000u));
  const uint32_t special = rest | 0x7F800000u;
  to = bits_to_float(sign | ((half & 0x7C00u) == 0x7C00u ? special : finite));
}
JACHESS_HD void convert(float from, Half& to) {  // round to nearest, ties to even
  const uint32_t bits = float_to_bits(from), sign = (bits >> 16) & 0x8000u;
  const uint32_t a = bits & 0x7FFFFFFFu;
  const uint32_t normal = (a - 0x38000000u + 0xFFFu + ((a >> 13) & 1u)) >> 13;
  // Below 2^-14: adding 1/2 leaves the half's subnormal bits, correctly rounded, in the mantissa.
  const uint32_t tiny = float_to_bits(bits_to_float(a) + 0.5f) - 0x3F000000u;
  uint32_t out = a < 0x38800000u ? tiny : normal;
  out = a >= 0x477FF000u ? 0x7C00u : out;
  out = a > 0x7F800000u ? 0x7E00u : out;
  to.bits = static_cast<uint16_t>(sign | out);
}

template <typename From, typename To>
JACHESS_CLONES void convert_array(const From* from, To* to, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) convert(from[i], to[i]);
}

template <int n>
using Int = std::integral_constant<int, n>;

// Calls f(Int<q>, Int<P>) for run-time q and P (q = 1 has no pair: P = 0).
template <typename F>
void dispatch_streams(int64_t q, int P, const F& f) {
  switch (q) {
    case 1:
      return f(Int<1>{}, Int<0>{});
    case 2:
      return P ? f(Int<2>{}, Int<1>{}) : f(Int<2>{}, Int<0>{});
    case 3:
      return P ? f(Int<3>{}, Int<3>{}) : f(Int<3>{}, Int<0>{});
    default:
      return P ? f(Int<4>{}, Int<6>{}) : f(Int<4>{}, Int<0>{});
  }
}

}  // namespace jachess
