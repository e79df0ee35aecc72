// The attention kernels for x86-64-v4 (AVX-512).
#include "attention_kernels.h"

#if JACHESS_HAS_CLONES

#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4,prefer-vector-width=512")
#define JACHESS_ISA attention_v4
#define JACHESS_VECTOR_BYTES 64
#define JACHESS_HAS_DOUBLE 0
#include "attention_isa.h"
#pragma GCC pop_options

namespace jachess {

AttentionKernels attention_kernels_v4() { return attention_v4::attention_kernels(); }

}  // namespace jachess

#endif
