// Torch's side of the CUDA kernels: of every operator, checked tensors as sizes, strides and
// pointers. The kernels themselves see no torch header.
#include <torch/csrc/stable/accelerator.h>

#include <limits>

#include "../activation_arguments.h"
#include "../attention/arguments.h"
#include "../direction_arguments.h"
#include "../jet_mean_squares_arguments.h"
#include "../norm_arguments.h"
#include "../ntk_gram_arguments.h"
#include "../softmax_arguments.h"
#include "launchers.h"

// Weak: a CPU build of torch has no such function, and must still be able to load this library.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace jachess {
namespace {

constexpr int64_t kMost = std::numeric_limits<int32_t>::max();  // blocks of a launch
constexpr int64_t kLargestHead = 256;

// Starts a launcher's kernels on x's device; it takes the queue behind the arguments.
template <typename Launcher, typename... Arguments>
void start(const char* op, const Tensor& x, const Launcher& launcher,
           const Arguments&... arguments) {
  check(aoti_torch_get_current_cuda_stream != nullptr, op,
        "x is on a GPU but this torch is a CPU build: install a CUDA build of torch.");
  Queue queue = {nullptr, x.get_device()};
  check(aoti_torch_get_current_cuda_stream(queue.device, &queue.stream) == 0, op,
        "torch could not name the current CUDA stream of device ", queue.device, ".");
  const int error = launcher(arguments..., queue);
  check(error == 0, op, "the CUDA kernel could not start (", launch_error(error),
        "): see `jachess doctor` for the GPUs this build serves.");
}

JetShape jet_shape(const char* op, const Tensor& x, int64_t q, int pairs) {
  check(q <= 2, op, "q is ", q, "; the CUDA kernels take one or two directions: call ",
        "jachess_ext.ops, which goes in passes of two.");
  return {storage_of(x.scalar_type()), static_cast<int>(q), pairs, x.numel() / x.size(0)};
}

const void* pointer(const Tensor& t) { return t.const_data_ptr(); }
const void* pointer(const std::optional<Tensor>& t) {
  return t.has_value() ? t->const_data_ptr() : nullptr;
}
void* target(const Tensor& t) { return t.mutable_data_ptr(); }
void* target(const std::optional<Tensor>& t) {
  return t.has_value() ? t->mutable_data_ptr() : nullptr;
}

// A dense parameter as it is, or none.
NormParameter norm_parameter(const std::optional<Tensor>& t) {
  return {pointer(t), t.has_value() ? storage_of(t->scalar_type()) : Storage::f32};
}

template <typename Norm>
NormShape norm_shape(const char* op, const Norm& norm) {
  return {jet_shape(op, norm.x, norm.streams.q, norm.streams.pairs),
          norm.shape.rows,
          norm.shape.n,
          norm.parameters.classes,
          norm.parameters.positions,
          norm.mean.has_value()};
}

TokenShape token_shape(const MeanSquaresInputs& in) {
  const TokenRows& r = in.rows;
  return {storage_of(in.x.scalar_type()),
          r.streams,
          r.directions,
          r.tokens,
          r.channels,
          in.count,
          1.0 / static_cast<double>(r.directions),
          1.0 / static_cast<double>(std::max(r.pairs, int64_t(1)))};
}

TokenBuffers token_buffers(const MeanSquaresInputs& in, const std::optional<Tensor>& position,
                           void* first, void* second, void* gx) {
  return {pointer(in.x),
          static_cast<const uint8_t*>(pointer(in.mask)),
          static_cast<const int64_t*>(pointer(in.index)),
          static_cast<int32_t*>(target(position)),
          first,
          second,
          gx};
}

void check_heads(const char* op, const AttentionProblem& p) {
  check(
      p.storage != Storage::f64 && p.q <= 2 && p.size <= kLargestHead &&
          p.value_size <= kLargestHead,
      op, "query is a jet of ", p.q, " directions with heads of ", p.size, " and ", p.value_size,
      "; the CUDA kernels take one or two directions of float32, bfloat16 or float16 and heads up "
      "to ",
      kLargestHead, ": call jachess_ext.ops.attention_jet, which goes on without them.");
  // Blocks are counted in 32 bits: a block takes at least 16 tokens of a head, and of the results'
  // columns at least a sixteenth.
  const int64_t most = kMost / 16, tiles = std::max(p.queries, p.keys) / 16 + 1;
  check(p.batch * p.heads <= most / tiles, op, p.batch, " batch entries of ", p.heads,
        " heads and ", p.queries, " queries are more than one launch can count; expected",
        " at most ", most, " tiles of 16 tokens: split the batch.");
}

// Whether there is nothing to multiply; the results are then zeros.
bool zeros(const AttentionProblem& p, std::vector<Tensor> results) {
  const bool empty = p.batch * p.heads * p.queries * p.keys * p.value_size == 0;
  for (Tensor& result : results)
    if (empty) torch::stable::zero_(result);
  return empty;
}

// What the operators of ../*_arguments.h ask of a device.
struct Cuda {
  using Guard = torch::stable::accelerator::DeviceGuard;
  static constexpr bool sums = false;

