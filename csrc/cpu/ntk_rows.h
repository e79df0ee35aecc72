// Rows of the NTK's operands as both forms read them; for JACHESS_ISA.
#pragma once

#include "attention_pack.h"

namespace jachess {
namespace JACHESS_ISA {

constexpr int64_t kGramAhead = 4;  // rows that are asked for ahead

// Consecutive rows of a plan.
struct GramBlock {
  const GramRow* rows;
  int64_t count;
};

template <typename Stored>
const Stored* gram_row(const GramRows& from, int64_t output, const GramRow& row, int64_t k) {
  return static_cast<const Stored*>(from.data) + output * from.output + row.sample * from.sample +
         row.position * from.position + k;
}

// Asks for n numbers of a row that will be read soon: rows lie too far apart, and are too short,
// for the processor to foresee them.
template <typename Stored>
JACHESS_HD void prefetch_row(const GramRows& from, int64_t output, GramBlock block, int64_t r,
                             int64_t k, int64_t n) {
  if (r >= block.count) return;
  const Stored* row = gram_row<Stored>(from, output, block.rows[r], k);
  for (int64_t l = 0; l < n; l += 64 / static_cast<int64_t>(sizeof(Stored)))
    __builtin_prefetch(row + l);
}

// n numbers of a row, converted, and zeros up to the next panel.
template <typename T, typename Stored>
JACHESS_HD void copy_row(const Stored* from, int64_t n, T* to) {
#pragma omp simd
  for (int64_t l = 0; l < n; ++l) convert(from[l], to[l]);
  for (int64_t l = n; l < round_up(n, kPanel<T>); ++l) to[l] = T(0);
}

}  // namespace JACHESS_ISA
}  // namespace jachess
