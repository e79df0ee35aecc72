// jachess::layer_norm_jet and its backward on CUDA: torch's side of layer_norm_jet.cu.
#include <torch/csrc/stable/library.h>

#include "norm_jet.h"

namespace jachess {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> layer_norm_jet(const Tensor& x,
                                                          const std::optional<Tensor>& residual,
                                                          const std::optional<Tensor>& weight,
                                                          const std::optional<Tensor>& bias,
                                                          double eps, int64_t q) {
  const NormForward norm =
      norm_forward("layer_norm_jet", layer_norm_jet_cuda, true, x, residual, weight, bias, eps, q);
  return {norm.y, norm.sum, *norm.mean, norm.rstd};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_jet_backward(
    const Tensor& gy, const std::optional<Tensor>& gsum, const Tensor& x,
    const std::optional<Tensor>& weight, double /*eps*/, int64_t q, const Tensor& mean,
    const Tensor& rstd, bool need_weight) {
  const NormBackward norm =
      norm_backward("layer_norm_jet_backward", "layer_norm_jet", layer_norm_jet_backward_cuda, gy,
                    gsum, x, weight, q, mean, rstd, need_weight);
  return {norm.gx, norm.gweight, *norm.gbias};
}

}  // namespace
}  // namespace jachess

STABLE_TORCH_LIBRARY_IMPL(jachess, CUDA, m) {
  m.impl("layer_norm_jet", TORCH_BOX(&jachess::layer_norm_jet));
  m.impl("layer_norm_jet_backward", TORCH_BOX(&jachess::layer_norm_jet_backward));
}
