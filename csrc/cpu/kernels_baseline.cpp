// The kernels for any processor, and attention's of float64, which serves checks: speed does not
// count there, and compiling it once is enough.
#include "kernels.h"

#define JACHESS_ISA baseline
#define JACHESS_VECTOR_BYTES 16
#define JACHESS_HAS_DOUBLE 1
#include "kernels_isa.h"
