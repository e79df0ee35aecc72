// CUDA kernels of jachess::activation_jet: one thread per group of `width` elements, all streams of
// an element in registers, one pass over memory. The formulas are jet_math.h's.
#include "activation_switch.h"
#include "pack.h"

namespace jachess {
namespace {

constexpr int kThreads = 256;

template <typename T, int q, int P, int width>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const T* __restrict__ x, T* __restrict__ y, int64_t n, Activation kind) {
  using A = accumulate_t<T>;
  using Group = Pack<T, width>;
  constexpr int S = 1 + q + P;
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * width;
  if (i >= n) return;
  Group in[S], out[S];
  JACHESS_UNROLL
  for (int s = 0; s < S; ++s) in[s] = *reinterpret_cast<const Group*>(x + s * n + i);
  JACHESS_UNROLL
  for (int w = 0; w < width; ++w) {
    A xs[S], ys[S];
    JACHESS_UNROLL
    for (int s = 0; s < S; ++s) convert(in[s].at[w], xs[s]);
    const Derivatives<A> d = derivatives(kind, xs[0]);
    ys[0] = d.f0;
    pointwise_jet<q, P>(d.f1, d.f2, xs, ys);
    JACHESS_UNROLL
    for (int s = 0; s < S; ++s) convert(ys[s], out[s].at[w]);
  }
  JACHESS_UNROLL
  for (int s = 0; s < S; ++s) *reinterpret_cast<Group*>(y + s * n + i) = out[s];
}

template <typename T, int q, int P, int width>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(const T* __restrict__ gy, const T* __restrict__ x, T* __restrict__ gx,
                    int64_t n, Activation kind) {
  using A = accumulate_t<T>;
  using Group = Pack<T, width>;
  constexpr int S = 1 + q + P;
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * width;
  if (i >= n) return;
  Group in[S], grad[S], out[S];
  JACHESS_UNROLL
  for (int s = 0; s < S; ++s) {
    in[s] = *reinterpret_cast<const Group*>(x + s * n + i);
    grad[s] = *reinterpret_cast<const Group*>(gy + s * n + i);
  }
  JACHESS_UNROLL
  for (int w = 0; w < width; ++w) {
    A xs[S], gs[S], os[S];
    JACHESS_UNROLL
    for (int s = 0; s < S; ++s) {
      convert(in[s].at[w], xs[s]);
      convert(grad[s].at[w], gs[s]);
    }
    const Derivatives<A> d = derivatives(kind, xs[0]);
    pointwise_jet_backward<q, P>(d.f1, d.f2, d.f3, xs, gs, os);
    JACHESS_UNROLL
    for (int s = 0; s < S; ++s) convert(os[s], out[s].at[w]);
  }
  JACHESS_UNROLL
  for (int s = 0; s < S; ++s) *reinterpret_cast<Group*>(gx + s * n + i) = out[s];
}

int64_t block_count(int64_t n, int width) {
  const int64_t per_block = static_cast<int64_t>(kThreads) * width;
  return (n + per_block - 1) / per_block;
}

}  // namespace

int activation_jet_cuda(JetShape shape, Activation kind, const void* x, void* y, Queue queue) {
  return dispatch_storage(shape.storage, [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    const T* from = static_cast<const T*>(x);
    T* to = static_cast<T*>(y);
    int error = 0;
    dispatch_streams(shape.q, shape.pairs, [&](auto q, auto P) {
      constexpr int q_ = decltype(q)::value, P_ = decltype(P)::value;
      if constexpr (sizeof(T) <= 4) {
        if (can_pack<T>(shape.n, x, y)) {
          error = launch(forward_kernel<T, q_, P_, 4>, block_count(shape.n, 4), kThreads, queue,
                         from, to, shape.n, kind);
          return;
        }
      }
      error = launch(forward_kernel<T, q_, P_, 1>, block_count(shape.n, 1), kThreads, queue, from,
                     to, shape.n, kind);
    });
    return error;
  });
}

int activation_jet_backward_cuda(JetShape shape, Activation kind, const void* gy, const void* x,
                                 void* gx, Queue queue) {
  return dispatch_storage(shape.storage, [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    const T *g = static_cast<const T*>(gy), *from = static_cast<const T*>(x);
    T* to = static_cast<T*>(gx);
    int error = 0;
    dispatch_streams(shape.q, shape.pairs, [&](auto q, auto P) {
      constexpr int q_ = decltype(q)::value, P_ = decltype(P)::value;
      // With q > 2 and pairs, four elements' streams no longer fit in registers.
      if constexpr (sizeof(T) <= 4 && 1 + q_ + P_ <= 5) {
        if (can_pack<T>(shape.n, gy, x, gx)) {
          error = launch(backward_kernel<T, q_, P_, 4>, block_count(shape.n, 4), kThreads, queue, g,
                         from, to, shape.n, kind);
          return;
        }
      }
      error = launch(backward_kernel<T, q_, P_, 1>, block_count(shape.n, 1), kThreads, queue, g,
                     from, to, shape.n, kind);
    });
    return error;
  });
}

}  // namespace jachess
