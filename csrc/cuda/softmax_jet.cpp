// jachess::softmax_jet and its backward on CUDA: torch's side of softmax_jet.cu.
#include <torch/csrc/stable/library.h>

#include "../row_layout.h"
#include "tensors.h"

namespace jachess {
namespace {

SoftmaxShape softmax_shape(const char* op, const Tensor& x, int64_t q, int pairs, bool masked) {
  const RowShape shape = row_shape(op, x);
  return {jet_shape(op, x, q, pairs), shape.rows, shape.n, masked};
}

Tensor softmax_jet(const Tensor& x, int64_t q, bool masked) {
  const char* op = "softmax_jet";
  const int pairs = check_jet(op, "x", x, q);
  const SoftmaxShape shape = softmax_shape(op, x, q, pairs, masked);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device());
  const Tensor dense = torch::stable::contiguous(x);
  Tensor y = torch::stable::empty_like(dense);
  if (dense.numel() == 0) return y;
  check_launch(
      op, softmax_jet_cuda(shape, dense.const_data_ptr(), y.mutable_data_ptr(), queue_of(op, x)));
  return y;
}

Tensor softmax_jet_backward(const Tensor& gy, const Tensor& x, int64_t q, bool masked) {
  const char* op = "softmax_jet_backward";
  const int pairs = check_jet(op, "x", x, q);
  check_same(op, "gy", gy, x);
  const SoftmaxShape shape = softmax_shape(op, x, q, pairs, masked);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device());
  const Tensor dense = torch::stable::contiguous(x), grad = torch::stable::contiguous(gy);
  Tensor gx = torch::stable::empty_like(dense);
  if (dense.numel() == 0) return gx;
  check_launch(op, softmax_jet_backward_cuda(shape, grad.const_data_ptr(), dense.const_data_ptr(),
                                             gx.mutable_data_ptr(), queue_of(op, x)));
  return gx;
}

}  // namespace
}  // namespace jachess

STABLE_TORCH_LIBRARY_IMPL(jachess, CUDA, m) {
  m.impl("softmax_jet", TORCH_BOX(&jachess::softmax_jet));
  m.impl("softmax_jet_backward", TORCH_BOX(&jachess::softmax_jet_backward));
}
