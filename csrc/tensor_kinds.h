// Dtypes and layouts of torch tensors, and new tensors, for the CPU and CUDA sides of an operator.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "checks.h"
#include "dtypes.h"

namespace jachess {

// The dtype of accumulation: float for the 16-bit types, else the type itself.
inline ScalarType wide_dtype(ScalarType dtype) {
  return dtype == ScalarType::Double ? dtype : ScalarType::Float;
}

inline Storage storage_of(ScalarType dtype) {
  return dtype == ScalarType::Double     ? Storage::f64
         : dtype == ScalarType::Float    ? Storage::f32
         : dtype == ScalarType::BFloat16 ? Storage::bf16
                                         : Storage::f16;
}

// Unwritten memory, or zeros, in the dtype of accumulation, on x's device.
inline Tensor new_wide(const Tensor& x, const std::vector<int64_t>& shape) {
  return torch::stable::new_empty(x, torch::headeronly::IntHeaderOnlyArrayRef(shape),
                                  wide_dtype(x.scalar_type()));
}
inline Tensor new_wide_zeros(const Tensor& x, const std::vector<int64_t>& shape) {
  return torch::stable::new_zeros(x, torch::headeronly::IntHeaderOnlyArrayRef(shape),
                                  wide_dtype(x.scalar_type()));
}

// x's shape without its last dimension: that of a statistic of rows.
inline std::vector<int64_t> shape_of_rows(const Tensor& x) {
  const auto sizes = x.sizes();
  return {sizes.begin(), sizes.end() - 1};
}

inline std::optional<Tensor> dense(const std::optional<Tensor>& t) {
  return t.has_value() ? std::optional(torch::stable::contiguous(*t)) : std::nullopt;
}

}  // namespace jachess
