// CUDA kernels of jachess::layer_norm_jet: the norm rule (docs/how_it_works.md), centred.
#include "norm_kernels.h"

namespace jachess {

int layer_norm_jet_cuda(NormShape shape, NormBuffers buffers, double eps, Queue queue) {
  return launch_norm<true>(shape, buffers, eps, queue);
}

int layer_norm_jet_backward_cuda(NormShape shape, NormBackwardBuffers buffers, Queue queue) {
  return launch_norm_backward<true>(shape, buffers, queue);
}

}  // namespace jachess
