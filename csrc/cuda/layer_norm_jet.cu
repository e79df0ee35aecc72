// CUDA kernels of jachess::layer_norm_jet: one block per row (all its streams), which is read again
// from L1/L2 for each sweep. Weight gradients: each block sums its rows into its own partial, a
// second kernel adds the partials in order, so the result is the same run to run.
#include "launch.h"

namespace jachess {
namespace {

constexpr int kThreads = 256;

// Where element `channel` of stream s lies in row r.
struct Layout {
  int64_t rows, channels;
  __device__ inline int64_t at(int64_t s, int64_t r, int64_t channel) const {
    return (s * rows + r) * channels + channel;
  }
};

template <int S, typename T, typename A>
__device__ inline void load_jet(const T* x, Layout layout, int64_t row, int64_t channel, A* out) {
  JACHESS_UNROLL
  for (int s = 0; s < S; ++s) convert(x[layout.at(s, row, channel)], out[s]);
}

template <int S, typename T, typename A>
__device__ inline void load_centered(const T* x, Layout layout, int64_t row, int64_t channel,
                                     const A* mean, A* out) {
  load_jet<S>(x, layout, row, channel, out);
  JACHESS_UNROLL
  for (int s = 0; s < S; ++s) out[s] -= mean[s];
}

template <typename T, typename A, int q, int P>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const T* __restrict__ x, const A* __restrict__ weight,
                   const A* __restrict__ bias, A eps, T* __restrict__ y, A* __restrict__ mean_out,
                   A* __restrict__ rstd_out, Layout layout) {
  constexpr int S = 1 + q + P;
  const int64_t row = blockIdx.x;
  const A n = static_cast<A>(layout.channels);
  A mean[S] = {}, sums[S] = {}, v[S], rstd[S];
  for (int64_t i = threadIdx.x; i < layout.channels; i += kThreads) {
    A values[S];
    load_jet<S>(x, layout, row, i, values);
    JACHESS_UNROLL
    for (int s = 0; s < S; ++s) mean[s] += values[s];
  }
  block_sum<S>(mean);
  JACHESS_UNROLL
  for (int s = 0; s < S; ++s) mean[s] /= n;

  for (int64_t i = threadIdx.x; i < layout.channels; i += kThreads) {
    A c[S];
    load_centered<S>(x, layout, row, i, mean, c);
    square_jet_add<q, P>(c, sums);
  }
  block_sum<S>(sums);
  square_jet_finish<q, P>(sums, n, v);
  rsqrt_jet<q, P>(v, eps, rstd);

  for (int64_t i = threadIdx.x; i < layout.channels; i += kThreads) {
    A c[S], z[S];
    load_centered<S>(x, layout, row, i, mean, c);
    product_jet<q, P>(c, rstd, z);
    const A w = weight ? weight[i] : A(1);
    z[0] = z[0] * w + (bias ? bias[i] : A(0));
    JACHESS_UNROLL
    for (int s = 1; s < S; ++s) z[s] *= w;
    JACHESS_UNROLL
    for (int s = 0; s < S; ++s) convert(z[s], y[layout.at(s, row, i)]);
  }
  if (threadIdx.x == 0) {
    JACHESS_UNROLL
    for (int s = 0; s < S; ++s) {
      mean_out[s * layout.rows + row] = mean[s];
      rstd_out[s * layout.rows + row] = rstd[s];
    }
  }
}

template <typename T, typename A, int q, int P>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(const T* __restrict__ gy, const T* __restrict__ x, const A* __restrict__ weight,
                    const A* __restrict__ mean_in, const A* __restrict__ rstd_in,
                    T* __restrict__ gx, A* __restrict__ partial, Layout layout) {
  constexpr int S = 1 + q + P;
  const A n = static_cast<A>(layout.channels);
  A* gweight = partial ? partial + 2 * blockIdx.x * layout.channels : nullptr;
  for (int64_t row = blockIdx.x; row < layout.rows; row += gridDim.x) {
    A mean[S], rstd[S], sums[2 * S] = {}, square[S], centring[S] = {};
    JACHESS_UNROLL
    for (int s = 0; s < S; ++s) {
      mean[s] = mean_in[s * layout.rows + row];
      rstd[s] = rstd_in[s * layout.rows + row];
    }
    A *gz_sum = sums, *gr_sum = sums + S;
    for (int64_t i = threadIdx.x; i < layout.channels; i += kThreads) {
      A c[S], g[S];
      load_centered<S>(x, layout, row, i, mean, c);
      load_jet<S>(gy, layout, row, i, g);
      const A w = weight ? weight[i] : A(1);
      JACHESS_UNROLL
      for (int s = 0; s < S; ++s) {
        g[s] *= w;
        gz_sum[s] += g[s];
      }
      product_jet_backward_add<q, P>(c, g, gr_sum);
    }
    block_sum<2 * S>(sums);
    rsqrt_jet_backward<q, P>(rstd, gr_sum, square);
    product_jet_backward_add<q, P>(rstd, gz_sum, centring);
    JACHESS_UNROLL
    for (int s = 0; s < S; ++s) {
      square[s] *= A(2) / n;
      centring[s] /= n;
    }
    for (int64_t i = threadIdx.x; i < layout.channels; i += kThreads) {
      A c[S], g[S], gc[S];
      load_centered<S>(x, layout, row, i, mean, c);
      load_jet<S>(gy, layout, row, i, g);
      if (gweight) {
        A z[S], gw = A(0);
        product_jet<q, P>(c, rstd, z);
        JACHESS_UNROLL
        for (int s = 0; s < S; ++s) gw += g[s] * z[s];
        gweight[i] += gw;
        gweight[layout.channels + i] += g[0];
      }
      const A w = weight ? weight[i] : A(1);
      JACHESS_UNROLL
      for (int s = 0; s < S; ++s) {
        g[s] *= w;
        gc[s] = -centring[s];
      }
      product_jet_backward_add<q, P>(rstd, g, gc);
      product_jet_backward_add<q, P>(c, square, gc);
      JACHESS_UNROLL
      for (int s = 0; s < S; ++s) convert(gc[s], gx[layout.at(s, row, i)]);
    }
  }
}

// One thread per channel adds the blocks' partials in order.
template <typename A>
__global__ void sum_partials_kernel(const A* __restrict__ partial, int64_t blocks, int64_t channels,
                                    A* __restrict__ gweight, A* __restrict__ gbias) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= channels) return;
  A gw = A(0), gb = A(0);
  for (int64_t b = 0; b < blocks; ++b) {
    gw += partial[2 * b * channels + i];
    gb += partial[(2 * b + 1) * channels + i];
  }
  gweight[i] = gw;
  gbias[i] = gb;
}

}  // namespace

