// The elementwise part of attention on tiles of scores, row by row: from scores to weights and
// back. For JACHESS_ISA.
//
// With l the jet of log sum e^s over a row's keys and z = s - l, the weights are the jet of e^z:
//     p_0 = e^{z_0},   p_i = p_0 z_i,   p_ij = p_0 (z_ij + z_i z_j),
//     l_i = sum p_0 s_i,   l_ij = sum p_0 (s_ij + z_i z_j).
#pragma once

#include "cpu_mask.h"

namespace jachess {
namespace JACHESS_ISA {

template <typename T>
constexpr T kInfinity = std::numeric_limits<T>::infinity();

// Sum over the lanes, halving: the partner of lane l is l ^ step.
template <typename T>
JACHESS_HD T sum_lanes(typename TileVector<T>::type v) {
  constexpr int lanes = TileVector<T>::lanes;
  using Index = std::conditional_t<sizeof(T) == 8, int64_t, int32_t>;
  typedef Index M __attribute__((vector_size(JACHESS_VECTOR_BYTES)));
  JACHESS_UNROLL
  for (int step = lanes / 2; step > 0; step /= 2) {
    M partner;
    JACHESS_UNROLL
    for (int l = 0; l < lanes; ++l) partner[l] = l ^ step;
    v += __builtin_shuffle(v, partner);
  }
  return v[0];
}

template <typename T>
JACHESS_HD T max_lanes(typename TileVector<T>::type v) {
  T top = v[0];
  for (int l = 1; l < TileVector<T>::lanes; ++l) top = v[l] > top ? v[l] : top;
  return top;
}

// to = e^(from - shift) over one row of a panel.
template <typename T>
JACHESS_HD void exp_panel(const T* from, T shift, T* to) {
#pragma omp simd
  for (int64_t l = 0; l < kPanel<T>; ++l) to[l] = exp_nonpositive(from[l] - shift);
}

// f, f', f'', f''' of f(x) = cap tanh(x / cap) over one row of a panel.
template <typename T>
struct CapDerivatives {
  alignas(64) T f0[kPanel<T>], f1[kPanel<T>], f2[kPanel<T>], f3[kPanel<T>];

  void at(const T* x, T cap) {
#pragma omp simd
    for (int64_t l = 0; l < kPanel<T>; ++l) {
      const Derivatives<T> d = ActivationOf<Activation::tanh, T>::at(x[l] / cap);
      f0[l] = cap * d.f0;
      f1[l] = d.f1;
      f2[l] = d.f2 / cap;
      f3[l] = d.f3 / (cap * cap);
    }
  }
};

template <int S, typename T, typename V>
JACHESS_HD void load_streams(Panels<T> z, int64_t panel, int64_t row, int v, V* out) {
  JACHESS_UNROLL
  for (int s = 0; s < S; ++s) out[s] = vector_at(z.at(s, panel, row), v);
}

template <int S, typename T, typename V>
JACHESS_HD void store_streams(Panels<T> z, int64_t panel, int64_t row, int v, const V* from) {
  JACHESS_UNROLL
  for (int s = 0; s < S; ++s) vector_at(z.at(s, panel, row), v) = from[s];
}

template <int S, typename T>
void clear_streams(Panels<T> z, int64_t panel, int64_t row) {
  for (int s = 0; s < S; ++s) {
    T* out = z.at(s, panel, row);
    for (int64_t l = 0; l < kPanel<T>; ++l) out[l] = T(0);
  }
}

// The jet of cap tanh(s / cap), in place.
template <int q, int P, typename T>
void cap_row(Panels<T> z, int64_t panel, int64_t row, T cap) {
  using V = typename TileVector<T>::type;
  constexpr int S = 1 + q + P;
  CapDerivatives<T> d;
  d.at(z.at(0, panel, row), cap);
  for (int v = 0; v < TileVector<T>::per_panel; ++v) {
    V s[S], y[S];
    load_streams<S>(z, panel, row, v, s);
    pointwise_jet<q, P>(vector_at(d.f1, v), vector_at(d.f2, v), s, y);
    y[0] = vector_at(d.f0, v);
    store_streams<S>(z, panel, row, v, y);
  }
}

// A row of scores, panels [begin, end) of which the mask shows something.
template <typename T>
struct ScoreRow {
  Panels<T> z;
  int64_t row, begin, end;
  const TileMask<T>* mask;

