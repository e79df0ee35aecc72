// The attention kernels as the torch side sees them: one pair of functions per instruction set.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "../attention_problem.h"
#include "aligned_buffer.h"
#include "simd.h"

namespace jachess {

// The tensors of the backward; strides as of JetHeads. `partial` holds the sums of every item where
// key heads are split, in the accumulation type.
struct AttentionGradients {
  JetHeads gy, y;
  const void* stats;
  JetHeads gquery, gkey, gvalue;
  int64_t splits;
  void* partial;
};

// Work is numbered; threads take ranges of the numbers. `partial_numbers` is how many numbers
// `partial` must hold.
struct AttentionKernels {
  int64_t (*blocks)(const AttentionProblem&);
  void (*forward)(const AttentionProblem&, const JetHeads& y, void* stats, int64_t begin,
                  int64_t end);
  int64_t (*partial_numbers)(const AttentionProblem&, const AttentionGradients&);
  void (*backward)(const AttentionProblem&, const AttentionGradients&, int64_t begin, int64_t end);
  void (*reduce)(const AttentionProblem&, const AttentionGradients&, int64_t begin, int64_t end);
};

AttentionKernels attention_kernels_baseline();
AttentionKernels attention_kernels_v3();
AttentionKernels attention_kernels_v4();

}  // namespace jachess
