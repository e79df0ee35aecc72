// jachess::layer_norm_jet, jachess::rms_norm_jet and their backwards on CUDA: torch's side of
// norm_jet.cu.
#include <torch/csrc/stable/library.h>

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

NormForward norm_forward(const char* op, bool centred, const Tensor& x,
                         const std::optional<Tensor>& residual, const std::optional<Tensor>& weight,
                         const std::optional<Tensor>& bias, double eps, int64_t q) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device());
  const NormForward norm = prepare_norm(op, x, residual, weight, bias, q, centred);
  if (norm.empty()) return norm;
  const std::optional<Tensor> w = widened(weight, x), b = widened(bias, x);
  NormBuffers buffers = {};
  buffers.x = norm.x.const_data_ptr();
  buffers.residual = pointer(norm.residual);
  buffers.weight = pointer(w);
  buffers.bias = pointer(b);
  buffers.y = norm.y.mutable_data_ptr();
  if (norm.residual.has_value()) buffers.sum = norm.sum.mutable_data_ptr();
  buffers.mean = mutable_pointer(norm.mean);
  buffers.rstd = norm.rstd.mutable_data_ptr();
  check_launch(op, norm_jet_cuda(norm_shape(norm, q), buffers, eps, queue_of(x)));
  return norm;
}

NormBackward norm_backward(const char* op, const char* forward, const Tensor& gy,
                           const std::optional<Tensor>& gsum, const Tensor& x,
                           const std::optional<Tensor>& weight, int64_t q,
                           const std::optional<Tensor>& mean, const Tensor& rstd,
                           bool need_weight) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device());
  const NormBackward norm =
      prepare_norm_backward(op, forward, gy, gsum, x, weight, q, mean, rstd, need_weight);
  if (norm.empty()) return norm;
  const std::optional<Tensor> w = widened(weight, x);
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
    partial = new_wide_zeros(x, {blocks, norm.gbias.has_value() ? 2 : 1, norm.shape.n});
    buffers.partial = partial->mutable_data_ptr();
    buffers.gweight = norm.gweight.mutable_data_ptr();
    buffers.gbias = mutable_pointer(norm.gbias);
  }
  check_launch(op, norm_jet_backward_cuda(norm_shape(norm, q), buffers, queue_of(x)));
  return norm;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> layer_norm_jet(const Tensor& x,
                                                          const std::optional<Tensor>& residual,
                                                          const std::optional<Tensor>& weight,
                                                          const std::optional<Tensor>& bias,
                                                          double eps, int64_t q) {
  const NormForward norm = norm_forward("layer_norm_jet", true, x, residual, weight, bias, eps, q);
  return {norm.y, norm.sum, *norm.mean, norm.rstd};
}

std::tuple<Tensor, Tensor, Tensor> rms_norm_jet(const Tensor& x,
                                                const std::optional<Tensor>& residual,
                                                const std::optional<Tensor>& weight, double eps,
                                                int64_t q) {
  const NormForward norm =
      norm_forward("rms_norm_jet", false, x, residual, weight, std::nullopt, eps, q);
  return {norm.y, norm.sum, norm.rstd};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_jet_backward(
    const Tensor& gy, const std::optional<Tensor>& gsum, const Tensor& x,
    const std::optional<Tensor>& weight, double /*eps*/, int64_t q, const Tensor& mean,
    const Tensor& rstd, bool need_weight) {
  const NormBackward norm = norm_backward("layer_norm_jet_backward", "layer_norm_jet", gy, gsum, x,
                                          weight, q, mean, rstd, need_weight);
  return {norm.gx, norm.gweight, *norm.gbias};
}

std::tuple<Tensor, Tensor> rms_norm_jet_backward(const Tensor& gy,
                                                 const std::optional<Tensor>& gsum, const Tensor& x,
                                                 const std::optional<Tensor>& weight,
                                                 double /*eps*/, int64_t q, const Tensor& rstd,
                                                 bool need_weight) {
  const NormBackward norm = norm_backward("rms_norm_jet_backward", "rms_norm_jet", gy, gsum, x,
                                          weight, q, std::nullopt, rstd, need_weight);
  return {norm.gx, norm.gweight};
}

}  // namespace
}  // namespace jachess

STABLE_TORCH_LIBRARY_IMPL(jachess, CUDA, m) {
  m.impl("layer_norm_jet", TORCH_BOX(&jachess::layer_norm_jet));
  m.impl("layer_norm_jet_backward", TORCH_BOX(&jachess::layer_norm_jet_backward));
  m.impl("rms_norm_jet", TORCH_BOX(&jachess::rms_norm_jet));
  m.impl("rms_norm_jet_backward", TORCH_BOX(&jachess::rms_norm_jet_backward));
}
