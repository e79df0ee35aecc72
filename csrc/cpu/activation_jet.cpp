// jachess::activation_jet, f(g) by the pointwise rule, and jachess::gated_activation_jet, f(g) u by
// Leibniz on top, with their backwards on the CPU.
//
// Elements are taken in blocks that stay in L1. Per block, one loop evaluates the derivatives of
// the activation (activation_derivatives.h), a second one multiplies them into the streams (one
// instance per stream count): kinds x stream counts would be too many instances.
#include <algorithm>

#include "../activation_arguments.h"
#include "activation_derivatives.h"
#include "streams.h"
#include "tensors.h"

namespace jachess {
namespace {

constexpr int64_t kBlock = 256;
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

struct Cpu {
  using Guard = NoGuard;

  template <bool gated>
  static void forward(const char* /*op*/, const ActivationInputs& in, int64_t q, const Tensor& y) {
    dispatch_dtype(y.scalar_type(), [&](auto* typed) {
      using T = std::remove_pointer_t<decltype(typed)>;
      const Rows<const T> gate = rows_of<T>(in.gate), up = rows_of<T>(in.up);
      const Rows<T> to = dense_rows(data<T>(y), in.cut);
      dispatch_streams(q, in.pairs, [&](auto q_, auto P_) {
        parallel_blocks(in.cut, [&](int64_t begin, int64_t end) {
          forward_blocks<gated, decltype(q_)::value, decltype(P_)::value>(gate, up, to, in.cut,
                                                                          begin, end, in.kind);
        });
      });
    });
  }

  template <bool gated>
  static void backward(const char* /*op*/, const ActivationInputs& in, int64_t q, const Tensor& gy,
                       const Tensor& gg, const Tensor& gu) {
    dispatch_dtype(gg.scalar_type(), [&](auto* typed) {
      using T = std::remove_pointer_t<decltype(typed)>;
      const Rows<const T> gate = rows_of<T>(in.gate), up = rows_of<T>(in.up);
      const Rows<const T> grad = dense_rows(input<T>(gy), in.cut);
      const Rows<T> to_gate = dense_rows(data<T>(gg), in.cut);
      const Rows<T> to_up = dense_rows(data<T>(gu), in.cut);
      dispatch_streams(q, in.pairs, [&](auto q_, auto P_) {
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
