// Rows of stacked streams [S, ..., D]: what kernels that work along the last dimension share.
#pragma once

#include <vector>

#include "../row_layout.h"
#include "tensors.h"

namespace jachess {

// A row's streams in the accumulation type: where they lie, or converted into scratch.
template <typename A, typename T>
const A* read_row(const T* x, int64_t stream_stride, int streams, int64_t n,
                  std::vector<A>& scratch, int64_t& row_stride) {
  if constexpr (std::is_same_v<A, T>) {
    row_stride = stream_stride;
    return x;
  } else {
    row_stride = n;
    scratch.resize(static_cast<size_t>(streams * n));
    for (int s = 0; s < streams; ++s)
      convert_array(x + s * stream_stride, scratch.data() + s * n, n);
    return scratch.data();
  }
}

template <typename A, typename T>
A* output_row(T* y, int64_t stream_stride, int streams, int64_t n, std::vector<A>& scratch,
              int64_t& row_stride) {
  if constexpr (std::is_same_v<A, T>) {
    row_stride = stream_stride;
    return y;
  } else {
    row_stride = n;
    scratch.resize(static_cast<size_t>(streams * n));
    return scratch.data();
  }
}

template <typename A, typename T>
void write_row(const A* from, T* y, int64_t stream_stride, int streams, int64_t n) {
  if constexpr (!std::is_same_v<A, T>) {
    for (int s = 0; s < streams; ++s) convert_array(from + s * n, y + s * stream_stride, n);
  }
}

}  // namespace jachess
