// jachess::ntk_gram on the CPU: arguments, which positions count, and the choice of the kernel.
#include <torch/csrc/stable/library.h>

#include "../ntk_gram_arguments.h"
#include "ntk_gram_kernels.h"
#include "ntk_positions.h"
#include "tensors.h"

namespace jachess {
namespace {

GramKernel choose_kernel() {
#if JACHESS_HAS_CLONES
  if (__builtin_cpu_supports("x86-64-v4")) return ntk_gram_v4;
  if (__builtin_cpu_supports("x86-64-v3")) return ntk_gram_v3;
#endif
  return ntk_gram_baseline;
}

Tensor ntk_gram(const Tensor& inputs, const std::vector<Tensor>& cotangents,
                const std::optional<Tensor>& other_inputs,
                const std::vector<Tensor>& other_cotangents) {
  const GramInputs prepared =
      prepare_gram("ntk_gram", inputs, cotangents, other_inputs, other_cotangents);
  if (prepared.empty()) return prepared.result;
  const GramProblem p = prepared.problem();
  const std::vector<GramRow> rows = rows_of(p, p.left);
  const std::vector<GramRow> columns = prepared.symmetric ? rows : rows_of(p, p.right);
  const std::vector<GramPair> pairs = gram_pairs(rows, columns, prepared.symmetric);
  const GramWork work = {rows.data(), columns.data(), pairs.data()};
  const GramKernel kernel = choose_kernel();
  void* out = data<void>(prepared.result);
  torch::stable::parallel_for(
      0, static_cast<int64_t>(pairs.size()), 1,
      [&](int64_t begin, int64_t end) { kernel(p, work, begin, end, out); });
  return prepared.result;
}

}  // namespace
}  // namespace jachess

STABLE_TORCH_LIBRARY_IMPL(jachess, CPU, m) { m.impl("ntk_gram", TORCH_BOX(&jachess::ntk_gram)); }
