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

// How many elements of S streams a thread takes at once where they are aligned: with q > 2 and
// pairs, kPack elements' streams no longer fit in registers.
struct UsualWidth {
  template <typename T, int S>
  static constexpr int of = sizeof(T) <= 4 && S <= 5 ? kPack : 1;
};

// Calls f(null pointer of T, Int<q>, Int<P>, Int<width>) and returns what it launched; n and the
// pointers as of can_pack.
template <typename Width = UsualWidth, typename F, typename... Pointers>
int dispatch_packs(const JetShape& jet, int64_t n, const F& f, Pointers... pointers) {
  return dispatch_storage(jet.storage, [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    int error = 0;
    dispatch_streams(jet.q, jet.pairs, [&](auto q, auto P) {
      constexpr int width = Width::template of<T, 1 + decltype(q)::value + decltype(P)::value>;
      error = can_pack<T>(n, pointers...) ? f(typed, q, P, Int<width>{}) : f(typed, q, P, Int<1>{});
    });
    return error;
  });
}

}  // namespace jachess
