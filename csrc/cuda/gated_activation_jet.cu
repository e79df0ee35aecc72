// CUDA kernels of jachess::gated_activation_jet: one thread per group of `width` elements, all
// streams of an element in registers, one pass over memory. Gate and up may be rows of a wider
// tensor. The formulas are jet_math.h's.
#include "activation_switch.h"
#include "pack.h"

namespace jachess {
namespace {

constexpr int kThreads = 256;

// Where groups of elements lie: in the dense tensors at `i`, in the gate and up at their rows.
struct GatedLayout {
  int64_t n, length;
  JetStrides g, u;
};

struct GatedPlace {
  int64_t i, g, u;
};

template <int width>
__device__ inline GatedPlace gated_place(const GatedLayout& layout) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * width;
  if (layout.length == layout.n || i >= layout.n) return {i, i, i};  // one row: no division
  const int64_t row = i / layout.length, inside = i - row * layout.length;
  return {i, row * layout.g.row + inside, row * layout.u.row + inside};
}

template <typename T, int q, int P, int width>
__global__ void __launch_bounds__(kThreads)
    gated_kernel(const T* __restrict__ g, const T* __restrict__ u, T* __restrict__ y,
                 GatedLayout layout, Activation kind) {
  using A = accumulate_t<T>;
  constexpr int S = 1 + q + P;
  const GatedPlace at = gated_place<width>(layout);
  if (at.i >= layout.n) return;
  A gate[width][S], up[width][S], out[width][S];
  load_packs<S, width>(g + at.g, layout.g.stream, gate);
  load_packs<S, width>(u + at.u, layout.u.stream, up);
  JACHESS_UNROLL
  for (int w = 0; w < width; ++w) {
    const Derivatives<A> d = derivatives(kind, gate[w][0]);
    gated_jet<q, P>(d.f0, d.f1, d.f2, gate[w], up[w], out[w]);
  }
  store_packs<S, width>(y + at.i, layout.n, out);
}

template <typename T, int q, int P, int width>
__global__ void __launch_bounds__(kThreads)
    gated_backward_kernel(const T* __restrict__ gy, const T* __restrict__ g,
                          const T* __restrict__ u, T* __restrict__ gg, T* __restrict__ gu,
                          GatedLayout layout, Activation kind) {
  using A = accumulate_t<T>;
  constexpr int S = 1 + q + P;
  const GatedPlace at = gated_place<width>(layout);
  if (at.i >= layout.n) return;
  A gate[width][S], up[width][S], grad[width][S], gate_out[width][S], up_out[width][S];
  load_packs<S, width>(g + at.g, layout.g.stream, gate);
  load_packs<S, width>(u + at.u, layout.u.stream, up);
  load_packs<S, width>(gy + at.i, layout.n, grad);
  JACHESS_UNROLL
  for (int w = 0; w < width; ++w) {
    const Derivatives<A> d = derivatives(kind, gate[w][0]);
    gated_jet_backward<q, P>(d, gate[w], up[w], grad[w], gate_out[w], up_out[w]);
  }
  store_packs<S, width>(gg + at.i, layout.n, gate_out);
  store_packs<S, width>(gu + at.i, layout.n, up_out);
}

// The distances that must be multiples of kPack for packs to be aligned.
bool can_pack_rows(const GatedShape& s) {
  const int64_t distances = s.jet.n | s.length | s.g.stream | s.g.row | s.u.stream | s.u.row;
  return distances % kPack == 0;
}

int64_t block_count(int64_t n, int width) {
  const int64_t per_block = static_cast<int64_t>(kThreads) * width;
  return (n + per_block - 1) / per_block;
}

// With q > 2 and pairs, kPack elements' streams no longer fit in registers.
template <typename T, int q, int P>
constexpr bool kGatedPacks = sizeof(T) <= 4 && 1 + q + P <= 5;

// Five jets of kPack floats spill on sm_100; half as many are still 8 bytes a load.
template <typename T>
constexpr int kBackwardPack = sizeof(T) == 4 ? kPack / 2 : kPack;

}  // namespace

int gated_activation_jet_cuda(GatedShape shape, Activation kind, const void* g, const void* u,
                              void* y, Queue queue) {
  const GatedLayout layout = {shape.jet.n, shape.length, shape.g, shape.u};
  return dispatch_storage(shape.jet.storage, [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    const T *gate = static_cast<const T*>(g), *up = static_cast<const T*>(u);
    T* to = static_cast<T*>(y);
    int error = 0;
    dispatch_streams(shape.jet.q, shape.jet.pairs, [&](auto q, auto P) {
      constexpr int q_ = decltype(q)::value, P_ = decltype(P)::value;
      if constexpr (kGatedPacks<T, q_, P_>) {
        if (can_pack_rows(shape) && can_pack<T>(shape.jet.n, g, u, y)) {
          error = launch(gated_kernel<T, q_, P_, kPack>, block_count(layout.n, kPack), kThreads,
                         queue, gate, up, to, layout, kind);
          return;
        }
      }
      error = launch(gated_kernel<T, q_, P_, 1>, block_count(layout.n, 1), kThreads, queue, gate,
                     up, to, layout, kind);
    });
    return error;
  });
}

int gated_activation_jet_backward_cuda(GatedShape shape, Activation kind, const void* gy,
                                       const void* g, const void* u, void* gg, void* gu,
                                       Queue queue) {
  const GatedLayout layout = {shape.jet.n, shape.length, shape.g, shape.u};
  return dispatch_storage(shape.jet.storage, [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    const T *grad = static_cast<const T*>(gy), *gate = static_cast<const T*>(g);
    const T* up = static_cast<const T*>(u);
    T *gate_out = static_cast<T*>(gg), *up_out = static_cast<T*>(gu);
    int error = 0;
    dispatch_streams(shape.jet.q, shape.jet.pairs, [&](auto q, auto P) {
      constexpr int q_ = decltype(q)::value, P_ = decltype(P)::value;
      if constexpr (kGatedPacks<T, q_, P_>) {
        if (can_pack_rows(shape) && can_pack<T>(shape.jet.n, gy, g, u, gg, gu)) {
          constexpr int width = kBackwardPack<T>;
          error = launch(gated_backward_kernel<T, q_, P_, width>, block_count(layout.n, width),
                         kThreads, queue, grad, gate, up, gate_out, up_out, layout, kind);
          return;
        }
      }
      error = launch(gated_backward_kernel<T, q_, P_, 1>, block_count(layout.n, 1), kThreads, queue,
                     grad, gate, up, gate_out, up_out, layout, kind);
    });
    return error;
  });
}

}  // namespace jachess
