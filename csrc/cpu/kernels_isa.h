// The code that is compiled once per instruction set. The including file first sets JACHESS_ISA (a
// namespace), JACHESS_VECTOR_BYTES and the compiler's target. Include shared headers before that,
// or the linker may keep a copy that an older processor cannot run.
#include "../attention/cpu_backward.h"
#include "../attention/cpu_forward.h"
#include "../attention/cpu_sum.h"
#include "ntk_gram_isa.h"

namespace jachess {
namespace JACHESS_ISA {

// Calls f with a null pointer of the accumulation type.
template <typename F>
void dispatch_accumulation(const AttentionProblem& p, const F& f) {
  if (p.storage == Storage::f64) return f(static_cast<double*>(nullptr));
  f(static_cast<float*>(nullptr));
}

// Calls f(Int<q>, Int<P>, null pointer of the accumulation type).
template <typename F>
void dispatch_attention(const AttentionProblem& p, const F& f) {
  dispatch_streams(p.q, p.pairs, [&](auto q, auto P) {
    dispatch_accumulation(p, [&](auto* typed) { f(q, P, typed); });
  });
}

#define JACHESS_ATTENTION(direction)                             \
  Attention##direction<decltype(q_)::value, decltype(P_)::value, \
                       std::remove_pointer_t<decltype(typed)>>

inline AttentionKernels attention_kernels() {
  AttentionKernels kernels;
  kernels.blocks = [](const AttentionProblem& p) {
    return p.batch * p.heads * ((p.queries + kForwardQueries - 1) / kForwardQueries);
  };
  kernels.forward = [](const AttentionProblem& p, const JetHeads& y, void* stats, int64_t begin,
                       int64_t end) {
    dispatch_attention(p, [&](auto q_, auto P_, auto* typed) {
      JACHESS_ATTENTION(Forward)(p, y, stats).run(begin, end);
    });
  };
  kernels.sums_forward = [](const AttentionProblem& p, const JetHeads& y, void* stats,
                            int64_t begin, int64_t end) {
    dispatch_accumulation(p, [&](auto* typed) {
      AttentionSum<std::remove_pointer_t<decltype(typed)>>(p, nullptr)
          .forward(y, stats, begin, end);
    });
  };
  kernels.sums_backward = [](const AttentionProblem& p, const AttentionGradients& t, int64_t begin,
                             int64_t end) {
    dispatch_accumulation(p, [&](auto* typed) {
      AttentionSum<std::remove_pointer_t<decltype(typed)>>(p, &t).backward(begin, end);
    });
  };
  kernels.partial_numbers = [](const AttentionProblem& p, const AttentionGradients& t) {
    int64_t numbers = 0;
    dispatch_attention(p, [&](auto q_, auto P_, auto* typed) {
      numbers = p.batch * p.key_heads * t.splits * JACHESS_ATTENTION(Backward)::gquery_numbers(p);
    });
    return numbers;
  };
  kernels.backward = [](const AttentionProblem& p, const AttentionGradients& t, int64_t begin,
                        int64_t end) {
    dispatch_attention(p, [&](auto q_, auto P_, auto* typed) {
      JACHESS_ATTENTION(Backward)(p, t).run(begin, end);
    });
  };
  kernels.reduce = [](const AttentionProblem& p, const AttentionGradients& t, int64_t begin,
                      int64_t end) {
    dispatch_attention(p, [&](auto q_, auto P_, auto* typed) {
      JACHESS_ATTENTION(Backward)(p, t).reduce(begin, end);
    });
  };
  return kernels;
}

#undef JACHESS_ATTENTION

Kernels kernels() { return {attention_kernels(), run_gram}; }

}  // namespace JACHESS_ISA
}  // namespace jachess
