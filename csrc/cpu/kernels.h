// The kernels of attention and of jachess::ntk_gram, compiled once per instruction set, as the
// torch side sees them.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <type_traits>

#include "../attention/problem.h"
#include "aligned_buffer.h"
#include "ntk_gram_plan.h"
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
  // Of problems with `any`; an item is a key head.
  void (*sums_forward)(const AttentionProblem&, const JetHeads& y, void* stats, int64_t begin,
                       int64_t end);
  void (*sums_backward)(const AttentionProblem&, const AttentionGradients&, int64_t begin,
                        int64_t end);
};

// Computes pairs [begin, end) into the result, which holds zeros, in the accumulation type.
using GramKernel = void (*)(const GramProblem&, const GramWork&, int64_t begin, int64_t end,
                            void* result);

struct Kernels {
  AttentionKernels attention;
  GramKernel gram;
};

namespace baseline {
Kernels kernels();
}
namespace v3 {
Kernels kernels();
}
namespace v4 {
Kernels kernels();
}

// The best that this processor can run, and that torch's own variable allows.
inline Kernels choose_kernels() {
#if JACHESS_HAS_CLONES
  const char* capability = std::getenv("ATEN_CPU_CAPABILITY");
  const auto is = [&](const char* name) { return capability && !std::strcmp(capability, name); };
  if (__builtin_cpu_supports("x86-64-v4") && !is("avx2") && !is("default")) return v4::kernels();
  if (__builtin_cpu_supports("x86-64-v3") && !is("default")) return v3::kernels();
#endif
  return baseline::kernels();
}

inline const Kernels& best_kernels() {
  static const Kernels kernels = choose_kernels();
  return kernels;
}

}  // namespace jachess
