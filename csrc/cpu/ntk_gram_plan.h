// How the positions of one side of jachess::ntk_gram are shared out: which count at all, and which
// are multiplied together. It follows from the operands alone, never from the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../ntk_gram_problem.h"

namespace jachess {

// Most positions of a tile, left and right. The right side is transposed when it is packed, which
// costs more, and is packed once per tile: a tile is higher than wide.
constexpr int64_t kGramLeft = 256;
constexpr int64_t kGramRight = 128;

struct GramRow {
  int64_t sample, position;
};

// Rows [begin, end) of whole samples: of several, or of one that may take several tiles.
struct GramGroup {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

// upper: some samples of the right lie before some of the left, and a symmetric problem wants only
// pairs of samples with the right one not before the left one.
struct GramPair {
  GramGroup left, right;
  bool upper;
};

// The positions that count, sample by sample.
// used: [samples, positions], not 0 where a position has a cotangent that is not 0.
inline std::vector<GramRow> gram_rows(const std::vector<uint8_t>& used, int64_t positions) {
  std::vector<GramRow> rows;
  for (size_t i = 0; i < used.size(); ++i) {
    const int64_t at = static_cast<int64_t>(i);
    if (used[i]) rows.push_back({at / positions, at % positions});
  }
  return rows;
}

// Whole samples together, as many as fit `most` rows. Few rows are cut finer, so that several
// threads find work.
inline std::vector<GramGroup> gram_groups(const std::vector<GramRow>& rows, int64_t most) {
  const int64_t count = static_cast<int64_t>(rows.size());
  const int64_t block = count >= 512 ? most : count >= 128 ? most / 2 : most / 4;
  std::vector<GramGroup> groups;
  for (int64_t begin = 0, end = 0; begin < count; begin = end) {
    const int64_t sample = rows[static_cast<size_t>(begin)].sample;
    while (end < count && rows[static_cast<size_t>(end)].sample == sample) ++end;
    if (!groups.empty() && end - groups.back().begin <= block) {
      groups.back().end = end;
    } else {
      groups.push_back({begin, end});
    }
  }
  return groups;
}

inline std::vector<GramPair> gram_pairs(const std::vector<GramRow>& left,
                                        const std::vector<GramRow>& right, bool symmetric) {
  const std::vector<GramGroup> down = gram_groups(left, kGramLeft);
  const std::vector<GramGroup> across = gram_groups(right, kGramRight);
  const auto first = [](const std::vector<GramRow>& rows, const GramGroup& group) {
    return rows[static_cast<size_t>(group.begin)].sample;
  };
  const auto last = [](const std::vector<GramRow>& rows, const GramGroup& group) {
    return rows[static_cast<size_t>(group.end) - 1].sample;
  };
  std::vector<GramPair> pairs;
  for (const GramGroup& i : down) {
    for (const GramGroup& j : across) {
      if (symmetric && last(right, j) < first(left, i)) continue;
      pairs.push_back({i, j, symmetric && first(right, j) < last(left, i)});
    }
  }
  return pairs;
}

// The kernels' work list.
struct GramWork {
  const GramRow *left, *right;
  const GramPair* pairs;
};

// Whether a row of 16-, 32- or 64-bit floats has an element that is neither 0 nor -0.
template <typename Bits>
bool has_nonzero(const void* row, int64_t n) {
  typedef Bits Aliased __attribute__((may_alias));
  const Aliased* bits = static_cast<const Aliased*>(row);
  for (int64_t k = 0; k < n; ++k)
    if (static_cast<Bits>(bits[k] << 1) != 0) return true;
  return false;
}

// Whether position t of sample n has a cotangent that is not 0.
inline bool is_used(const GramProblem& p, const GramSide& side, int64_t n, int64_t t) {
  const int64_t bytes = p.storage == Storage::f64 ? 8 : p.storage == Storage::f32 ? 4 : 2;
  for (int64_t l = 0; l < p.layers; ++l) {
    const GramRows& delta = side.cotangents[l];
    for (int64_t c = 0; c < p.outputs; ++c) {
      const int64_t at = c * delta.output + n * delta.sample + t * delta.position;
      const void* row = static_cast<const char*>(delta.data) + at * bytes;
      const bool used = bytes == 8   ? has_nonzero<uint64_t>(row, delta.size)
                        : bytes == 4 ? has_nonzero<uint32_t>(row, delta.size)
                                     : has_nonzero<uint16_t>(row, delta.size);
      if (used) return true;
    }
  }
  return false;
}

}  // namespace jachess
