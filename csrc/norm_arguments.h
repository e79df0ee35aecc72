// The tensors of the normalisation operators, as the CPU and CUDA sides both see them.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <vector>

#include "row_layout.h"
#include "tensor_kinds.h"

namespace jachess {

// `forward`: the operator that returned the statistic.
inline void check_statistics(const char* op, const char* forward, const Tensor& statistic,
                             const Tensor& x, int64_t rows) {
  check(statistic.numel() == x.size(0) * rows &&
            statistic.scalar_type() == wide_dtype(x.scalar_type()) &&
            statistic.device() == x.device(),
        op, "mean or rstd is ", shape_of(statistic), " for x ", shape_of(x), "; expected what ",
        forward, " returned for this x.");
}

// Unwritten memory for what the kernels fill, of rows of this shape; zeros where they do not run.
inline Tensor new_statistics(const Tensor& x, const std::vector<int64_t>& sizes,
                             const RowShape& shape) {
  return shape.rows == 0 || shape.n == 0 ? new_wide_zeros(x, sizes) : new_wide(x, sizes);
}

// The number of classes of rows, and of neighbouring elements that share an entry: rows of
// x [S, ..., classes, n] with a weight [classes, n / positions] have each its own parameters, else
// all have those of one class, [n].
struct ParameterShape {
  int64_t classes, positions;
};

inline ParameterShape check_parameters(const char* op, const std::optional<Tensor>& weight,
                                       const std::optional<Tensor>& bias, const Tensor& x) {
  const bool apart = weight.has_value() && weight->dim() == 2 && x.dim() > 2;
  const int64_t n = x.size(x.dim() - 1), entries = apart ? weight->size(1) : n;
  const bool shared = entries > 0 && n % entries == 0;
  check_channels(op, "weight", weight, x, apart, shared ? entries : n);
  check_channels(op, "bias", bias, x, apart, shared ? entries : n);
  return {apart ? weight->size(0) : 1, shared ? n / entries : 1};
}

// Layer norm subtracts the mean, adds a bias and saves the mean; RMS norm does none of these.
struct NormForward {
  JetStreams streams;
  RowShape shape;
  ParameterShape parameters;
  Tensor x;
  std::optional<Tensor> residual;
  Tensor y, sum, rstd;  // sum: x + residual; of no element without a residual
  std::optional<Tensor> mean;
  bool empty() const { return shape.rows == 0 || shape.n == 0; }
};

// Checks the forward's arguments, makes x and residual dense and the results' tensors.
inline NormForward prepare_norm(const char* op, const Tensor& x,
                                const std::optional<Tensor>& residual,
                                const std::optional<Tensor>& weight,
                                const std::optional<Tensor>& bias, int64_t q, int64_t summed,
                                bool sums, bool centred) {
  const JetStreams streams = check_streams(op, "x", x, q, summed, sums);
  const RowShape shape = row_shape(op, x);
  if (residual.has_value()) check_same(op, "residual", *residual, x);
  const std::vector<int64_t> none = {0}, rows = shape_of_rows(x);
  return {streams,
          shape,
          check_parameters(op, weight, bias, x),
          torch::stable::contiguous(x),
          dense(residual),
          new_contiguous(x),
          residual.has_value() ? new_contiguous(x) : torch::stable::new_empty(x, none),
          new_statistics(x, rows, shape),
          centred ? std::optional(new_statistics(x, rows, shape)) : std::nullopt};
}

struct NormBackward {
  JetStreams streams;
  RowShape shape;
  ParameterShape parameters;
  Tensor gy;
  std::optional<Tensor> gsum;
  Tensor x, rstd;
  std::optional<Tensor> mean;
  Tensor gx, gweight;  // gweight: of no element where it is not wanted
  std::optional<Tensor> gbias;
  bool empty() const { return shape.rows == 0 || shape.n == 0; }
};

// Checks the backward's arguments, makes them dense and the results' tensors. x is what was
// normalised (the sum, where there was a residual); mean is given by layer norm alone.
inline NormBackward prepare_norm_backward(const char* op, const char* forward, const Tensor& gy,
                                          const std::optional<Tensor>& gsum, const Tensor& x,
                                          const std::optional<Tensor>& weight, int64_t q,
                                          const std::optional<Tensor>& mean, const Tensor& rstd,
                                          bool need_weight, int64_t summed, bool sums) {
  const JetStreams streams = check_streams(op, "x", x, q, summed, sums);
  const RowShape shape = row_shape(op, x);
  check_same(op, "gy", gy, x);
  if (gsum.has_value()) check_same(op, "gsum", *gsum, x);
  const ParameterShape parameters = check_parameters(op, weight, std::nullopt, x);
  if (mean.has_value()) check_statistics(op, forward, *mean, x, shape.rows);
  check_statistics(op, forward, rstd, x, shape.rows);
  std::vector<int64_t> channels = {need_weight ? shape.n : 0};
  if (need_weight && weight.has_value())
    channels.assign(weight->sizes().begin(), weight->sizes().end());
  return {streams,
          shape,
          parameters,
          torch::stable::contiguous(gy),
          dense(gsum),
          torch::stable::contiguous(x),
          torch::stable::contiguous(rstd),
          dense(mean),
          new_contiguous(x),
          new_statistics(x, channels, shape),
          mean.has_value() ? std::optional(new_statistics(x, channels, shape)) : std::nullopt};
}

// The operators of one device, around what both norms share there:
//     Device::Guard                     for the time of a call, of x's device
//     Device::sums                      as of check_streams
//     Device::forward<centred>(op, norm, weight, bias, eps)
//     Device::backward<centred>(op, norm, weight, need_weight)
// which fill the results; x is not empty.
template <typename Device>
struct NormOperators {
  template <bool centred>
  static NormForward forward(const char* op, const Tensor& x, const std::optional<Tensor>& residual,
                             const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                             double eps, int64_t q, int64_t summed) {
    const NormForward norm =
        prepare_norm(op, x, residual, weight, bias, q, summed, Device::sums, centred);
    const typename Device::Guard guard(x.get_device());
    if (!norm.empty()) Device::template forward<centred>(op, norm, weight, bias, eps);
    return norm;
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor> layer_norm_jet(
      const Tensor& x, const std::optional<Tensor>& residual, const std::optional<Tensor>& weight,
      const std::optional<Tensor>& bias, double eps, int64_t q, int64_t summed) {
    const NormForward norm =
        forward<true>("layer_norm_jet", x, residual, weight, bias, eps, q, summed);
    return {norm.y, norm.sum, *norm.mean, norm.rstd};
  }

  static std::tuple<Tensor, Tensor, Tensor> rms_norm_jet(const Tensor& x,
                                                         const std::optional<Tensor>& residual,
                                                         const std::optional<Tensor>& weight,
                                                         double eps, int64_t q, int64_t summed) {
    const NormForward norm =
        forward<false>("rms_norm_jet", x, residual, weight, std::nullopt, eps, q, summed);
    return {norm.y, norm.sum, norm.rstd};
  }

  template <bool centred>
  static NormBackward backward(const char* op, const char* forward, const Tensor& gy,
                               const std::optional<Tensor>& gsum, const Tensor& x,
                               const std::optional<Tensor>& weight, int64_t q,
                               const std::optional<Tensor>& mean, const Tensor& rstd,
                               bool need_weight, int64_t summed) {
    const NormBackward norm = prepare_norm_backward(op, forward, gy, gsum, x, weight, q, mean, rstd,
                                                    need_weight, summed, Device::sums);
    const typename Device::Guard guard(x.get_device());
    if (!norm.empty()) Device::template backward<centred>(op, norm, weight, need_weight);
    return norm;
  }

  static std::tuple<Tensor, Tensor, Tensor> layer_norm_jet_backward(
      const Tensor& gy, const std::optional<Tensor>& gsum, const Tensor& x,
      const std::optional<Tensor>& weight, double /*eps*/, int64_t q, const Tensor& mean,
      const Tensor& rstd, bool need_weight, int64_t summed) {
    const NormBackward norm = backward<true>("layer_norm_jet_backward", "layer_norm_jet", gy, gsum,
                                             x, weight, q, mean, rstd, need_weight, summed);
    return {norm.gx, norm.gweight, *norm.gbias};
  }

  static std::tuple<Tensor, Tensor> rms_norm_jet_backward(
      const Tensor& gy, const std::optional<Tensor>& gsum, const Tensor& x,
      const std::optional<Tensor>& weight, double /*eps*/, int64_t q, const Tensor& rstd,
      bool need_weight, int64_t summed) {
    const NormBackward norm = backward<false>("rms_norm_jet_backward", "rms_norm_jet", gy, gsum, x,
                                              weight, q, std::nullopt, rstd, need_weight, summed);
    return {norm.gx, norm.gweight};
  }

  static void add_to(torch::stable::detail::StableLibrary& m) {
    m.impl("layer_norm_jet", TORCH_BOX(&layer_norm_jet));
    m.impl("layer_norm_jet_backward", TORCH_BOX(&layer_norm_jet_backward));
    m.impl("rms_norm_jet", TORCH_BOX(&rms_norm_jet));
    m.impl("rms_norm_jet_backward", TORCH_BOX(&rms_norm_jet_backward));
  }
};

}  // namespace jachess
