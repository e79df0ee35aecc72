// jachess::sample_directions on CUDA: torch's side of sample_directions.cu.
#include <torch/csrc/stable/library.h>

#include "../direction_arguments.h"
#include "../text.h"
#include "tensors.h"

namespace jachess {
namespace {

Tensor sample_directions(const Tensor& token, int64_t q, int64_t d, const Tensor& seed,
                         const Tensor& offset, const Text& distribution, ScalarType dtype) {
  const char* op = "sample_directions";
  const bool gaussian = parse_distribution(distribution) == Distribution::gaussian;
  const torch::stable::accelerator::DeviceGuard guard(token.get_device());
  Tensor out = new_directions(token, q, d, dtype);
  if (out.numel() == 0) return out;
  const Tensor dense = torch::stable::contiguous(token);
  const DirectionShape shape = {storage_of(dtype),
                                gaussian,
                                q,
                                token.numel(),
                                d,
                                number_on_device(op, "seed", seed, token),
                                number_on_device(op, "offset", offset, token)};
  check_launch(op, sample_directions_cuda(shape, dense.const_data_ptr(), out.mutable_data_ptr(),
                                          queue_of(op, token)));
  return out;
}

}  // namespace
}  // namespace jachess

STABLE_TORCH_LIBRARY_IMPL(jachess, CUDA, m) {
  m.impl("sample_directions", TORCH_BOX(&jachess::sample_directions));
}
