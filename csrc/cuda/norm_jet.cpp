// jachess::layer_norm_jet, jachess::rms_norm_jet and their backwards on CUDA: torch's side of
// norm_jet.cu.
#include <algorithm>

#include "../norm_arguments.h"
#include "tensors.h"

namespace jachess {
namespace {

// A dense parameter as it is, or none.
NormParameter norm_parameter(const std::optional<Tensor>& t) {
  if (!t.has_value()) return {};
  return {t->const_data_ptr(), storage_of(t->scalar_type())};
}

template <typename Norm>
NormShape norm_shape(const char* op, const Norm& norm, int64_t q) {
  return {jet_shape(op, norm.x, q, norm.pairs), norm.shape.rows, norm.shape.n,
          norm.mean.has_value()};
}

struct Cuda {
  using Guard = torch::stable::accelerator::DeviceGuard;

  template <bool centred>
  static void forward(const char* op, const NormForward& norm, const std::optional<Tensor>& weight,
                      const std::optional<Tensor>& bias, double eps, int64_t q) {
    const std::optional<Tensor> w = dense(weight), b = dense(bias);
    NormBuffers buffers = {};
    buffers.x = norm.x.const_data_ptr();
    buffers.residual = pointer(norm.residual);
    buffers.weight = norm_parameter(w);
    buffers.bias = norm_parameter(b);
    buffers.y = norm.y.mutable_data_ptr();
    if (norm.residual.has_value()) buffers.sum = norm.sum.mutable_data_ptr();
    buffers.mean = mutable_pointer(norm.mean);
    buffers.rstd = norm.rstd.mutable_data_ptr();
    check_launch(op, norm_jet_cuda(norm_shape(op, norm, q), buffers, eps, queue_of(op, norm.x)));
  }

  template <bool centred>
  static void backward(const char* op, const NormBackward& norm,
                       const std::optional<Tensor>& weight, int64_t q, bool need_weight) {
    const std::optional<Tensor> w = dense(weight);
    NormBackwardBuffers buffers = {};
    buffers.gy = norm.gy.const_data_ptr();
    buffers.gsum = pointer(norm.gsum);
    buffers.x = norm.x.const_data_ptr();
    buffers.weight = norm_parameter(w);
    buffers.mean = pointer(norm.mean);
    buffers.rstd = norm.rstd.const_data_ptr();
    buffers.gx = norm.gx.mutable_data_ptr();
    std::optional<Tensor> partial;
    if (need_weight) {
      const int64_t blocks = std::min(norm.shape.rows, kNormBlocks);
      partial = new_wide(norm.x, {blocks, centred ? 2 : 1, norm.shape.n});
      buffers.partial = partial->mutable_data_ptr();
      buffers.gweight = norm.gweight.mutable_data_ptr();
      buffers.gbias = mutable_pointer(norm.gbias);
    }
    check_launch(op,
                 norm_jet_backward_cuda(norm_shape(op, norm, q), buffers, queue_of(op, norm.x)));
  }
};

}  // namespace
}  // namespace jachess

STABLE_TORCH_LIBRARY_IMPL(jachess, CUDA, m) { jachess::NormOperators<jachess::Cuda>::add_to(m); }
