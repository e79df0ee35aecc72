// From the tensors of jachess::ntk_gram to a GramProblem, checked; shared by the CPU and CUDA
// sides.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "checks.h"
#include "ntk_gram_problem.h"
#include "tensor_kinds.h"

namespace jachess {

// One side's tensors, rows dense, and the views that a GramSide points to.
struct GramOperands {
  std::vector<Tensor> tensors;
  std::vector<GramRows> views;  // the inputs', then each layer's cotangents

  GramSide side() const {
    const Tensor& inputs = tensors.front();
    return {inputs.size(0), inputs.size(1), views.front(), views.data() + 1};
  }
  // Whether every sum is empty.
  bool is_empty() const {
    int64_t cotangents = 0;
    for (size_t l = 1; l < tensors.size(); ++l) cotangents += tensors[l].numel();
    return tensors.front().numel() == 0 || cotangents == 0;
  }
};

inline void check_gram_side(const char* name, const Tensor& inputs,
                            const std::vector<Tensor>& cotangents) {
  check(inputs.dim() == 3 && is_supported_dtype(inputs.scalar_type()), "ntk_gram", "", name, " is ",
        dtype_name(inputs.scalar_type()), shape_of(inputs), "; expected [N, T, d] of ",
        kSupportedDtypes, ": reshape or convert it.");
  check(!cotangents.empty(), "ntk_gram", "there is no cotangent for ", name,
        "; expected at least one, [C, N, T, e].");
  for (const Tensor& delta : cotangents) {
    check(delta.dim() == 4 && delta.size(0) == cotangents.front().size(0) &&
              delta.size(1) == inputs.size(0) && delta.size(2) == inputs.size(1),
          "ntk_gram", "a cotangent has shape ", shape_of(delta), " for ", name, " ",
          shape_of(inputs), "; expected [C, N, T, e] with the same C for every layer.");
    check(delta.scalar_type() == inputs.scalar_type() && delta.device() == inputs.device(),
          "ntk_gram", "a cotangent has another dtype or device than ", name,
          ": convert it with .to(inputs).");
  }
}

inline void check_gram(const Tensor& inputs, const std::vector<Tensor>& cotangents,
                       const std::optional<Tensor>& other,
                       const std::vector<Tensor>& other_cotangents) {
  check_gram_side("inputs", inputs, cotangents);
  check(other.has_value() == !other_cotangents.empty(), "ntk_gram",
        "one of other_inputs and other_cotangents is missing: give both, or "
        "neither.");
  if (!other.has_value()) return;
  check_gram_side("other_inputs", *other, other_cotangents);
  check(other->scalar_type() == inputs.scalar_type() && other->device() == inputs.device(),
        "ntk_gram",
        "other_inputs has another dtype or device than inputs: convert it with "
        ".to(inputs).");
  bool same = other->size(2) == inputs.size(2) && cotangents.size() == other_cotangents.size();
  for (size_t l = 0; same && l < cotangents.size(); ++l)
    same = cotangents[l].size(0) == other_cotangents[l].size(0) &&
           cotangents[l].size(3) == other_cotangents[l].size(3);
  check(same, "ntk_gram", "left and right differ in their numbers of layers or outputs, or ",
        "in their feature sizes: give the cotangents of the same layers in the same order.");
}

inline GramOperands gram_operands(const Tensor& inputs, const std::vector<Tensor>& cotangents) {
  GramOperands operands;
  const auto add = [&](const Tensor& t) {
    const int64_t last = t.dim() - 1;
    const bool dense = t.size(last) <= 1 || t.stride(last) == 1;
    const Tensor& kept = operands.tensors.emplace_back(dense ? t : torch::stable::contiguous(t));
    operands.views.push_back({kept.const_data_ptr(), last == 3 ? kept.stride(0) : 0,
                              kept.stride(last - 2), kept.stride(last - 1), kept.size(last)});
  };
  add(inputs);
  for (const Tensor& delta : cotangents) add(delta);
  return operands;
}

// Points into the operands, which must outlive the problem.
inline GramProblem gram_problem(const GramOperands& left, const GramOperands& right,
                                bool symmetric) {
  const Tensor &inputs = left.tensors[0], &delta = left.tensors[1];
  return {storage_of(inputs.scalar_type()),
          delta.size(0),
          static_cast<int64_t>(left.tensors.size()) - 1,
          symmetric,
          left.side(),
          right.side()};
}

// Checked operands of both sides (one side twice where symmetric) and the result they will fill:
// [C, N, C, M] zeros in the accumulation dtype.
struct GramInputs {
  GramOperands left, right;
  Tensor result;
  bool symmetric;
  bool empty() const { return left.is_empty() || right.is_empty(); }
  GramProblem problem() const { return gram_problem(left, right, symmetric); }
};

inline GramInputs prepare_gram(const Tensor& inputs, const std::vector<Tensor>& cotangents,
                               const std::optional<Tensor>& other_inputs,
                               const std::vector<Tensor>& other_cotangents) {
  check_gram(inputs, cotangents, other_inputs, other_cotangents);
  const bool symmetric = !other_inputs.has_value();
  const GramOperands left = gram_operands(inputs, cotangents);
  const GramOperands right = symmetric ? left : gram_operands(*other_inputs, other_cotangents);
  const int64_t outputs = cotangents.front().size(0);
  const int64_t others = symmetric ? inputs.size(0) : other_inputs->size(0);
  return {left, right, new_wide_zeros(inputs, {outputs, inputs.size(0), outputs, others}),
          symmetric};
}

}  // namespace jachess
