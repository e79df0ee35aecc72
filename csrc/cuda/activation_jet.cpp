// jachess::activation_jet and its backward on CUDA: torch's side of activation_jet.cu.
#include <torch/csrc/stable/library.h>

#include "../text.h"
#include "tensors.h"

namespace jachess {
namespace {

Tensor activation_jet(const Tensor& x, const Text& kind, int64_t q) {
  const char* op = "activation_jet";
  const int pairs = check_jet(op, "x", x, q);
  const Activation activation = parse_activation(op, kind);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device());
  const Tensor dense = torch::stable::contiguous(x);
  Tensor y = torch::stable::empty_like(dense);
  if (dense.numel() == 0) return y;
  check_launch(op, activation_jet_cuda(jet_shape(dense, q, pairs), activation,
                                       dense.const_data_ptr(), y.mutable_data_ptr(), queue_of(x)));
  return y;
}

Tensor activation_jet_backward(const Tensor& gy, const Tensor& x, const Text& kind, int64_t q) {
  const char* op = "activation_jet_backward";
  const int pairs = check_jet(op, "x", x, q);
  check_same(op, "gy", gy, x);
  const Activation activation = parse_activation(op, kind);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device());
  const Tensor dense = torch::stable::contiguous(x), grad = torch::stable::contiguous(gy);
  Tensor gx = torch::stable::empty_like(dense);
  if (dense.numel() == 0) return gx;
  check_launch(op, activation_jet_backward_cuda(jet_shape(dense, q, pairs), activation,
                                                grad.const_data_ptr(), dense.const_data_ptr(),
                                                gx.mutable_data_ptr(), queue_of(x)));
  return gx;
}

}  // namespace
}  // namespace jachess

STABLE_TORCH_LIBRARY_IMPL(jachess, CUDA, m) {
  m.impl("activation_jet", TORCH_BOX(&jachess::activation_jet));
  m.impl("activation_jet_backward", TORCH_BOX(&jachess::activation_jet_backward));
}
