// Packs: neighbouring elements that one load or store moves, for the kernels that are bound by
// memory. What would double their number without making them faster is asked at run time: whether
// packs are aligned, and which of the two 16-bit types a tensor holds.
#pragma once

#include <cstdint>

#include "launch.h"

namespace jachess {

struct Bits16 {  // BFloat16 or Half
  uint16_t bits;
};

// What a launch knows of the elements of its tensors.
struct Elements {
  bool aligned;  // every row falls into whole packs, each at a multiple of its size
  bool half;     // Bits16 are Half
};

template <typename T>
constexpr int kPack = sizeof(T) == 8 ? 1 : 4;

template <typename T, int width>
struct alignas(sizeof(T) * width) Pack {
  T at[width];
};

template <typename T, typename A>
__device__ inline void read(T from, const Elements&, A& to) {
  convert(from, to);
}
template <typename A>
__device__ inline void read(Bits16 from, const Elements& elements, A& to) {
  float brain, half;
  convert(BFloat16{from.bits}, brain);
  convert(Half{from.bits}, half);
  to = elements.half ? half : brain;
}
template <typename T, typename A>
__device__ inline void write(A from, const Elements&, T& to) {
  convert(from, to);
}
__device__ inline void write(float from, const Elements& elements, Bits16& to) {
  BFloat16 brain;
  Half half;
  convert(from, brain);
  convert(from, half);
  to.bits = elements.half ? half.bits : brain.bits;
}

// `width` elements of each of S streams, `stride` apart, from p on -> out[element][stream]; zeros
// for those beyond the first `valid`.
template <int S, int width, typename T, typename A>
__device__ inline void load_packs(const T* p, int64_t stride, int64_t valid,
                                  const Elements& elements, A (*out)[S]) {
  JACHESS_UNROLL
  for (int s = 0; s < S; ++s) {
    Pack<T, width> pack;
    if (elements.aligned) {
      pack = *reinterpret_cast<const Pack<T, width>*>(p + s * stride);
    } else {
      JACHESS_UNROLL
      for (int w = 0; w < width; ++w) pack.at[w] = w < valid ? p[s * stride + w] : T{};
    }
    JACHESS_UNROLL
    for (int w = 0; w < width; ++w) read(pack.at[w], elements, out[w][s]);
  }
}

template <int S, int width, typename T, typename A>
__device__ inline void store_packs(T* p, int64_t stride, int64_t valid, const Elements& elements,
                                   const A (*values)[S]) {
  JACHESS_UNROLL
  for (int s = 0; s < S; ++s) {
    Pack<T, width> pack;
    JACHESS_UNROLL
    for (int w = 0; w < width; ++w) write(values[w][s], elements, pack.at[w]);
    if (elements.aligned) {
      *reinterpret_cast<Pack<T, width>*>(p + s * stride) = pack;
    } else {
      JACHESS_UNROLL
      for (int w = 0; w < width; ++w)
        if (w < valid) p[s * stride + w] = pack.at[w];
    }
  }
}

// ---- host ---------------------------------------------------------------------------------------

// Of rows of n elements that start at these addresses, null where there is no tensor.
template <typename T, typename... Pointers>
Elements elements_of(Storage storage, int64_t n, Pointers... pointers) {
  const auto address = (reinterpret_cast<uintptr_t>(static_cast<const void*>(pointers)) | ...);
  const bool aligned = n % kPack<T> == 0 && address % (kPack<T> * sizeof(T)) == 0;
  return {aligned, storage == Storage::f16};
}

// Calls f with a null pointer of double, float or Bits16 and returns what it does.
template <typename F>
int dispatch_bytes(Storage storage, const F& f) {
  switch (storage) {
    case Storage::f64:
      return f(static_cast<double*>(nullptr));
    case Storage::f32:
      return f(static_cast<float*>(nullptr));
    default:
      return f(static_cast<Bits16*>(nullptr));
  }
}

// Calls f(null pointer, Int<q>, Int<P>) for one or two directions.
template <typename F>
int dispatch_jets(const JetShape& jet, const F& f) {
  return dispatch_bytes(jet.storage, [&](auto* typed) {
    if (jet.q == 1) return f(typed, Int<1>{}, Int<0>{});
    return jet.pairs == 0 ? f(typed, Int<2>{}, Int<0>{}) : f(typed, Int<2>{}, Int<1>{});
  });
}

}  // namespace jachess
