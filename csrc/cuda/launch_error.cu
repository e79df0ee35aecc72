// The CUDA runtime's words for an error code.
#include "launch.h"

namespace jachess {

const char* launch_error(int error) {
  if (error == kNoTileFits) return "no tile of these sizes fits the GPU's shared memory";
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

}  // namespace jachess
