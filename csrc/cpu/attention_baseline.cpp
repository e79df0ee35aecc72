// The attention kernels for any processor, and those of float64, which serves checks: speed does
// not count there, and compiling it once is enough.
#include "attention_kernels.h"

#define JACHESS_ISA attention_baseline
#define JACHESS_VECTOR_BYTES 16
#define JACHESS_HAS_DOUBLE 1
#include "attention_isa.h"

namespace jachess {

AttentionKernels attention_kernels_baseline() { return attention_baseline::attention_kernels(); }

}  // namespace jachess
