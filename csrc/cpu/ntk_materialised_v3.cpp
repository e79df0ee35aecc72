// The kernels of jachess::ntk_materialised for x86-64-v3 (AVX2).
#include "ntk_materialised_kernels.h"

#if JACHESS_HAS_CLONES

#pragma GCC push_options
#pragma GCC target("arch=x86-64-v3")
#define JACHESS_ISA ntk_materialised_isa_v3
#define JACHESS_VECTOR_BYTES 32
#include "ntk_materialised_isa.h"
#pragma GCC pop_options

namespace jachess {

const MaterialisedKernels& ntk_materialised_v3() {
  return ntk_materialised_isa_v3::materialised_kernels();
}

}  // namespace jachess

#endif
