// CUDA kernels of jachess::activation_jet and jachess::gated_activation_jet, bound by memory. Gate
// and up may be rows of a wider tensor; a dense tensor is one row.
//
//     a thread                         every stream of its elements, in registers
//     gate   [S][4 neighbours]  ->  f, f', f'' of the primal  ->  y [S][4]
//     up     [S][4], if any         f''' too, backward            gate's and up's gradients
//
// One element of a double. No shared memory; the formulas are jet_math.h's. The kind of activation
// and whether there is an up are the same for all threads: branches on them cost nothing beside the
// memory.
#include "pack.h"

namespace jachess {
namespace {

constexpr int kThreads = 256;

template <typename A>
__device__ inline Derivatives<A> derivatives(Activation kind, A x) {
  switch (kind) {
#define JACHESS_CASE(name) \
  case Activation::name:   \
    return ActivationOf<Activation::name, A>::at(x);
    JACHESS_FOR_EACH_ACTIVATION(JACHESS_CASE)
#undef JACHESS_CASE
  }
  return {};
}

template <typename T, int q, int P, bool backward>
__global__ void __launch_bounds__(kThreads)
    kernel(const __grid_constant__ ActivationShape shape, Activation kind,
           const __grid_constant__ ActivationBuffers b, const __grid_constant__ Elements elements) {
  using A = accumulate_t<T>;
  constexpr int S = 1 + q + P;
  const int64_t packs = (shape.length + kPack<T> - 1) / kPack<T>;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t number = shape.rows == 1 ? 0 : index / packs, start = number * shape.length;
  const int64_t i = (index - number * packs) * kPack<T>;
  if (number >= shape.rows || i >= shape.length) return;
  const Row<T> row = {shape.length, 0, 0, elements};
  const Streams<S, const T> gate(b.g, number * shape.g.row, shape.g.stream);
  const Streams<S, const T> up(b.u, number * shape.u.row, shape.u.stream);
  const Streams<S, const T> gy(b.gy, start, shape.jet.n);
  const Streams<S, T> out(b.out, start, shape.jet.n), up_out(b.gu, start, shape.jet.n);
  const bool gated = b.u != nullptr;
  if constexpr (backward) {
    const auto differentiate = [&](int64_t, const A* g, const A* u, const A* grad, A* gg, A* gu) {
      const Derivatives<A> d = derivatives(kind, g[0]);
      if (gated) {
        gated_jet_backward<q, P>(d, g, u, grad, gg, gu);
      } else {
        pointwise_jet_backward<q, P>(d.f1, d.f2, d.f3, g, grad, gg);
      }
    };
    row.pack(i, differentiate, gate, up, gy, out, up_out);
  } else {
    const auto activate = [&](int64_t, const A* g, const A* u, A* y) {
      const Derivatives<A> d = derivatives(kind, g[0]);
      if (gated) {
        gated_jet<q, P>(d.f0, d.f1, d.f2, g, u, y);
      } else {
        pointwise_jet<q, P>(d.f1, d.f2, g, y);
        y[0] = d.f0;
      }
    };
    row.pack(i, activate, gate, up, out);
  }
}

}  // namespace

int activation_jet_cuda(ActivationShape s, Activation kind, ActivationBuffers b, Queue queue) {
  // Packs are aligned where every distance is a multiple of theirs.
  const int64_t distances = s.jet.n | s.length | s.g.stream | s.g.row | s.u.stream | s.u.row;
  return dispatch_jets(s.jet, [&](auto* typed, auto q, auto P) {
    using T = std::remove_pointer_t<decltype(typed)>;
    constexpr int directions = decltype(q)::value, pairs = decltype(P)::value;
    const int64_t threads = s.rows * ceil_divide(s.length, kPack<T>);
    const auto start = [&](auto chosen) {
      return launch(chosen, ceil_divide(threads, kThreads), kThreads, queue, s, kind, b,
                    elements_of<T>(s.jet.storage, distances, b.gy, b.g, b.u, b.out, b.gu));
    };
    return b.gy == nullptr ? start(kernel<T, directions, pairs, false>)
                           : start(kernel<T, directions, pairs, true>);
  });
}

}  // namespace jachess
