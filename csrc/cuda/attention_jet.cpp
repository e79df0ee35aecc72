// jachess::attention_jet and its backward on CUDA: torch's side of attention_jet_forward.cu and
// attention_jet_backward.cu.
#include <limits>

#include "../attention_arguments.h"
#include "tensors.h"

namespace jachess {
namespace {

constexpr int64_t kLargestHead = 256;

void check_sizes(const char* op, const AttentionProblem& p) {
  check(
      p.storage != Storage::f64 && p.q <= 2 && p.size <= kLargestHead &&
          p.value_size <= kLargestHead,
      op, "query is a jet of ", p.q, " directions with heads of ", p.size, " and ", p.value_size,
      "; the CUDA kernels take one or two directions of float32, bfloat16 or float16 and heads up "
      "to ",
      kLargestHead, ": call jachess_ext.ops.attention_jet, which goes on without them.");
  // Blocks are counted in 32 bits: a block takes at least 16 tokens of a head, and of the results'
  // columns at least a sixteenth.
  const int64_t most = std::numeric_limits<int32_t>::max() / 16;
  const int64_t tiles = std::max(p.queries, p.keys) / 16 + 1;
  check(p.batch * p.heads <= most / tiles, op, p.batch, " batch entries of ", p.heads,
        " heads and ", p.queries, " queries are more than one launch can count; expected",
        " at most ", most, " tiles of 16 tokens: split the batch.");
}

// Whether there is nothing to multiply, so that the results are zeros.
bool is_empty(const AttentionProblem& p) {
  return p.batch * p.heads * p.queries * p.keys * p.value_size == 0;
}

struct Cuda {
  using Guard = torch::stable::accelerator::DeviceGuard;
  static constexpr bool sums = false;

  static void forward(const char* op, const AttentionInputs& inputs, const Tensor& y,
                      const Tensor& stats) {
    const AttentionProblem& p = inputs.problem;
    check_sizes(op, p);
    if (is_empty(p)) return fill_with_zeros({y, stats});
    check_launch(op, attention_jet_cuda(p, jet_heads(y), stats.mutable_data_ptr(),
                                        queue_of(op, inputs.query)));
  }

  static void backward(const char* op, const AttentionInputs& inputs, const Tensor& gy,
                       const Tensor& y, const Tensor& stats, const Tensor& gquery,
                       const Tensor& gkey, const Tensor& gvalue) {
    const AttentionProblem& p = inputs.problem;
    check_sizes(op, p);
    if (is_empty(p)) return fill_with_zeros({gquery, gkey, gvalue});
    const Tensor shares = torch::stable::empty_like(stats);
    check_launch(op, attention_jet_backward_cuda(p, jet_heads(gy), jet_heads(y),
                                                 stats.const_data_ptr(), shares.mutable_data_ptr(),
                                                 jet_heads(gquery), jet_heads(gkey),
                                                 jet_heads(gvalue), queue_of(op, inputs.query)));
  }

 private:
  static void fill_with_zeros(std::vector<Tensor> results) {
    for (Tensor& result : results) torch::stable::zero_(result);
  }
};

}  // namespace
}  // namespace jachess

STABLE_TORCH_LIBRARY_IMPL(jachess, CUDA, m) {
  jachess::AttentionOperators<jachess::Cuda>::add_to(m);
}
