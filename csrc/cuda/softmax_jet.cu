// CUDA kernels of jachess::softmax_jet (docs/how_it_works.md, softmax). A short row is a warp's, a
// long one a block's; the row is read again from L1/L2 for each sweep, and p is computed anew in
// each.
//
// With c_i = s_i − Σ p s_i and m, v the means of s_ij and of c_i c_j under p:
//     p_i = p c_i,   p_ij = p (s_ij − m_ij − v_ij + c_i c_j).
// p is the jet of exp(z), z = s − log Σ e^s, so its gradient is the transposed jet product, twice:
//     R = Σ p ⊗ᵀ gy  (the share of the normaliser),   gx = p ⊗ᵀ (gy − R).
#include <limits>

#include "launch.h"
#include "pack.h"

namespace jachess {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kWarpScores = 1024;  // a row up to here is a warp's

// The scores one row's threads see: the row, its place among them, how they reduce.
struct Row {
  int64_t begin, stream, n;  // first element, distance between streams, scores
  int first, step;           // this thread's first group of scores, and from one to the next
  bool whole_block;

  template <int count, typename A>
  __device__ inline void sum(A* values) const {
    if (whole_block)
      block_sum<count>(values);
    else
      warp_sum<count>(values);
  }
  template <typename A>
  __device__ inline A max(A value) const {
    return whole_block ? block_max(value) : warp_max(value);
  }
};

__device__ inline bool find_row(int64_t rows, int64_t n, Row& row) {
  row.whole_block = n > kWarpScores;
  const int threads = row.whole_block ? kThreads : kWarp, per_block = kThreads / threads;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * per_block + threadIdx.x / threads;
  row.begin = index * n;
  row.stream = rows * n;
  row.n = n;
  row.first = threadIdx.x % threads;
  row.step = threads;
  return index < rows;
}

// Calls f with the jets of this thread's scores, `width` read at once, as f(jet, element).
template <int S, int width, typename T, typename F>
__device__ inline void for_each_jet(const Row& row, const T* x, const F& f) {
  using A = accumulate_t<T>;
#pragma unroll 1
  for (int64_t i = static_cast<int64_t>(row.first) * width; i < row.n;
       i += static_cast<int64_t>(row.step) * width) {
    Pack<T, width> in[S];
    JACHESS_UNROLL
    for (int s = 0; s < S; ++s)
      in[s] = *reinterpret_cast<const Pack<T, width>*>(x + row.begin + s * row.stream + i);
    JACHESS_UNROLL
    for (int w = 0; w < width; ++w) {
      A jet[S];
      JACHESS_UNROLL
      for (int s = 0; s < S; ++s) convert(in[s].at[w], jet[s]);
      f(jet, row.begin + i + w);
    }
  }
}

// 1 / x for x = 0 or NaN, or x >= 1, where a fast approximation and one step of Newton's will do;
// division proper calls a subroutine, around which registers go to memory.
__device__ inline float reciprocal(float x) {
#if defined(__CUDA_ARCH__)
  const float r = __fdividef(1.0f, x);
  return r * (2.0f - x * r);
#else
  return 1.0f / x;
#endif
}
__device__ inline double reciprocal(double x) { return 1.0 / x; }

// The normaliser of one row as a jet: what must be taken off the scores so that p = exp of them.
template <int q, int P, typename A>
struct Normaliser {
  A top, inverse;  // largest primal score, 1 / Σ e^(s−top)
  A mean[1 + q + P];

