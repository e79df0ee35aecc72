// jachess::gated_activation_jet and its backward on the CPU: f(g) u by the pointwise rule and
// Leibniz, in blocks that stay in L1, as activation_jet does it.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "../row_layout.h"
#include "../text.h"
#include "activation_derivatives.h"
#include "blocks.h"
#include "tensors.h"

namespace jachess {
namespace {

template <int q, int P, typename V, typename T>
JACHESS_HD void gate_at(const T* f0, const T* f1, const T* f2, Window<const T> g, Window<const T> u,
                        Window<T> y, int64_t i) {
  constexpr int S = 1 + q + P;
  V d0, d1, d2, gate[S], up[S], out[S];
  load(d0, f0 + i);
  load(d1, f1 + i);
  load(d2, f2 + i);
  load_jet<S>(gate, g, i);
  load_jet<S>(up, u, i);
  gated_jet<q, P>(d0, d1, d2, gate, up, out);
  store_jet<S>(y, out, i);
}

template <int q, int P, typename T>
JACHESS_CLONES void gate_block(const T* f0, const T* f1, const T* f2, Window<const T> g,
                               Window<const T> u, Window<T> y, int64_t n) {
  using V = typename VectorOf<T>::type;
  constexpr int64_t width = sizeof(V) / sizeof(T);
  int64_t i = 0;
  for (; i + width <= n; i += width) gate_at<q, P, V>(f0, f1, f2, g, u, y, i);
  for (; i < n; ++i) gate_at<q, P, T>(f0, f1, f2, g, u, y, i);
}

template <int q, int P, typename V, typename T>
JACHESS_HD void gate_backward_at(const Derivatives<const T*>& f, Window<const T> gy,
                                 Window<const T> g, Window<const T> u, Window<T> gg, Window<T> gu,
                                 int64_t i) {
  constexpr int S = 1 + q + P;
  Derivatives<V> d;
  V gate[S], up[S], grad[S], gate_out[S], up_out[S];
  load(d.f0, f.f0 + i);
  load(d.f1, f.f1 + i);
  load(d.f2, f.f2 + i);
  load(d.f3, f.f3 + i);
  load_jet<S>(gate, g, i);
  load_jet<S>(up, u, i);
  load_jet<S>(grad, gy, i);
  gated_jet_backward<q, P>(d, gate, up, grad, gate_out, up_out);
  store_jet<S>(gg, gate_out, i);
  store_jet<S>(gu, up_out, i);
}

template <int q, int P, typename T>
JACHESS_CLONES void gate_backward_block(Derivatives<const T*> f, Window<const T> gy,
                                        Window<const T> g, Window<const T> u, Window<T> gg,
                                        Window<T> gu, int64_t n) {
  using V = typename VectorOf<T>::type;
  constexpr int64_t width = sizeof(V) / sizeof(T);
  int64_t i = 0;
  for (; i + width <= n; i += width) gate_backward_at<q, P, V>(f, gy, g, u, gg, gu, i);
  for (; i < n; ++i) gate_backward_at<q, P, T>(f, gy, g, u, gg, gu, i);
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

template <int q, int P, typename T>
void forward_blocks(Rows<const T> g, Rows<const T> u, Rows<T> y, RowCut cut, int64_t begin,
                    int64_t end, Activation kind) {
  using A = accumulate_t<T>;
  constexpr int S = 1 + q + P;
  const DerivativeLoop<A> derivatives = derivative_loop<A>(kind, false);
  A f0[kBlock], f1[kBlock], f2[kBlock], gate[S * kBlock], up[S * kBlock], out[S * kBlock];
  for_each_block(cut, begin, end, [&](int64_t row, int64_t i, int64_t n) {
    const Window<const A> wg = read_block<A>(g.at(row, i), g.stream_stride, S, n, gate);
    const Window<const A> wu = read_block<A>(u.at(row, i), u.stream_stride, S, n, up);
    const Window<A> wy = output_block<A>(y.at(row, i), y.stream_stride, out);
    derivatives(wg.p, f0, f1, f2, nullptr, n);
    gate_block<q, P, A>(f0, f1, f2, wg, wu, wy, n);
    write_block(wy, y.at(row, i), y.stream_stride, S, n);
  });
}

template <int q, int P, typename T>
void backward_blocks(Rows<const T> gy, Rows<const T> g, Rows<const T> u, Rows<T> gg, Rows<T> gu,
                     RowCut cut, int64_t begin, int64_t end, Activation kind) {
  using A = accumulate_t<T>;
  constexpr int S = 1 + q + P;
  const DerivativeLoop<A> derivatives = derivative_loop<A>(kind, true);
  A f0[kBlock], f1[kBlock], f2[kBlock], f3[kBlock];
  A gate[S * kBlock], up[S * kBlock], grad[S * kBlock], gate_out[S * kBlock], up_out[S * kBlock];
  for_each_block(cut, begin, end, [&](int64_t row, int64_t i, int64_t n) {
    const Window<const A> wg = read_block<A>(g.at(row, i), g.stream_stride, S, n, gate);
    const Window<const A> wu = read_block<A>(u.at(row, i), u.stream_stride, S, n, up);
    const Window<const A> wgy = read_block<A>(gy.at(row, i), gy.stream_stride, S, n, grad);
    const Window<A> wgg = output_block<A>(gg.at(row, i), gg.stream_stride, gate_out);
    const Window<A> wgu = output_block<A>(gu.at(row, i), gu.stream_stride, up_out);
    derivatives(wg.p, f0, f1, f2, f3, n);
    gate_backward_block<q, P, A>({f0, f1, f2, f3}, wgy, wg, wu, wgg, wgu, n);
    write_block(wgg, gg.at(row, i), gg.stream_stride, S, n);
    write_block(wgu, gu.at(row, i), gu.stream_stride, S, n);
  });
}

Tensor gated_activation_jet(const Tensor& g, const Tensor& u, const Text& kind, int64_t q) {
  const char* op = "gated_activation_jet";
  const int P = check_jet(op, "g", g, q);
  check_same(op, "u", u, g, "g");
  const Activation activation = parse_activation(op, kind);
  Tensor y = new_contiguous(g);
  if (g.numel() == 0) return y;
  const JetRows gate = jet_rows(g), up = jet_rows(u);
  const RowCut cut = common_cut(gate, up);
  dispatch_dtype(g.scalar_type(), [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    const Rows<const T> from_gate = rows_of<T>(gate), from_up = rows_of<T>(up);
    const Rows<T> to = dense_rows(data<T>(y), cut);
    dispatch_streams(q, P, [&](auto q_, auto P_) {
      parallel_blocks(cut, [&](int64_t begin, int64_t end) {
        forward_blocks<decltype(q_)::value, decltype(P_)::value>(from_gate, from_up, to, cut, begin,
                                                                 end, activation);
      });
    });
  });
  return y;
}

std::tuple<Tensor, Tensor> gated_activation_jet_backward(const Tensor& gy, const Tensor& g,
                                                         const Tensor& u, const Text& kind,
                                                         int64_t q) {
  const char* op = "gated_activation_jet_backward";
  const int P = check_jet(op, "g", g, q);
  check_same(op, "u", u, g, "g");
  check_same(op, "gy", gy, g, "g");
  const Activation activation = parse_activation(op, kind);
  Tensor gg = new_contiguous(g), gu = new_contiguous(g);
  if (g.numel() == 0) return {gg, gu};
  const JetRows gate = jet_rows(g), up = jet_rows(u);
  const Tensor grad = torch::stable::contiguous(gy);
  const RowCut cut = common_cut(gate, up);
  dispatch_dtype(g.scalar_type(), [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    const Rows<const T> from_gate = rows_of<T>(gate), from_up = rows_of<T>(up);
    const Rows<const T> from_grad = dense_rows(input<T>(grad), cut);
    const Rows<T> to_gate = dense_rows(data<T>(gg), cut), to_up = dense_rows(data<T>(gu), cut);
    dispatch_streams(q, P, [&](auto q_, auto P_) {
      parallel_blocks(cut, [&](int64_t begin, int64_t end) {
        backward_blocks<decltype(q_)::value, decltype(P_)::value>(
            from_grad, from_gate, from_up, to_gate, to_up, cut, begin, end, activation);
      });
    });
  });
  return {gg, gu};
}

}  // namespace
}  // namespace jachess

STABLE_TORCH_LIBRARY_IMPL(jachess, CPU, m) {
  m.impl("gated_activation_jet", TORCH_BOX(&jachess::gated_activation_jet));
  m.impl("gated_activation_jet_backward", TORCH_BOX(&jachess::gated_activation_jet_backward));
}
