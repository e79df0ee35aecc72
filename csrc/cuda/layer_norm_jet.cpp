// jachess::layer_norm_jet and its backward on CUDA: torch's side of layer_norm_jet.cu.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "../norm_arguments.h"
#include "tensors.h"

namespace jachess {
namespace {

NormShape norm_shape(const char* op, const Tensor& x, int64_t q, int pairs) {
  check(x.dim() >= 2, "jachess::", op, ": x has shape ", shape_of(x),
        "; expected [S, ..., D], streams in front and the normalised dimension last.");
  int64_t rows = 1;
  for (int64_t d = 1; d + 1 < x.dim(); ++d) rows *= x.size(d);
  return {jet_shape(x, q, pairs), rows, x.size(x.dim() - 1)};
}

// A parameter in the accumulation dtype, dense, or none.
std::optional<Tensor> widened(const std::optional<Tensor>& parameter, const Tensor& x) {
  if (!parameter.has_value()) return std::nullopt;
  return torch::stable::contiguous(torch::stable::to(*parameter, wide_dtype(x.scalar_type()),
                                                     std::nullopt, std::nullopt, std::nullopt,
                                                     false, false, std::nullopt));
}

const void* pointer(const std::optional<Tensor>& t) {
  return t.has_value() ? t->const_data_ptr() : nullptr;
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_jet(const Tensor& x,
                                                  const std::optional<Tensor>& weight,
                                                  const std::optional<Tensor>& bias, double eps,
                                                  int64_t q) {
  const char* op = "layer_norm_jet";
  const int pairs = check_jet(op, "x", x, q);
  const NormShape shape = norm_shape(op, x, q, pairs);
  check_channels(op, "weight", weight, x, shape.channels);
  check_channels(op, "bias", bias, x, shape.channels);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device());
  const Tensor dense = torch::stable::contiguous(x);
  const std::optional<Tensor> w = widened(weight, x), b = widened(bias, x);
  Tensor y = torch::stable::empty_like(dense);
  Tensor mean = new_statistics(dense), rstd = new_statistics(dense);
  if (dense.numel() == 0) return {y, mean, rstd};
  check_launch(op, layer_norm_jet_cuda(shape, dense.const_data_ptr(), pointer(w), pointer(b), eps,
                                       y.mutable_data_ptr(), mean.mutable_data_ptr(),
                                       rstd.mutable_data_ptr(), queue_of(x)));
  return {y, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_jet_backward(const Tensor& gy, const Tensor& x,
                                                           const std::optional<Tensor>& weight,
                                                           double /*eps*/, int64_t q,
                                                           const Tensor& mean, const Tensor& rstd,
                                                           bool need_weight) {
  const char* op = "layer_norm_jet_backward";
  const int pairs = check_jet(op, "x", x, q);
  const NormShape shape = norm_shape(op, x, q, pairs);
  check_same(op, "gy", gy, x);
  check_channels(op, "weight", weight, x, shape.channels);
  check_statistics(op, mean, x, shape.rows);
  check_statistics(op, rstd, x, shape.rows);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device());
  const Tensor dense = torch::stable::contiguous(x), grad = torch::stable::contiguous(gy);
  const Tensor means = torch::stable::contiguous(mean), rstds = torch::stable::contiguous(rstd);
  const std::optional<Tensor> w = widened(weight, x);
  const std::vector<int64_t> channel_shape = {need_weight ? shape.channels : 0};
  Tensor gx = torch::stable::empty_like(dense);
  Tensor gweight = new_wide_zeros(dense, channel_shape);
  Tensor gbias = new_wide_zeros(dense, channel_shape);
  if (dense.numel() == 0) return {gx, gweight, gbias};
  std::optional<Tensor> partial;
  if (need_weight)
    partial = new_wide_zeros(dense, {std::min(shape.rows, kNormBlocks), 2, shape.channels});
  check_launch(op, layer_norm_jet_backward_cuda(
                       shape, grad.const_data_ptr(), dense.const_data_ptr(), pointer(w),
                       means.const_data_ptr(), rstds.const_data_ptr(), gx.mutable_data_ptr(),
                       need_weight ? partial->mutable_data_ptr() : nullptr,
                       need_weight ? gweight.mutable_data_ptr() : nullptr,
                       need_weight ? gbias.mutable_data_ptr() : nullptr, queue_of(x)));
  return {gx, gweight, gbias};
}

}  // namespace
}  // namespace jachess

STABLE_TORCH_LIBRARY_IMPL(jachess, CUDA, m) {
  m.impl("layer_norm_jet", TORCH_BOX(&jachess::layer_norm_jet));
  m.impl("layer_norm_jet_backward", TORCH_BOX(&jachess::layer_norm_jet_backward));
}
