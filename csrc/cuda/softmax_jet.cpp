// jachess::softmax_jet and its backward on CUDA: torch's side of softmax_jet.cu.
#include "../softmax_arguments.h"
#include "tensors.h"

namespace jachess {
namespace {

struct Cuda {
  using Guard = torch::stable::accelerator::DeviceGuard;
  static constexpr bool sums = false;

  static void softmax(const char* op, const SoftmaxInputs& in, const Tensor& result) {
    const SoftmaxShape shape = {jet_shape(op, in.x, in.streams.q, in.streams.pairs), in.rows.rows,
                                in.rows.n, in.masked};
    check_launch(op, softmax_jet_cuda(shape, pointer(in.gy), in.x.const_data_ptr(),
                                      result.mutable_data_ptr(), queue_of(op, in.x)));
  }
};

}  // namespace
}  // namespace jachess

STABLE_TORCH_LIBRARY_IMPL(jachess, CUDA, m) { jachess::SoftmaxOperators<jachess::Cuda>::add_to(m); }
