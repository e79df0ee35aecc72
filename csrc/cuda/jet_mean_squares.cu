// CUDA kernels of jachess::jet_mean_squares, bound by memory.
//
//     forward, a warp a token                    backward, a thread a pack of 4 of one stream
//     x_i [token] for every direction i          x [S, token, channel] times its stream's factor:
//       -> Σ x_i², mean over i                     0 for the primal and for masked tokens
//     x_ij [token, index] for every pair           2/q gfirst of the token for x_i
//       -> mean of x_ij² over pairs                2/P gsecond at the channel's place for x_ij
//
// Nothing is added up in the backward; where each channel stands in `index` is looked up
// beforehand, by a kernel of its own. No shared memory.
#include "pack.h"

namespace jachess {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;

__device__ inline bool counts(const uint8_t* mask, int64_t token) {
  return mask == nullptr || mask[token] != 0;
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    mean_squares_kernel(const __grid_constant__ TokenShape shape,
                        const __grid_constant__ TokenBuffers b,
                        const __grid_constant__ Elements elements) {
  using A = accumulate_t<T>;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  if (token >= shape.tokens) return;
  const bool counted = counts(b.mask, token);
  const int64_t stream = shape.tokens * shape.channels;
  const T* row = static_cast<const T*>(b.x) + token * shape.channels;
  const Row<T> cut = {shape.channels, lane, kWarp, elements};
  A sum = A(0);
  const auto add_square = [&](int64_t, const A* x) { sum += x[0] * x[0]; };
  for (int64_t s = 1; counted && s <= shape.directions; ++s)
    cut.sweep(add_square, Streams<1, const T>(row, s * stream, 0));
  warp_reduce<Add, 1>(&sum);
  if (lane == 0) static_cast<A*>(b.first)[token] = sum * static_cast<A>(shape.of_directions);
  for (int64_t k = lane; k < shape.chosen; k += kWarp) {
    const int64_t j = b.index == nullptr ? k : b.index[k];
    // The host cannot see an index on the device without waiting for it.
    const bool known = j >= 0 && j < shape.channels;
    A squares = known ? A(0) : A(NAN);
    for (int64_t s = 1 + shape.directions; known && counted && s < shape.streams; ++s) {
      A value;
      read(row[s * stream + j], elements, value);
      squares += value * value;
    }
    static_cast<A*>(b.second)[token * shape.chosen + k] = squares * static_cast<A>(shape.of_pairs);
  }
}

// Where each dimension stands in `index`: -1 nowhere, -2 more than once. For one block.
__global__ void __launch_bounds__(kThreads)
    position_kernel(const int64_t* __restrict__ index, int64_t chosen, int64_t channels,
                    int32_t* __restrict__ position) {
  for (int64_t j = threadIdx.x; j < channels; j += kThreads) position[j] = -1;
  __syncthreads();
  for (int64_t k = threadIdx.x; k < chosen; k += kThreads) {
    const int64_t j = index[k];
    if (j < 0 || j >= channels) continue;
    if (atomicCAS(position + j, -1, static_cast<int32_t>(k)) != -1) atomicExch(position + j, -2);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    gradient_kernel(const __grid_constant__ TokenShape shape,
                    const __grid_constant__ TokenBuffers b,
                    const __grid_constant__ Elements elements) {
  using A = accumulate_t<T>;
  constexpr int W = kPack<T>;
  const int64_t packs = (shape.channels + W - 1) / W;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t channel = i % packs * W, row = i / packs, stream = row / shape.tokens;
  if (stream >= shape.streams) return;
  const int64_t token = row % shape.tokens, at = row * shape.channels + channel;
  const int64_t valid = shape.channels - channel;
  A factor[W] = {};
  JetPack<A, W, 1> jets;
  bool any = false;
  JACHESS_UNROLL
  for (int w = 0; w < W; ++w) {
    if (stream == 0 || w >= valid || !counts(b.mask, token)) continue;
    if (stream <= shape.directions) {
      factor[w] = A(2 * shape.of_directions) * static_cast<const A*>(b.first)[token];
      any = true;
      continue;
    }
    const int64_t k = b.position == nullptr ? channel + w : b.position[channel + w];
    if (k == -1) continue;
    const A* gradient = static_cast<const A*>(b.second) + token * shape.chosen;
    factor[w] = k < 0 ? A(NAN) : A(2 * shape.of_pairs) * gradient[k];
    any = true;
  }
  if (any) Streams<1, const T>(b.x, at, 0).load(0, valid, elements, jets);
  JACHESS_UNROLL
  for (int w = 0; w < W; ++w) jets.at[w][0] = any ? jets.at[w][0] * factor[w] : A(0);
  Streams<1, T>(b.gx, at, 0).store(0, valid, elements, jets);
}

}  // namespace

int jet_mean_squares_cuda(TokenShape shape, TokenBuffers b, Queue queue) {
  return dispatch_bytes(shape.storage, [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    return launch(mean_squares_kernel<T>, ceil_divide(shape.tokens, kWarps), kThreads, queue, shape,
                  b, elements_of<T>(shape.storage, shape.channels, b.x));
  });
}

int jet_mean_squares_backward_cuda(TokenShape shape, TokenBuffers b, Queue queue) {
  if (b.position != nullptr) {
    const int error = launch(position_kernel, 1, kThreads, queue, b.index, shape.chosen,
                             shape.channels, b.position);
    if (error != 0) return error;
  }
  return dispatch_bytes(shape.storage, [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    const int64_t packs = ceil_divide(shape.channels, kPack<T>);
    return launch(gradient_kernel<T>, ceil_divide(shape.streams * shape.tokens * packs, kThreads),
                  kThreads, queue, shape, b,
                  elements_of<T>(shape.storage, shape.channels, b.x, b.gx));
  });
}

}  // namespace jachess
