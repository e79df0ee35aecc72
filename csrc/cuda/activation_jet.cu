// CUDA kernels of jachess::activation_jet and jachess::gated_activation_jet: one thread per group
// of `width` elements, all streams of an element in registers, one pass over memory. Gate and up
// may be rows of a wider tensor. The formulas are jet_math.h's.
#include "activation_switch.h"
#include "pack.h"

namespace jachess {
namespace {

constexpr int kThreads = 256;

// Where groups of elements lie: in the dense tensors at `i`, in the gate and up at their rows.
struct Layout {
  int64_t n, length;
  JetStrides g, u;
};

struct Place {
  int64_t i, g, u;
};

template <int width>
__device__ inline Place find_place(const Layout& layout) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * width;
  if (layout.length == layout.n || i >= layout.n) return {i, i, i};  // one row: no division
  const int64_t row = i / layout.length, inside = i - row * layout.length;
  return {i, row * layout.g.row + inside, row * layout.u.row + inside};
}

// Without a gate, u and gu are null.
template <bool gated, typename T, int q, int P, int width>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const T* __restrict__ g, const T* __restrict__ u, T* __restrict__ y,
                   Layout layout, Activation kind) {
  using A = accumulate_t<T>;
  constexpr int S = 1 + q + P;
  const Place at = find_place<width>(layout);
  if (at.i >= layout.n) return;
  A gate[width][S], up[gated ? width : 1][S], out[width][S];
  load_packs<S, width>(g + at.g, layout.g.stream, gate);
  if constexpr (gated) load_packs<S, width>(u + at.u, layout.u.stream, up);
  JACHESS_UNROLL
  for (int w = 0; w < width; ++w) {
    const Derivatives<A> d = derivatives(kind, gate[w][0]);
    if constexpr (gated) {
      gated_jet<q, P>(d.f0, d.f1, d.f2, gate[w], up[w], out[w]);
    } else {
      pointwise_jet<q, P>(d.f1, d.f2, gate[w], out[w]);
      out[w][0] = d.f0;
    }
  }
  store_packs<S, width>(y + at.i, layout.n, out);
}

template <bool gated, typename T, int q, int P, int width>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(const T* __restrict__ gy, const T* __restrict__ g, const T* __restrict__ u,
                    T* __restrict__ gg, T* __restrict__ gu, Layout layout, Activation kind) {
  using A = accumulate_t<T>;
  constexpr int S = 1 + q + P, ups = gated ? width : 1;
  const Place at = find_place<width>(layout);
  if (at.i >= layout.n) return;
  A gate[width][S], up[ups][S], grad[width][S], gate_out[width][S], up_out[ups][S];
  load_packs<S, width>(g + at.g, layout.g.stream, gate);
  if constexpr (gated) load_packs<S, width>(u + at.u, layout.u.stream, up);
  load_packs<S, width>(gy + at.i, layout.n, grad);
  JACHESS_UNROLL
  for (int w = 0; w < width; ++w) {
    const Derivatives<A> d = derivatives(kind, gate[w][0]);
    if constexpr (gated) {
      gated_jet_backward<q, P>(d, gate[w], up[w], grad[w], gate_out[w], up_out[w]);
    } else {
      pointwise_jet_backward<q, P>(d.f1, d.f2, d.f3, gate[w], grad[w], gate_out[w]);
    }
  }
  store_packs<S, width>(gg + at.i, layout.n, gate_out);
  if constexpr (gated) store_packs<S, width>(gu + at.i, layout.n, up_out);
}

// All distances that packs must divide in order to be aligned, combined by bitwise or.
int64_t distances(const ActivationShape& s) {
  return s.jet.n | s.length | s.g.stream | s.g.row | s.u.stream | s.u.row;
}

// Without a gate, one jet in and one out always fit in registers. Five jets of kPack floats spill
// on sm_100; half as many are still 8 bytes a load.
template <bool gated, bool backward>
struct Width {
  template <typename T, int S>
  static constexpr int of = sizeof(T) > 4                                  ? 1
                            : !gated && !backward                          ? kPack
                            : gated && backward && sizeof(T) == 4 && S < 6 ? kPack / 2
                                                                           : UsualWidth::of<T, S>;
};

int64_t block_count(int64_t n, int width) {
  const int64_t per_block = static_cast<int64_t>(kThreads) * width;
  return (n + per_block - 1) / per_block;
}

template <bool gated>
int forward(const ActivationShape& shape, Activation kind, const void* g, const void* u, void* y,
            Queue queue) {
  const Layout layout = {shape.jet.n, shape.length, shape.g, shape.u};
  const auto run = [&](auto* typed, auto q, auto P, auto width) {
    using T = std::remove_pointer_t<decltype(typed)>;
    constexpr int w = decltype(width)::value;
    return launch(forward_kernel<gated, T, decltype(q)::value, decltype(P)::value, w>,
                  block_count(layout.n, w), kThreads, queue, static_cast<const T*>(g),
                  static_cast<const T*>(u), static_cast<T*>(y), layout, kind);
  };
  return dispatch_packs<Width<gated, false>>(shape.jet, distances(shape), run, g, u, y);
}

template <bool gated>
int backward(const ActivationShape& shape, Activation kind, const void* gy, const void* g,
             const void* u, void* gg, void* gu, Queue queue) {
  const Layout layout = {shape.jet.n, shape.length, shape.g, shape.u};
  const auto run = [&](auto* typed, auto q, auto P, auto width) {
    using T = std::remove_pointer_t<decltype(typed)>;
    constexpr int w = decltype(width)::value;
    return launch(backward_kernel<gated, T, decltype(q)::value, decltype(P)::value, w>,
                  block_count(layout.n, w), kThreads, queue, static_cast<const T*>(gy),
                  static_cast<const T*>(g), static_cast<const T*>(u), static_cast<T*>(gg),
                  static_cast<T*>(gu), layout, kind);
  };
  return dispatch_packs<Width<gated, true>>(shape.jet, distances(shape), run, gy, g, u, gg, gu);
}

}  // namespace

int activation_jet_cuda(ActivationShape shape, Activation kind, const void* g, const void* u,
                        void* y, Queue queue) {
  return (u == nullptr ? forward<false> : forward<true>)(shape, kind, g, u, y, queue);
}

int activation_jet_backward_cuda(ActivationShape shape, Activation kind, const void* gy,
                                 const void* g, const void* u, void* gg, void* gu, Queue queue) {
  return (u == nullptr ? backward<false> : backward<true>)(shape, kind, gy, g, u, gg, gu, queue);
}

}  // namespace jachess
