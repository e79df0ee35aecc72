// The arguments of jachess::sample_directions, as the CPU and CUDA sides both see them.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <string>
#include <vector>

#include "checks.h"
#include "direction_values.h"

namespace jachess {

inline Distribution parse_distribution(const std::string& name) {
  check(name == "gaussian" || name == "rademacher", "sample_directions", "distribution is '", name,
        "'; expected 'gaussian' or 'rademacher'.");
  return name == "gaussian" ? Distribution::gaussian : Distribution::rademacher;
}

inline void check_offset(int64_t offset) {
  check(offset >= 0 && offset < kOffsets, "sample_directions", "offset is ", offset,
        "; expected 0 to 2^62 - 1: use another seed.");
}

// Checks all arguments but seed and offset, and returns the still unwritten result, [q,
// *token.shape, d] of `dtype`.
inline Tensor new_directions(const Tensor& token, int64_t q, int64_t d, ScalarType dtype) {
  const char* op = "sample_directions";
  check(token.scalar_type() == ScalarType::Long, op, "token has dtype ",
        dtype_name(token.scalar_type()),
        "; expected int64, a token's number or -1 at padding: use token_numbers(mask).");
  check(token.numel() <= kMaxTokens, op, "token has ", token.numel(),
        " elements; expected at most 2^32: split the batch.");
  check(q >= 0 && q <= kMaxDrawn, op, "q is ", q, "; expected 0 to ", kMaxDrawn,
        " directions: draw more with another offset.");
  check(d >= 0 && d <= kMaxDimensions, op, "d is ", d, "; expected 0 to ", kMaxDimensions,
        " dimensions.");
  check(is_supported_dtype(dtype), op, "dtype is ", dtype_name(dtype), "; expected ",
        kSupportedDtypes, ".");
  std::vector<int64_t> shape = {q};
  for (int64_t k = 0; k < token.dim(); ++k) shape.push_back(token.size(k));
  shape.push_back(d);
  return torch::stable::new_empty(token, torch::headeronly::IntHeaderOnlyArrayRef(shape), dtype);
}

}  // namespace jachess
