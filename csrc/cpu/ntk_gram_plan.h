// How the positions of one side of jachess::ntk_gram are shared out: which count at all, and which
// are multiplied together. It follows from the operands alone, never from the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../ntk_gram_problem.h"

namespace jachess {

// Most positions a side of a tile: with 256 features of two outputs, packed, they stay in L2.
constexpr int64_t kGramBlock = 128;

struct GramRow {
  int64_t sample, position;
};

// Rows [begin, end) of whole samples: of several, or of one that may take several blocks.
struct GramGroup {
  int64_t begin, end;
};

// A plan as the kernels see it.
struct GramWork {
  const GramRow* rows;
  const GramGroup* groups;
  int64_t group_count;
};

struct GramPlan {
  std::vector<GramRow> rows;
  std::vector<GramGroup> groups;

  GramWork work() const {
    return {rows.data(), groups.data(), static_cast<int64_t>(groups.size())};
  }
};

// Few positions are cut finer, so that several threads find work.
inline int64_t gram_block(int64_t rows) { return rows >= 1024 ? kGramBlock : rows >= 256 ? 64 : 32; }

// used: [samples, positions], not 0 where a position has a cotangent that is not 0.
inline GramPlan plan_gram(const uint8_t* used, int64_t samples, int64_t positions) {
  GramPlan plan;
  std::vector<int64_t> first;  // row of each sample, and the end
  for (int64_t n = 0; n < samples; ++n) {
    first.push_back(static_cast<int64_t>(plan.rows.size()));
    for (int64_t t = 0; t < positions; ++t)
      if (used[n * positions + t]) plan.rows.push_back({n, t});
  }
  first.push_back(static_cast<int64_t>(plan.rows.size()));
  const int64_t block = gram_block(first.back());
  for (int64_t n = 0; n < samples; ++n) {
    const int64_t begin = first[static_cast<size_t>(n)], end = first[static_cast<size_t>(n) + 1];
    if (begin == end) continue;
    if (!plan.groups.empty() && end - plan.groups.back().begin <= block) {
      plan.groups.back().end = end;
    } else {
      plan.groups.push_back({begin, end});
    }
  }
  return plan;
}

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
      const bool found = bytes == 8   ? has_nonzero<uint64_t>(row, delta.size)
                         : bytes == 4 ? has_nonzero<uint32_t>(row, delta.size)
                                      : has_nonzero<uint16_t>(row, delta.size);
      if (found) return true;
    }
  }
  return false;
}

}  // namespace jachess
