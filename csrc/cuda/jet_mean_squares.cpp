// jachess::jet_mean_squares and its backward on CUDA: torch's side of jet_mean_squares.cu.
#include <torch/csrc/stable/library.h>

#include "../jet_mean_squares_arguments.h"
#include "tensors.h"

namespace jachess {
namespace {

TokenShape token_shape(const MeanSquaresInputs& in) {
  return {storage_of(in.x.scalar_type()),
          in.rows.streams,
          in.rows.directions,
          in.rows.tokens,
          in.rows.channels,
          in.count};
}

std::tuple<Tensor, Tensor> jet_mean_squares(const Tensor& x, const std::optional<Tensor>& mask,
                                            const std::optional<Tensor>& index, int64_t q) {
  const char* op = "jet_mean_squares";
  const MeanSquaresInputs in = prepare_mean_squares(op, x, mask, index, q);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device());
  Tensor first = new_per_token(x, {}), second = new_per_token(x, {in.count});
  if (first.numel() == 0) return {first, second};
  check_launch(op, jet_mean_squares_cuda(token_shape(in), in.x.const_data_ptr(), pointer(in.mask),
                                         pointer(in.index), first.mutable_data_ptr(),
                                         second.mutable_data_ptr(), queue_of(op, x)));
  return {first, second};
}

Tensor jet_mean_squares_backward(const Tensor& gfirst, const Tensor& gsecond, const Tensor& x,
                                 const std::optional<Tensor>& mask,
                                 const std::optional<Tensor>& index, int64_t q) {
  const char* op = "jet_mean_squares_backward";
  const MeanSquaresInputs in = prepare_mean_squares(op, x, mask, index, q);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device());
  check_gradient(op, "gfirst", gfirst, x, in.rows.tokens);
  check_gradient(op, "gsecond", gsecond, x, in.rows.tokens * in.count);
  const Tensor g_first = torch::stable::contiguous(gfirst);
  const Tensor g_second = torch::stable::contiguous(gsecond);
  Tensor gx = torch::stable::empty_like(in.x);
  if (gx.numel() == 0) return gx;
  std::optional<Tensor> position;
  if (in.index.has_value())
    position = torch::stable::new_empty(
        x, torch::headeronly::IntHeaderOnlyArrayRef(&in.rows.channels, 1), ScalarType::Int);
  check_launch(op, jet_mean_squares_backward_cuda(
                       token_shape(in), g_first.const_data_ptr(), g_second.const_data_ptr(),
                       in.x.const_data_ptr(), pointer(in.mask), pointer(in.index),
                       mutable_pointer(position), gx.mutable_data_ptr(), queue_of(op, x)));
  return gx;
}

}  // namespace
}  // namespace jachess

STABLE_TORCH_LIBRARY_IMPL(jachess, CUDA, m) {
  m.impl("jet_mean_squares", TORCH_BOX(&jachess::jet_mean_squares));
  m.impl("jet_mean_squares_backward", TORCH_BOX(&jachess::jet_mean_squares_backward));
}
