// What both sides of an operator, CPU and CUDA, ask of a torch tensor's dtype and layout.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

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

inline std::optional<Tensor> dense(const std::optional<Tensor>& t) {
  return t.has_value() ? std::optional(torch::stable::contiguous(*t)) : std::nullopt;
}

}  // namespace jachess
