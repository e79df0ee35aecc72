// jachess::activation_jet, jachess::gated_activation_jet and their backwards on CUDA: torch's side
// of activation_jet.cu.
#include <torch/csrc/stable/library.h>

#include "../row_layout.h"
#include "../text.h"
#include "tensors.h"

namespace jachess {
namespace {

ActivationShape activation_shape(const JetRows& gate, const JetRows& up, int64_t q, int pairs) {
  const RowCut cut = common_cut(gate, up);
  return {jet_shape(gate.tensor, q, pairs),
          cut.rows,
          cut.length,
          {gate.stream_stride, gate.row_stride},
          {up.stream_stride, up.row_stride}};
}

// u is null without a gate.
Tensor forward(const char* op, const Tensor& g, const Tensor* u, const Text& kind, int64_t q) {
  const int pairs = check_jet(op, u ? "g" : "x", g, q);
  if (u) check_same(op, "u", *u, g, "g");
  const Activation activation = parse_activation(op, kind);
  const torch::stable::accelerator::DeviceGuard guard(g.get_device());
  Tensor y = new_contiguous(g);
  if (g.numel() == 0) return y;
  const JetRows gate = jet_rows(g), up = u ? jet_rows(*u) : gate;
  check_launch(op, activation_jet_cuda(activation_shape(gate, up, q, pairs), activation,
                                       gate.tensor.const_data_ptr(),
                                       u ? up.tensor.const_data_ptr() : nullptr,
                                       y.mutable_data_ptr(), queue_of(g)));
  return y;
}

// The gradients of g and of u; without a gate the second one is g's, too.
std::tuple<Tensor, Tensor> backward(const char* op, const Tensor& gy, const Tensor& g,
                                    const Tensor* u, const Text& kind, int64_t q) {
  const char* like = u ? "g" : "x";
  const int pairs = check_jet(op, like, g, q);
  if (u) check_same(op, "u", *u, g, like);
  check_same(op, "gy", gy, g, like);
  const Activation activation = parse_activation(op, kind);
  const torch::stable::accelerator::DeviceGuard guard(g.get_device());
  Tensor gg = new_contiguous(g), gu = u ? new_contiguous(g) : gg;
  if (g.numel() == 0) return {gg, gu};
  const JetRows gate = jet_rows(g), up = u ? jet_rows(*u) : gate;
  const Tensor grad = torch::stable::contiguous(gy);
  check_launch(op, activation_jet_backward_cuda(
                       activation_shape(gate, up, q, pairs), activation, grad.const_data_ptr(),
                       gate.tensor.const_data_ptr(), u ? up.tensor.const_data_ptr() : nullptr,
                       gg.mutable_data_ptr(), u ? gu.mutable_data_ptr() : nullptr, queue_of(g)));
  return {gg, gu};
}

Tensor activation_jet(const Tensor& x, const Text& kind, int64_t q) {
  return forward("activation_jet", x, nullptr, kind, q);
}

Tensor activation_jet_backward(const Tensor& gy, const Tensor& x, const Text& kind, int64_t q) {
  return std::get<0>(backward("activation_jet_backward", gy, x, nullptr, kind, q));
}

Tensor gated_activation_jet(const Tensor& g, const Tensor& u, const Text& kind, int64_t q) {
  return forward("gated_activation_jet", g, &u, kind, q);
}

std::tuple<Tensor, Tensor> gated_activation_jet_backward(const Tensor& gy, const Tensor& g,
                                                         const Tensor& u, const Text& kind,
                                                         int64_t q) {
  return backward("gated_activation_jet_backward", gy, g, &u, kind, q);
}

}  // namespace
}  // namespace jachess

STABLE_TORCH_LIBRARY_IMPL(jachess, CUDA, m) {
  m.impl("activation_jet", TORCH_BOX(&jachess::activation_jet));
  m.impl("activation_jet_backward", TORCH_BOX(&jachess::activation_jet_backward));
  m.impl("gated_activation_jet", TORCH_BOX(&jachess::gated_activation_jet));
  m.impl("gated_activation_jet_backward", TORCH_BOX(&jachess::gated_activation_jet_backward));
}
