// The kernel of jachess::ntk_gram for x86-64-v4 (AVX-512).
#include "ntk_gram_kernels.h"

#if JACHESS_HAS_CLONES

#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4,prefer-vector-width=512")
#define JACHESS_ISA ntk_gram_isa_v4
#define JACHESS_VECTOR_BYTES 64
#include "ntk_gram_isa.h"
#pragma GCC pop_options

namespace jachess {

void ntk_gram_v4(const GramProblem& p, const GramWork& work, int64_t begin, int64_t end,
                 void* result) {
  ntk_gram_isa_v4::run_gram(p, work, begin, end, result);
}

}  // namespace jachess

#endif
