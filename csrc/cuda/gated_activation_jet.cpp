// jachess::gated_activation_jet and its backward on CUDA: torch's side of gated_activation_jet.cu.
#include <torch/csrc/stable/library.h>

#include "../row_layout.h"
#include "../text.h"
#include "tensors.h"

namespace jachess {
namespace {

GatedShape gated_shape(const JetRows& gate, const JetRows& up, int64_t q, int pairs) {
  const RowCut cut = common_cut(gate, up);
  return {jet_shape(gate.tensor, q, pairs),
          cut.rows,
          cut.length,
          {gate.stream_stride, gate.row_stride},
          {up.stream_stride, up.row_stride}};
}

Tensor gated_activation_jet(const Tensor& g, const Tensor& u, const Text& kind, int64_t q) {
  const char* op = "gated_activation_jet";
  const int pairs = check_jet(op, "g", g, q);
  check_same(op, "u", u, g, "g");
  const Activation activation = parse_activation(op, kind);
  const torch::stable::accelerator::DeviceGuard guard(g.get_device());
  Tensor y = new_contiguous(g);
  if (g.numel() == 0) return y;
  const JetRows gate = jet_rows(g), up = jet_rows(u);
  check_launch(op, gated_activation_jet_cuda(
                       gated_shape(gate, up, q, pairs), activation, gate.tensor.const_data_ptr(),
                       up.tensor.const_data_ptr(), y.mutable_data_ptr(), queue_of(g)));
  return y;
}

std::tuple<Tensor, Tensor> gated_activation_jet_backward(const Tensor& gy, const Tensor& g,
                                                         const Tensor& u, const Text& kind,
                                                         int64_t q) {
  const char* op = "gated_activation_jet_backward";
  const int pairs = check_jet(op, "g", g, q);
  check_same(op, "u", u, g, "g");
  check_same(op, "gy", gy, g, "g");
  const Activation activation = parse_activation(op, kind);
  const torch::stable::accelerator::DeviceGuard guard(g.get_device());
  Tensor gg = new_contiguous(g), gu = new_contiguous(g);
  if (g.numel() == 0) return {gg, gu};
  const JetRows gate = jet_rows(g), up = jet_rows(u);
  const Tensor grad = torch::stable::contiguous(gy);
  check_launch(op, gated_activation_jet_backward_cuda(
                       gated_shape(gate, up, q, pairs), activation, grad.const_data_ptr(),
                       gate.tensor.const_data_ptr(), up.tensor.const_data_ptr(),
                       gg.mutable_data_ptr(), gu.mutable_data_ptr(), queue_of(g)));
  return {gg, gu};
}

}  // namespace
}  // namespace jachess

STABLE_TORCH_LIBRARY_IMPL(jachess, CUDA, m) {
  m.impl("gated_activation_jet", TORCH_BOX(&jachess::gated_activation_jet));
  m.impl("gated_activation_jet_backward", TORCH_BOX(&jachess::gated_activation_jet_backward));
}
