// Tiles of attention scores in a warp's registers: band and mask, soft cap, dropout, the jets of
// the softmax, and the scores' gradients (docs/how_it_works.md).
#pragma once

#include <limits>

#include "../cuda/pack.h"
#include "mma_jets.h"

namespace jachess {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// What single scores depend on, of AttentionProblem; filled on the host.
struct ScoreRules {
  float scale, softcap;
  float inverse_keep;       // 1 / (1 − dropout_p)
  bool adds_bias;           // whether the mask adds numbers rather than hides
  uint32_t keep_threshold;  // dropout_threshold; 0: no dropout
  const int64_t* seed;
  int heads, queries, keys, left, right;
  AttentionMask mask;
};

inline ScoreRules score_rules(const AttentionProblem& problem) {
  ScoreRules rules;
  rules.scale = static_cast<float>(problem.scale);
  rules.softcap = static_cast<float>(problem.softcap);
  rules.inverse_keep = static_cast<float>(1.0 / (1.0 - problem.dropout_p));
  rules.keep_threshold = dropout_threshold(problem.dropout_p);
  rules.seed = problem.dropout_seed;
  rules.heads = static_cast<int>(problem.heads);
  rules.queries = static_cast<int>(problem.queries);
  rules.keys = static_cast<int>(problem.keys);
  rules.left = static_cast<int>(problem.left);
  rules.right = static_cast<int>(problem.right);
  rules.mask = problem.mask;
  rules.adds_bias = problem.mask.kind != MaskKind::none && problem.mask.kind != MaskKind::boolean;
  return rules;
}

// Indices of a score, or of the first of a tile.
struct ScoreCoord {
  int batch, head, query, key;
};

__device__ inline bool in_band(const ScoreRules& rules, int query, int key) {
  return query < rules.queries && key < rules.keys &&
         (rules.left < 0 || key >= query - rules.left) &&
         (rules.right < 0 || key <= query + rules.right);
}

// Whether all scores of a tile lie within the band.
__device__ inline bool tile_within_band(const ScoreRules& rules, const ScoreCoord& first,
                                        int queries, int keys) {
  const int last_query = first.query + queries - 1, last_key = first.key + keys - 1;
  return last_query < rules.queries && last_key < rules.keys &&
         (rules.left < 0 || first.key >= last_query - rules.left) &&
         (rules.right < 0 || last_key <= first.query + rules.right);
}

// Whether any score of a tile lies within the band.
__device__ inline bool tile_in_band(const ScoreRules& rules, const ScoreCoord& first, int queries,
                                    int keys) {
  const int last_query =
      first.query + queries < rules.queries ? first.query + queries - 1 : rules.queries - 1;
  const int last_key = first.key + keys < rules.keys ? first.key + keys - 1 : rules.keys - 1;
  return (rules.left < 0 || last_key >= first.query - rules.left) &&
         (rules.right < 0 || first.key <= last_query + rules.right);
}

// What the mask adds to a score; −inf where it hides the score.
__device__ inline float mask_value(const AttentionMask& mask, const ScoreCoord& p) {
  const int64_t at =
      p.batch * mask.batch + p.head * mask.head + p.query * mask.query + p.key * mask.key;
  if (mask.kind == MaskKind::none) return 0;
  if (mask.kind == MaskKind::boolean)
    return static_cast<const uint8_t*>(mask.data)[at] ? 0 : kMinusInfinity;
  if (mask.kind == MaskKind::f64) return static_cast<const double*>(mask.data)[at];
  if (mask.kind == MaskKind::f32) return static_cast<const float*>(mask.data)[at];
  float value;
  read(static_cast<const Bits16*>(mask.data)[at], {false, mask.kind == MaskKind::f16}, value);
  return value;
}

// What mask and band add to the score at p.
__device__ inline float bias_of_score(const ScoreRules& rules, const ScoreCoord& p) {
  return in_band(rules, p.query, p.key) ? mask_value(rules.mask, p) : kMinusInfinity;
}

// Whether any score of a tile is visible; all threads of the block call it.
__device__ inline bool tile_takes_part(const ScoreRules& rules, const ScoreCoord& first,
                                       int queries, int keys) {
  if (!tile_in_band(rules, first, queries, keys)) return false;
  if (rules.mask.kind == MaskKind::none) return true;
  int any = 0;
#pragma unroll 1
  for (int n = threadIdx.x; n < queries * keys && !any; n += blockDim.x) {
    const ScoreCoord p = {first.batch, first.head, first.query + n / keys, first.key + n % keys};
    any = bias_of_score(rules, p) != kMinusInfinity;
  }
  return __syncthreads_or(any) != 0;
}

// ---- a warp's tile of scores --------------------------------------------------------------------

// Calls f(block, element) for every score of a lane.
template <int N, typename F>
__device__ inline void for_each_score(const F& f) {
  JACHESS_UNROLL
  for (int n = 0; n < N / 8; ++n) {
    JACHESS_UNROLL
    for (int e = 0; e < 4; ++e) f(n, e);
  }
}

// Calls f(block, element, old, jet) for every jet of a lane, whose streams lie in so many blocks of
// columns; what f makes of `jet`, which is `old` before, takes its place.
template <int S, int blocks, typename F>
__device__ inline void for_each_jet(float (&jets)[S][blocks][4], const F& f) {
  for_each_score<8 * blocks>([&](int n, int e) {
    float old[S], jet[S];
    JACHESS_UNROLL
    for (int s = 0; s < S; ++s) old[s] = jet[s] = jets[s][n][e];
    f(n, e, old, jet);
    JACHESS_UNROLL
    for (int s = 0; s < S; ++s) jets[s][n][e] = jet[s];
  });
}

template <int S>
__device__ inline void scale_jet(float factor, float* jet) {
  JACHESS_UNROLL
  for (int s = 0; s < S; ++s) jet[s] *= factor;
}

__device__ inline uint32_t word_of(const PhiloxWords& words, int which) {
  const uint32_t low = which & 1 ? words.y : words.x, high = which & 1 ? words.w : words.z;
  return which & 2 ? high : low;
}

// Bias and dropout of a tile of scores: a warp's kWarpRows resident tokens against N streamed ones.
// They lie in the warp's scratch: lanes write them along the keys, four at a time, in the order of
// memory and random words, and read them back in the order of the scores' fragments.
template <int N, bool keys_resident>
struct ScoreTile {
  static constexpr int kQueries = keys_resident ? N : kWarpRows,
                       kKeys = keys_resident ? kWarpRows : N;
  static constexpr int kLd = kKeys + 8;  // which keeps queries in different banks
  static_assert(4 * kQueries * kLd + kQueries * kKeys / 4 <= attention_scratch_bytes(N, 0), "");

