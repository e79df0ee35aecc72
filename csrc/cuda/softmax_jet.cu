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

struct Arguments {
  SoftmaxShape shape;
  Elements elements;
  const void *gy, *x;
  void* out;  // y, backward gx
};

// The scores one row's threads see: the row, its place among them, how they reduce.
template <typename T>
struct Row {
  using A = accumulate_t<T>;
  static constexpr int W = kPack<T>;
  int64_t begin, stream, n;  // first element, distance between streams, scores
  int first, step;           // this thread's first pack, and from one to the next
  bool whole_block;
  Elements elements;

  template <typename How, int count = 1>
  __device__ inline void reduce(A* values) const {
    if (whole_block)
      block_reduce<How, count>(values);
    else
      warp_reduce<How, count>(values);
  }
  // Calls f(first score of this thread's next pack, how many scores there are from it on).
  template <typename F>
  __device__ inline void for_each_pack(const F& f) const {
#pragma unroll 1
    for (int64_t i = static_cast<int64_t>(first) * W; i < n; i += static_cast<int64_t>(step) * W)
      f(i, n - i);
  }
  template <int S>
  __device__ inline void load(const void* from, int64_t i, A (*jets)[S]) const {
    load_packs<S, W>(static_cast<const T*>(from) + begin + i, stream, n - i, elements, jets);
  }
  template <int S>
  __device__ inline void store(void* to, int64_t i, const A (*jets)[S]) const {
    store_packs<S, W>(static_cast<T*>(to) + begin + i, stream, n - i, elements, jets);
  }
  // Calls f with the jets of this thread's scores.
  template <int S, typename F>
  __device__ inline void for_each_jet(const void* x, const F& f) const {
    for_each_pack([&](int64_t i, int64_t valid) {
      A jets[W][S];
      load<S>(x, i, jets);
      JACHESS_UNROLL
      for (int w = 0; w < W; ++w)
        if (w < valid) f(jets[w]);
    });
  }
};

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
template <typename T, int q, int P>
struct Normaliser {
  using A = accumulate_t<T>;
  static constexpr int S = 1 + q + P;
  A top, inverse;  // largest primal score, 1 / Σ e^(s−top)
  A mean[S] = {};

  __device__ inline Normaliser(const Row<T>& row, const void* x, bool masked) {
    top = -std::numeric_limits<A>::infinity();
    row.template for_each_jet<1>(x, [&](const A* s) { top = s[0] > top ? s[0] : top; });
    row.template reduce<Larger>(&top);
    // −inf − (−inf) would be NaN; against 0 such a row sums to 0, and a NaN in it stays visible.
    if (top == -std::numeric_limits<A>::infinity()) top = A(0);
    row.template for_each_jet<S>(x, [&](const A* s) {
      const A e = exp_nonpositive(s[0] - top);
      mean[0] += e;
      JACHESS_UNROLL
      for (int k = 1; k < S; ++k) mean[k] += e * s[k];
    });
    row.template reduce<Add, S>(mean);
    inverse = masked && mean[0] == A(0) ? A(0) : reciprocal(mean[0]);
    JACHESS_UNROLL
    for (int k = 0; k < S; ++k) mean[k] *= inverse;
    if constexpr (P > 0) {
      A products[P] = {};
      row.template for_each_jet<S>(x, [&](const A* s) {
        const A p = exp_nonpositive(s[0] - top) * inverse;
        for_each_pair<q, P>([&](int i, int j, int ij) JACHESS_INLINE {
          products[ij - 1 - q] += p * (s[1 + i] - mean[1 + i]) * (s[1 + j] - mean[1 + j]);
        });
      });
      row.template reduce<Add, P>(products);
      JACHESS_UNROLL
      for (int k = 0; k < P; ++k) mean[1 + q + k] += products[k];
    }
  }

  // p's jet from the scores'.
  __device__ inline void weights(const A* s, A* p) const {
    A z[S];
    p[0] = exp_nonpositive(s[0] - top) * inverse;
    JACHESS_UNROLL
    for (int k = 1; k < S; ++k) z[k] = s[k] - mean[k];
    pointwise_jet<q, P>(p[0], p[0], z, p);
  }
};

template <typename T, int q, int P, bool backward>
__global__ void __launch_bounds__(kThreads, 3) kernel(const __grid_constant__ Arguments args) {
  using A = accumulate_t<T>;
  constexpr int S = 1 + q + P, W = kPack<T>;
  const SoftmaxShape& shape = args.shape;
  const bool whole_block = shape.scores > kWarpScores;
  const int threads = whole_block ? kThreads : kWarp, thread = static_cast<int>(threadIdx.x);
  const int64_t index = static_cast<int64_t>(blockIdx.x) * (kThreads / threads) + thread / threads;
  if (index >= shape.rows) return;
  const Row<T> row = {index * shape.scores, shape.jet.n,  shape.scores, thread % threads, threads,
                      whole_block,          args.elements};
  const Normaliser<T, q, P> norm(row, args.x, shape.masked);

  A share[S] = {};
  if constexpr (backward) {
    row.for_each_pack([&](int64_t i, int64_t valid) {
      A x[W][S], g[W][S], p[S];
      row.template load<S>(args.x, i, x);
      row.template load<S>(args.gy, i, g);
      JACHESS_UNROLL
      for (int w = 0; w < W; ++w) {
        if (w >= valid) continue;
        norm.weights(x[w], p);
        product_jet_backward_add<q, P>(p, g[w], share);
      }
    });
    row.template reduce<Add, S>(share);
  }
  row.for_each_pack([&](int64_t i, int64_t) {
    A x[W][S], g[W][S], p[S], out[W][S] = {};
    row.template load<S>(args.x, i, x);
    if constexpr (backward) row.template load<S>(args.gy, i, g);
    JACHESS_UNROLL
    for (int w = 0; w < W; ++w) {
      norm.weights(x[w], backward ? p : out[w]);
      if constexpr (backward) {
        JACHESS_UNROLL
        for (int k = 0; k < S; ++k) g[w][k] -= share[k];
        product_jet_backward_add<q, P>(p, g[w], out[w]);
      }
    }
    row.template store<S>(args.out, i, out);
  });
}

template <bool backward>
int start(Arguments args, Queue queue) {
  const SoftmaxShape& shape = args.shape;
  const int64_t rows_of_block = shape.scores > kWarpScores ? 1 : kThreads / kWarp;
  return dispatch_jets(shape.jet, [&](auto* typed, auto q, auto P) {
    using T = std::remove_pointer_t<decltype(typed)>;
    args.elements = elements_of<T>(shape.jet.storage, shape.scores, args.gy, args.x, args.out);
    return launch(kernel<T, decltype(q)::value, decltype(P)::value, backward>,
                  ceil_divide(shape.rows, rows_of_block), kThreads, queue, args);
  });
}

}  // namespace

int softmax_jet_cuda(SoftmaxShape shape, const void* gy, const void* x, void* out, Queue queue) {
  const Arguments args = {shape, {}, gy, x, out};
  return gy == nullptr ? start<false>(args, queue) : start<true>(args, queue);
}

}  // namespace jachess
