// The tensors of the normalisation operators, as the CPU and CUDA faces both see them.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <vector>

#include "checks.h"

namespace jachess {

// The accumulation dtype of the spec: float for the 16-bit types, else the type itself.
inline ScalarType wide_dtype(ScalarType dtype) {
  return dtype == ScalarType::Double ? dtype : ScalarType::Float;
}

// Zeros in the accumulation dtype, on x's device.
inline Tensor new_wide_zeros(const Tensor& x, const std::vector<int64_t>& shape) {
  return torch::stable::new_zeros(x, torch::headeronly::IntHeaderOnlyArrayRef(shape),
                                  wide_dtype(x.scalar_type()));
}

// The saved statistics have x's shape without its last dimension.
inline Tensor new_statistics(const Tensor& x) {
  const auto sizes = x.sizes();
  return new_wide_zeros(x, std::vector<int64_t>(sizes.begin(), sizes.end() - 1));
}

inline void check_statistics(const char* op, const Tensor& statistic, const Tensor& x,
                             int64_t rows) {
  check(statistic.numel() == x.size(0) * rows &&
            statistic.scalar_type() == wide_dtype(x.scalar_type()) &&
            statistic.device() == x.device(),
        "jachess::", op, ": mean or rstd is ", shape_of(statistic), " for x ", shape_of(x),
        "; expected what layer_norm_jet returned for this x.");
}

}  // namespace jachess
