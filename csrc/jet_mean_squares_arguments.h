// The arguments of jachess::jet_mean_squares, as the CPU and CUDA sides both see them.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "checks.h"
#include "tensor_kinds.h"

namespace jachess {

// A jet [S, ..., D] as rows: one of `channels` elements per token and stream.
struct TokenRows {
  int64_t streams, directions, pairs, tokens, channels;
};

inline TokenRows token_rows(const char* op, const Tensor& x, int64_t q) {
  const int pairs = check_jet(op, "x", x, q);
  check(x.dim() >= 2, op, "x has shape ", shape_of(x),
        "; expected [S, ..., D], streams in front and the dimension to sum over last.");
  int64_t tokens = 1;
  for (int64_t d = 1; d + 1 < x.dim(); ++d) tokens *= x.size(d);
  return {x.size(0), q, pairs, tokens, x.size(x.dim() - 1)};
}

inline void check_mask(const char* op, const std::optional<Tensor>& mask, const Tensor& x) {
  if (!mask.has_value()) return;
  bool fits = mask->dim() == x.dim() - 2 && mask->scalar_type() == ScalarType::Bool;
  for (int64_t d = 0; fits && d < mask->dim(); ++d) fits = mask->size(d) == x.size(d + 1);
  check(fits, op, "mask is ", dtype_name(mask->scalar_type()), shape_of(*mask),
        "; expected bool of x's shape ", shape_of(x),
        " without its first and last dimension: true where a token counts.");
  check(mask->device() == x.device(), op,
        "mask is not on the device of x: move it there with .to(x.device).");
}

inline void check_index(const char* op, const std::optional<Tensor>& index, const Tensor& x) {
  if (!index.has_value()) return;
  check(index->dim() == 1 && index->scalar_type() == ScalarType::Long, op, "index is ",
        dtype_name(index->scalar_type()), shape_of(*index),
        "; expected int64[n], distinct numbers of x's last dimension.");
  check(index->device() == x.device(), op,
        "index is not on the device of x: move it there with .to(x.device).");
}

// The arguments checked, dense; count: of dimensions whose second-order mean square is wanted.
struct MeanSquaresInputs {
  TokenRows rows;
  int64_t count;
  Tensor x;
  std::optional<Tensor> mask, index;
};

inline MeanSquaresInputs prepare_mean_squares(const char* op, const Tensor& x,
                                              const std::optional<Tensor>& mask,
                                              const std::optional<Tensor>& index, int64_t q) {
  const TokenRows rows = token_rows(op, x, q);
  check_mask(op, mask, x);
  check_index(op, index, x);
  const int64_t chosen = index.has_value() ? index->size(0) : rows.channels;
  return {rows, rows.pairs == 0 ? 0 : chosen, torch::stable::contiguous(x), dense(mask),
          dense(index)};
}

// An unwritten result [*x.shape[1:-1], *trailing] in the accumulation dtype.
inline Tensor new_per_token(const Tensor& x, const std::vector<int64_t>& trailing) {
  std::vector<int64_t> shape;
  for (int64_t d = 1; d + 1 < x.dim(); ++d) shape.push_back(x.size(d));
  shape.insert(shape.end(), trailing.begin(), trailing.end());
  return new_wide(x, shape);
}

// A gradient that must be as the forward operator's result was.
inline void check_gradient(const char* op, const char* name, const Tensor& gradient,
                           const Tensor& x, int64_t elements) {
  const ScalarType wide = wide_dtype(x.scalar_type());
  check(gradient.numel() == elements && gradient.scalar_type() == wide &&
            gradient.device() == x.device(),
        op, name, " is ", dtype_name(gradient.scalar_type()), shape_of(gradient), " for x ",
        shape_of(x), "; expected ", elements, " elements of ", dtype_name(wide),
        " on x's device, as the forward operator returns.");
}

// The operators of one device:
//     Device::Guard                                        for the time of a call, of x's device
//     Device::forward(op, inputs, first, second)           fill the results, which may be empty
//     Device::backward(op, inputs, gfirst, gsecond, gx)
template <typename Device>
struct MeanSquaresOperators {
  static std::tuple<Tensor, Tensor> jet_mean_squares(const Tensor& x,
                                                     const std::optional<Tensor>& mask,
                                                     const std::optional<Tensor>& index,
                                                     int64_t q) {
    const char* op = "jet_mean_squares";
    const typename Device::Guard guard(x.get_device());
    const MeanSquaresInputs in = prepare_mean_squares(op, x, mask, index, q);
    const Tensor first = new_per_token(x, {}), second = new_per_token(x, {in.count});
    Device::forward(op, in, first, second);
    return {first, second};
  }

  static Tensor jet_mean_squares_backward(const Tensor& gfirst, const Tensor& gsecond,
                                          const Tensor& x, const std::optional<Tensor>& mask,
                                          const std::optional<Tensor>& index, int64_t q) {
    const char* op = "jet_mean_squares_backward";
    const typename Device::Guard guard(x.get_device());
    const MeanSquaresInputs in = prepare_mean_squares(op, x, mask, index, q);
    check_gradient(op, "gfirst", gfirst, x, in.rows.tokens);
    check_gradient(op, "gsecond", gsecond, x, in.rows.tokens * in.count);
    const Tensor gx = torch::stable::empty_like(in.x);
    Device::backward(op, in, torch::stable::contiguous(gfirst), torch::stable::contiguous(gsecond),
                     gx);
    return gx;
  }

  static void add_to(torch::stable::detail::StableLibrary& m) {
    m.impl("jet_mean_squares", TORCH_BOX(&jet_mean_squares));
    m.impl("jet_mean_squares_backward", TORCH_BOX(&jet_mean_squares_backward));
  }
};

}  // namespace jachess
