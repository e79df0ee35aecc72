// jachess::jet_mean_squares and its backward on CUDA: torch's side of jet_mean_squares.cu.
#include <torch/csrc/stable/library.h>

#include "../jet_mean_squares_arguments.h"
#include "tensors.h"

namespace jachess {
namespace {

TokenShape token_shape(const Tensor& x, const TokenRows& rows, int64_t chosen) {
  return {storage_of(x.scalar_type()),
          rows.streams,
          rows.directions,
          rows.tokens,
          rows.channels,
          chosen};
}

std::tuple<Tensor, Tensor> jet_mean_squares(const Tensor& x, const std::optional<Tensor>& mask,
                                            const std::optional<Tensor>& index, int64_t q) {
  const char* op = "jet_mean_squares";
  const TokenRows rows = token_rows(op, x, q);
  check_mask(op, mask, x);
  check_index(op, index, x);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device());
  const Tensor dense_x = torch::stable::contiguous(x);
  const std::optional<Tensor> dense_mask = dense(mask), dense_index = dense(index);
  const int64_t count = chosen_count(index, rows);
  Tensor first = new_per_token(x, {}, {}), second = new_per_token(x, {}, {count});
  if (first.numel() == 0) return {first, second};
  check_launch(
      op, jet_mean_squares_cuda(token_shape(x, rows, count), dense_x.const_data_ptr(),
                                pointer(dense_mask), pointer(dense_index), first.mutable_data_ptr(),
                                second.mutable_data_ptr(), queue_of(x)));
  return {first, second};
}

Tensor jet_mean_squares_backward(const Tensor& gfirst, const Tensor& gsecond, const Tensor& x,
                                 const std::optional<Tensor>& mask,
                                 const std::optional<Tensor>& index, int64_t q) {
  const char* op = "jet_mean_squares_backward";
  const TokenRows rows = token_rows(op, x, q);
  check_mask(op, mask, x);
  check_index(op, index, x);
  const int64_t count = chosen_count(index, rows);
  check_gradient(op, "gfirst", gfirst, x, rows.tokens);
  check_gradient(op, "gsecond", gsecond, x, rows.tokens * count);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device());
  const Tensor dense_x = torch::stable::contiguous(x);
  const Tensor g_first = torch::stable::contiguous(gfirst);
  const Tensor g_second = torch::stable::contiguous(gsecond);
  const std::optional<Tensor> dense_mask = dense(mask), dense_index = dense(index);
  Tensor gx = torch::stable::empty_like(dense_x);
  if (gx.numel() == 0) return gx;
  std::optional<Tensor> position;
  if (dense_index.has_value())
    position = torch::stable::new_empty(
        x, torch::headeronly::IntHeaderOnlyArrayRef(&rows.channels, 1), ScalarType::Int);
  check_launch(
      op, jet_mean_squares_backward_cuda(
              token_shape(x, rows, count), g_first.const_data_ptr(), g_second.const_data_ptr(),
              dense_x.const_data_ptr(), pointer(dense_mask), pointer(dense_index),
              position.has_value() ? position->mutable_data_ptr() : nullptr, gx.mutable_data_ptr(),
              queue_of(x)));
  return gx;
}

}  // namespace
}  // namespace jachess

STABLE_TORCH_LIBRARY_IMPL(jachess, CUDA, m) {
  m.impl("jet_mean_squares", TORCH_BOX(&jachess::jet_mean_squares));
  m.impl("jet_mean_squares_backward", TORCH_BOX(&jachess::jet_mean_squares_backward));
}
