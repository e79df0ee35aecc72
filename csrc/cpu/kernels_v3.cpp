// The kernels for x86-64-v3 (AVX2).
#include "kernels.h"

#if JACHESS_HAS_CLONES
#pragma GCC target("arch=x86-64-v3")
#define JACHESS_ISA v3
#define JACHESS_VECTOR_BYTES 32
#include "kernels_isa.h"
#endif
