// jachess::ntk_gram on the CPU: arguments, which positions count, and the choice of the kernel.
#include <torch/csrc/stable/library.h>

#include "../ntk_gram_arguments.h"
#include "kernels.h"
#include "tensors.h"

namespace jachess {
namespace {

// Positions without any cotangent add nothing, so they are left out before anything is multiplied:
// padding, and all that a classifier does not read.
std::vector<GramRow> rows_of(const GramProblem& p, const GramSide& side) {
  std::vector<uint8_t> used(static_cast<size_t>(side.samples * side.positions));
  torch::stable::parallel_for(0, side.samples, 16, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n)
      for (int64_t t = 0; t < side.positions; ++t)
        used[static_cast<size_t>(n * side.positions + t)] = is_used(p, side, n, t);
  });
  return gram_rows(used, side.positions);
}

Tensor ntk_gram(const Tensor& inputs, const std::vector<Tensor>& cotangents,
                const std::optional<Tensor>& other_inputs,
                const std::vector<Tensor>& other_cotangents) {
  const GramInputs prepared = prepare_gram(inputs, cotangents, other_inputs, other_cotangents);
  if (prepared.empty()) return prepared.result;
  const GramProblem p = prepared.problem();
  const std::vector<GramRow> rows = rows_of(p, p.left);
  const std::vector<GramRow> columns = prepared.symmetric ? rows : rows_of(p, p.right);
  const std::vector<GramPair> pairs = gram_pairs(rows, columns, prepared.symmetric);
  const GramWork work = {rows.data(), columns.data(), pairs.data()};
  const GramKernel kernel = best_kernels().gram;
  void* out = data<void>(prepared.result);
  torch::stable::parallel_for(
      0, static_cast<int64_t>(pairs.size()), 1,
      [&](int64_t begin, int64_t end) { kernel(p, work, begin, end, out); });
  return prepared.result;
}

}  // namespace
}  // namespace jachess

STABLE_TORCH_LIBRARY_IMPL(jachess, CPU, m) { m.impl("ntk_gram", TORCH_BOX(&jachess::ntk_gram)); }