  template <bool gated>
  static void forward(const char* op, const ActivationInputs& in, const Tensor& y) {
    activate<gated>(op, in, nullptr, y, nullptr);
  }
  template <bool gated>
  static void backward(const char* op, const ActivationInputs& in, const Tensor& gy,
                       const Tensor& gg, const Tensor& gu) {
    activate<gated>(op, in, pointer(gy), gg, gated ? target(gu) : nullptr);
  }

  template <bool centred>
  static void forward(const char* op, const NormForward& norm, const std::optional<Tensor>& weight,
                      const std::optional<Tensor>& bias, double eps) {
    const std::optional<Tensor> w = dense(weight), b = dense(bias);
    const NormBuffers buffers = {pointer(norm.x),   pointer(norm.residual), norm_parameter(w),
                                 norm_parameter(b), target(norm.y),         target(norm.sum),
                                 target(norm.mean), target(norm.rstd)};
    start(op, norm.x, norm_jet_cuda, norm_shape(op, norm), buffers, eps);
  }
  template <bool centred>
  static void backward(const char* op, const NormBackward& norm,
                       const std::optional<Tensor>& weight, bool need_weight) {
    const NormShape shape = norm_shape(op, norm);
    const std::optional<Tensor> w = dense(weight);
    std::optional<Tensor> partial;
    if (need_weight) partial = new_wide(norm.x, {norm_partials(shape)});
    const NormBackwardBuffers buffers = {
        pointer(norm.gy),     pointer(norm.gsum), pointer(norm.x), norm_parameter(w),
        pointer(norm.mean),   pointer(norm.rstd), target(norm.gx), target(partial),
        target(norm.gweight), target(norm.gbias)};
    start(op, norm.x, norm_jet_backward_cuda, shape, buffers);
  }

  static void softmax(const char* op, const SoftmaxInputs& in, const Tensor& result) {
    const SoftmaxShape shape = {jet_shape(op, in.x, in.streams.q, in.streams.pairs), in.rows.rows,
                                in.rows.n, in.masked};
    start(op, in.x, softmax_jet_cuda, shape, pointer(in.gy), pointer(in.x), target(result));
  }

  static void forward(const char* op, const MeanSquaresInputs& in, const Tensor& first,
                      const Tensor& second) {
    if (first.numel() == 0) return;
    start(op, in.x, jet_mean_squares_cuda, token_shape(in),
          token_buffers(in, std::nullopt, target(first), target(second), nullptr));
  }
  static void backward(const char* op, const MeanSquaresInputs& in, const Tensor& gfirst,
                       const Tensor& gsecond, const Tensor& gx) {
    if (gx.numel() == 0) return;
    std::optional<Tensor> position;
    if (in.index.has_value())
      position = torch::stable::new_empty(
          gx, torch::headeronly::IntHeaderOnlyArrayRef(&in.rows.channels, 1), ScalarType::Int);
    start(op, gx, jet_mean_squares_backward_cuda, token_shape(in),
          token_buffers(in, position, const_cast<void*>(pointer(gfirst)),
                        const_cast<void*>(pointer(gsecond)), target(gx)));
  }

