// jachess::jet_mean_squares and its backward on CUDA: torch's side of jet_mean_squares.cu.
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

struct Cuda {
  using Guard = torch::stable::accelerator::DeviceGuard;

  static void forward(const char* op, const MeanSquaresInputs& in, const Tensor& first,
                      const Tensor& second) {
    if (first.numel() == 0) return;
    check_launch(op, jet_mean_squares_cuda(token_shape(in), in.x.const_data_ptr(), pointer(in.mask),
                                           pointer(in.index), first.mutable_data_ptr(),
                                           second.mutable_data_ptr(), queue_of(op, in.x)));
  }

  static void backward(const char* op, const MeanSquaresInputs& in, const Tensor& gfirst,
                       const Tensor& gsecond, const Tensor& gx) {
    if (gx.numel() == 0) return;
    std::optional<Tensor> position;
    if (in.index.has_value())
      position = torch::stable::new_empty(
          gx, torch::headeronly::IntHeaderOnlyArrayRef(&in.rows.channels, 1), ScalarType::Int);
    check_launch(op, jet_mean_squares_backward_cuda(
                         token_shape(in), gfirst.const_data_ptr(), gsecond.const_data_ptr(),
                         in.x.const_data_ptr(), pointer(in.mask), pointer(in.index),
                         mutable_pointer(position), gx.mutable_data_ptr(), queue_of(op, gx)));
  }
};

}  // namespace
}  // namespace jachess

STABLE_TORCH_LIBRARY_IMPL(jachess, CUDA, m) {
  jachess::MeanSquaresOperators<jachess::Cuda>::add_to(m);
}
