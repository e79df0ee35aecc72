// Form A of the NTK of linear layers (docs/ntk.md), as the CPU and CUDA kernels both see it:
//     K[c, n, c', m] = sum over t, t' of (a_nt . a_mt') sum over l of (delta^l_nct .
//     delta^l_mc't').
// No torch and no CUDA header.
#pragma once

#include <cstdint>

#include "dtypes.h"

namespace jachess {

// Rows of `size` numbers by (output, sample, position): strides in elements, that within a row is
// 1. Inputs are the same for all outputs: their output stride is 0.
struct GramRows {
  const void* data;
  int64_t output, sample, position, size;
};

// `cotangents`: one for each of the layers that share the inputs.
struct GramSide {
  int64_t samples, positions;
  GramRows inputs;
  const GramRows* cotangents;
};

// The result is [outputs, left.samples, outputs, right.samples]. symmetric: right is left, and each
// pair of samples is computed once.
struct GramProblem {
  Storage storage;
  int64_t outputs, layers;
  bool symmetric;
  GramSide left, right;
};

}  // namespace jachess
