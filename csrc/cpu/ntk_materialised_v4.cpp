// The kernels of jachess::ntk_materialised for x86-64-v4 (AVX-512).
#include "ntk_materialised_kernels.h"

#if JACHESS_HAS_CLONES

#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4,prefer-vector-width=512")
#define JACHESS_ISA ntk_materialised_isa_v4
#define JACHESS_VECTOR_BYTES 64
#include "ntk_materialised_isa.h"
#pragma GCC pop_options

namespace jachess {

const MaterialisedKernels& ntk_materialised_v4() {
  return ntk_materialised_isa_v4::materialised_kernels();
}

}  // namespace jachess

#endif
