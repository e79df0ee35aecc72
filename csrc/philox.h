// Philox4x32-10, the counter-based random number generator of Salmon, Moraes, Dror and Shaw,
// "Parallel random numbers: as easy as 1, 2, 3" (SC 2011): four words of random bits that are a
// function of a counter of four words and a key of two. Integers only, so host and device agree to
// the bit, and no number depends on which others were drawn, or in what order.
#pragma once

#include <cstdint>

#include "scalar_math.h"

namespace jachess {

struct PhiloxWords {
  uint32_t x, y, z, w;
};
struct PhiloxKey {
  uint32_t x, y;
};

// The key of a 64-bit seed, low word first. Uses of one seed are kept apart by the counter's last
// word: attention's dropout has one of its own, directions stay below 2^30.
JACHESS_HD PhiloxKey philox_key(uint64_t seed) {
  return {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
}

// One round: two 32 x 32 -> 64 bit products, whose halves are crossed over, and the key mixed in.
JACHESS_HD PhiloxWords philox_round(PhiloxWords c, PhiloxKey key) {
  const uint64_t a = uint64_t{0xD2511F53u} * c.x, b = uint64_t{0xCD9E8D57u} * c.z;
  return {static_cast<uint32_t>(b >> 32) ^ c.y ^ key.x, static_cast<uint32_t>(b),
          static_cast<uint32_t>(a >> 32) ^ c.w ^ key.y, static_cast<uint32_t>(a)};
}

JACHESS_HD PhiloxWords philox4x32_10(PhiloxWords counter, PhiloxKey key) {
#if defined(__CUDACC__)
#pragma unroll
#else
#pragma GCC unroll 10
#endif
  for (int round = 0; round < 10; ++round) {
    counter = philox_round(counter, key);
    key.x += 0x9E3779B9u;  // the key's Weyl sequence: golden ratio, and sqrt(3) - 1
    key.y += 0xBB67AE85u;
  }
  return counter;
}

}  // namespace jachess
