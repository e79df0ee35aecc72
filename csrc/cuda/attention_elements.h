// Single scores in the attention kernels: band, mask, soft cap and dropout, and the jets of the
// softmax's parts (docs/how_it_works.md).
#pragma once

#include <limits>

#include "attention_tiles.h"

namespace jachess {

// The settings of AttentionProblem that apply to single scores, in the kernel's own types.
template <typename A>
struct ScoreRules {
  A scale, softcap;
  A kept_weight;       // 1 / (1 − dropout_p)
  uint32_t keep_from;  // dropout_threshold; 0: no dropout
  uint64_t seed;
  int heads, queries, keys, left, right;
  AttentionMask mask;
};

template <typename A>
ScoreRules<A> score_rules(const AttentionProblem& problem) {
  ScoreRules<A> rules;
  rules.scale = static_cast<A>(problem.scale);
  rules.softcap = static_cast<A>(problem.softcap);
  rules.kept_weight = static_cast<A>(1.0 / (1.0 - problem.dropout_p));
  rules.keep_from = dropout_threshold(problem.dropout_p);
  rules.seed = problem.dropout_seed;
  rules.heads = static_cast<int>(problem.heads);
  rules.queries = static_cast<int>(problem.queries);
  rules.keys = static_cast<int>(problem.keys);
  rules.left = static_cast<int>(problem.left);
  rules.right = static_cast<int>(problem.right);
  rules.mask = problem.mask;
  return rules;
}

// Where a score lies.
struct ScorePlace {
  int batch, head, query, key;
};

template <typename A>
__device__ inline A minus_infinity() {
  return -std::numeric_limits<A>::infinity();
}

template <typename A>
__device__ inline bool in_band(const ScoreRules<A>& rules, int query, int key) {
  return query < rules.queries && key < rules.keys &&
         (rules.left < 0 || key >= query - rules.left) &&
         (rules.right < 0 || key <= query + rules.right);
}

// Whether a tile of scores, first row and column and counts, meets the band at all.
template <typename A>
__device__ inline bool tile_in_band(const ScoreRules<A>& rules, int query, int queries, int key,
                                    int keys) {
  const int last_query =
      query + queries - 1 < rules.queries ? query + queries - 1 : rules.queries - 1;
  const int last_key = key + keys - 1 < rules.keys ? key + keys - 1 : rules.keys - 1;
  return (rules.left < 0 || last_key >= query - rules.left) &&
         (rules.right < 0 || key <= last_query + rules.right);
}

template <typename T, typename A>
__device__ inline A mask_entry(const void* data, int64_t at) {
  accumulate_t<T> value;
  convert(static_cast<const T*>(data)[at], value);
  return static_cast<A>(value);
}

// The mask's addend to a score; −inf where the score takes no part.
template <typename A>
__device__ inline A mask_value(const AttentionMask& mask, const ScorePlace& p) {
  const int64_t at =
      p.batch * mask.batch + p.head * mask.head + p.query * mask.query + p.key * mask.key;
  switch (mask.kind) {
    case MaskKind::none:
      return A(0);
    case MaskKind::boolean:
      return static_cast<const uint8_t*>(mask.data)[at] ? A(0) : minus_infinity<A>();
    case MaskKind::f64:
      return mask_entry<double, A>(mask.data, at);
    case MaskKind::f32:
      return mask_entry<float, A>(mask.data, at);
    case MaskKind::bf16:
      return mask_entry<BFloat16, A>(mask.data, at);
    default:
      return mask_entry<Half, A>(mask.data, at);
  }
}

// The addend to the score at p: the mask's, and −inf outside the band.
template <typename A>
__device__ inline A offset_of_score(const ScoreRules<A>& rules, const ScorePlace& p) {
  return in_band(rules, p.query, p.key) ? mask_value<A>(rules.mask, p) : minus_infinity<A>();
}

// The whole block asks whether any score of a tile takes part.
template <typename A>
__device__ inline bool tile_takes_part(const ScoreRules<A>& rules, int batch, int head, int query,
                                       int queries, int key, int keys) {
  if (!tile_in_band(rules, query, queries, key, keys)) return false;
  if (rules.mask.kind == MaskKind::none) return true;
  int any = 0;
  for (int n = threadIdx.x; n < queries * keys && !any; n += kThreads) {
    const ScorePlace p = {batch, head, query + n / keys, key + n % keys};
    any = offset_of_score(rules, p) != minus_infinity<A>();
  }
  return __syncthreads_or(any) != 0;
}

// Dropout's factor of the weight at p: 0 or 1 / (1 − dropout_p).
template <typename A>
__device__ inline A dropout_factor(const ScoreRules<A>& rules, const ScorePlace& p) {
  if (rules.keep_from == 0) return A(1);
  const int64_t head = static_cast<int64_t>(p.batch) * rules.heads + p.head;
  const PhiloxWords words = dropout_words(rules.seed, head, p.query, p.key / 4);
  const int which = p.key % 4;
  const uint32_t word = which == 0   ? words.x
                        : which == 1 ? words.y
                        : which == 2 ? words.z
                                     : words.w;
  return (word >> 8) >= rules.keep_from ? rules.kept_weight : A(0);
}

// The jet at (row, column) of a tile [S][rows][columns], times `factor`; 0 in streams that the jet
// lacks.
template <int q, int P, typename A>
__device__ inline void load_element(const Tile<A>& tile, const StreamMap& map, int row, int column,
                                    A factor, A* jet) {
  JACHESS_UNROLL
  for (int s = 0; s < 1 + q + P; ++s)
    jet[s] = map.at[s] < 0 ? A(0) : factor * *tile.at(map.at[s], row, column);
}

// Writes a jet as the operand of a product.
template <int q, int P, typename T, typename A>
__device__ inline void store_element(const Tile<T>& tile, const StreamMap& map, int row, int column,
                                     const A* jet) {
  JACHESS_UNROLL
  for (int s = 0; s < 1 + q + P; ++s) {
    if (map.at[s] >= 0) convert(jet[s], *tile.at(map.at[s], row, column));
  }
}

// Derivatives of c tanh(s / c).
template <typename A>
__device__ inline Derivatives<A> softcap_derivatives(A s, A softcap) {
  const A inverse = A(1) / softcap;
  const Derivatives<A> d = ActivationOf<Activation::tanh, A>::at(s * inverse);
  return {softcap * d.f0, d.f1, inverse * d.f2, inverse * inverse * d.f3};
}

// The jet of the capped score, in place.
template <int q, int P, typename A>
__device__ inline void cap_score(A softcap, A* s) {
  if (softcap == A(0)) return;
  A capped[1 + q + P];
  const Derivatives<A> d = softcap_derivatives(s[0], softcap);
  pointwise_jet<q, P>(d.f1, d.f2, s, capped);
  s[0] = d.f0;
  JACHESS_UNROLL
  for (int k = 1; k < 1 + q + P; ++k) s[k] = capped[k];
}

// The jet of n / d.
template <int q, int P, typename A>
__device__ inline void quotient_jet(const A* n, const A* d, A* y) {
  const A inverse = A(1) / d[0];
  y[0] = n[0] * inverse;
  JACHESS_UNROLL
  for (int i = 1; i <= q; ++i) y[i] = (n[i] - y[0] * d[i]) * inverse;
  for_each_pair<q, P>([&](int i, int j, int ij) JACHESS_INLINE {
    y[ij] = (n[ij] - y[1 + i] * d[1 + j] - y[1 + j] * d[1 + i] - y[0] * d[ij]) * inverse;
  });
}

}  // namespace jachess
