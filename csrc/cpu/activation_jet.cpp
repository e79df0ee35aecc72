// jachess::activation_jet, f(g) by the pointwise rule, and jachess::gated_activation_jet, f(g) u by
// Leibniz on top, with their backwards on the CPU.
//
// Elements are taken in blocks that stay in L1. Per block, one loop evaluates the derivatives of
// the activation (activation_derivatives.h), a second one multiplies them into the streams (one
// instance per stream count): kinds x stream counts would be too many instances. Where the number
// of streams is known at run time alone (sums of squares, more than four directions), the streams
// of a block are visited one after another, and the squares added up in a block of their own.
#include <algorithm>

#include "../activation_arguments.h"
#include "activation_derivatives.h"
#include "streams.h"
#include "tensors.h"

namespace jachess {
namespace {

constexpr int64_t kBlock = 128;
constexpr int64_t kGrain = 4096;  // elements a thread takes at least

// Without a gate, u and gu are not touched, and the value, f0, is in y already.
template <bool gated, int q, int P, typename V, typename T>
JACHESS_HD void forward_at(const Derivatives<const T*>& f, Window<const T> g, Window<const T> u,
                           Window<T> y, int64_t i) {
  constexpr int S = 1 + q + P;
  V d1, d2, in[S], out[S];
  load(d1, f.f1 + i);
  load(d2, f.f2 + i);
  load_jet<S>(in, g, i);
  if constexpr (gated) {
    V d0, up[S];
    load(d0, f.f0 + i);
    load_jet<S>(up, u, i);
    gated_jet<q, P>(d0, d1, d2, in, up, out);
    store_jet<S>(y, out, i);
  } else {
    pointwise_jet<q, P>(d1, d2, in, out);
    JACHESS_UNROLL
    for (int s = 1; s < S; ++s) store(y.p + s * y.stride + i, out[s]);
  }
}

template <bool gated, int q, int P, typename T>
JACHESS_CLONES void forward_block(Derivatives<const T*> f, Window<const T> g, Window<const T> u,
                                  Window<T> y, int64_t n) {
  using V = typename VectorOf<T>::type;
  constexpr int64_t width = sizeof(V) / sizeof(T);
  int64_t i = 0;
  for (; i + width <= n; i += width) forward_at<gated, q, P, V>(f, g, u, y, i);
  for (; i < n; ++i) forward_at<gated, q, P, T>(f, g, u, y, i);
}

template <bool gated, int q, int P, typename V, typename T>
JACHESS_HD void backward_at(const Derivatives<const T*>& f, Window<const T> gy, Window<const T> g,
                            Window<const T> u, Window<T> gg, Window<T> gu, int64_t i) {
  constexpr int S = 1 + q + P;
  Derivatives<V> d;
  V in[S], grad[S], out[S];
  load(d.f1, f.f1 + i);
  load(d.f2, f.f2 + i);
  load(d.f3, f.f3 + i);
  load_jet<S>(in, g, i);
  load_jet<S>(grad, gy, i);
  if constexpr (gated) {
    V up[S], up_out[S];
    load(d.f0, f.f0 + i);
    load_jet<S>(up, u, i);
    gated_jet_backward<q, P>(d, in, up, grad, out, up_out);
    store_jet<S>(gu, up_out, i);
  } else {
    pointwise_jet_backward<q, P>(d.f1, d.f2, d.f3, in, grad, out);
  }
  store_jet<S>(gg, out, i);
}

template <bool gated, int q, int P, typename T>
JACHESS_CLONES void backward_block(Derivatives<const T*> f, Window<const T> gy, Window<const T> g,
                                   Window<const T> u, Window<T> gg, Window<T> gu, int64_t n) {
  using V = typename VectorOf<T>::type;
  constexpr int64_t width = sizeof(V) / sizeof(T);
  int64_t i = 0;
  for (; i + width <= n; i += width) backward_at<gated, q, P, V>(f, gy, g, u, gg, gu, i);
  for (; i < n; ++i) backward_at<gated, q, P, T>(f, gy, g, u, gg, gu, i);
}

// ---- any number of directions, and the sum of the squares of some ------------------------------
//
// With Q = Σ g_i² and C = Σ h_i u_i over the summed directions, h = f(g), and y = h u where gated:
//     h_i = f' g_i;   h_s = f' g_s + f'' Q;   y_s = h_s u_0 + 2 C + h_0 u_s

template <typename T>
JACHESS_HD void scaled(const T* __restrict a, const T* __restrict b, T* __restrict to, int64_t n) {
#pragma omp simd
  for (int64_t e = 0; e < n; ++e) to[e] = a[e] * b[e];
}

template <typename T>
JACHESS_HD void add_product(const T* __restrict a, const T* __restrict b, T factor,
                            T* __restrict to, int64_t n) {
#pragma omp simd
  for (int64_t e = 0; e < n; ++e) to[e] += factor * (a[e] * b[e]);
}

// Without a gate, u is not touched, and the value is in y already.
template <bool gated, typename T>
JACHESS_CLONES void forward_sum(const JetStreams& jet, Derivatives<const T*> f, Window<const T> g,
                                Window<const T> u, Window<T> y, int64_t n) {
  T squares[kBlock] = {}, cross[kBlock] = {}, h[kBlock];
  for (int64_t i = 0; i < jet.q; ++i) {
    const T *gi = g.p + (1 + i) * g.stride, *ui = u.p + (1 + i) * u.stride;
    T* yi = y.p + (1 + i) * y.stride;
    scaled(f.f1, gi, gated ? h : yi, n);
    if (i < jet.summed) add_product(gi, gi, T(1), squares, n);
    if constexpr (gated) {
      scaled(h, u.p, yi, n);
      add_product(f.f0, ui, T(1), yi, n);
      if (i < jet.summed) add_product(h, ui, T(2), cross, n);
    }
  }
  if (jet.pairs > 0) {
    const int64_t s = 1 + jet.q;
    const T *gs = g.p + s * g.stride, *us = u.p + s * u.stride;
    T* ys = y.p + s * y.stride;
    scaled(f.f1, gs, gated ? h : ys, n);
    add_product(f.f2, squares, T(1), gated ? h : ys, n);
    if constexpr (gated) {
#pragma omp simd
      for (int64_t e = 0; e < n; ++e) ys[e] = h[e] * u.p[e] + cross[e] + f.f0[e] * us[e];
    }
  }
  if constexpr (gated) scaled(f.f0, u.p, y.p, n);
}

// From the gradient gh of the streams of h = f(g) to that of g's:
//     gg_i = f' gh_i + 2 f'' g_i gh_s;   gg_s = f' gh_s;
//     gg_0 = f1 gh_0 + f2 (Σ g_i gh_i + g_s gh_s) + f3 Q gh_s
template <typename T>
JACHESS_HD void pointwise_sum_backward(const JetStreams& jet, const Derivatives<const T*>& f,
                                       Window<const T> g, Window<const T> gh, Window<T> gg,
                                       int64_t n) {
  T squares[kBlock] = {}, inner[kBlock] = {}, bent[kBlock] = {};
  const int64_t s = 1 + jet.q;
  if (jet.pairs > 0) {
    const T *gs = g.p + s * g.stride, *ghs = gh.p + s * gh.stride;
    add_product(gs, ghs, T(1), inner, n);
    scaled(f.f2, ghs, bent, n);
  }
  for (int64_t i = 1; i < s; ++i) {
    const T *gi = g.p + i * g.stride, *ghi = gh.p + i * gh.stride;
    T* ggi = gg.p + i * gg.stride;
    add_product(gi, ghi, T(1), inner, n);
    scaled(f.f1, ghi, ggi, n);
    if (i > jet.summed) continue;
    add_product(gi, gi, T(1), squares, n);
    add_product(bent, gi, T(2), ggi, n);
  }
#pragma omp simd
  for (int64_t e = 0; e < n; ++e) gg.p[e] = f.f1[e] * gh.p[e] + f.f2[e] * inner[e];
  if (jet.pairs == 0) return;
  const T* ghs = gh.p + s * gh.stride;
  T* ggs = gg.p + s * gg.stride;
#pragma omp simd
  for (int64_t e = 0; e < n; ++e) gg.p[e] += f.f3[e] * squares[e] * ghs[e];
  scaled(f.f1, ghs, ggs, n);
}

// gh and gu of y = h u: gh_i = u_0 gy_i + 2 u_i gy_s, gu_i = h_0 gy_i + 2 h_i gy_s, and
// gh_0 = Σ u gy, gu_0 = Σ h gy over all streams. The streams of h are made again.
template <typename T>
JACHESS_HD void product_sum_backward(const JetStreams& jet, const Derivatives<const T*>& f,
                                     Window<const T> g, Window<const T> u, Window<const T> gy,
                                     Window<T> gh, Window<T> gu, int64_t n) {
  const int64_t s = 1 + jet.q;
  const T* gys = gy.p + s * gy.stride;
  T squares[kBlock] = {}, h[kBlock];
  scaled(u.p, gy.p, gh.p, n);
  scaled(f.f0, gy.p, gu.p, n);
  for (int64_t i = 1; i < s + jet.pairs; ++i) {
    const T *gi = g.p + i * g.stride, *ui = u.p + i * u.stride, *gyi = gy.p + i * gy.stride;
    T *ghi = gh.p + i * gh.stride, *gui = gu.p + i * gu.stride;
    scaled(f.f1, gi, h, n);
    if (i == s) add_product(f.f2, squares, T(1), h, n);
    add_product(ui, gyi, T(1), gh.p, n);
    add_product(h, gyi, T(1), gu.p, n);
    scaled(u.p, gyi, ghi, n);
    scaled(f.f0, gyi, gui, n);
    if (i > jet.summed || i == s) continue;
    add_product(gi, gi, T(1), squares, n);
    add_product(ui, gys, T(2), ghi, n);
    add_product(h, gys, T(2), gui, n);
  }
}

// `gh`: scratch for the gradient of h, where gated.
template <bool gated, typename T>
JACHESS_CLONES void backward_sum(const JetStreams& jet, Derivatives<const T*> f, Window<const T> gy,
                                 Window<const T> g, Window<const T> u, Window<T> gg, Window<T> gu,
                                 T* gh, int64_t n) {
  if constexpr (gated) {
    product_sum_backward(jet, f, g, u, gy, {gh, kBlock}, gu, n);
    pointwise_sum_backward(jet, f, g, {gh, kBlock}, gg, n);
  } else {
    pointwise_sum_backward(jet, f, g, gy, gg, n);
  }
}

// ---- blocks of rows ----------------------------------------------------------------------------

// Streams of rows in memory, at some element.
template <typename T>
struct Rows {
  T* p;
  int64_t stream_stride, row_stride;
  T* at(int64_t row, int64_t i) const { return p + row * row_stride + i; }
};

template <typename T>
Rows<const T> rows_of(const JetRows& jet) {
  return {input<T>(jet.tensor), jet.stream_stride, jet.row_stride};
}

template <typename T>
Rows<T> dense_rows(T* p, RowCut cut) {
  return {p, cut.rows * cut.length, cut.length};
}

// Calls f(row, first element, count) for the blocks [begin, end) of the rows.
template <typename F>
void for_each_block(RowCut cut, int64_t begin, int64_t end, const F& f) {
  const int64_t per_row = (cut.length + kBlock - 1) / kBlock;
  for (int64_t block = begin; block < end; ++block) {
    const int64_t first = block % per_row * kBlock;
    f(block / per_row, first, std::min(kBlock, cut.length - first));
  }
}

// Runs f(begin, end) over all blocks on torch's threads.
template <typename F>
void parallel_blocks(RowCut cut, const F& f) {
  const int64_t blocks = cut.rows * ((cut.length + kBlock - 1) / kBlock);
  const int64_t grain = std::max<int64_t>(1, kGrain / std::min(cut.length, kBlock));
  torch::stable::parallel_for(0, blocks, grain, f);
}

template <bool gated, int q, int P, typename T>
void forward_blocks(Rows<const T> g, Rows<const T> u, Rows<T> y, RowCut cut, int64_t begin,
                    int64_t end, Activation kind) {
  using A = accumulate_t<T>;
  constexpr int S = 1 + q + P, own = gated ? S * kBlock : 1;
  const DerivativeLoop<A> derivatives = derivative_loop<A>(kind, false);
  A f0[kBlock], f1[kBlock], f2[kBlock], in[S * kBlock], up[own], out[S * kBlock];
  for_each_block(cut, begin, end, [&](int64_t row, int64_t i, int64_t n) {
    const Window<const A> wg = read_streams<A>(g.at(row, i), g.stream_stride, S, n, in, kBlock);
    Window<const A> wu = wg;
    if constexpr (gated) wu = read_streams<A>(u.at(row, i), u.stream_stride, S, n, up, kBlock);
    const Window<A> wy = output_streams<A>(y.at(row, i), y.stream_stride, out, kBlock);
    derivatives(wg.p, gated ? f0 : wy.p, f1, f2, nullptr, n);
    forward_block<gated, q, P, A>({f0, f1, f2, nullptr}, wg, wu, wy, n);
    write_streams(wy, y.at(row, i), y.stream_stride, S, n);
  });
}

template <bool gated, int q, int P, typename T>
void backward_blocks(Rows<const T> gy, Rows<const T> g, Rows<const T> u, Rows<T> gg, Rows<T> gu,
                     RowCut cut, int64_t begin, int64_t end, Activation kind) {
  using A = accumulate_t<T>;
  constexpr int S = 1 + q + P, own = gated ? S * kBlock : 1;
  const DerivativeLoop<A> derivatives = derivative_loop<A>(kind, true);
  A f0[kBlock], f1[kBlock], f2[kBlock], f3[kBlock];
  A in[S * kBlock], up[own], grad[S * kBlock], out[S * kBlock], up_out[own];
  for_each_block(cut, begin, end, [&](int64_t row, int64_t i, int64_t n) {
    const Window<const A> wg = read_streams<A>(g.at(row, i), g.stream_stride, S, n, in, kBlock);
    const Window<const A> wgy =
        read_streams<A>(gy.at(row, i), gy.stream_stride, S, n, grad, kBlock);
    const Window<A> wgg = output_streams<A>(gg.at(row, i), gg.stream_stride, out, kBlock);
    derivatives(wg.p, f0, f1, f2, f3, n);
    if constexpr (gated) {
      const Window<const A> wu = read_streams<A>(u.at(row, i), u.stream_stride, S, n, up, kBlock);
      const Window<A> wgu = output_streams<A>(gu.at(row, i), gu.stream_stride, up_out, kBlock);
      backward_block<true, q, P, A>({f0, f1, f2, f3}, wgy, wg, wu, wgg, wgu, n);
      write_streams(wgu, gu.at(row, i), gu.stream_stride, S, n);
    } else {
      backward_block<false, q, P, A>({f0, f1, f2, f3}, wgy, wg, wg, wgg, wgg, n);
    }
    write_streams(wgg, gg.at(row, i), gg.stream_stride, S, n);
  });
}

template <bool gated, typename T>
void forward_sum_blocks(Rows<const T> g, Rows<const T> u, Rows<T> y, const ActivationInputs& in,
                        int64_t begin, int64_t end) {
  using A = accumulate_t<T>;
  const JetStreams& jet = in.streams;
  const int64_t S = 1 + jet.q + jet.pairs;
  const DerivativeLoop<A> derivatives = derivative_loop<A>(in.kind, false);
  A f0[kBlock], f1[kBlock], f2[kBlock];
  std::vector<A> from = scratch_of<T>(S * kBlock), up = scratch_of<T>(gated ? S * kBlock : 0),
                 out = scratch_of<T>(S * kBlock);
  for_each_block(in.cut, begin, end, [&](int64_t row, int64_t i, int64_t n) {
    const Window<const A> wg =
        read_streams<A>(g.at(row, i), g.stream_stride, S, n, from.data(), kBlock);
    Window<const A> wu = wg;
    if constexpr (gated)
      wu = read_streams<A>(u.at(row, i), u.stream_stride, S, n, up.data(), kBlock);
    const Window<A> wy = output_streams<A>(y.at(row, i), y.stream_stride, out.data(), kBlock);
    derivatives(wg.p, gated ? f0 : wy.p, f1, f2, nullptr, n);
    forward_sum<gated, A>(jet, {f0, f1, f2, nullptr}, wg, wu, wy, n);
    write_streams(wy, y.at(row, i), y.stream_stride, S, n);
  });
}

template <bool gated, typename T>
void backward_sum_blocks(Rows<const T> gy, Rows<const T> g, Rows<const T> u, Rows<T> gg, Rows<T> gu,
                         const ActivationInputs& in, int64_t begin, int64_t end) {
  using A = accumulate_t<T>;
  const JetStreams& jet = in.streams;
  const int64_t S = 1 + jet.q + jet.pairs, own = gated ? S * kBlock : 0;
  const DerivativeLoop<A> derivatives = derivative_loop<A>(in.kind, true);
  A f0[kBlock], f1[kBlock], f2[kBlock], f3[kBlock];
  std::vector<A> from = scratch_of<T>(S * kBlock), grad = scratch_of<T>(S * kBlock),
                 out = scratch_of<T>(S * kBlock), up = scratch_of<T>(own),
                 up_out = scratch_of<T>(own), gh(static_cast<size_t>(own));
  for_each_block(in.cut, begin, end, [&](int64_t row, int64_t i, int64_t n) {
    const Window<const A> wg =
        read_streams<A>(g.at(row, i), g.stream_stride, S, n, from.data(), kBlock);
    const Window<const A> wgy =
        read_streams<A>(gy.at(row, i), gy.stream_stride, S, n, grad.data(), kBlock);
    const Window<A> wgg = output_streams<A>(gg.at(row, i), gg.stream_stride, out.data(), kBlock);
    Window<const A> wu = wg;
    Window<A> wgu = wgg;
    if constexpr (gated) {
      wu = read_streams<A>(u.at(row, i), u.stream_stride, S, n, up.data(), kBlock);
      wgu = output_streams<A>(gu.at(row, i), gu.stream_stride, up_out.data(), kBlock);
    }
    derivatives(wg.p, f0, f1, f2, f3, n);
    backward_sum<gated, A>(jet, {f0, f1, f2, f3}, wgy, wg, wu, wgg, wgu, gh.data(), n);
    if constexpr (gated) write_streams(wgu, gu.at(row, i), gu.stream_stride, S, n);
    write_streams(wgg, gg.at(row, i), gg.stream_stride, S, n);
  });
}

struct Cpu {
  using Guard = NoGuard;
  static constexpr bool sums = true;

