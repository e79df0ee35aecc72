// Groups of neighbouring elements that one load or store moves.
#pragma once

#include <cstdint>

#include "launch.h"

namespace jachess {

template <typename T, int width>
struct alignas(sizeof(T) * width) Pack {
  T at[width];
};

// Streams `stride` elements apart, from p on -> out[element][stream] in the accumulation type.
template <int S, int width, typename T, typename A>
__device__ inline void load_packs(const T* p, int64_t stride, A (*out)[S]) {
  JACHESS_UNROLL
  for (int s = 0; s < S; ++s) {
    const auto pack = *reinterpret_cast<const Pack<T, width>*>(p + s * stride);
    JACHESS_UNROLL
    for (int w = 0; w < width; ++w) convert(pack.at[w], out[w][s]);
  }
}

template <int S, int width, typename T, typename A>
__device__ inline void store_packs(T* p, int64_t stride, const A (*values)[S]) {
  JACHESS_UNROLL
  for (int s = 0; s < S; ++s) {
    Pack<T, width> pack;
    JACHESS_UNROLL
    for (int w = 0; w < width; ++w) convert(values[w][s], pack.at[w]);
    *reinterpret_cast<Pack<T, width>*>(p + s * stride) = pack;
  }
}

constexpr int kPack = 4;

// Whether rows of n elements that start at these addresses (null where there is no tensor) fall
// into groups of kPack, which holds where every row then starts aligned; doubles are moved one by
// one.
template <typename T, typename... Pointers>
bool can_pack(int64_t n, Pointers... pointers) {
  const auto address = (reinterpret_cast<uintptr_t>(static_cast<const void*>(pointers)) | ...);
  return sizeof(T) <= 4 && n % kPack == 0 && address % (kPack * sizeof(T)) == 0;
}

}  // namespace jachess