  static void forward(const char* op, const AttentionInputs& in, const Tensor& y,
                      const Tensor& stats) {
    check_heads(op, in.problem);
    if (stats.numel() == 0) return;
    start(op, y, attention_jet_cuda, in.problem, jet_heads(y), target(stats));
  }
  static void backward(const char* op, const AttentionInputs& in, const Tensor& gy, const Tensor& y,
                       const Tensor& stats, const Tensor& gquery, const Tensor& gkey,
                       const Tensor& gvalue) {
    check_heads(op, in.problem);
    if (zeros(in.problem, {gquery, gkey, gvalue})) return;
    const Tensor delta = torch::stable::empty_like(stats);
    start(op, y, attention_jet_delta_cuda, in.problem, jet_heads(gy), jet_heads(y), target(delta));
    start(op, y, attention_jet_backward_cuda, in.problem, jet_heads(gy), pointer(stats),
          pointer(delta), jet_heads(gquery), jet_heads(gkey), jet_heads(gvalue));
  }

 private:
  template <bool gated>
  static void activate(const char* op, const ActivationInputs& in, const void* gy,
                       const Tensor& out, void* gu) {
    const ActivationShape shape = {jet_shape(op, in.gate.tensor, in.streams.q, in.streams.pairs),
                                   in.cut.rows,
                                   in.cut.length,
                                   {in.gate.stream_stride, in.gate.row_stride},
                                   {in.up.stream_stride, in.up.row_stride}};
    start(op, out, activation_jet_cuda, shape, in.kind,
          ActivationBuffers{gy, pointer(in.gate.tensor), gated ? pointer(in.up.tensor) : nullptr,
                            target(out), gu});
  }
};

// δ of every query, [S, B, H, T]: what attention_jet_scores reads of y.
Tensor attention_jet_delta(const Tensor& gy, const Tensor& y, int64_t q) {
  const char* op = "attention_jet_delta";
  check_attention_tensors(op, y, y, y, q, 0, Cuda::sums);
  check_same(op, "gy", gy, y, "y");
  const Cuda::Guard guard(y.get_device());
  const Tensor rows = with_dense_rows(y), grads = with_dense_rows(gy);
  const Tensor delta = new_attention_statistics(y);
  const AttentionProblem p = attention_problem(op, rows, rows, rows, std::nullopt, std::nullopt,
                                               {q, 1.0, false, -1, -1, 0.0, 0.0, 0});
  check_heads(op, p);
  if (delta.numel() != 0)
    start(op, y, attention_jet_delta_cuda, p, jet_heads(grads), jet_heads(rows), target(delta));
  return delta;
}

// [S, heads, rows, keys] of x's dtype, rows at multiples of 16 bytes, as matrix products like them.
Tensor new_scores(const Tensor& x, int64_t heads, int64_t rows, int64_t keys) {
  const int64_t ld = (keys + 7) / 8 * 8;
  const int64_t shape[] = {x.size(0), heads, rows, keys};
  const int64_t strides[] = {heads * rows * ld, rows * ld, ld, 1};
  return new_strided(x, shape, strides);
}

std::tuple<Tensor, Tensor> attention_jet_scores(
    const Tensor& gy, const Tensor& query, const Tensor& key, const Tensor& value,
    const std::optional<Tensor>& mask, const std::optional<Tensor>& dropout_seed,
    const Tensor& stats, const Tensor& delta, int64_t q, double scale, bool causal,
    int64_t window_left, int64_t window_right, double softcap, double dropout_p, int64_t summed,
    int64_t first_head, int64_t heads, int64_t first_row, int64_t rows, int64_t keys) {
  const char* op = "attention_jet_scores";
  const AttentionInputs in = prepare_attention(
      op, query, key, value, mask, dropout_seed,
      {q, scale, causal, window_left, window_right, softcap, dropout_p, summed}, Cuda::sums);
  const AttentionProblem& p = in.problem;
  check_heads(op, p);
  check(p.storage == Storage::bf16, op, "query has dtype ", dtype_name(query.scalar_type()),
        "; the kernel takes bfloat16: call attention_jet_backward.");
  check_backward_tensors(op, p, query, gy, gy, stats);
  check_same(op, "delta", delta, stats, "stats");
  check(delta.device() == stats.device(), op, "delta is not on the device of stats.");
  const auto within = [](int64_t first, int64_t count, int64_t all) {
    return first >= 0 && count >= 0 && count <= all - first;
  };
  check(within(first_head, heads, p.batch * p.heads) && within(first_row, rows, p.queries) &&
            within(0, keys, p.keys),
        op, "the chunk is heads ", first_head, " + ", heads, ", rows ", first_row, " + ", rows,
        " and ", keys, " keys; expected some of ", p.batch * p.heads, ", ", p.queries, " and ",
        p.keys, ".");
  const Cuda::Guard guard(query.get_device());
  const Tensor weights = new_scores(query, heads, rows, keys);
  const Tensor grads = new_scores(query, heads, rows, keys);
  if (weights.numel() == 0) return {weights, grads};
  const Tensor cotangents = with_dense_rows(gy);
  const ScoreChunk chunk = {
      first_head,        heads,           first_row,    rows, keys, weights.stride(0),
      weights.stride(2), target(weights), target(grads)};
  start(op, query, attention_jet_scores_cuda, p, jet_heads(cotangents),
        pointer(torch::stable::contiguous(stats)), pointer(torch::stable::contiguous(delta)),
        chunk);
  return {weights, grads};
}

Tensor sample_directions(const Tensor& token, int64_t q, int64_t d, const Tensor& seed,
                         const Tensor& offset, const Text& distribution, ScalarType dtype) {
  const char* op = "sample_directions";
  const bool gaussian = parse_distribution(distribution) == Distribution::gaussian;
  const Cuda::Guard guard(token.get_device());
  Tensor out = new_directions(token, q, d, dtype);
  if (out.numel() == 0) return out;
  const DirectionShape shape = {storage_of(dtype),
                                gaussian,
                                q,
                                token.numel(),
                                d,
                                number_on_device(op, "seed", seed, token),
                                number_on_device(op, "offset", offset, token)};
  start(op, token, sample_directions_cuda, shape, pointer(torch::stable::contiguous(token)),
        target(out));
  return out;
}

Tensor ntk_gram(const Tensor& inputs, const std::vector<Tensor>& cotangents,
                const std::optional<Tensor>& other_inputs,
                const std::vector<Tensor>& other_cotangents) {
  const char* op = "ntk_gram";
  const GramInputs prepared = prepare_gram(inputs, cotangents, other_inputs, other_cotangents);
  const Cuda::Guard guard(inputs.get_device());
  if (prepared.empty()) return prepared.result;
  check(
      inputs.scalar_type() != ScalarType::Double, op, "inputs have dtype float64; the CUDA kernel ",
      "takes float32, bfloat16 and float16: call jachess_ext.ops.ntk_gram, which goes on without.");
  const GramProblem p = prepared.problem();
  const GramScratch scratch = ntk_gram_scratch(p);
  check(scratch.blocks <= kMost, op, p.left.samples, " by ", p.right.samples, " samples of ",
        p.left.positions, " by ", p.right.positions,
        " positions are more than one launch can count: take blocks of samples.");
  const Tensor partial = new_wide(inputs, {scratch.numbers});
  start(op, inputs, ntk_gram_cuda, p, static_cast<float*>(target(partial)),
        static_cast<float*>(target(prepared.result)));
  return prepared.result;
}

}  // namespace
}  // namespace jachess

STABLE_TORCH_LIBRARY_IMPL(jachess, CUDA, m) {
  using namespace jachess;
  ActivationOperators<Cuda>::add_to(m);
  AttentionOperators<Cuda>::add_to(m);
  MeanSquaresOperators<Cuda>::add_to(m);
  NormOperators<Cuda>::add_to(m);
  SoftmaxOperators<Cuda>::add_to(m);
  m.impl("attention_jet_delta", TORCH_BOX(&attention_jet_delta));
  m.impl("attention_jet_scores", TORCH_BOX(&attention_jet_scores));
  m.impl("sample_directions", TORCH_BOX(&sample_directions));
  m.impl("ntk_gram", TORCH_BOX(&ntk_gram));
}