int layer_norm_jet_cuda(NormShape shape, const void* x, const void* weight, const void* bias,
                        double eps, void* y, void* mean, void* rstd, Queue queue) {
  const Layout layout = {shape.rows, shape.channels};
  return dispatch_storage(shape.jet.storage, [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    using A = accumulate_t<T>;
    int error = 0;
    dispatch_streams(shape.jet.q, shape.jet.pairs, [&](auto q, auto P) {
      error = launch(forward_kernel<T, A, decltype(q)::value, decltype(P)::value>, shape.rows,
                     kThreads, queue, static_cast<const T*>(x), static_cast<const A*>(weight),
                     static_cast<const A*>(bias), static_cast<A>(eps), static_cast<T*>(y),
                     static_cast<A*>(mean), static_cast<A*>(rstd), layout);
    });
    return error;
  });
}

int layer_norm_jet_backward_cuda(NormShape shape, const void* gy, const void* x, const void* weight,
                                 const void* mean, const void* rstd, void* gx, void* partial,
                                 void* gweight, void* gbias, Queue queue) {
  const Layout layout = {shape.rows, shape.channels};
  const int64_t most = partial ? kNormBlocks : shape.rows;
  const int64_t blocks = shape.rows < most ? shape.rows : most;
  return dispatch_storage(shape.jet.storage, [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    using A = accumulate_t<T>;
    int error = 0;
    dispatch_streams(shape.jet.q, shape.jet.pairs, [&](auto q, auto P) {
      error = launch(backward_kernel<T, A, decltype(q)::value, decltype(P)::value>, blocks,
                     kThreads, queue, static_cast<const T*>(gy), static_cast<const T*>(x),
                     static_cast<const A*>(weight), static_cast<const A*>(mean),
                     static_cast<const A*>(rstd), static_cast<T*>(gx), static_cast<A*>(partial),
                     layout);
    });
    if (error != 0 || partial == nullptr) return error;
    return launch(sum_partials_kernel<A>, (shape.channels + kThreads - 1) / kThreads, kThreads,
                  queue, static_cast<const A*>(partial), blocks, shape.channels,
                  static_cast<A*>(gweight), static_cast<A*>(gbias));
  });
}

}  // namespace jachess
