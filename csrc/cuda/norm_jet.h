// Torch's side of the normalisations on CUDA: their arguments for the launchers of the kernels.
#pragma once

#include <algorithm>

#include "../norm_arguments.h"
#include "tensors.h"

namespace jachess {

// A parameter in the accumulation dtype, dense, or none.
inline std::optional<Tensor> widened(const std::optional<Tensor>& parameter, const Tensor& x) {
  if (!parameter.has_value()) return std::nullopt;
  return torch::stable::contiguous(torch::stable::to(*parameter, wide_dtype(x.scalar_type()),
                                                     std::nullopt, std::nullopt, std::nullopt,
                                                     false, false, std::nullopt));
}

template <typename Norm>
NormShape norm_shape(const Norm& norm, int64_t q) {
  return {jet_shape(norm.x, q, norm.pairs), norm.shape.rows, norm.shape.n};
}

using NormLauncher = int (*)(NormShape, NormBuffers, double, Queue);
using NormBackwardLauncher = int (*)(NormShape, NormBackwardBuffers, Queue);

inline NormForward norm_forward(const char* op, NormLauncher launcher, bool centred,
                                const Tensor& x, const std::optional<Tensor>& residual,
                                const std::optional<Tensor>& weight,
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
  check_launch(op, launcher(norm_shape(norm, q), buffers, eps, queue_of(x)));
  return norm;
}

inline NormBackward norm_backward(const char* op, const char* forward,
                                  NormBackwardLauncher launcher, const Tensor& gy,
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
  check_launch(op, launcher(norm_shape(norm, q), buffers, queue_of(x)));
  return norm;
}

}  // namespace jachess
