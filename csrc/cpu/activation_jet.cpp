// jachess::activation_jet and its backward on the CPU: the pointwise jet rule.
//
// Elements are taken in blocks that stay in L1. Per block, one loop evaluates the derivatives of
// the activation (activation_derivatives.h), a second one multiplies them into the streams (one
// instance per stream count): kinds x stream counts would be too many instances.
#include <torch/csrc/stable/library.h>

#include "../text.h"
#include "activation_derivatives.h"
#include "blocks.h"
#include "tensors.h"

namespace jachess {
namespace {

template <int q, int P, typename V, typename T>
JACHESS_HD void multiply_at(const T* f1, const T* f2, Window<const T> x, Window<T> y, int64_t i) {
  V d1, d2, in[1 + q + P], out[1 + q + P];
  load(d1, f1 + i);
  load(d2, f2 + i);
  JACHESS_UNROLL
  for (int s = 1; s < 1 + q + P; ++s) load(in[s], x.p + s * x.stride + i);
  pointwise_jet<q, P>(d1, d2, in, out);
  JACHESS_UNROLL
  for (int s = 1; s < 1 + q + P; ++s) store(y.p + s * y.stride + i, out[s]);
}

template <int q, int P, typename T>
JACHESS_CLONES void multiply(const T* f1, const T* f2, Window<const T> x, Window<T> y, int64_t n) {
  using V = typename VectorOf<T>::type;
  constexpr int64_t width = sizeof(V) / sizeof(T);
  int64_t i = 0;
  for (; i + width <= n; i += width) multiply_at<q, P, V>(f1, f2, x, y, i);
  for (; i < n; ++i) multiply_at<q, P, T>(f1, f2, x, y, i);
}

template <int q, int P, typename V, typename T>
JACHESS_HD void multiply_backward_at(const T* f1, const T* f2, const T* f3, Window<const T> x,
                                     Window<const T> gy, Window<T> gx, int64_t i) {
  V d1, d2, d3, in[1 + q + P], grad[1 + q + P], out[1 + q + P];
  load(d1, f1 + i);
  load(d2, f2 + i);
  load(d3, f3 + i);
  load_jet<1 + q + P>(in, x, i);
  load_jet<1 + q + P>(grad, gy, i);
  pointwise_jet_backward<q, P>(d1, d2, d3, in, grad, out);
  store_jet<1 + q + P>(gx, out, i);
}

template <int q, int P, typename T>
JACHESS_CLONES void multiply_backward(const T* f1, const T* f2, const T* f3, Window<const T> x,
                                      Window<const T> gy, Window<T> gx, int64_t n) {
  using V = typename VectorOf<T>::type;
  constexpr int64_t width = sizeof(V) / sizeof(T);
  int64_t i = 0;
  for (; i + width <= n; i += width) multiply_backward_at<q, P, V>(f1, f2, f3, x, gy, gx, i);
  for (; i < n; ++i) multiply_backward_at<q, P, T>(f1, f2, f3, x, gy, gx, i);
}

template <int q, int P, typename T>
void forward_range(const T* x, T* y, int64_t stride, int64_t begin, int64_t end, Activation kind) {
  using A = accumulate_t<T>;
  constexpr int S = 1 + q + P;
  const DerivativeLoop<A> derivatives = derivative_loop<A>(kind, false);
  A f1[kBlock], f2[kBlock], in[S * kBlock], out[S * kBlock];
  for (int64_t i = begin; i < end; i += kBlock) {
    const int64_t n = end - i < kBlock ? end - i : kBlock;
    const Window<const A> wx = read_block<A>(x + i, stride, S, n, in);
    const Window<A> wy = output_block<A>(y + i, stride, out);
    derivatives(wx.p, wy.p, f1, f2, nullptr, n);
    multiply<q, P, A>(f1, f2, wx, wy, n);
    write_block(wy, y + i, stride, S, n);
  }
}

template <int q, int P, typename T>
void backward_range(const T* gy, const T* x, T* gx, int64_t stride, int64_t begin, int64_t end,
                    Activation kind) {
  using A = accumulate_t<T>;
  constexpr int S = 1 + q + P;
  const DerivativeLoop<A> derivatives = derivative_loop<A>(kind, true);
  A f0[kBlock], f1[kBlock], f2[kBlock], f3[kBlock], in[S * kBlock], grad[S * kBlock],
      out[S * kBlock];
  for (int64_t i = begin; i < end; i += kBlock) {
    const int64_t n = end - i < kBlock ? end - i : kBlock;
    const Window<const A> wx = read_block<A>(x + i, stride, S, n, in);
    const Window<const A> wg = read_block<A>(gy + i, stride, S, n, grad);
    const Window<A> wo = output_block<A>(gx + i, stride, out);
    derivatives(wx.p, f0, f1, f2, f3, n);
    multiply_backward<q, P, A>(f1, f2, f3, wx, wg, wo, n);
    write_block(wo, gx + i, stride, S, n);
  }
}

Tensor activation_jet(const Tensor& x, const Text& kind, int64_t q) {
  const char* op = "activation_jet";
  const int P = check_jet(op, "x", x, q);
  const Activation activation = parse_activation(op, kind);
  const Tensor dense = torch::stable::contiguous(x);
  Tensor y = torch::stable::empty_like(dense);
  const int64_t n = dense.numel() / dense.size(0);
  if (n == 0) return y;
  dispatch_dtype(dense.scalar_type(), [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    const T* from = input<T>(dense);
    T* to = data<T>(y);
    dispatch_streams(q, P, [&](auto q_, auto P_) {
      torch::stable::parallel_for(0, n, kGrain, [&](int64_t begin, int64_t end) {
        forward_range<decltype(q_)::value, decltype(P_)::value>(from, to, n, begin, end,
                                                                activation);
      });
    });
  });
  return y;
}

Tensor activation_jet_backward(const Tensor& gy, const Tensor& x, const Text& kind, int64_t q) {
  const char* op = "activation_jet_backward";
  const int P = check_jet(op, "x", x, q);
  check_same(op, "gy", gy, x);
  const Activation activation = parse_activation(op, kind);
  const Tensor dense = torch::stable::contiguous(x), grad = torch::stable::contiguous(gy);
  Tensor gx = torch::stable::empty_like(dense);
  const int64_t n = dense.numel() / dense.size(0);
  if (n == 0) return gx;
  dispatch_dtype(dense.scalar_type(), [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    const T *from = input<T>(dense), *g = input<T>(grad);
    T* to = data<T>(gx);
    dispatch_streams(q, P, [&](auto q_, auto P_) {
      torch::stable::parallel_for(0, n, kGrain, [&](int64_t begin, int64_t end) {
        backward_range<decltype(q_)::value, decltype(P_)::value>(g, from, to, n, begin, end,
                                                                 activation);
      });
    });
  });
  return gx;
}

}  // namespace
}  // namespace jachess

STABLE_TORCH_LIBRARY_IMPL(jachess, CPU, m) {
  m.impl("activation_jet", TORCH_BOX(&jachess::activation_jet));
  m.impl("activation_jet_backward", TORCH_BOX(&jachess::activation_jet_backward));
}