  // p's jet from the scores'.
  __device__ inline void weights(const A* s, A* p) const {
    A z[1 + q + P];
    p[0] = exp_nonpositive(s[0] - top) * inverse;
    JACHESS_UNROLL
    for (int k = 1; k < 1 + q + P; ++k) z[k] = s[k] - mean[k];
    pointwise_jet<q, P>(p[0], p[0], z, p);
  }
};

template <int q, int P, int width, typename T, typename A = accumulate_t<T>>
__device__ inline Normaliser<q, P, A> normalise(const Row& row, const T* x, bool masked) {
  constexpr int S = 1 + q + P;
  Normaliser<q, P, A> norm;
  A top = -std::numeric_limits<A>::infinity(), sums[S] = {};
  for_each_jet<1, width>(row, x, [&](const A* s, int64_t) { top = s[0] > top ? s[0] : top; });
  top = row.max(top);
  // −inf − (−inf) would be NaN; against 0 such a row sums to 0, and a NaN in it stays visible.
  norm.top = top == -std::numeric_limits<A>::infinity() ? A(0) : top;
  for_each_jet<S, width>(row, x, [&](const A* s, int64_t) {
    const A e = exp_nonpositive(s[0] - norm.top);
    sums[0] += e;
    JACHESS_UNROLL
    for (int k = 1; k < S; ++k) sums[k] += e * s[k];
  });
  row.template sum<S>(sums);
  norm.inverse = masked && sums[0] == A(0) ? A(0) : reciprocal(sums[0]);
  JACHESS_UNROLL
  for (int k = 0; k < S; ++k) norm.mean[k] = sums[k] * norm.inverse;
  if constexpr (P > 0) {
    A products[P] = {};
    for_each_jet<S, width>(row, x, [&](const A* s, int64_t) {
      const A p = exp_nonpositive(s[0] - norm.top) * norm.inverse;
      for_each_pair<q, P>([&](int i, int j, int ij) JACHESS_INLINE {
        products[ij - 1 - q] += p * (s[1 + i] - norm.mean[1 + i]) * (s[1 + j] - norm.mean[1 + j]);
      });
    });
    row.template sum<P>(products);
    JACHESS_UNROLL
    for (int k = 0; k < P; ++k) norm.mean[1 + q + k] += products[k];
  }
  return norm;
}

template <typename T, int q, int P, int width>
__global__ void __launch_bounds__(kThreads, 3)
    forward_kernel(const T* __restrict__ x, T* __restrict__ y, int64_t rows, int64_t scores,
                   bool masked) {
  using A = accumulate_t<T>;
  constexpr int S = 1 + q + P;
  Row row;
  if (!find_row(rows, scores, row)) return;
  const Normaliser<q, P, A> norm = normalise<q, P, width>(row, x, masked);
  for_each_jet<S, width>(row, x, [&](const A* s, int64_t at) {
    A p[S];
    norm.weights(s, p);
    JACHESS_UNROLL
    for (int k = 0; k < S; ++k) convert(p[k], y[at + k * row.stream]);
  });
}

template <typename T, int q, int P, int width>
__global__ void __launch_bounds__(kThreads, 3)
    backward_kernel(const T* __restrict__ gy, const T* __restrict__ x, T* __restrict__ gx,
                    int64_t rows, int64_t scores, bool masked) {
  using A = accumulate_t<T>;
  constexpr int S = 1 + q + P;
  Row row;
  if (!find_row(rows, scores, row)) return;
  const Normaliser<q, P, A> norm = normalise<q, P, width>(row, x, masked);
  A share[S] = {};
  const auto load_gradient = [&](int64_t at, A* g) {
    JACHESS_UNROLL
    for (int k = 0; k < S; ++k) convert(gy[at + k * row.stream], g[k]);
  };
  for_each_jet<S, width>(row, x, [&](const A* s, int64_t at) {
    A p[S], g[S];
    norm.weights(s, p);
    load_gradient(at, g);
    product_jet_backward_add<q, P>(p, g, share);
  });
  row.template sum<S>(share);
  for_each_jet<S, width>(row, x, [&](const A* s, int64_t at) {
    A p[S], g[S], out[S] = {};
    norm.weights(s, p);
    load_gradient(at, g);
    JACHESS_UNROLL
    for (int k = 0; k < S; ++k) g[k] -= share[k];
    product_jet_backward_add<q, P>(p, g, out);
    JACHESS_UNROLL
    for (int k = 0; k < S; ++k) convert(out[k], gx[at + k * row.stream]);
  });
}

int64_t block_count(int64_t rows, int64_t scores) {
  const int64_t per_block = scores > kWarpScores ? 1 : kThreads / kWarp;
  return (rows + per_block - 1) / per_block;
}

}  // namespace

int softmax_jet_cuda(SoftmaxShape shape, const void* x, void* y, Queue queue) {
  const auto run = [&](auto* typed, auto q, auto P, auto width) {
    using T = std::remove_pointer_t<decltype(typed)>;
    return launch(forward_kernel<T, decltype(q)::value, decltype(P)::value, decltype(width)::value>,
                  block_count(shape.rows, shape.scores), kThreads, queue, static_cast<const T*>(x),
                  static_cast<T*>(y), shape.rows, shape.scores, shape.masked);
  };
  return dispatch_packs(shape.jet, shape.scores, run, x, y);
}

int softmax_jet_backward_cuda(SoftmaxShape shape, const void* gy, const void* x, void* gx,
                              Queue queue) {
  const auto run = [&](auto* typed, auto q, auto P, auto width) {
    using T = std::remove_pointer_t<decltype(typed)>;
    return launch(
        backward_kernel<T, decltype(q)::value, decltype(P)::value, decltype(width)::value>,
        block_count(shape.rows, shape.scores), kThreads, queue, static_cast<const T*>(gy),
        static_cast<const T*>(x), static_cast<T*>(gx), shape.rows, shape.scores, shape.masked);
  };
  return dispatch_packs(shape.jet, shape.scores, run, gy, x, gx);
}

}  // namespace jachess
