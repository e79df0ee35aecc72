// The kernels of jachess::ntk_gram as the torch side sees them: one function per instruction set.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../attention_problem.h"  // attention_pack.h needs its strides
#include "aligned_buffer.h"
#include "ntk_gram_plan.h"
#include "simd.h"

namespace jachess {

// Computes pairs [begin, end) into the result, which holds zeros, in the accumulation type.
using GramKernel = void (*)(const GramProblem&, const GramWork&, int64_t begin, int64_t end,
                            void* result);

void ntk_gram_baseline(const GramProblem&, const GramWork&, int64_t, int64_t, void*);
void ntk_gram_v3(const GramProblem&, const GramWork&, int64_t, int64_t, void*);
void ntk_gram_v4(const GramProblem&, const GramWork&, int64_t, int64_t, void*);

}  // namespace jachess
