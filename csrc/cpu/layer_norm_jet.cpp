// jachess::layer_norm_jet and its backward on the CPU: the norm rule (docs/how_it_works.md),
// centred.
#include <torch/csrc/stable/library.h>

#include "norm_jet.h"

namespace jachess {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> layer_norm_jet(const Tensor& x,
                                                          const std::optional<Tensor>& residual,
                                                          const std::optional<Tensor>& weight,
                                                          const std::optional<Tensor>& bias,
                                                          double eps, int64_t q) {
  const NormForward norm = norm_forward<true>("layer_norm_jet", x, residual, weight, bias, eps, q);
  return {norm.y, norm.sum, *norm.mean, norm.rstd};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_jet_backward(
    const Tensor& gy, const std::optional<Tensor>& gsum, const Tensor& x,
    const std::optional<Tensor>& weight, double /*eps*/, int64_t q, const Tensor& mean,
    const Tensor& rstd, bool need_weight) {
  const NormBackward norm = norm_backward<true>("layer_norm_jet_backward", "layer_norm_jet", gy,
                                                gsum, x, weight, q, mean, rstd, need_weight);
  return {norm.gx, norm.gweight, *norm.gbias};
}

}  // namespace
}  // namespace jachess

STABLE_TORCH_LIBRARY_IMPL(jachess, CPU, m) {
  m.impl("layer_norm_jet", TORCH_BOX(&jachess::layer_norm_jet));
  m.impl("layer_norm_jet_backward", TORCH_BOX(&jachess::layer_norm_jet_backward));
}
