// The attention kernels for x86-64-v3 (AVX2).
#include "attention_kernels.h"

#if JACHESS_HAS_CLONES

#pragma GCC push_options
#pragma GCC target("arch=x86-64-v3")
#define JACHESS_ISA attention_v3
#define JACHESS_VECTOR_BYTES 32
#define JACHESS_HAS_DOUBLE 0
#include "attention_isa.h"
#pragma GCC pop_options

namespace jachess {

AttentionKernels attention_kernels_v3() { return attention_v3::attention_kernels(); }

}  // namespace jachess

#endif