  float* bias;                 // [query][key]: what mask and band add
  uint8_t* keep_bits;          // [query][key / 4]: a bit for each weight that dropout keeps
  float* scores;               // [S][N / 8][4][lane]: scores before a soft cap
  const bool masked, dropped;  // whether `bias`, `keep_bits` are filled
  int first_query, first_key;
  bool changed;  // whether the bias of any score may differ from 0

  __device__ inline ScoreTile(const ScoreRules& rules, char* scratch)
      : masked(rules.mask.kind != MaskKind::none), dropped(rules.keep_threshold != 0) {
    bias = reinterpret_cast<float*>(scratch);
    keep_bits = reinterpret_cast<uint8_t*>(bias + kQueries * kLd);
    scores = reinterpret_cast<float*>(scratch + attention_scratch_bytes(N, 0)) + lane_index();
  }

  // Fills bias and dropout of the tile from `first` on; all lanes of the warp call it.
  __device__ inline void fill(const ScoreRules& rules, const ScoreCoord& first) {
    changed = masked || !tile_within_band(rules, first, kQueries, kKeys);
    first_query = first.query;
    first_key = first.key;
    if (!masked && !dropped) return;
#pragma unroll 1
    for (int quad = lane_index(); quad < kQueries * kKeys / 4; quad += kWarp) {
      const int query = quad / (kKeys / 4), key = quad % (kKeys / 4) * 4;
      PhiloxWords words = {};
      if (dropped)
        words = dropout_words(static_cast<uint64_t>(*rules.seed),
                              static_cast<int64_t>(first.batch) * rules.heads + first.head,
                              first.query + query, (first.key + key) / 4);
      unsigned bits = 0;
#pragma unroll 1
      for (int k = 0; k < 4; ++k) {
        bias[query * kLd + key + k] = bias_of_score(
            rules, {first.batch, first.head, first.query + query, first.key + key + k});
        if ((word_of(words, k) >> 8) >= rules.keep_threshold) bits |= 1u << k;
      }
      keep_bits[quad] = static_cast<uint8_t>(bits);
    }
    __syncwarp();
  }

  // Query and key, within the tile, of element e of block n of a lane's fragments.
  static __device__ inline int query_of(int n, int e) {
    return keys_resident ? 8 * n + lane_index() % 4 * 2 + e % 2 : lane_index() / 4 + e / 2 * 8;
  }
  static __device__ inline int key_of(int n, int e) {
    return keys_resident ? lane_index() / 4 + e / 2 * 8 : 8 * n + lane_index() % 4 * 2 + e % 2;
  }
  // What mask and band add to a score.
  __device__ inline float bias_of(const ScoreRules& rules, int n, int e) const {
    const int query = query_of(n, e), key = key_of(n, e);
    if (masked) return bias[query * kLd + key];
    return in_band(rules, first_query + query, first_key + key) ? 0 : kMinusInfinity;
  }
  // What dropout multiplies a weight by.
  __device__ inline float factor(const ScoreRules& rules, int n, int e) const {
    const int key = key_of(n, e);
    const bool keep = keep_bits[query_of(n, e) * (kKeys / 4) + key / 4] >> (key % 4) & 1;
    return keep ? rules.inverse_keep : 0.0f;
  }
  __device__ inline float& score(int s, int n, int e) const {
    return scores[((s * (N / 8) + n) * 4 + e) * kWarp];
  }
};

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

// e^s to a relative error of 2^-22; 0 below the smallest normal number.
__device__ inline float fast_exp(float s) {
  const float power = s * 1.44269504f;  // of two
#if defined(__CUDACC__)
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(power));
  return e;
#else
  return ::exp2f(power);
#endif
}

