// CUDA kernels of jachess::softmax_jet (docs/how_it_works.md, softmax), bound by memory.
//
//     a row up to 1024 scores: a warp's, 8 rows a block        a longer one: a block's
//     x [S, row], 4 neighbours a thread at a time, read again from the caches for each sweep:
//     largest  ->  Σ e^s, Σ e^s s_i  ->  Σ p c_i c_j  ->  y;   backward R, then gx
//
// With c_i = s_i − Σ p s_i and m, v the means of s_ij and of c_i c_j under p:
//     p_i = p c_i,   p_ij = p (s_ij − m_ij − v_ij + c_i c_j).
// p is the jet of exp(z), z = s − log Σ e^s, so its gradient is the transposed jet product, twice:
//     R = Σ p ⊗ᵀ gy  (the share of the normaliser),   gx = p ⊗ᵀ (gy − R).
#include <limits>

#include "pack.h"

namespace jachess {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kWarpScores = 1024;  // a row up to here is a warp's

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

// Combines values over the threads of a row: a block's or a warp's.
template <typename How, int count, typename A>
__device__ inline void reduce(bool whole_block, A* values) {
  if (whole_block)
    block_reduce<How, count>(values);
  else
    warp_reduce<How, count>(values);
}

template <typename T, int q, int P, bool backward>
__global__ void __launch_bounds__(kThreads, 3)
    kernel(const __grid_constant__ SoftmaxShape shape, const __grid_constant__ Elements elements,
           const void* gy_data, const void* x_data, void* out_data) {
  using A = accumulate_t<T>;
  constexpr int S = 1 + q + P;
  const bool whole_block = shape.scores > kWarpScores;
  const int threads = whole_block ? kThreads : kWarp, thread = static_cast<int>(threadIdx.x);
  const int64_t index = static_cast<int64_t>(blockIdx.x) * (kThreads / threads) + thread / threads;
  if (index >= shape.rows) return;
  const Row<T> row = {shape.scores, thread % threads, threads, elements};
  const int64_t start = index * shape.scores;
  const Streams<S, const T> x(x_data, start, shape.jet.n), gy(gy_data, start, shape.jet.n);
  const Streams<S, T> out(out_data, start, shape.jet.n);

  // The normaliser as a jet: what must be taken off the scores so that p = exp of them.
  A top = -std::numeric_limits<A>::infinity(), mean[S] = {};
  const auto largest = [&](int64_t, const A* s) { top = s[0] > top ? s[0] : top; };
  row.sweep(largest, Streams<1, const T>(x_data, start, 0));
  reduce<Larger, 1>(whole_block, &top);
  // −inf − (−inf) would be NaN; against 0 such a row sums to 0, and a NaN in it stays visible.
  if (top == -std::numeric_limits<A>::infinity()) top = A(0);
  const auto add_up = [&](int64_t, const A* s) {
    const A e = exp_nonpositive(s[0] - top);
    mean[0] += e;
    JACHESS_UNROLL
    for (int k = 1; k < S; ++k) mean[k] += e * s[k];
  };
  row.sweep(add_up, x);
  reduce<Add, S>(whole_block, mean);
  const A inverse = shape.masked && mean[0] == A(0) ? A(0) : reciprocal(mean[0]);
  JACHESS_UNROLL
  for (int k = 0; k < S; ++k) mean[k] *= inverse;
  if constexpr (P > 0) {
    A products[P] = {};
    const auto add_products = [&](int64_t, const A* s) {
      const A p = exp_nonpositive(s[0] - top) * inverse;
      for_each_pair<q, P>([&](int i, int j, int ij) JACHESS_INLINE {
        products[ij - 1 - q] += p * (s[1 + i] - mean[1 + i]) * (s[1 + j] - mean[1 + j]);
      });
    };
    row.sweep(add_products, x);
    reduce<Add, P>(whole_block, products);
    JACHESS_UNROLL
    for (int k = 0; k < P; ++k) mean[1 + q + k] += products[k];
  }

  // p's jet from the scores'.
  const auto weigh = [&](const A* s, A* p) {
    A z[S];
    p[0] = exp_nonpositive(s[0] - top) * inverse;
    JACHESS_UNROLL
    for (int k = 1; k < S; ++k) z[k] = s[k] - mean[k];
    pointwise_jet<q, P>(p[0], p[0], z, p);
  };
  if constexpr (backward) {
    A share[S] = {};
    const auto add_share = [&](int64_t, const A* s, const A* g) {
      A p[S];
      weigh(s, p);
      product_jet_backward_add<q, P>(p, g, share);
    };
    row.sweep(add_share, x, gy);
    reduce<Add, S>(whole_block, share);
    const auto differentiate = [&](int64_t, const A* s, const A* g, A* gx) {
      A p[S], rest[S];
      weigh(s, p);
      JACHESS_UNROLL
      for (int k = 0; k < S; ++k) {
        rest[k] = g[k] - share[k];
        gx[k] = A(0);
      }
      product_jet_backward_add<q, P>(p, rest, gx);
    };
    row.sweep(differentiate, x, gy, out);
  } else {
    const auto write_weights = [&](int64_t, const A* s, A* y) { weigh(s, y); };
    row.sweep(write_weights, x, out);
  }
}

}  // namespace

int softmax_jet_cuda(SoftmaxShape shape, const void* gy, const void* x, void* out, Queue queue) {
  const int64_t rows_of_block = shape.scores > kWarpScores ? 1 : kThreads / kWarp;
  return dispatch_jets(shape.jet, [&](auto* typed, auto q, auto P) {
    using T = std::remove_pointer_t<decltype(typed)>;
    constexpr int directions = decltype(q)::value, pairs = decltype(P)::value;
    const auto start = [&](auto chosen) {
      return launch(chosen, ceil_divide(shape.rows, rows_of_block), kThreads, queue, shape,
                    elements_of<T>(shape.jet.storage, shape.scores, gy, x, out), gy, x, out);
    };
    return gy == nullptr ? start(kernel<T, directions, pairs, false>)
                         : start(kernel<T, directions, pairs, true>);
  });
}

}  // namespace jachess
