// The kernels for x86-64-v4 (AVX-512).
#include "kernels.h"

#if JACHESS_HAS_CLONES
#pragma GCC target("arch=x86-64-v4,prefer-vector-width=512")
#define JACHESS_ISA v4
#define JACHESS_VECTOR_BYTES 64
#include "kernels_isa.h"
#endif
