// The arguments of jachess::activation_jet, f(x), and jachess::gated_activation_jet, f(g) u, as the
// CPU and CUDA sides both see them.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <string>
#include <tuple>

#include "row_layout.h"
#include "text.h"

namespace jachess {

inline Activation parse_activation(const char* op, const std::string& kind) {
#define JACHESS_MATCH(name) \
  if (kind == #name) return Activation::name;
  JACHESS_FOR_EACH_ACTIVATION(JACHESS_MATCH)
#undef JACHESS_MATCH
  std::string known;
#define JACHESS_LIST(name) known += (known.empty() ? "" : ", ") + std::string(#name);
  JACHESS_FOR_EACH_ACTIVATION(JACHESS_LIST)
#undef JACHESS_LIST
  check(false, op, "kind is '", kind, "'; expected one of ", known, ".");
  return Activation::gelu;
}

// Gate and up as rows; without a gate, x is the gate and `up` is x again.
struct ActivationInputs {
  JetStreams streams;
  Activation kind;
  JetRows gate, up;
  RowCut cut;
};

// The operators of one device, around what both forms share there:
//     Device::Guard                                  for the time of a call, of g's device
//     Device::sums                                   as of check_streams
//     Device::forward<gated>(op, inputs, y)
//     Device::backward<gated>(op, inputs, gy, gg, gu)
// which fill the results; no tensor is empty, and gy is contiguous.
template <typename Device>
struct ActivationOperators {
  template <bool gated>
  static ActivationInputs prepare(const char* op, const Tensor& g, const Tensor& u,
                                  const Text& kind, int64_t q, int64_t summed,
                                  const Tensor* gy = nullptr) {
    const char* name = gated ? "g" : "x";
    const JetStreams streams = check_streams(op, name, g, q, summed, Device::sums);
    if (gated) check_same(op, "u", u, g, name);
    if (gy != nullptr) check_same(op, "gy", *gy, g, name);
    const Activation activation = parse_activation(op, kind);
    const JetRows gate = jet_rows(g), up = gated ? jet_rows(u) : gate;
    return {streams, activation, gate, up, common_cut(gate, up)};
  }

  template <bool gated>
  static Tensor forward(const char* op, const Tensor& g, const Tensor& u, const Text& kind,
                        int64_t q, int64_t summed) {
    const typename Device::Guard guard(g.get_device());
    const ActivationInputs inputs = prepare<gated>(op, g, u, kind, q, summed);
    const Tensor y = new_contiguous(g);
    if (g.numel() != 0) Device::template forward<gated>(op, inputs, y);
    return y;
  }

  // The gradients of g and of u; without a gate the second one is g's, too.
  template <bool gated>
  static std::tuple<Tensor, Tensor> backward(const char* op, const Tensor& gy, const Tensor& g,
                                             const Tensor& u, const Text& kind, int64_t q,
                                             int64_t summed) {
    const typename Device::Guard guard(g.get_device());
    const ActivationInputs inputs = prepare<gated>(op, g, u, kind, q, summed, &gy);
    const Tensor gg = new_contiguous(g), gu = gated ? new_contiguous(g) : gg;
    if (g.numel() != 0)
      Device::template backward<gated>(op, inputs, torch::stable::contiguous(gy), gg, gu);
    return {gg, gu};
  }

  static Tensor activation_jet(const Tensor& x, const Text& kind, int64_t q, int64_t summed) {
    return forward<false>("activation_jet", x, x, kind, q, summed);
  }
  static Tensor activation_jet_backward(const Tensor& gy, const Tensor& x, const Text& kind,
                                        int64_t q, int64_t summed) {
    return std::get<0>(backward<false>("activation_jet_backward", gy, x, x, kind, q, summed));
  }
  static Tensor gated_activation_jet(const Tensor& g, const Tensor& u, const Text& kind, int64_t q,
                                     int64_t summed) {
    return forward<true>("gated_activation_jet", g, u, kind, q, summed);
  }
  static std::tuple<Tensor, Tensor> gated_activation_jet_backward(const Tensor& gy, const Tensor& g,
                                                                  const Tensor& u, const Text& kind,
                                                                  int64_t q, int64_t summed) {
    return backward<true>("gated_activation_jet_backward", gy, g, u, kind, q, summed);
  }

  static void add_to(torch::stable::detail::StableLibrary& m) {
    m.impl("activation_jet", TORCH_BOX(&activation_jet));
    m.impl("activation_jet_backward", TORCH_BOX(&activation_jet_backward));
    m.impl("gated_activation_jet", TORCH_BOX(&gated_activation_jet));
    m.impl("gated_activation_jet_backward", TORCH_BOX(&gated_activation_jet_backward));
  }
};

}  // namespace jachess
