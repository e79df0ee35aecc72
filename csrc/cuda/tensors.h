// Small helpers between torch tensors and the launchers of the CUDA kernels.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "../checks.h"
#include "../tensor_kinds.h"
#include "launchers.h"

// Weak: a CPU build of torch has no such function, and must still be able to load this library.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace jachess {

inline Queue queue_of(const char* op, const Tensor& x) {
  check(aoti_torch_get_current_cuda_stream != nullptr, op,
        "x is on a GPU but this torch is a CPU build: install a CUDA build of torch.");
  Queue queue = {nullptr, x.get_device()};
  check(aoti_torch_get_current_cuda_stream(queue.device, &queue.stream) == 0, op,
        "torch could not name the current CUDA stream of device ", queue.device, ".");
  return queue;
}

inline JetShape jet_shape(const char* op, const Tensor& x, int64_t q, int pairs) {
  check(q <= 2, op, "q is ", q, "; the CUDA kernels take one or two directions: call ",
        "jachess_ext.ops, which goes in passes of two.");
  return {storage_of(x.scalar_type()), static_cast<int>(q), pairs, x.numel() / x.size(0)};
}

inline const void* pointer(const std::optional<Tensor>& t) {
  return t.has_value() ? t->const_data_ptr() : nullptr;
}

inline void* mutable_pointer(const std::optional<Tensor>& t) {
  return t.has_value() ? t->mutable_data_ptr() : nullptr;
}

inline void check_launch(const char* op, int error) {
  check(error == 0, op, "the CUDA kernel could not start (", launch_error(error),
        "): see `jachess doctor` for the GPUs this build serves.");
}

}  // namespace jachess
