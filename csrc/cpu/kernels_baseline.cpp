// The kernels for any processor.
#include "kernels.h"

#define JACHESS_ISA baseline
#define JACHESS_VECTOR_BYTES 16
#include "kernels_isa.h"
