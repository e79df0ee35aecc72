// Rows of jets along the last dimension, also of jets that are read in place although they are not
// contiguous, such as each half of a stacked gate-and-up projection.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>

#include "checks.h"

namespace jachess {

// The rows along the last dimension of [S, ..., D], per stream.
struct RowShape {
  int64_t rows, n;
};

inline RowShape row_shape(const char* op, const Tensor& x) {
  check(x.dim() >= 2, op, "x has shape ", shape_of(x),
        "; expected [S, ..., D], streams in front and the normalised dimension last.");
  int64_t rows = 1;
  for (int64_t d = 1; d + 1 < x.dim(); ++d) rows *= x.size(d);
  return {rows, x.size(x.dim() - 1)};
}

// A jet [S, ...] whose last dimension is dense and whose rows of it lie `row_stride` elements
// apart.
struct JetRows {
  Tensor tensor;
  int64_t stream_stride, row_stride;
};

inline int64_t row_length(const Tensor& t) { return t.dim() > 1 ? t.size(t.dim() - 1) : 1; }

// A contiguous tensor of t's shape, whatever its strides.
inline Tensor new_contiguous(const Tensor& t) { return torch::stable::new_empty(t, t.sizes()); }

// Whether the last dimension is dense and those between it and the streams advance at one stride.
inline bool has_rows(const Tensor& t) {
  const int64_t last = t.dim() - 1;
  if (last >= 1 && t.size(last) > 1 && t.stride(last) != 1) return false;
  int64_t expected = -1;
  for (int64_t d = last - 1; d >= 1; --d) {
    if (t.size(d) == 1) continue;
    if (expected >= 0 && t.stride(d) != expected) return false;
    expected = t.stride(d) * t.size(d);
  }
  return true;
}

// t where it lies if it has rows, else a contiguous copy.
inline JetRows jet_rows(const Tensor& t) {
  const Tensor rows = has_rows(t) ? t : torch::stable::contiguous(t);
  int64_t row_stride = row_length(rows);
  for (int64_t d = rows.dim() - 2; d >= 1; --d) {
    if (rows.size(d) == 1) continue;
    row_stride = rows.stride(d);
    break;
  }
  return {rows, rows.stride(0), row_stride};
}

// n elements per stream as rows that both jets have: a single one where both are dense.
struct RowCut {
  int64_t rows, length;
};
inline RowCut common_cut(const JetRows& a, const JetRows& b) {
  const int64_t n = a.tensor.numel() / a.tensor.size(0), length = row_length(a.tensor);
  if (n == 0 || (a.row_stride == length && b.row_stride == length)) return {1, n};
  return {n / length, length};
}

}  // namespace jachess
