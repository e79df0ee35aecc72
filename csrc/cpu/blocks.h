// Blocks of elements that stay in L1: what the pointwise kernels share.
#pragma once

#include <type_traits>

#include "simd.h"

namespace jachess {

constexpr int64_t kBlock = 256;
constexpr int64_t kGrain = 4096;  // elements a thread takes at least

// The block's streams in the accumulation type: in place, or converted into scratch.
template <typename A, typename T>
Window<const A> read_block(const T* x, int64_t stride, int64_t streams, int64_t n, A* scratch) {
  if constexpr (std::is_same_v<A, T>) {
    return {x, stride};
  } else {
    for (int64_t s = 0; s < streams; ++s) convert_array(x + s * stride, scratch + s * kBlock, n);
    return {scratch, kBlock};
  }
}

template <typename A, typename T>
Window<A> output_block(T* y, int64_t stride, A* scratch) {
  if constexpr (std::is_same_v<A, T>) {
    return {y, stride};
  } else {
    return {scratch, kBlock};
  }
}

template <typename A, typename T>
void write_block(Window<A> from, T* y, int64_t stride, int64_t streams, int64_t n) {
  if constexpr (!std::is_same_v<A, T>) {
    for (int64_t s = 0; s < streams; ++s) convert_array(from.p + s * kBlock, y + s * stride, n);
  }
}

}  // namespace jachess
