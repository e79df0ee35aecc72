// jachess::activation_jet, jachess::gated_activation_jet and their backwards on CUDA: torch's side
// of activation_jet.cu.
#include "../activation_arguments.h"
#include "tensors.h"

namespace jachess {
namespace {

struct Cuda {
  using Guard = torch::stable::accelerator::DeviceGuard;
  static constexpr bool sums = false;

  template <bool gated>
  static void forward(const char* op, const ActivationInputs& in, const Tensor& y) {
    launch<gated>(op, in, nullptr, y, nullptr);
  }

  template <bool gated>
  static void backward(const char* op, const ActivationInputs& in, const Tensor& gy,
                       const Tensor& gg, const Tensor& gu) {
    launch<gated>(op, in, gy.const_data_ptr(), gg, gated ? gu.mutable_data_ptr() : nullptr);
  }

 private:
  template <bool gated>
  static void launch(const char* op, const ActivationInputs& in, const void* gy, const Tensor& out,
                     void* gu) {
    const ActivationShape shape = {jet_shape(op, in.gate.tensor, in.streams.q, in.streams.pairs),
                                   in.cut.rows,
                                   in.cut.length,
                                   {in.gate.stream_stride, in.gate.row_stride},
                                   {in.up.stream_stride, in.up.row_stride}};
    check_launch(op, activation_jet_cuda(shape, in.kind, gy, in.gate.tensor.const_data_ptr(),
                                         gated ? in.up.tensor.const_data_ptr() : nullptr,
                                         out.mutable_data_ptr(), gu, queue_of(op, out)));
  }
};

}  // namespace
}  // namespace jachess

STABLE_TORCH_LIBRARY_IMPL(jachess, CUDA, m) {
  jachess::ActivationOperators<jachess::Cuda>::add_to(m);
}
