// jachess::attention_jet and its backward on the CPU: arguments, and the choice of kernels.
#include <torch/csrc/stable/library.h>

#include "../attention_arguments.h"
#include "kernels.h"
#include "tensors.h"

namespace jachess {
namespace {

// Items of the backward that keep many processors busy; more would only cost memory.
constexpr int64_t kWantedItems = 16;
constexpr int64_t kMaxSplits = 4;
constexpr int64_t kMinKeysPerSplit = 512;

AttentionKernels choose_kernels(Storage storage) {
  return (storage == Storage::f64 ? baseline::kernels() : best_kernels()).attention;
}

// From the shape alone: results must not depend on the number of threads.
int64_t key_splits(const AttentionProblem& p) {
  const int64_t wanted = (kWantedItems + p.batch * p.key_heads - 1) / (p.batch * p.key_heads);
  return std::max<int64_t>(1, std::min({wanted, kMaxSplits, p.keys / kMinKeysPerSplit}));
}

std::tuple<Tensor, Tensor> attention_jet(const Tensor& query, const Tensor& key,
                                         const Tensor& value, const std::optional<Tensor>& mask,
                                         int64_t q, double scale, bool causal, int64_t window_left,
                                         int64_t window_right, double softcap, double dropout_p,
                                         int64_t dropout_seed) {
  const char* op = "attention_jet";
  const AttentionInputs inputs = prepare_attention(
      op, query, key, value, mask,
      {q, scale, causal, window_left, window_right, softcap, dropout_p, dropout_seed});
  const AttentionProblem& p = inputs.problem;
  Tensor y = new_by_token(query, p.heads, p.queries, p.value_size);
  Tensor stats = new_attention_statistics(query);
  const AttentionKernels kernels = choose_kernels(p.storage);
  const JetHeads rows = jet_heads(y);
  torch::stable::parallel_for(0, kernels.blocks(p), 1, [&](int64_t begin, int64_t end) {
    kernels.forward(p, rows, data<void>(stats), begin, end);
  });
  return {y, stats};
}

std::tuple<Tensor, Tensor, Tensor> attention_jet_backward(
    const Tensor& gy, const Tensor& query, const Tensor& key, const Tensor& value,
    const std::optional<Tensor>& mask, const Tensor& y, const Tensor& stats, int64_t q,
    double scale, bool causal, int64_t window_left, int64_t window_right, double softcap,
    double dropout_p, int64_t dropout_seed) {
  const char* op = "attention_jet_backward";
  const AttentionInputs inputs = prepare_attention(
      op, query, key, value, mask,
      {q, scale, causal, window_left, window_right, softcap, dropout_p, dropout_seed});
  const AttentionProblem& p = inputs.problem;
  check_backward_tensors(op, p, query, gy, y, stats);
  const Tensor dense_gy = with_dense_rows(gy), dense_y = with_dense_rows(y);
  const Tensor dense_stats = torch::stable::contiguous(stats);
  Tensor gquery = new_by_token(query, p.heads, p.queries, p.size);
  Tensor gkey = new_by_token(key, p.key_heads, p.keys, p.size);
  Tensor gvalue = new_by_token(value, p.key_heads, p.keys, p.value_size);
  if (p.batch * p.key_heads == 0) return {gquery, gkey, gvalue};
  AttentionGradients t = {jet_heads(dense_gy),
                          jet_heads(dense_y),
                          dense_stats.const_data_ptr(),
                          jet_heads(gquery),
                          jet_heads(gkey),
                          jet_heads(gvalue),
                          key_splits(p),
                          nullptr};
  const AttentionKernels kernels = choose_kernels(p.storage);
  const int64_t pairs = p.batch * p.key_heads;
  const std::vector<int64_t> partial_shape = {t.splits > 1 ? kernels.partial_numbers(p, t) : 0};
  const Tensor partial = torch::stable::new_empty(
      dense_stats, torch::headeronly::IntHeaderOnlyArrayRef(partial_shape));
  t.partial = data<void>(partial);
  torch::stable::parallel_for(0, pairs * t.splits, 1, [&](int64_t begin, int64_t end) {
    kernels.backward(p, t, begin, end);
  });
  if (t.splits > 1) {
    torch::stable::parallel_for(
        0, pairs, 1, [&](int64_t begin, int64_t end) { kernels.reduce(p, t, begin, end); });
  }
  return {gquery, gkey, gvalue};
}

}  // namespace
}  // namespace jachess

STABLE_TORCH_LIBRARY_IMPL(jachess, CPU, m) {
  m.impl("attention_jet", TORCH_BOX(&jachess::attention_jet));
  m.impl("attention_jet_backward", TORCH_BOX(&jachess::attention_jet_backward));
}
