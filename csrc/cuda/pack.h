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

// Calls f with a null pointer of double, float or Bits16 and returns what it does.
template <typename F>
JACHESS_HD auto dispatch_bytes(Storage storage, const F& f) {
  switch (storage) {
    case Storage::f64:
      return f(static_cast<double*>(nullptr));
    case Storage::f32:
      return f(static_cast<float*>(nullptr));
    default:
      return f(static_cast<Bits16*>(nullptr));
  }
}

// ---- rows of jets -------------------------------------------------------------------------------

// W jets, of neighbouring elements.
template <typename A, int W, int S>
struct JetPack {
  A at[W][S];
};

// S streams of a row in memory, `stream` elements apart: read where T is const, else written, and
// read before where they are updated. Where data is null, zeros are read, and nothing is written.
template <int S, typename T, bool updated = false>
struct Streams {
  using Stored = std::remove_const_t<T>;
  static constexpr bool kWritten = !std::is_const_v<T>, kRead = updated || !kWritten;
  static constexpr int kStreams = S;
  T* data;
  int64_t stream;

  // The row that starts `offset` elements behind `start`, which may be null.
  __device__ inline Streams(const void* start, int64_t offset, int64_t stream)
      : data(const_cast<T*>(static_cast<const T*>(start))), stream(stream) {
    if (data != nullptr) data += offset;
  }
  // Elements from i on, zeros for those beyond the first `valid`.
  template <int W, typename A>
  __device__ inline void load(int64_t i, int64_t valid, const Elements& elements,
                              JetPack<A, W, S>& to) const {
    if constexpr (kRead) {
      if (data == nullptr) return;
      JACHESS_UNROLL
      for (int s = 0; s < S; ++s) {
        const T* from = data + s * stream + i;
        Pack<Stored, W> pack;
        if (elements.aligned) {
          pack = *reinterpret_cast<const Pack<Stored, W>*>(from);
        } else {
          JACHESS_UNROLL
          for (int w = 0; w < W; ++w) pack.at[w] = w < valid ? from[w] : Stored{};
        }
        JACHESS_UNROLL
        for (int w = 0; w < W; ++w) read(pack.at[w], elements, to.at[w][s]);
      }
    }
  }
  template <int W, typename A>
  __device__ inline void store(int64_t i, int64_t valid, const Elements& elements,
                               const JetPack<A, W, S>& from) const {
    if constexpr (kWritten) {
      if (data == nullptr) return;
      JACHESS_UNROLL
      for (int s = 0; s < S; ++s) {
        T* to = data + s * stream + i;
        Pack<T, W> pack;
        JACHESS_UNROLL
        for (int w = 0; w < W; ++w) write(from.at[w][s], elements, pack.at[w]);
        if (elements.aligned) {
          *reinterpret_cast<Pack<T, W>*>(to) = pack;
        } else {
          JACHESS_UNROLL
          for (int w = 0; w < W; ++w)
            if (w < valid) to[w] = pack.at[w];
        }
      }
    }
  }
};

// What a thread does with its packs of a row of n elements: from pack `first` on, `step` apart.
template <typename T>
struct Row {
  using A = accumulate_t<T>;
  static constexpr int W = kPack<T>;
  int64_t n, first, step;
  Elements elements;

  // Loads what is read of the pack that starts at element i, calls f(element, jets...) for each of
  // its elements with a pointer to each operand's jet, and stores what is written. Where something
  // is, f is called beyond the row's end, too.
  template <typename F, typename... Operands>
  __device__ inline void pack(int64_t i, const F& f, const Operands&... operands) const {
    const auto with = [&](auto... jets) {
      (operands.load(i, n - i, elements, jets), ...);
      JACHESS_UNROLL
      for (int w = 0; w < W; ++w)
        if ((Operands::kWritten || ...) || i + w < n) f(i + w, jets.at[w]...);
      (operands.store(i, n - i, elements, jets), ...);
    };
    with(JetPack<A, W, Operands::kStreams>()...);
  }
  // The same of all packs of this thread.
  template <typename F, typename... Operands>
  __device__ inline void sweep(const F& f, const Operands&... operands) const {
#pragma unroll 1
    for (int64_t i = first * W; i < n; i += step * W) pack(i, f, operands...);
  }
};

// ---- host ---------------------------------------------------------------------------------------

// Of rows of n elements that start at these addresses, null where there is no tensor.
template <typename T, typename... Pointers>
Elements elements_of(Storage storage, int64_t n, Pointers... pointers) {
  const auto address = (reinterpret_cast<uintptr_t>(static_cast<const void*>(pointers)) | ...);
  const bool aligned = n % kPack<T> == 0 && address % (kPack<T> * sizeof(T)) == 0;
  return {aligned, storage == Storage::f16};
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
