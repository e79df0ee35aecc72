// The random numbers of jachess::sample_directions: what stands at dimension j of direction i of
// token n, as a function of (seed, offset, i, n, j) alone, the same bits on every device.
//
// Bits are Philox words (philox.h). Normals come from them by the method of Box and Muller ("A note
// on the generation of random normal deviates", 1958) in single precision, from operations that
// IEEE 754 rounds in one way only: conversion, product, fused multiply-add, square root. No product
// is ever added to anything but by `fused`, so that no compiler can fuse what another does not.
// The polynomials were fitted for this project as those of scalar_math.h.
#pragma once

#include "dtypes.h"
#include "philox.h"

namespace jachess {

// Dimensions are served in groups: lane l of a group draws one block of four words, and word w is
// dimension 32 g + 8 w + l, so that eight lanes write eight neighbours.
constexpr int kDirectionLanes = 8;
constexpr int kDirectionGroup = 4 * kDirectionLanes;
// Counter words: x = (direction, block of the token), y = token, z and w = offset.
constexpr int kBlockBits = 18;
constexpr int64_t kMaxDrawn = int64_t{1} << (32 - kBlockBits);
constexpr int64_t kMaxDimensions = (int64_t{1} << kBlockBits) * 4;
constexpr int64_t kMaxTokens = int64_t{1} << 32;
constexpr int64_t kOffsets = int64_t{1} << 62;  // philox.h: the last word stays below 2^30

enum class Distribution : int { gaussian, rademacher };

// Four values: of the same lane and words 0 to 3.
struct DirectionValues {
  float of_word[4];
};

JACHESS_HD PhiloxWords direction_words(PhiloxKey key, uint64_t offset, uint32_t direction,
                                       uint32_t token, uint32_t block) {
  return philox4x32_10({(direction << kBlockBits) | block, token, static_cast<uint32_t>(offset),
                        static_cast<uint32_t>(offset >> 32)},
                       key);
}

// a b + c, rounded once.
JACHESS_HD float fused(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}
JACHESS_HD float product(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}
JACHESS_HD float root(float a) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(a);
#else
  return __builtin_sqrtf(a);
#endif
}

// sqrt(-2 ln u) for u = (k + 1/2) / 2^31, k the word's upper 31 bits: at most 6.67. Error 2 ulp.
JACHESS_HD float rayleigh(uint32_t word) {
  const float u = fused(static_cast<float>(static_cast<int32_t>(word >> 1)), 0x1p-31f, 0x1p-32f);
  // u = m 2^e with m in [1/sqrt 2, sqrt 2): then ln u = e ln 2 + f + f^2 P(f), f = m - 1 exactly.
  const uint32_t bits = float_to_bits(u) - 0x3F3504F3u;
  const float e = static_cast<float>(static_cast<int32_t>(bits) >> 23);
  const float f = bits_to_float((bits & 0x007FFFFFu) + 0x3F3504F3u) - 1.0f;
  float p = 0.08734841f;
  p = fused(p, f, -0.14307521f);
  p = fused(p, f, 0.14917974f);
  p = fused(p, f, -0.16570508f);
  p = fused(p, f, 0.19962072f);
  p = fused(p, f, -0.25001755f);
  p = fused(p, f, 0.3333395f);
  p = fused(p, f, -0.4999999f);
  const float log_u = fused(e, 0.6931472f, fused(product(p, f), f, f));
  return root(product(-2.0f, log_u));
}

// cos and sin of 2 pi word / 2^32, times `radius`. The nearest quarter turn is taken off exactly;
// polynomials on [-pi/4, pi/4] do the rest.
JACHESS_HD void turned(float radius, uint32_t word, float& cosine, float& sine) {
  const uint32_t quarter = (word + 0x20000000u) >> 30;
  const int32_t rest = static_cast<int32_t>(word - (quarter << 30));
  const float t = product(static_cast<float>(rest), 0x1.921fb6p-30f);  // pi / 2^31
  const float t2 = product(t, t);
  float s = fused(-0.00019515284f, t2, 0.00833216f);
  s = fused(s, t2, -0.16666655f);
  s = fused(product(s, t2), t, t);
  float c = fused(2.4433157e-05f, t2, -0.0013887316f);
  c = fused(c, t2, 0.041666646f);
  c = fused(c, t2, -0.5f);
  c = fused(c, t2, 1.0f);
  const bool odd = (quarter & 1u) != 0;
  const uint32_t cosine_sign = ((quarter + 1u) & 2u) << 30, sine_sign = (quarter & 2u) << 30;
  const float x = product(radius, odd ? s : c), y = product(radius, odd ? c : s);
  cosine = bits_to_float(float_to_bits(x) ^ cosine_sign);
  sine = bits_to_float(float_to_bits(y) ^ sine_sign);
}

JACHESS_HD float random_sign(uint32_t word) {
  return bits_to_float(0x3F800000u | (word & 0x80000000u));
}

template <Distribution distribution>
JACHESS_HD DirectionValues direction_values(PhiloxWords words) {
  DirectionValues v;
  if constexpr (distribution == Distribution::gaussian) {
    turned(rayleigh(words.x), words.y, v.of_word[0], v.of_word[1]);
    turned(rayleigh(words.z), words.w, v.of_word[2], v.of_word[3]);
  } else {
    v.of_word[0] = random_sign(words.x);
    v.of_word[1] = random_sign(words.y);
    v.of_word[2] = random_sign(words.z);
    v.of_word[3] = random_sign(words.w);
  }
  return v;
}

}  // namespace jachess
