// The kernel of jachess::ntk_gram for any processor.
#include "ntk_gram_kernels.h"

#define JACHESS_ISA ntk_gram_isa_baseline
#define JACHESS_VECTOR_BYTES 16
#include "ntk_gram_isa.h"

namespace jachess {

void ntk_gram_baseline(const GramProblem& p, const GramWork& work, int64_t begin, int64_t end,
                       void* result) {
  ntk_gram_isa_baseline::run_gram(p, work, begin, end, result);
}

}  // namespace jachess
