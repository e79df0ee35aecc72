// jachess::attention_jet and its backward on CUDA: torch's side of attention_jet_forward.cu and
// attention_jet_backward.cu.
#include <torch/csrc/stable/library.h>

#include <limits>

#include "../attention_arguments.h"
#include "tensors.h"

namespace jachess {
namespace {

constexpr int64_t kLargestHead = 256;

void check_sizes(const char* op, const AttentionProblem& p) {
  check(p.size <= kLargestHead && p.value_size <= kLargestHead, "jachess::", op,
        ": the head sizes are ", p.size, " and ", p.value_size, "; the CUDA kernels serve up to ",
        kLargestHead, ": use attention_jet_reference.");
  // Blocks are counted in 32 bits: a block takes at least 16 tokens of a head, and of the results'
  // columns at least an eighth.
  const int64_t most = std::numeric_limits<int32_t>::max() / 8;
  const int64_t tiles = std::max(p.queries, p.keys) / 16 + 1;
  check(p.batch * p.heads <= most / tiles, "jachess::", op, ": ", p.batch, " batch entries of ",
        p.heads, " heads and ", p.queries, " queries are more than one launch can count; expected",
        " at most ", most, " tiles of 16 tokens: split the batch.");
}

// Whether there is nothing to multiply, so that results are zeros.
bool is_empty(const AttentionProblem& p) {
  return p.batch * p.heads * p.queries * p.keys * p.value_size == 0;
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
  const torch::stable::accelerator::DeviceGuard guard(query.get_device());
  const AttentionProblem& problem = inputs.problem;
  check_sizes(op, problem);
  Tensor y = new_by_token(query, problem.heads, problem.queries, problem.value_size);
  Tensor stats = new_attention_statistics(query);
  if (is_empty(problem)) {
    torch::stable::zero_(y);
    torch::stable::zero_(stats);
    return {y, stats};
  }
  check_launch(
      op, attention_jet_cuda(problem, jet_heads(y), stats.mutable_data_ptr(), queue_of(query)));
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
  const torch::stable::accelerator::DeviceGuard guard(query.get_device());
  const AttentionProblem& problem = inputs.problem;
  check_sizes(op, problem);
  check_backward_tensors(op, problem, query, gy, y, stats);
  const Tensor grads = with_dense_rows(gy), results = with_dense_rows(y);
  const Tensor statistics = torch::stable::contiguous(stats);
  Tensor gquery = new_by_token(query, problem.heads, problem.queries, problem.size);
  Tensor gkey = new_by_token(key, problem.key_heads, problem.keys, problem.size);
  Tensor gvalue = new_by_token(value, problem.key_heads, problem.keys, problem.value_size);
  if (is_empty(problem)) {
    for (Tensor* gradient : {&gquery, &gkey, &gvalue}) torch::stable::zero_(*gradient);
    return {gquery, gkey, gvalue};
  }
  Tensor shares = torch::stable::empty_like(statistics);
  check_launch(op, attention_jet_backward_cuda(
                       problem, jet_heads(grads), jet_heads(results), statistics.const_data_ptr(),
                       shares.mutable_data_ptr(), jet_heads(gquery), jet_heads(gkey),
                       jet_heads(gvalue), queue_of(query)));
  return {gquery, gkey, gvalue};
}

}  // namespace
}  // namespace jachess

STABLE_TORCH_LIBRARY_IMPL(jachess, CUDA, m) {
  m.impl("attention_jet", TORCH_BOX(&jachess::attention_jet));
  m.impl("attention_jet_backward", TORCH_BOX(&jachess::attention_jet_backward));
}
