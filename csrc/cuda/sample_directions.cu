// CUDA kernel of jachess::sample_directions: one thread per block of four random words. Eight
// neighbouring threads write eight neighbouring elements, once per word (direction_values.h).
#include "../direction_values.h"
#include "launch.h"

namespace jachess {
namespace {

constexpr int kThreads = 256;

template <typename T, Distribution distribution>
__global__ void __launch_bounds__(kThreads)
    sample_kernel(const int64_t* __restrict__ token, DirectionShape shape, PhiloxKey key,
                  T* __restrict__ out) {
  const int64_t groups = (shape.d + kDirectionGroup - 1) / kDirectionGroup;
  const int64_t blocks = groups * kDirectionLanes;  // of words, per row
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t row = i / blocks;
  if (row >= shape.q * shape.tokens) return;
  const uint32_t block = static_cast<uint32_t>(i % blocks);
  const uint32_t direction = static_cast<uint32_t>(row / shape.tokens);
  const int64_t number = token[row % shape.tokens];
  const DirectionValues values = direction_values<distribution>(
      direction_words(key, shape.offset, direction, static_cast<uint32_t>(number), block));
  const int64_t first =
      static_cast<int64_t>(block / kDirectionLanes) * kDirectionGroup + block % kDirectionLanes;
  JACHESS_UNROLL
  for (int word = 0; word < 4; ++word) {
    const int64_t j = first + word * kDirectionLanes;
    if (j < shape.d) convert(number < 0 ? 0.0f : values.of_word[word], out[row * shape.d + j]);
  }
}

}  // namespace

int sample_directions_cuda(DirectionShape shape, const void* token, void* out, Queue queue) {
  const int64_t groups = (shape.d + kDirectionGroup - 1) / kDirectionGroup;
  const int64_t threads = shape.q * shape.tokens * groups * kDirectionLanes;
  const int64_t blocks = (threads + kThreads - 1) / kThreads;
  const PhiloxKey key = philox_key(shape.seed);
  const int64_t* numbers = static_cast<const int64_t*>(token);
  return dispatch_storage(shape.storage, [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    T* to = static_cast<T*>(out);
    if (shape.gaussian)
      return launch(sample_kernel<T, Distribution::gaussian>, blocks, kThreads, queue, numbers,
                    shape, key, to);
    return launch(sample_kernel<T, Distribution::rademacher>, blocks, kThreads, queue, numbers,
                  shape, key, to);
  });
}

}  // namespace jachess