  template <bool gated>
  static void forward(const char* /*op*/, const ActivationInputs& in, const Tensor& y) {
    dispatch_dtype(y.scalar_type(), [&](auto* typed) {
      using T = std::remove_pointer_t<decltype(typed)>;
      const Rows<const T> gate = rows_of<T>(in.gate), up = rows_of<T>(in.up);
      const Rows<T> to = dense_rows(data<T>(y), in.cut);
      if (in.streams.any) {
        return parallel_blocks(in.cut, [&](int64_t begin, int64_t end) {
          forward_sum_blocks<gated>(gate, up, to, in, begin, end);
        });
      }
      dispatch_streams(in.streams.q, in.streams.pairs, [&](auto q_, auto P_) {
        parallel_blocks(in.cut, [&](int64_t begin, int64_t end) {
          forward_blocks<gated, decltype(q_)::value, decltype(P_)::value>(gate, up, to, in.cut,
                                                                          begin, end, in.kind);
        });
      });
    });
  }

  template <bool gated>
  static void backward(const char* /*op*/, const ActivationInputs& in, const Tensor& gy,
                       const Tensor& gg, const Tensor& gu) {
    dispatch_dtype(gg.scalar_type(), [&](auto* typed) {
      using T = std::remove_pointer_t<decltype(typed)>;
      const Rows<const T> gate = rows_of<T>(in.gate), up = rows_of<T>(in.up);
      const Rows<const T> grad = dense_rows(input<T>(gy), in.cut);
      const Rows<T> to_gate = dense_rows(data<T>(gg), in.cut);
      const Rows<T> to_up = dense_rows(data<T>(gu), in.cut);
      if (in.streams.any) {
        return parallel_blocks(in.cut, [&](int64_t begin, int64_t end) {
          backward_sum_blocks<gated>(grad, gate, up, to_gate, to_up, in, begin, end);
        });
      }
      dispatch_streams(in.streams.q, in.streams.pairs, [&](auto q_, auto P_) {
        parallel_blocks(in.cut, [&](int64_t begin, int64_t end) {
          backward_blocks<gated, decltype(q_)::value, decltype(P_)::value>(
              grad, gate, up, to_gate, to_up, in.cut, begin, end, in.kind);
        });
      });
    });
  }
};

}  // namespace
}  // namespace jachess

STABLE_TORCH_LIBRARY_IMPL(jachess, CPU, m) {
  jachess::ActivationOperators<jachess::Cpu>::add_to(m);
}
