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

struct Arguments {
  TokenShape shape;
  Elements elements;
  double of_directions, of_pairs;  // 1/q and 1/P: a division of doubles is a call on the device
  const void* x;
  const uint8_t* mask;
  const int64_t* index;
  const int32_t* position;  // see position_kernel
  const void *gfirst, *gsecond;
  void *first, *second, *gx;
};

__device__ inline bool counts(const uint8_t* mask, int64_t token) {
  return mask == nullptr || mask[token] != 0;
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    mean_squares_kernel(const __grid_constant__ Arguments args) {
  using A = accumulate_t<T>;
  const TokenShape& shape = args.shape;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  if (token >= shape.tokens) return;
  const bool counted = counts(args.mask, token);
  const int64_t stream = shape.tokens * shape.channels;
  const T* row = static_cast<const T*>(args.x) + token * shape.channels;
  const Row<T> cut = {shape.channels, lane, kWarp, args.elements};
  A sum = A(0);
  const auto add_square = [&](int64_t, const A* x) { sum += x[0] * x[0]; };
  for (int64_t s = 1; counted && s <= shape.directions; ++s)
    cut.sweep(add_square, Streams<1, const T>(row, s * stream, 0));
  warp_reduce<Add, 1>(&sum);
  if (lane == 0) static_cast<A*>(args.first)[token] = sum * static_cast<A>(args.of_directions);
  for (int64_t k = lane; k < shape.chosen; k += kWarp) {
    const int64_t j = args.index == nullptr ? k : args.index[k];
    // The host cannot see an index on the device without waiting for it.
    const bool known = j >= 0 && j < shape.channels;
    A squares = known ? A(0) : A(NAN);
    for (int64_t s = 1 + shape.directions; known && counted && s < shape.streams; ++s) {
      A value;
      read(row[s * stream + j], args.elements, value);
      squares += value * value;
    }
    static_cast<A*>(args.second)[token * shape.chosen + k] =
        squares * static_cast<A>(args.of_pairs);
  }
}

// Where each dimension stands in `index`: -1 nowhere, -2 more than once.
__global__ void __launch_bounds__(kThreads)
    position_kernel(const int64_t* __restrict__ index, int64_t chosen, int64_t channels,
                    int32_t* __restrict__ position) {
  const int64_t j = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (j >= channels) return;
  int32_t found = -1;
  for (int64_t k = 0; k < chosen; ++k)
    if (index[k] == j) found = found == -1 ? static_cast<int32_t>(k) : -2;
  position[j] = found;
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    gradient_kernel(const __grid_constant__ Arguments args) {
  using A = accumulate_t<T>;
  constexpr int W = kPack<T>;
  const TokenShape& shape = args.shape;
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
    if (stream == 0 || w >= valid || !counts(args.mask, token)) continue;
    if (stream <= shape.directions) {
      factor[w] = A(2 * args.of_directions) * static_cast<const A*>(args.gfirst)[token];
      any = true;
      continue;
    }
    const int64_t k = args.position == nullptr ? channel + w : args.position[channel + w];
    if (k == -1) continue;
    const A* gradient = static_cast<const A*>(args.gsecond) + token * shape.chosen;
    factor[w] = k < 0 ? A(NAN) : A(2 * args.of_pairs) * gradient[k];
    any = true;
  }
  if (any) Streams<1, const T>(args.x, at, 0).load(0, valid, args.elements, jets);
  JACHESS_UNROLL
  for (int w = 0; w < W; ++w) jets.at[w][0] = any ? jets.at[w][0] * factor[w] : A(0);
  Streams<1, T>(args.gx, at, 0).store(0, valid, args.elements, jets);
}

Arguments arguments_of(const TokenShape& shape, const void* x, const void* mask,
                       const void* index) {
  const int64_t pairs = shape.streams - 1 - shape.directions;
  Arguments args = {};
  args.shape = shape;
  args.of_directions = 1.0 / static_cast<double>(shape.directions);
  args.of_pairs = pairs > 0 ? 1.0 / static_cast<double>(pairs) : 0.0;
  args.x = x;
  args.mask = static_cast<const uint8_t*>(mask);
  args.index = static_cast<const int64_t*>(index);
  return args;
}

}  // namespace

int jet_mean_squares_cuda(TokenShape shape, const void* x, const void* mask, const void* index,
                          void* first, void* second, Queue queue) {
  Arguments args = arguments_of(shape, x, mask, index);
  args.first = first;
  args.second = second;
  return dispatch_bytes(shape.storage, [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    args.elements = elements_of<T>(shape.storage, shape.channels, x);
    return launch(mean_squares_kernel<T>, ceil_divide(shape.tokens, kWarps), kThreads, queue, args);
  });
}

int jet_mean_squares_backward_cuda(TokenShape shape, const void* gfirst, const void* gsecond,
                                   const void* x, const void* mask, const void* index,
                                   void* position, void* gx, Queue queue) {
  Arguments args = arguments_of(shape, x, mask, index);
  args.position = static_cast<const int32_t*>(position);
  args.gfirst = gfirst;
  args.gsecond = gsecond;
  args.gx = gx;
  if (position != nullptr) {
    const int error =
        launch(position_kernel, ceil_divide(shape.channels, kThreads), kThreads, queue, args.index,
               shape.chosen, shape.channels, static_cast<int32_t*>(position));
    if (error != 0) return error;
  }
  return dispatch_bytes(shape.storage, [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    args.elements = elements_of<T>(shape.storage, shape.channels, x, gx);
    const int64_t rows = shape.streams * shape.tokens;
    return launch(gradient_kernel<T>,
                  ceil_divide(rows * ceil_divide(shape.channels, kPack<T>), kThreads), kThreads,
                  queue, args);
  });
}

}  // namespace jachess
