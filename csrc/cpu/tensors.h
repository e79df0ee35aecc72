// Small helpers between torch tensors and the raw pointers of the CPU kernels.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <vector>

#include "../tensor_kinds.h"
#include "simd.h"

namespace jachess {

// Stands in for a GPU's DeviceGuard.
struct NoGuard {
  explicit NoGuard(int32_t) {}
};

template <typename T>
const T* input(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}

template <typename T>
T* data(const Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

template <typename F>
void dispatch_dtype(ScalarType dtype, const F& f) {
  dispatch_storage(storage_of(dtype), f);
}

// A per-channel parameter of any dtype as n values of T, each entry `repeats` times; `missing`
// fills in for none.
template <typename T>
std::vector<T> channels(const std::optional<Tensor>& parameter, int64_t n, int64_t repeats,
                        T missing) {
  std::vector<T> values(static_cast<size_t>(n), missing);
  if (!parameter.has_value()) return values;
  const Tensor dense = torch::stable::contiguous(*parameter);
  dispatch_dtype(dense.scalar_type(), [&](auto* typed) {
    using Stored = std::remove_pointer_t<decltype(typed)>;
    const Stored* from = input<Stored>(dense);
    for (int64_t i = 0; i < n; ++i) {
      accumulate_t<Stored> value;
      convert(from[i / repeats], value);
      values[static_cast<size_t>(i)] = static_cast<T>(value);
    }
  });
  return values;
}

}  // namespace jachess
