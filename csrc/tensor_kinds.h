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

// A number as a tensor: on a GPU it may change from one replay of a CUDA graph to the next, and the
// host does not wait for it.
inline const int64_t* number_on_device(const char* op, const char* name, const Tensor& number,
                                       const Tensor& x) {
  check(number.numel() == 1 && number.scalar_type() == ScalarType::Long &&
            number.device() == x.device(),
        op, name, " is ", dtype_name(number.scalar_type()), shape_of(number),
        "; expected one int64 on the device of the other tensors: use torch.full((), ", name,
        ", dtype=torch.int64, device=...).");
  return static_cast<const int64_t*>(number.const_data_ptr());
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
