// Which positions count in the NTK of linear layers: forms A and B leave out the same ones.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <vector>

#include "ntk_gram_plan.h"

namespace jachess {

// Positions without any cotangent add nothing, so they are left out before anything is multiplied:
// padding, and all that a classifier does not read.
inline std::vector<GramRow> rows_of(const GramProblem& p, const GramSide& side) {
  std::vector<uint8_t> used(static_cast<size_t>(side.samples * side.positions));
  torch::stable::parallel_for(0, side.samples, 16, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n)
      for (int64_t t = 0; t < side.positions; ++t)
        used[static_cast<size_t>(n * side.positions + t)] = is_used(p, side, n, t);
  });
  return gram_rows(used, side.positions);
}

}  // namespace jachess
