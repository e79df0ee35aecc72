// Attention's sizes, strides, mask and settings, as the CPU and CUDA kernels both see them. No
// torch and no CUDA header. The formulas are in docs/how_it_works.md and
// jachess_ext/ops/attention.py.
#pragma once

#include <cstdint>

#include "../dtypes.h"
#include "../philox.h"

namespace jachess {

// A stack [S, B, heads, tokens, size] in memory: strides in elements, that of the last is 1.
struct JetHeads {
  void* data;
  int64_t stream, batch, head, token;
};

// Of the primal scores, broadcast to [B, H, T, Tk] by strides of 0: a byte that is not 0 takes
// part, or a number is added.
enum class MaskKind : int { none, boolean, f64, f32, bf16, f16 };
struct AttentionMask {
  const void* data;
  MaskKind kind;
  int64_t batch, head, query, key;
};

struct AttentionProblem {
  Storage storage;
  int q, pairs;
  int64_t summed;  // of directions, as of JetStreams; `any`, too
  bool any;
  int64_t batch, heads, key_heads, queries, keys, size, value_size;
  JetHeads query, key, value;
  AttentionMask mask;
  double scale, softcap;  // softcap 0: none
  int64_t left, right;    // query i sees keys i - left <= j <= i + right, -1: no limit; causal is
                          // right = 0
  double dropout_p;
  const int64_t* dropout_seed;  // a number where the tensors are; null without dropout
};

// The keys that the window and causality leave to query i: [first_key, end_key).
JACHESS_HD int64_t first_key(const AttentionProblem& p, int64_t i) {
  const int64_t first = i - p.left;
  return p.left < 0 || first < 0 ? 0 : (first < p.keys ? first : p.keys);
}
JACHESS_HD int64_t end_key(const AttentionProblem& p, int64_t i) {
  const int64_t end = i + p.right + 1;
  return p.right < 0 || end > p.keys ? p.keys : end;
}

// ---- dropout of the weights ----------------------------------------------------------------

constexpr uint32_t kAttentionDropoutCounter = 0x4A414354u;  // "JACT"; no other draw uses it

// The random words of weights (i, 4 quad) .. (i, 4 quad + 3); head counts over batch and heads.
JACHESS_HD PhiloxWords dropout_words(uint64_t seed, int64_t head, int64_t i, int64_t quad) {
  return philox4x32_10({static_cast<uint32_t>(head), static_cast<uint32_t>(i),
                        static_cast<uint32_t>(quad), kAttentionDropoutCounter},
                       {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
}

// A weight is kept where (word >> 8) >= this: (word >> 8) 2^-24 is uniform on [0, 1).
JACHESS_HD uint32_t dropout_threshold(double p) {
  const double scaled = p * 16777216.0;
  const uint32_t floor = static_cast<uint32_t>(scaled);
  return floor + (static_cast<double>(floor) < scaled ? 1u : 0u);
}

}  // namespace jachess