  Cover cover(int64_t panel) const { return mask->at(row / kRows, panel); }
};

// Softcap and mask on the row's scores; returns the largest.
template <int q, int P, typename T>
T masked_scores(const ScoreRow<T>& r, T cap) {
  using V = typename TileVector<T>::type;
  V top = V{} - kInfinity<T>;
  for (int64_t p = r.begin; p < r.end; ++p) {
    if (r.cover(p) == Cover::hidden) continue;
    if (cap > T(0)) cap_row<q, P>(r.z, p, r.row, cap);
    T* s0 = r.z.at(0, p, r.row);
    for (int v = 0; v < TileVector<T>::per_panel; ++v) {
      V& s = vector_at(s0, v);
      if (r.cover(p) == Cover::masked) s += vector_at(r.mask->add.at(0, p, r.row), v);
      top = s > top ? s : top;
    }
  }
  return max_lanes<T>(top);
}

// From scores to weights, in place, normalised within this row. lse [S] gets the jet of log sum e^s
// (-inf and 0 where nothing is seen). The weights of second order lack one term, -p_0 lag_ij, which
// the caller subtracts from the products with the values: lag [P] is known only after the row.
template <int q, int P, typename T>
void softmax_row(const ScoreRow<T>& r, T cap, T* lse, T* lag) {
  using V = typename TileVector<T>::type;
  constexpr int S = 1 + q + P;
  constexpr int vectors = TileVector<T>::per_panel;
  T top = masked_scores<q, P>(r, cap);
  if (top == -kInfinity<T>) top = T(0);  // nothing seen; or NaN, which the sum then shows
  V sums[S] = {};
  for (int64_t p = r.begin; p < r.end; ++p) {
    if (r.cover(p) == Cover::hidden) continue;
    T* s0 = r.z.at(0, p, r.row);
    exp_panel(s0, top, s0);
    for (int v = 0; v < vectors; ++v) {
      V s[S];
      load_streams<S>(r.z, p, r.row, v, s);
      sums[0] += s[0];
      JACHESS_UNROLL
      for (int k = 1; k < S; ++k) sums[k] += s[0] * s[k];
    }
  }
  const T total = sum_lanes<T>(sums[0]);
  const bool empty = total == T(0);
  const T inverse = empty ? T(0) : T(1) / total;
  lse[0] = empty ? -kInfinity<T> : top + std::log(total);
  for (int k = 1; k < S; ++k) lse[k] = empty ? T(0) : sum_lanes<T>(sums[k]) * inverse;
  V lags[P + 1] = {};
  for (int64_t p = r.begin; p < r.end; ++p) {
    if (r.cover(p) == Cover::hidden) {
      clear_streams<S>(r.z, p, r.row);
      continue;
    }
    for (int v = 0; v < vectors; ++v) {
      V s[S], w[S];
      load_streams<S>(r.z, p, r.row, v, s);
      w[0] = s[0] * inverse;
      JACHESS_UNROLL
      for (int k = 1; k < S; ++k) s[k] -= lse[k];
      pointwise_jet<q, P>(w[0], w[0], s, w);
      JACHESS_UNROLL
      for (int k = 0; k < P; ++k) lags[k] += w[1 + q + k];
      store_streams<S>(r.z, p, r.row, v, w);
    }
  }
  for (int k = 0; k < P; ++k) {
    lag[k] = sum_lanes<T>(lags[k]);
    lse[1 + q + k] += lag[k];
  }
}

// z *= factors, every stream: dropout.
template <int S, typename T>
void scale_row(const ScoreRow<T>& r, Panels<T> factors) {
  for (int64_t p = r.begin; p < r.end; ++p) {
    for (int v = 0; v < TileVector<T>::per_panel; ++v) {
      const auto factor = vector_at(factors.at(0, p, r.row), v);
      for (int s = 0; s < S; ++s) vector_at(r.z.at(s, p, r.row), v) *= factor;
    }
  }
}

// Constants of a row in the backward: the jet of log sum e^s, and delta = gradient of the weights
// averaged with the weights (which is <gy, y> in the sense of product_jet_backward).
template <typename T, int S>
struct RowConstants {
  T lse[S], delta[S];
};

// One row of a panel: scores z -> weights (with dropout), gradients g in the weights -> in the
// scores, both in place:  with G = factor g - delta,
//     gs_ij = p_0 G_ij,  gs_i = p_0 (G_i + sum_j z_j G_ij),
//     gs_0 = p_0 (G_0 + sum z_i G_i + sum (z_ij + z_i z_j) G_ij).
template <int q, int P, bool capped, typename T>
void gradient_panel(const ScoreRow<T>& r, int64_t p, Panels<T> g,
                    const RowConstants<T, 1 + q + P>& row, T cap, const T* factors) {
  using V = typename TileVector<T>::type;
  constexpr int S = 1 + q + P;
  alignas(64) T weight[kPanel<T>];
  CapDerivatives<T> d;
  const T* s0 = r.z.at(0, p, r.row);
  if constexpr (capped) {
    d.at(s0, cap);
    s0 = d.f0;
  }
  if (r.cover(p) == Cover::masked) {
    const T* add = r.mask->add.at(0, p, r.row);
    for (int64_t l = 0; l < kPanel<T>; ++l) weight[l] = s0[l] + add[l];
    s0 = weight;
  }
  exp_panel(s0, row.lse[0], weight);
  for (int v = 0; v < TileVector<T>::per_panel; ++v) {
    V raw[S], z[S], w[S], up[S], down[S];
    load_streams<S>(r.z, p, r.row, v, raw);
    if constexpr (capped) {
      pointwise_jet<q, P>(vector_at(d.f1, v), vector_at(d.f2, v), raw, z);
    } else {
      JACHESS_UNROLL
      for (int s = 1; s < S; ++s) z[s] = raw[s];
    }
    JACHESS_UNROLL
    for (int s = 1; s < S; ++s) z[s] -= row.lse[s];
    load_streams<S>(g, p, r.row, v, up);
    w[0] = vector_at(weight, v);
    const V weight0 = w[0];
    pointwise_jet<q, P>(weight0, weight0, z, w);
    if (factors != nullptr) {
      const V factor = *reinterpret_cast<const V*>(factors + v * TileVector<T>::lanes);
      JACHESS_UNROLL
      for (int s = 0; s < S; ++s) {
        up[s] *= factor;
        w[s] *= factor;
      }
    }
    JACHESS_UNROLL
    for (int s = 0; s < S; ++s) up[s] -= row.delta[s];
    pointwise_jet_backward<q, P>(weight0, weight0, weight0, z, up, down);
    if constexpr (capped) {
      V inner[S];
      pointwise_jet_backward<q, P>(vector_at(d.f1, v), vector_at(d.f2, v), vector_at(d.f3, v), raw,
                                   down, inner);
      store_streams<S>(g, p, r.row, v, inner);
    } else {
      store_streams<S>(g, p, r.row, v, down);
    }
    store_streams<S>(r.z, p, r.row, v, w);
  }
}

template <int q, int P, typename T>
void gradient_row(const ScoreRow<T>& r, Panels<T> g, const RowConstants<T, 1 + q + P>& row, T cap,
                  const Panels<T>* factors) {
  for (int64_t p = r.begin; p < r.end; ++p) {
    if (r.cover(p) == Cover::hidden) {
      clear_streams<1 + q + P>(r.z, p, r.row);
      clear_streams<1 + q + P>(g, p, r.row);
      continue;
    }
    const T* factor = factors == nullptr ? nullptr : factors->at(0, p, r.row);
    if (cap > T(0)) {
      gradient_panel<q, P, true>(r, p, g, row, cap, factor);
    } else {
      gradient_panel<q, P, false>(r, p, g, row, cap, factor);
    }
  }
}

}  // namespace JACHESS_ISA
}  // namespace jachess
