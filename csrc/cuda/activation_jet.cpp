// jachess::activation_jet, jachess::gated_activation_jet and their backwards on CUDA: torch's side
// of activation_jet.cu.
#include "../activation_arguments.h"
#include "tensors.h"

namespace jachess {
namespace {

ActivationShape activation_shape(const char* op, const ActivationInputs& in, int64_t q) {
  return {jet_shape(op, in.gate.tensor, q, in.pairs),
          in.cut.rows,
          in.cut.length,
          {in.gate.stream_stride, in.gate.row_stride},
          {in.up.stream_stride, in.up.row_stride}};
}

struct Cuda {
  using Guard = torch::stable::accelerator::DeviceGuard;

  template <bool gated>
  static void forward(const char* op, const ActivationInputs& in, int64_t q, const Tensor& y) {
    check_launch(op, activation_jet_cuda(activation_shape(op, in, q), in.kind,
                                         in.gate.tensor.const_data_ptr(),
                                         gated ? in.up.tensor.const_data_ptr() : nullptr,
                                         y.mutable_data_ptr(), queue_of(op, y)));
  }

  template <bool gated>
  static void backward(const char* op, const ActivationInputs& in, int64_t q, const Tensor& gy,
                       const Tensor& gg, const Tensor& gu) {
    check_launch(
        op, activation_jet_backward_cuda(
                activation_shape(op, in, q), in.kind, gy.const_data_ptr(),
                in.gate.tensor.const_data_ptr(), gated ? in.up.tensor.const_data_ptr() : nullptr,
                gg.mutable_data_ptr(), gated ? gu.mutable_data_ptr() : nullptr, queue_of(op, gg)));
  }
};

}  // namespace
}  // namespace jachess

STABLE_TORCH_LIBRARY_IMPL(jachess, CUDA, m) {
  jachess::ActivationOperators<jachess::Cuda>::add_to(m);
}
