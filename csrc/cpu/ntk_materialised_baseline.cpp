// The kernels of jachess::ntk_materialised for any processor.
#include "ntk_materialised_kernels.h"

#define JACHESS_ISA ntk_materialised_isa_baseline
#define JACHESS_VECTOR_BYTES 16
#include "ntk_materialised_isa.h"

namespace jachess {

const MaterialisedKernels& ntk_materialised_baseline() {
  return ntk_materialised_isa_baseline::materialised_kernels();
}

}  // namespace jachess