// The jet of e^s.
template <int S>
__device__ inline void exp_jet(const float* s, float* e) {
  e[0] = fast_exp(s[0]);
  pointwise_jet<kDirections<S>, kPairs<S>>(e[0], e[0], s, e);
}

// The jet of n / d, in place of n; zeros where d is, whatever n.
template <int S>
__device__ inline void quotient_jet(const float* d, float* n) {
  const float inverse = 1.0f / d[0];
  n[0] *= inverse;
  JACHESS_UNROLL
  for (int i = 1; i < 3 && i < S; ++i) n[i] = (n[i] - n[0] * d[i]) * inverse;
  if constexpr (S == 4) n[3] = (n[3] - n[1] * d[2] - n[2] * d[1] - n[0] * d[3]) * inverse;
  JACHESS_UNROLL
  for (int s = 0; s < S; ++s) n[s] = d[0] == 0 ? 0 : n[s];
}

// ---- weights and scores' gradients of a tile, from the saved l and δ ----------------------------

// Sets the jets of hidden scores to 0.
template <int S, int N, bool keys_resident>
__device__ inline void clear_hidden(const ScoreRules& rules,
                                    const ScoreTile<N, keys_resident>& tile,
                                    float (&w)[S][N / 8][4]) {
  if (!tile.changed) return;
  for_each_jet(w, [&](int n, int e, const float*, float* jet) {
    const bool hidden = tile.bias_of(rules, n, e) == kMinusInfinity;
    JACHESS_UNROLL
    for (int k = 0; k < S; ++k) jet[k] = hidden ? 0 : jet[k];
  });
}

// Computes the jets of the weights from those of q · k, in place; where the scores are capped, the
// uncapped ones are kept in the tile. normaliser(s, n, e): streams of l.
template <int S, bool keys_resident, int N, typename Normaliser>
__device__ inline void recompute_weights(const ScoreRules& rules,
                                         const ScoreTile<N, keys_resident>& tile,
                                         const Normaliser& normaliser, float (&w)[S][N / 8][4]) {
  float scale = rules.scale;
  if (rules.softcap != 0 || rules.adds_bias) {
    for_each_jet(w, [&](int n, int e, const float*, float* jet) {
      scale_jet<S>(scale, jet);
      if (rules.softcap != 0) {
        JACHESS_UNROLL
        for (int k = 0; k < S; ++k) tile.score(k, n, e) = jet[k];
        cap_score<S>(rules.softcap, jet);
      }
      if (rules.adds_bias) jet[0] += tile.bias_of(rules, n, e);
    });
    scale = 1;
  }
  for_each_jet(w, [&](int n, int e, const float* score, float* p) {
    float z[S];
    JACHESS_UNROLL
    for (int k = 0; k < S; ++k) z[k] = scale * score[k] - normaliser(k, n, e);
    exp_jet<S>(z, p);
  });
  clear_hidden<S>(rules, tile, w);
}

// Computes the scores' gradients from the weights p and their gradients gp, in place of gp.
// delta(s, n, e): streams of δ.
template <int S, bool keys_resident, int N, typename Delta>
__device__ inline void score_gradients(const ScoreRules& rules,
                                       const ScoreTile<N, keys_resident>& tile, const Delta& delta,
                                       const float (&p)[S][N / 8][4], float (&gp)[S][N / 8][4]) {
  constexpr int q = kDirections<S>, P = kPairs<S>;
  for_each_jet(gp, [&](int n, int e, const float* grad, float* out) {
    const float factor = tile.dropped ? tile.factor(rules, n, e) : 1;
    float weight[S], g[S], gs[S] = {};
    JACHESS_UNROLL
    for (int k = 0; k < S; ++k) {
      weight[k] = p[k][n][e];
      g[k] = factor * grad[k] - delta(k, n, e);
    }
    product_jet_backward_add<q, P>(weight, g, gs);
    if (rules.softcap != 0) {
      float s[S], uncapped[S];
      JACHESS_UNROLL
      for (int k = 0; k < S; ++k) s[k] = tile.score(k, n, e);
      const Derivatives<float> d = softcap_derivatives(s[0], rules.softcap);
      pointwise_jet_backward<q, P>(d.f1, d.f2, d.f3, s, gs, uncapped);
      JACHESS_UNROLL
      for (int k = 0; k < S; ++k) gs[k] = uncapped[k];
    }
    JACHESS_UNROLL
    for (int k = 0; k < S; ++k) out[k] = rules.scale * gs[k];
  });
  clear_hidden<S>(rules, tile, gp);  // a weight of 0 is not enough: δ may be NaN
}

}  // namespace jachess
