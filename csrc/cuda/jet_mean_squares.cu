// CUDA kernels of jachess::jet_mean_squares. Sums: one warp per token. Gradients: one thread per
// pack of `width` neighbours of one stream, written once; nothing is added up, so there is no order
// of threads that results could depend on.
#include "pack.h"

namespace jachess {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;

__device__ inline bool counts(const uint8_t* mask, int64_t token) {
  return mask == nullptr || mask[token] != 0;
}

// Sum over a row of squares; every lane of the warp gets it.
template <typename T, int width>
__device__ inline accumulate_t<T> sum_of_squares(const T* row, int64_t channels, int lane) {
  using A = accumulate_t<T>;
  A sum = A(0);
  for (int64_t i = lane * width; i < channels; i += kWarp * width) {
    const auto pack = *reinterpret_cast<const Pack<T, width>*>(row + i);
    JACHESS_UNROLL
    for (int w = 0; w < width; ++w) {
      A value;
      convert(pack.at[w], value);
      sum += value * value;
    }
  }
  warp_sum<1>(&sum);
  return sum;
}

// 1/q and 1/P, divided on the host: a division of doubles is a call on the device.
template <typename A>
struct Means {
  A directions, pairs;
};

template <typename A>
Means<A> means_of(const TokenShape& shape) {
  const int64_t pairs = shape.streams - 1 - shape.directions;
  return {A(1) / static_cast<A>(shape.directions), pairs ? A(1) / static_cast<A>(pairs) : A(0)};
}

// One warp per token: the mean over directions of sums of squares, and per chosen dimension the
// mean over pairs of squares.
template <typename T, int width>
__global__ void __launch_bounds__(kThreads)
    mean_squares_kernel(const T* __restrict__ x, const uint8_t* __restrict__ mask,
                        const int64_t* __restrict__ index, TokenShape shape,
                        Means<accumulate_t<T>> means, accumulate_t<T>* __restrict__ first,
                        accumulate_t<T>* __restrict__ second) {
  using A = accumulate_t<T>;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  if (token >= shape.tokens) return;
  const bool counted = counts(mask, token);
  const int64_t stream = shape.tokens * shape.channels;
  const T* row = x + token * shape.channels;
  A sum = A(0);
  if (counted)
    for (int64_t i = 1; i <= shape.directions; ++i)
      sum += sum_of_squares<T, width>(row + i * stream, shape.channels, lane);
  if (lane == 0) first[token] = sum * means.directions;
  for (int64_t k = lane; k < shape.chosen; k += kWarp) {
    const int64_t j = index == nullptr ? k : index[k];
    A squares = A(0);
    if (j < 0 || j >= shape.channels) {
      squares = A(NAN);  // the host cannot see an index on the device without waiting for it
    } else if (counted) {
      for (int64_t s = 1 + shape.directions; s < shape.streams; ++s) {
        A value;
        convert(row[s * stream + j], value);
        squares += value * value;
      }
    }
    second[token * shape.chosen + k] = squares * means.pairs;
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

// The first element of a thread's pack in the stack.
struct Place {
  int64_t at, stream, token, channel;
};

template <int width>
__device__ inline bool find_place(const TokenShape& shape, Place& place) {
  place.at = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * width;
  const int64_t row = place.at / shape.channels;
  place.stream = row / shape.tokens;
  place.token = row % shape.tokens;
  place.channel = place.at % shape.channels;
  return place.stream < shape.streams;
}

// factors.of(w): the derivative of the loss by x, over x, w elements behind the place.
template <typename T, int width, typename Factors>
__device__ inline void write_scaled(const T* x, T* gx, int64_t at, const Factors& factors) {
  const auto in = *reinterpret_cast<const Pack<T, width>*>(x + at);
  Pack<T, width> out;
  JACHESS_UNROLL
  for (int w = 0; w < width; ++w) {
    accumulate_t<T> value;
    convert(in.at[w], value);
    convert(value * factors.of(w), out.at[w]);
  }
  *reinterpret_cast<Pack<T, width>*>(gx + at) = out;
}

template <typename T, int width>
__device__ inline void write_zeros(T* gx, int64_t at) {
  *reinterpret_cast<Pack<T, width>*>(gx + at) = Pack<T, width>{};
}

template <typename A>
struct SameFactor {
  A factor;
  __device__ inline A of(int) const { return factor; }
};

template <typename A>
struct ChosenFactors {
  const A* gradient;        // of the token's mean squares
  const int32_t* position;  // at the pack's first channel, or null: every dimension was chosen
  A factor;
  __device__ inline A of(int w) const {
    if (position == nullptr) return factor * gradient[w];
    const int32_t k = position[w];
    return k >= 0 ? factor * gradient[k] : k == -1 ? A(0) : A(NAN);
  }
};

template <typename T, int width>
__global__ void __launch_bounds__(kThreads)
    mean_squares_gradient_kernel(const accumulate_t<T>* __restrict__ gfirst,
                                 const accumulate_t<T>* __restrict__ gsecond,
                                 const T* __restrict__ x, const uint8_t* __restrict__ mask,
                                 const int32_t* __restrict__ position, TokenShape shape,
                                 Means<accumulate_t<T>> means, T* __restrict__ gx) {
  using A = accumulate_t<T>;
  Place place;
  if (!find_place<width>(shape, place)) return;
  if (place.stream == 0 || !counts(mask, place.token)) return write_zeros<T, width>(gx, place.at);
  if (place.stream <= shape.directions) {
    const A factor = A(2) * means.directions * gfirst[place.token];
    return write_scaled<T, width>(x, gx, place.at, SameFactor<A>{factor});
  }
  const A mean = A(2) * means.pairs;
  const A* gradient = gsecond + place.token * shape.chosen;
  if (position == nullptr) {
    const ChosenFactors<A> factors = {gradient + place.channel, nullptr, mean};
    return write_scaled<T, width>(x, gx, place.at, factors);
  }
  bool any = false;
  JACHESS_UNROLL
  for (int w = 0; w < width; ++w) any |= position[place.channel + w] != -1;
  if (!any) return write_zeros<T, width>(gx, place.at);
  const ChosenFactors<A> factors = {gradient, position + place.channel, mean};
  write_scaled<T, width>(x, gx, place.at, factors);
}

int64_t ceil_divide(int64_t n, int64_t d) { return (n + d - 1) / d; }

// Sixteen bytes at a time where every row starts aligned; one element otherwise.
template <typename T>
bool can_pack(const TokenShape& shape, const void* a, const void* b) {
  constexpr int width = 16 / sizeof(T);
  const auto address = reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b);
  return shape.channels % width == 0 && address % 16 == 0;
}

// Calls f(T*, Int<width>).
template <typename F>
int dispatch_packs(const TokenShape& shape, const void* a, const void* b, const F& f) {
  return dispatch_storage(shape.storage, [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    if (can_pack<T>(shape, a, b)) return f(typed, Int<16 / sizeof(T)>{});
    return f(typed, Int<1>{});
  });
}

}  // namespace

int jet_mean_squares_cuda(TokenShape shape, const void* x, const void* mask, const void* index,
                          void* first, void* second, Queue queue) {
  return dispatch_packs(shape, x, nullptr, [&](auto* typed, auto width) {
    using T = std::remove_pointer_t<decltype(typed)>;
    using A = accumulate_t<T>;
    return launch(mean_squares_kernel<T, decltype(width)::value>, ceil_divide(shape.tokens, kWarps),
                  kThreads, queue, static_cast<const T*>(x), static_cast<const uint8_t*>(mask),
                  static_cast<const int64_t*>(index), shape, means_of<A>(shape),
                  static_cast<A*>(first), static_cast<A*>(second));
  });
}

int jet_mean_squares_backward_cuda(TokenShape shape, const void* gfirst, const void* gsecond,
                                   const void* x, const void* mask, const void* index,
                                   void* position, void* gx, Queue queue) {
  const int64_t elements = shape.streams * shape.tokens * shape.channels;
  int32_t* positions = static_cast<int32_t*>(position);
  if (positions != nullptr) {
    const int error =
        launch(position_kernel, ceil_divide(shape.channels, kThreads), kThreads, queue,
               static_cast<const int64_t*>(index), shape.chosen, shape.channels, positions);
    if (error != 0) return error;
  }
  return dispatch_packs(shape, x, gx, [&](auto* typed, auto width) {
    using T = std::remove_pointer_t<decltype(typed)>;
    using A = accumulate_t<T>;
    constexpr int w = decltype(width)::value;
    return launch(mean_squares_gradient_kernel<T, w>, ceil_divide(elements, kThreads * w), kThreads,
                  queue, static_cast<const A*>(gfirst), static_cast<const A*>(gsecond),
                  static_cast<const T*>(x), static_cast<const uint8_t*>(mask),
                  static_cast<const int32_t*>(positions), shape, means_of<A>(shape),
                  static_cast<T*>(gx));
  });
}

}  // namespace jachess
