// Which scores of a tile take part: mask, causality, window and ragged ends as numbers added to the
// primal scores; and the factors of dropout. For JACHESS_ISA.
#pragma once

#include "../cpu/gemm_tile.h"

namespace jachess {
namespace JACHESS_ISA {

enum class Cover : uint8_t { hidden, open, masked };

// A block of queries and keys in pieces of kRows x kPanel. `add` is filled for masked pieces only.
template <typename T>
struct TileMask {
  Panels<T> add;
  Cover* cover;  // [groups, panels]
  int64_t groups, panels;

  Cover at(int64_t group, int64_t panel) const { return cover[group * panels + panel]; }
  // The panels that a group of rows sees, without hidden ones at the ends: [begin, end).
  void panels_seen(int64_t group, int64_t& begin, int64_t& end) const {
    begin = 0;
    end = panels;
    while (begin < end && at(group, begin) == Cover::hidden) ++begin;
    while (begin < end && at(group, end - 1) == Cover::hidden) --end;
  }
  // Calls f(begin, end) for every run of groups of rows that see a panel: what a tile holds for
  // others is of an earlier tile.
  template <typename F>
  void for_each_run_seeing(int64_t panel, const F& f) const {
    for (int64_t begin = 0, end; begin < groups; begin = end) {
      end = begin + 1;
      if (at(begin, panel) == Cover::hidden) continue;
      while (end < groups && at(end, panel) != Cover::hidden) ++end;
      f(begin, end);
    }
  }
};

// Keys [first, end) of a row of the mask, as numbers to add, to out[0 .. end - first).
template <typename T, typename Stored>
void read_mask(const AttentionMask& mask, int64_t at, int64_t first, int64_t end, T* out) {
  const Stored* from = static_cast<const Stored*>(mask.data) + at;
  for (int64_t j = first; j < end; ++j) {
    if constexpr (std::is_same_v<Stored, uint8_t>) {
      out[j - first] = from[j * mask.key] ? T(0) : -std::numeric_limits<T>::infinity();
    } else {
      accumulate_t<Stored> value;
      convert(from[j * mask.key], value);
      out[j - first] = static_cast<T>(value);
    }
  }
}

template <typename T>
void mask_row(const AttentionProblem& p, int64_t batch, int64_t head, int64_t i, int64_t first,
              int64_t end, T* out) {
  const AttentionMask& mask = p.mask;
  const int64_t at = batch * mask.batch + head * mask.head + i * mask.query;
  switch (mask.kind) {
    case MaskKind::none:
      for (int64_t j = first; j < end; ++j) out[j - first] = T(0);
      return;
    case MaskKind::boolean:
      return read_mask<T, uint8_t>(mask, at, first, end, out);
    case MaskKind::f64:
      return read_mask<T, double>(mask, at, first, end, out);
    case MaskKind::f32:
      return read_mask<T, float>(mask, at, first, end, out);
    case MaskKind::bf16:
      return read_mask<T, BFloat16>(mask, at, first, end, out);
    case MaskKind::f16:
      return read_mask<T, Half>(mask, at, first, end, out);
  }
}

// One piece: queries i .. i + rows - 1, keys j .. j + kPanel - 1; fills `add` where it is masked.
template <typename T>
Cover cover_piece(const AttentionProblem& p, int64_t batch, int64_t head, int64_t i, int64_t rows,
                  int64_t j, T* add) {
  const int64_t end = j + kPanel<T>, last = i + rows - 1;
  if (rows <= 0 || end_key(p, last) <= j || first_key(p, i) >= (end < p.keys ? end : p.keys))
    return Cover::hidden;
  const bool inside = first_key(p, last) <= j && end_key(p, i) >= end;
  if (inside && p.mask.kind == MaskKind::none) return Cover::open;
  constexpr T hidden = -std::numeric_limits<T>::infinity();
  bool any_seen = false, any_number = false;
  for (int64_t r = 0; r < kRows; ++r) {
    T* row = add + r * kPanel<T>;
    if (r > 0 && r < rows && inside && p.mask.query == 0) {
      std::memcpy(row, add, sizeof(T) * kPanel<T>);
      continue;
    }
    for (int64_t l = 0; l < kPanel<T>; ++l) row[l] = hidden;
    if (r >= rows) continue;
    const int64_t low = first_key(p, i + r), high = end_key(p, i + r);
    const int64_t from = low > j ? low : j, to = high < end ? high : end;
    if (from < to) mask_row(p, batch, head, i + r, from, to, row + (from - j));
    int seen = 0, number = 0;
    for (int64_t l = 0; l < kPanel<T>; ++l) {
      seen |= row[l] != hidden;
      number |= row[l] != T(0);
    }
    any_seen = any_seen || seen;
    any_number = any_number || number;
  }
  return !any_seen ? Cover::hidden : any_number ? Cover::masked : Cover::open;
}

// Queries [i, i + rows) and the panels of keys from j on.
template <typename T>
JACHESS_ONCE void cover_tile(const AttentionProblem& p, int64_t batch, int64_t head, int64_t i,
                             int64_t rows, int64_t j, TileMask<T>& tile) {
  for (int64_t g = 0; g < tile.groups; ++g) {
    const int64_t left = rows - g * kRows;
    for (int64_t c = 0; c < tile.panels; ++c) {
      tile.cover[g * tile.panels + c] =
          cover_piece(p, batch, head, i + g * kRows, left < kRows ? left : kRows, j + c * kPanel<T>,
                      tile.add.at(0, c, g * kRows));
    }
  }
}

// The factor of every weight of the tile: 1 / (1 - p) or 0.
template <typename T>
JACHESS_ONCE void dropout_factors(const AttentionProblem& p, int64_t batch, int64_t head, int64_t i,
                                  int64_t rows, int64_t j, int64_t panels, Panels<T> to) {
  constexpr int64_t quads = kPanel<T> / 4;
  const uint32_t threshold = dropout_threshold(p.dropout_p);
  const T factor = static_cast<T>(1 / (1 - p.dropout_p));
  const uint64_t seed = static_cast<uint64_t>(*p.dropout_seed);
  for (int64_t c = 0; c < panels; ++c) {
    for (int64_t r = 0; r < rows; ++r) {
      uint32_t words[4][quads];
#pragma omp simd
      for (int64_t l = 0; l < quads; ++l) {
        const PhiloxWords drawn =
            dropout_words(seed, batch * p.heads + head, i + r, (j + c * kPanel<T>) / 4 + l);
        words[0][l] = drawn.x;
        words[1][l] = drawn.y;
        words[2][l] = drawn.z;
        words[3][l] = drawn.w;
      }
      T* out = to.at(0, c, r);
      for (int64_t l = 0; l < kPanel<T>; ++l)
        out[l] = (words[l % 4][l / 4] >> 8) >= threshold ? factor : T(0);
    }
  }
}

}  // namespace JACHESS_ISA
}  // namespace jachess
