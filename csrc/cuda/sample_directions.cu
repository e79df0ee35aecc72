// CUDA kernel of jachess::sample_directions: one thread per block of four random words
// (direction_values.h), which are four elements, eight apart.
//
//     thread    0  1  2  3  4  5  6  7      word 0 -> elements 0 .. 7, word 1 -> 8 .. 15, ...
//               8  9 ...                    of 32 neighbours of a row
//
// Eight neighbouring threads write eight neighbours, once per word. No memory is read but the
// tokens' numbers, and the seed and offset, which lie on the device: a CUDA graph that is replayed
// draws anew where they have changed.
#include "../direction_values.h"
#include "pack.h"

namespace jachess {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    sample_kernel(const int64_t* __restrict__ token, const __grid_constant__ DirectionShape shape,
                  void* __restrict__ out) {
  const int64_t groups = (shape.d + kDirectionGroup - 1) / kDirectionGroup;
  const int64_t blocks = groups * kDirectionLanes;  // of words, per row
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t row = i / blocks;
  if (row >= shape.q * shape.tokens) return;
  const uint32_t block = static_cast<uint32_t>(i % blocks);
  const uint32_t direction = static_cast<uint32_t>(row / shape.tokens);
  const int64_t number = token[row % shape.tokens];
  const PhiloxWords words = direction_words(philox_key(static_cast<uint64_t>(*shape.seed)),
                                            static_cast<uint64_t>(*shape.offset), direction,
                                            static_cast<uint32_t>(number), block);
  const DirectionValues values = shape.gaussian ? direction_values<Distribution::gaussian>(words)
                                                : direction_values<Distribution::rademacher>(words);
  const int64_t first =
      static_cast<int64_t>(block / kDirectionLanes) * kDirectionGroup + block % kDirectionLanes;
  JACHESS_UNROLL
  for (int word = 0; word < 4; ++word) {
    const int64_t j = first + word * kDirectionLanes, at = row * shape.d + j;
    if (j >= shape.d) continue;
    const float value = number < 0 ? 0.0f : values.of_word[word];
    dispatch_bytes(shape.storage, [&](auto* typed) {
      write(value, {true, shape.storage == Storage::f16}, static_cast<decltype(typed)>(out)[at]);
    });
  }
}

}  // namespace

int sample_directions_cuda(DirectionShape shape, const void* token, void* out, Queue queue) {
  const int64_t groups = ceil_divide(shape.d, kDirectionGroup);
  const int64_t threads = shape.q * shape.tokens * groups * kDirectionLanes;
  return launch(sample_kernel, ceil_divide(threads, kThreads), kThreads, queue,
                static_cast<const int64_t*>(token), shape, out);
}

}  // namespace jachess
