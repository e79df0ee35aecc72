// Streams of a jet in memory, read and written in the accumulation type: where they lie if they
// have it, else converted into and out of scratch memory.
#pragma once

#include <type_traits>
#include <vector>

#include "simd.h"

namespace jachess {

// Scratch memory for `count` numbers, where T must be converted.
template <typename T, typename A = accumulate_t<T>>
std::vector<A> scratch_of(int64_t count) {
  return std::vector<A>(std::is_same_v<A, T> ? 0 : static_cast<size_t>(count));
}

// n elements of every stream, `stride` apart in memory and `scratch_stride` in scratch.
template <typename A, typename T>
Window<const A> read_streams(const T* x, int64_t stride, int64_t streams, int64_t n, A* scratch,
                             int64_t scratch_stride) {
  if constexpr (std::is_same_v<A, T>) {
    return {x, stride};
  } else {
    for (int64_t s = 0; s < streams; ++s)
      convert_array(x + s * stride, scratch + s * scratch_stride, n);
    return {scratch, scratch_stride};
  }
}

// Where the results of y go until write_streams.
template <typename A, typename T>
Window<A> output_streams(T* y, int64_t stride, A* scratch, int64_t scratch_stride) {
  if constexpr (std::is_same_v<A, T>) {
    return {y, stride};
  } else {
    return {scratch, scratch_stride};
  }
}

template <typename A, typename T>
void write_streams(Window<A> from, T* y, int64_t stride, int64_t streams, int64_t n) {
  if constexpr (!std::is_same_v<A, T>) {
    for (int64_t s = 0; s < streams; ++s)
      convert_array(from.p + s * from.stride, y + s * stride, n);
  }
}

}  // namespace jachess
