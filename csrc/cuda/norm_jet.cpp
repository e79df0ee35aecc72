// jachess::layer_norm_jet, jachess::rms_norm_jet and their backwards on CUDA: torch's side of
// norm_jet.cu.
#include <algorithm>

#include "../norm_arguments.h"
#include "tensors.h"

namespace jachess {
namespace {

// A parameter in the accumulation dtype, dense, or none.
std::optional<Tensor> widened(const std::optional<Tensor>& parameter, const Tensor& x) {
  if (!parameter.has_value()) return std::nullopt;
  return torch::stable::contiguous(torch::stable::to(*parameter, wide_dtype(x.scalar_type()),
                                                     std::nullopt, std::nullopt, std::nullopt,
                                                     false, false, std::nullopt));
}

template <typename Norm>
NormShape norm_shape(const Norm& norm, int64_t q) {
  return {jet_shape(norm.x, q, norm.pairs), norm.shape.rows, norm.shape.n, norm.mean.has_value()};
}

struct Cuda {
  using Guard = torch::stable::accelerator::DeviceGuard;

  template <bool centred>
  static void forward(const char* op, const NormForward& norm, const std::optional<Tensor>& weight,
                      const std::optional<Tensor>& bias, double eps, int64_t q) {
    const std::optional<Tensor> w = widened(weight, norm.x), b = widened(bias, norm.x);
    NormBuffers buffers = {};
    buffers.x = norm.x.const_data_ptr();
    buffers.residual = pointer(norm.residual);
    buffers.weight = pointer(w);
    buffers.bias = pointer(b);
    buffers.y = norm.y.mutable_data_ptr();
    if (norm.residual.has_value()) buffers.sum = norm.sum.mutable_data_ptr();
    buffers.mean = mutable_pointer(norm.mean);
    buffers.rstd = norm.rstd.mutable_data_ptr();
    check_launch(op, norm_jet_cuda(norm_shape(norm, q), buffers, eps, queue_of(op, norm.x)));
  }

  template <bool centred>
  static void backward(const char* op, const NormBackward& norm,
                       const std::optional<Tensor>& weight, int64_t q, bool need_weight) {
    const std::optional<Tensor> w = widened(weight, norm.x);
    NormBackwardBuffers buffers = {};
    buffers.gy = norm.gy.const_data_ptr();
    buffers.gsum = pointer(norm.gsum);
    buffers.x = norm.x.const_data_ptr();
    buffers.weight = pointer(w);
    buffers.mean = pointer(norm.mean);
    buffers.rstd = norm.rstd.const_data_ptr();
    buffers.gx = norm.gx.mutable_data_ptr();
    std::optional<Tensor> partial;
    if (need_weight) {
      const int64_t blocks = std::min(norm.shape.rows, kNormBlocks);
      partial = new_wide_zeros(norm.x, {blocks, centred ? 2 : 1, norm.shape.n});
      buffers.partial = partial->mutable_data_ptr();
      buffers.gweight = norm.gweight.mutable_data_ptr();
      buffers.gbias = mutable_pointer(norm.gbias);
    }
    check_launch(op, norm_jet_backward_cuda(norm_shape(norm, q), buffers, queue_of(op, norm.x)));
  }
};

}  // namespace
}  // namespace jachess

STABLE_TORCH_LIBRARY_IMPL(jachess, CUDA, m) { jachess::NormOperators<jachess::Cuda>::add_to(m); }
