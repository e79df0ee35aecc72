// What the attention kernels do to one score: which take part, soft cap, mask, dropout, and the
// jets of the softmax's pieces (docs/how_it_works.md).
#pragma once

#include <limits>

#include "attention_tiles.h"

namespace jachess {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// From the host: what of AttentionProblem decides on single scores.
struct ScoreRules {
  float scale, softcap;
  float kept_weight;   // 1 / (1 − dropout_p)
  uint32_t keep_from;  // dropout_threshold; 0: no dropout
  uint64_t seed;
  int heads, queries, keys, left, right;
  AttentionMask mask;
};

inline ScoreRules score_rules(const AttentionProblem& problem) {
  ScoreRules rules;
  rules.scale = static_cast<float>(problem.scale);
  rules.softcap = static_cast<float>(problem.softcap);
  rules.kept_weight = static_cast<float>(1.0 / (1.0 - problem.dropout_p));
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

// Whether scores are only scaled, within their band: no mask, soft cap or dropout.
inline bool is_plain(const ScoreRules& rules) {
  return rules.mask.kind == MaskKind::none && rules.softcap == 0 && rules.keep_from == 0;
}

// Where a score, or the first of a tile, lies.
struct ScorePlace {
  int batch, head, query, key;
};

__device__ inline bool in_band(const ScoreRules& rules, int query, int key) {
  return query < rules.queries && key < rules.keys &&
         (rules.left < 0 || key >= query - rules.left) &&
         (rules.right < 0 || key <= query + rules.right);
}

// Whether a tile of scores lies within the band as a whole.
__device__ inline bool tile_within_band(const ScoreRules& rules, const ScorePlace& first,
                                        int queries, int keys) {
  const int last_query = first.query + queries - 1, last_key = first.key + keys - 1;
  return last_query < rules.queries && last_key < rules.keys &&
         (rules.left < 0 || first.key >= last_query - rules.left) &&
         (rules.right < 0 || last_key <= first.query + rules.right);
}

// Whether a tile of scores meets the band at all.
__device__ inline bool tile_in_band(const ScoreRules& rules, const ScorePlace& first, int queries,
                                    int keys) {
  const int last_query =
      first.query + queries < rules.queries ? first.query + queries - 1 : rules.queries - 1;
  const int last_key = first.key + keys < rules.keys ? first.key + keys - 1 : rules.keys - 1;
  return (rules.left < 0 || last_key >= first.query - rules.left) &&
         (rules.right < 0 || first.key <= last_query + rules.right);
}

template <typename T>
__device__ inline float mask_entry(const void* data, int64_t at) {
  accumulate_t<T> value;
  convert(static_cast<const T*>(data)[at], value);
  return static_cast<float>(value);
}

// What the mask adds to a score; −inf where the score takes no part.
__device__ inline float mask_value(const AttentionMask& mask, const ScorePlace& p) {
  const int64_t at =
      p.batch * mask.batch + p.head * mask.head + p.query * mask.query + p.key * mask.key;
  switch (mask.kind) {
    case MaskKind::none:
      return 0;
    case MaskKind::boolean:
      return static_cast<const uint8_t*>(mask.data)[at] ? 0 : kMinusInfinity;
    case MaskKind::f64:
      return mask_entry<double>(mask.data, at);
    case MaskKind::f32:
      return mask_entry<float>(mask.data, at);
    case MaskKind::bf16:
      return mask_entry<BFloat16>(mask.data, at);
    default:
      return mask_entry<Half>(mask.data, at);
  }
}

// What is added to the score at p: −inf outside the band, too.
__device__ inline float offset_of_score(const ScoreRules& rules, const ScorePlace& p) {
  return in_band(rules, p.query, p.key) ? mask_value(rules.mask, p) : kMinusInfinity;
}

// The whole block asks whether any score of a tile takes part.
__device__ inline bool tile_takes_part(const ScoreRules& rules, const ScorePlace& first,
                                       int queries, int keys) {
  if (!tile_in_band(rules, first, queries, keys)) return false;
  if (rules.mask.kind == MaskKind::none) return true;
  int any = 0;
  for (int n = threadIdx.x; n < queries * keys && !any; n += blockDim.x) {
    const ScorePlace p = {first.batch, first.head, first.query + n / keys, first.key + n % keys};
    any = offset_of_score(rules, p) != kMinusInfinity;
  }
  return __syncthreads_or(any) != 0;
}

// Calls f(null pointer of the storage type, Int<S>) for up to two directions; -1 for what the
// kernels do not serve.
template <typename F>
int dispatch_attention(const AttentionProblem& problem, const F& f) {
  return dispatch_storage(problem.storage, [&](auto* typed) {
    if constexpr (sizeof(*typed) == 8) {
      return kNoTileFits;
    } else {
      const int streams = 1 + problem.q + problem.pairs;
      if (problem.q > 2) return kNoTileFits;
      return streams == 2   ? f(typed, Int<2>{})
             : streams == 3 ? f(typed, Int<3>{})
                            : f(typed, Int<4>{});
    }
  });
}

// ---- dropout ------------------------------------------------------------------------------------

__device__ inline uint32_t word_of(const PhiloxWords& words, int which) {
  const uint32_t low = which & 1 ? words.y : words.x, high = which & 1 ? words.w : words.z;
  return which & 2 ? high : low;
}

// What dropout multiplies the weights of a strip by, 0 or 1 / (1 − dropout_p), as the fragments of
// its scores. Random words come four at a time, for neighbouring keys: lanes that share them make
// some each and exchange them. `first` is the strip's first row and column; keys are the columns,
// or with `of_keys` the rows.
template <bool of_keys, int N>
__device__ inline void dropout_factors(const ScoreRules& rules, const ScorePlace& first,
                                       float (&factor)[N / 8][4]) {
  const int g = lane_index() / 4, t = lane_index() % 4;
  const int64_t head = static_cast<int64_t>(first.batch) * rules.heads + first.head;
  const auto weight = [&](uint32_t word) {
    return (word >> 8) >= rules.keep_from ? rules.kept_weight : 0.0f;
  };
  JACHESS_UNROLL
  for (int n = 0; n < N / 8; ++n) {
    if constexpr (of_keys) {
      // Four lanes share rows 4 (g / 4) .. + 3 and columns 2t, 2t + 1: each makes the words of one
      // column and one of the two groups of rows, and gives each of the others its word.
      const int mine = g % 4;
      const PhiloxWords words =
          dropout_words(rules.seed, head, first.query + 8 * n + 2 * t + mine % 2,
                        first.key / 4 + g / 4 + 2 * (mine / 2));
      JACHESS_UNROLL
      for (int m = 0; m < 4; ++m) {
        const int from = mine ^ m;
        const uint32_t word = __shfl_xor_sync(0xFFFFFFFFu, word_of(words, from), 4 * m);
        JACHESS_UNROLL
        for (int e = 0; e < 4; ++e) {
          if (e == from) factor[n][e] = weight(word);
        }
      }
    } else {
      // Two lanes share four columns: the even one makes the words of row g, the odd one of g + 8.
      const bool even = t % 2 == 0;
      const PhiloxWords words = dropout_words(rules.seed, head, first.query + g + (even ? 0 : 8),
                                              first.key / 4 + 2 * n + t / 2);
      JACHESS_UNROLL
      for (int e = 0; e < 2; ++e) {
        const uint32_t kept = word_of(words, even ? e : 2 + e);
        const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, word_of(words, even ? 2 + e : e), 1);
        factor[n][e] = weight(even ? kept : other);
        factor[n][2 + e] = weight(even ? other : kept);
      }
    }
  }
}

// ---- jets of one score --------------------------------------------------------------------------

template <int S>
constexpr int kDirections = S == 2 ? 1 : 2;
template <int S>
constexpr int kPairs = S == 4 ? 1 : 0;

// Derivatives of c tanh(s / c).
__device__ inline Derivatives<float> softcap_derivatives(float s, float softcap) {
  const float inverse = 1.0f / softcap;
  const Derivatives<float> d = ActivationOf<Activation::tanh, float>::at(s * inverse);
  return {softcap * d.f0, d.f1, inverse * d.f2, inverse * inverse * d.f3};
}

// The jet of the capped score, in place.
template <int S>
__device__ inline void cap_score(float softcap, float* s) {
  float capped[S];
  const Derivatives<float> d = softcap_derivatives(s[0], softcap);
  pointwise_jet<kDirections<S>, kPairs<S>>(d.f1, d.f2, s, capped);
  s[0] = d.f0;
  JACHESS_UNROLL
  for (int k = 1; k < S; ++k) s[k] = capped[k];
}

// The jet of e^s for s with primal part s[0] <= 0.
template <int S>
__device__ inline void exp_jet(const float* s, float* e) {
  e[0] = exp_nonpositive(s[0]);
  pointwise_jet<kDirections<S>, kPairs<S>>(e[0], e[0], s, e);
}

// The jet of n / d.
template <int S>
__device__ inline void quotient_jet(const float* n, const float* d, float* y) {
  const float inverse = 1.0f / d[0];
  y[0] = n[0] * inverse;
  JACHESS_UNROLL
  for (int i = 1; i < 3 && i < S; ++i) y[i] = (n[i] - y[0] * d[i]) * inverse;
  if constexpr (S == 4) y[3] = (n[3] - y[1] * d[2] - y[2] * d[1] - y[0] * d[3]) * inverse;
}

}  // namespace jachess
