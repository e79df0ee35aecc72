// What the .cu files offer to the torch glue: raw device pointers, sizes and a stream. No torch and
// no CUDA header, so both sides may include it. Every launcher returns 0 or a cudaError_t.
#pragma once

#include <cstdint>

#include "../attention/problem.h"
#include "../dtypes.h"
#include "../jet_math.h"
#include "../ntk_gram_problem.h"

namespace jachess {

// Where a kernel runs: a cudaStream_t and its device.
struct Queue {
  void* stream;
  int device;
};

// A jet in memory: S = 1 + q + pairs streams of n elements each, stream after stream; q is 1 or 2.
struct JetShape {
  Storage storage;
  int q, pairs;
  int64_t n;
};

// A jet's place: streams `stream` elements apart, the rows of each `row` elements apart.
struct JetStrides {
  int64_t stream, row;
};

// shape.n = rows * length; the tensors other than g and u are contiguous.
struct ActivationShape {
  JetShape jet;
  int64_t rows, length;
  JetStrides g, u;
};

// y = f(g), or f(g) u where u is not null, into out; with gy, the gradients of g into out and of u
// into gu.
struct ActivationBuffers {
  const void *gy, *g, *u;
  void *out, *gu;
};

int activation_jet_cuda(ActivationShape shape, Activation kind, ActivationBuffers buffers,
                        Queue queue);

// n = rows * channels; rows whose number leaves the same remainder by `classes` share parameters,
// and so do `positions` neighbouring elements of a row: those of a group norm's channel.
// centred: layer norm, else RMS norm.
struct NormShape {
  JetShape jet;
  int64_t rows, channels, classes, positions;
  bool centred;
};

// [classes, channels / positions] of any storage type, or null.
struct NormParameter {
  const void* data;
  Storage storage;
};

// The normalisations' tensors, contiguous. mean and rstd are [S, rows] in the accumulation type
// (float, or double for f64). With a residual (or null), x + residual is written to sum, rounded,
// and normalised. RMS norm has neither bias nor mean.
struct NormBuffers {
  const void *x, *residual;
  NormParameter weight, bias;
  void *y, *sum, *mean, *rstd;
};

int norm_jet_cuda(NormShape shape, NormBuffers buffers, double eps, Queue queue);

// gx is the gradient through the norm, plus gsum where it is not null. partial is room for
// norm_partials numbers, [blocks, 2 (RMS norm: 1), channels / positions], in the accumulation type,
// or null where no weight gradient is wanted; gweight (and gbias), of a parameter's shape, are
// written only where it is given.
inline int64_t norm_blocks(const NormShape& shape) {  // as many of every class
  const int64_t rows = shape.rows / shape.classes,
                most = shape.classes < 1024 ? 1024 / shape.classes : 1;
  return shape.classes * (rows < most ? rows : most);
}
inline int64_t norm_partials(const NormShape& shape) {
  return norm_blocks(shape) * (shape.centred ? 2 : 1) * (shape.channels / shape.positions);
}
struct NormBackwardBuffers {
  const void *gy, *gsum, *x;
  NormParameter weight;
  const void *mean, *rstd;
  void *gx, *partial, *gweight, *gbias;
};

int norm_jet_backward_cuda(NormShape shape, NormBackwardBuffers buffers, Queue queue);

// Random directions [q, tokens, d] of the streams (*seed, *offset), numbers on the device; token:
// [tokens] int64.
struct DirectionShape {
  Storage storage;
  bool gaussian;  // else Rademacher
  int64_t q, tokens, d;
  const int64_t *seed, *offset;
};

int sample_directions_cuda(DirectionShape shape, const void* token, void* out, Queue queue);

// n = rows * scores: softmax over the scores of each row. `masked`: a row of −inf gives zeros.
struct SoftmaxShape {
  JetShape jet;
  int64_t rows, scores;
  bool masked;
};

// y into out or, with gy, gx.
int softmax_jet_cuda(SoftmaxShape shape, const void* gy, const void* x, void* out, Queue queue);

// A jet as rows: one of `channels` elements per token and stream. chosen: how many dimensions the
// mean squares of the pairs are wanted of.
struct TokenShape {
  Storage storage;
  int64_t streams, directions, tokens, channels, chosen;
  double of_directions, of_pairs;  // 1/q and 1/P: a division of doubles is a call on the device
};

// mask: [tokens], or null; index: [chosen], or null for all dimensions; position, of the backward
// where there is an index: room for [channels]. first: [tokens], second: [tokens, chosen], backward
// their gradients.
struct TokenBuffers {
  const void* x;
  const uint8_t* mask;
  const int64_t* index;
  int32_t* position;
  void *first, *second, *gx;
};

int jet_mean_squares_cuda(TokenShape shape, TokenBuffers buffers, Queue queue);
int jet_mean_squares_backward_cuda(TokenShape shape, TokenBuffers buffers, Queue queue);

// Returned by a launcher where no tile of the operands fits the device's shared memory.
constexpr int kNoTileFits = -1;

// stats [S, B, H, T] in the accumulation type: the jet of log Σ e^score.
int attention_jet_cuda(const AttentionProblem& problem, JetHeads y, void* stats, Queue queue);

// delta, of the shape of stats: δ (attention/backward.cu), which the other two read.
int attention_jet_delta_cuda(const AttentionProblem& problem, JetHeads gy, JetHeads y, void* delta,
                             Queue queue);
int attention_jet_backward_cuda(const AttentionProblem& problem, JetHeads gy, const void* stats,
                                const void* delta, JetHeads gquery, JetHeads gkey, JetHeads gvalue,
                                Queue queue);

// Queries [first_row, first_row + rows) of heads [first_head, first_head + heads), which count over
// batch and heads, and keys [0, keys): weights and grads are [S, heads, rows, keys] of bfloat16,
// `stream` elements from stream to stream and `ld`, an even number, from row to row.
struct ScoreChunk {
  int64_t first_head, heads, first_row, rows, keys, stream, ld;
  void *weights, *grads;
};

// kNoTileFits of another dtype, too.
int attention_jet_scores_cuda(const AttentionProblem& problem, JetHeads gy, const void* stats,
                              const void* delta, ScoreChunk chunk, Queue queue);

// Numbers that ntk_gram_cuda needs as scratch; and the blocks of its launch, which must fit 31
// bits.
struct GramScratch {
  int64_t numbers, blocks;
};
GramScratch ntk_gram_scratch(const GramProblem& problem);

// result: [C, N, C, M]. The problem's views are of device memory, the array of them is the host's;
// no dimension is 0, and no operand float64.
int ntk_gram_cuda(const GramProblem& problem, float* scratch, float* result, Queue queue);

// The meaning of a launcher's error code.
const char* launch_error(int error);

}  // namespace jachess
