// What forms A and B of a linear layer's NTK cost (docs/ntk.md), in operations and bytes: what the
// choice between them goes by. The formulas are in jachess_ext/ntk/cost.py, which counts the same.
#pragma once

#include "cpu/ntk_gram_plan.h"

namespace jachess {

// Of one contraction: positions are those kept, per sample.
struct NtkSize {
  double samples, positions, other_samples, other_positions, outputs, inputs, cotangents;
  bool symmetric;
  double bytes_per_number;
};

struct NtkCost {
  double gram_flops, gram_bytes, materialise_flops, materialise_bytes;
};

inline NtkCost ntk_cost(const NtkSize& size) {
  const double rows = size.samples * size.positions,
               columns = size.other_samples * size.other_positions;
  const double squared = size.outputs * size.outputs;
  const double weights = size.inputs * size.cotangents;
  const double share = size.symmetric ? 0.5 : 1.0;
  const double sides = size.symmetric ? rows : rows + columns;
  const double vectors = size.symmetric ? size.samples : size.samples + size.other_samples;
  const double packed = 1.0 / kGramLeft + 1.0 / kGramRight;
  const double pairs = size.samples * size.other_samples * squared;
  return {share * 2 * rows * columns * (size.inputs + squared * size.cotangents),
          share * rows * columns * packed * (size.inputs + squared * size.cotangents) *
              size.bytes_per_number,
          2 * sides * size.outputs * weights + 2 * pairs * weights * share,
          2 * vectors * size.outputs * weights * size.bytes_per_number};
}

}  // namespace jachess
