// jachess::rms_norm_jet and its backward on the CPU: the norm rule (docs/how_it_works.md), not
// centred.
#include <torch/csrc/stable/library.h>

#include "norm_jet.h"

namespace jachess {
namespace {

std::tuple<Tensor, Tensor, Tensor> rms_norm_jet(const Tensor& x,
                                                const std::optional<Tensor>& residual,
                                                const std::optional<Tensor>& weight, double eps,
                                                int64_t q) {
  const NormForward norm =
      norm_forward<false>("rms_norm_jet", x, residual, weight, std::nullopt, eps, q);
  return {norm.y, norm.sum, norm.rstd};
}

std::tuple<Tensor, Tensor> rms_norm_jet_backward(const Tensor& gy,
                                                 const std::optional<Tensor>& gsum, const Tensor& x,
                                                 const std::optional<Tensor>& weight,
                                                 double /*eps*/, int64_t q, const Tensor& rstd,
                                                 bool need_weight) {
  const NormBackward norm = norm_backward<false>("rms_norm_jet_backward", "rms_norm_jet", gy, gsum,
                                                 x, weight, q, std::nullopt, rstd, need_weight);
  return {norm.gx, norm.gweight};
}

}  // namespace
}  // namespace jachess

STABLE_TORCH_LIBRARY_IMPL(jachess, CPU, m) {
  m.impl("rms_norm_jet", TORCH_BOX(&jachess::rms_norm_jet));
  m.impl("rms_norm_jet_backward", TORCH_BOX(&jachess::rms_norm_jet_backward));
}
