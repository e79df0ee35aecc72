// jachess::ntk_gram on CUDA: torch's side of ntk_gram.cu.
#include <torch/csrc/stable/library.h>

#include <limits>

#include "../ntk_gram_arguments.h"
#include "tensors.h"

namespace jachess {
namespace {

Tensor ntk_gram(const Tensor& inputs, const std::vector<Tensor>& cotangents,
                const std::optional<Tensor>& other_inputs,
                const std::vector<Tensor>& other_cotangents) {
  const char* op = "ntk_gram";
  const GramInputs prepared = prepare_gram(inputs, cotangents, other_inputs, other_cotangents);
  const torch::stable::accelerator::DeviceGuard guard(inputs.get_device());
  if (prepared.empty()) return prepared.result;
  const GramProblem p = prepared.problem();
  const GramScratch scratch = ntk_gram_scratch(p);
  check(scratch.blocks <= std::numeric_limits<int32_t>::max(), op, p.left.samples, " by ",
        p.right.samples, " samples of ", p.left.positions, " by ", p.right.positions,
        " positions are more than one launch can count: take blocks of samples.");
  const Tensor partial = new_wide(inputs, {scratch.numbers});
  check_launch(op, ntk_gram_cuda(p, partial.mutable_data_ptr(), prepared.result.mutable_data_ptr(),
                                 queue_of(op, inputs)));
  return prepared.result;
}

}  // namespace
}  // namespace jachess

STABLE_TORCH_LIBRARY_IMPL(jachess, CUDA, m) { m.impl("ntk_gram", TORCH_BOX(&jachess::ntk_gram)); }
