// CUDA kernels of jachess::rms_norm_jet: the norm rule (docs/how_it_works.md), not centred.
#include "norm_kernels.h"

namespace jachess {

int rms_norm_jet_cuda(NormShape shape, NormBuffers buffers, double eps, Queue queue) {
  return launch_norm<false>(shape, buffers, eps, queue);
}

int rms_norm_jet_backward_cuda(NormShape shape, NormBackwardBuffers buffers, Queue queue) {
  return launch_norm_backward<false>(shape, buffers, queue);
}

}  // namespace jachess
