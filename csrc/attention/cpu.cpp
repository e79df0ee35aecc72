// jachess::attention_jet and its backward on the CPU: arguments, and the choice of kernels.
#include "../cpu/kernels.h"
#include "../cpu/tensors.h"
#include "arguments.h"

namespace jachess {
namespace {

// Items of the backward that keep many processors busy; more would only cost memory.
constexpr int64_t kWantedItems = 16;
constexpr int64_t kMaxSplits = 4;
constexpr int64_t kMinKeysPerSplit = 512;

// From the shape alone: results must not depend on the number of threads.
int64_t key_splits(const AttentionProblem& p) {
  const int64_t wanted = (kWantedItems + p.batch * p.key_heads - 1) / (p.batch * p.key_heads);
  return std::max<int64_t>(1, std::min({wanted, kMaxSplits, p.keys / kMinKeysPerSplit}));
}

struct Cpu {
  using Guard = NoGuard;
  static constexpr bool sums = true;

  static void forward(const char* /*op*/, const AttentionInputs& inputs, const Tensor& y,
                      const Tensor& stats) {
    const AttentionProblem& p = inputs.problem;
    const AttentionKernels kernels = best_kernels().attention;
    const JetHeads rows = jet_heads(y);
    if (p.any) {
      return torch::stable::parallel_for(
          0, p.batch * p.key_heads, 1, [&](int64_t begin, int64_t end) {
            kernels.sums_forward(p, rows, data<void>(stats), begin, end);
          });
    }
    torch::stable::parallel_for(0, kernels.blocks(p), 1, [&](int64_t begin, int64_t end) {
      kernels.forward(p, rows, data<void>(stats), begin, end);
    });
  }

  static void backward(const char* /*op*/, const AttentionInputs& inputs, const Tensor& gy,
                       const Tensor& y, const Tensor& stats, const Tensor& gquery,
                       const Tensor& gkey, const Tensor& gvalue) {
    const AttentionProblem& p = inputs.problem;
    const int64_t pairs = p.batch * p.key_heads;
    if (pairs == 0) return;
    AttentionGradients t = {jet_heads(gy),     jet_heads(y),    stats.const_data_ptr(),
                            jet_heads(gquery), jet_heads(gkey), jet_heads(gvalue),
                            key_splits(p),     nullptr};
    const AttentionKernels kernels = best_kernels().attention;
    if (p.any) {
      return torch::stable::parallel_for(0, pairs, 1, [&](int64_t begin, int64_t end) {
        kernels.sums_backward(p, t, begin, end);
      });
    }
    const int64_t numbers = t.splits > 1 ? kernels.partial_numbers(p, t) : 0;
    const Tensor partial = new_wide(stats, {numbers});
    t.partial = data<void>(partial);
    torch::stable::parallel_for(0, pairs * t.splits, 1, [&](int64_t begin, int64_t end) {
      kernels.backward(p, t, begin, end);
    });
    if (t.splits == 1) return;
    torch::stable::parallel_for(
        0, pairs, 1, [&](int64_t begin, int64_t end) { kernels.reduce(p, t, begin, end); });
  }
};

}  // namespace
}  // namespace jachess

STABLE_TORCH_LIBRARY_IMPL(jachess, CPU, m) { jachess::AttentionOperators<jachess::Cpu>::add_to(m); }
