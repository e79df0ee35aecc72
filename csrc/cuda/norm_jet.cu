// CUDA kernels of jachess::layer_norm_jet (centred) and jachess::rms_norm_jet: one block per row
// (all its streams), which is read again from L1/L2 for each sweep, kPack elements at a time where
// they are aligned. Weight gradients: each block adds its rows into its own partial, a second
// kernel adds the partials in a fixed order, so that the result is the same run to run.
#include "pack.h"

namespace jachess {
namespace {

constexpr int kMaxNormThreads = 256;

// Offsets of elements of stream 0, and the distance between streams.
struct NormLayout {
  int64_t rows, channels;
  __device__ inline int64_t at(int64_t r, int64_t channel) const { return r * channels + channel; }
  __device__ inline int64_t stride() const { return rows * channels; }
};

// Not __restrict__: sum is read after it was written, by the same thread.
template <typename T, typename A>
struct NormForwardPointers {
  const T *x, *residual;
  const A *weight, *bias;
  T *y, *sum;
  A *mean, *rstd;
};

template <typename T, typename A>
struct NormBackwardPointers {
  const T *gy, *gsum, *x;
  const A *weight, *mean, *rstd;
  T* gx;
  A* partial;
};

template <bool centred, int S, int width, typename A>
__device__ inline void subtract(const A* mean, A (*values)[S]) {
  if constexpr (centred) {
    JACHESS_UNROLL
    for (int w = 0; w < width; ++w) {
      JACHESS_UNROLL
      for (int s = 0; s < S; ++s) values[w][s] -= mean[s];
    }
  }
}

// x, or x + residual rounded to the storage type and written to sum.
template <int S, int width, typename T, typename A>
__device__ inline void load_input(const NormForwardPointers<T, A>& t, int64_t at, int64_t stride,
                                  A (*values)[S]) {
  load_packs<S, width>(t.x + at, stride, values);
  if (t.residual == nullptr) return;
  JACHESS_UNROLL
  for (int s = 0; s < S; ++s) {
    const auto residual = *reinterpret_cast<const Pack<T, width>*>(t.residual + at + s * stride);
    Pack<T, width> sum;
    JACHESS_UNROLL
    for (int w = 0; w < width; ++w) {
      A other;
      convert(residual.at[w], other);
      convert(values[w][s] + other, sum.at[w]);
      convert(sum.at[w], values[w][s]);
    }
    *reinterpret_cast<Pack<T, width>*>(t.sum + at + s * stride) = sum;
  }
}

template <typename T, typename A, int q, int P, int width, bool centred>
__global__ void __launch_bounds__(kMaxNormThreads)
    norm_kernel(NormForwardPointers<T, A> t, A eps, NormLayout layout) {
  constexpr int S = 1 + q + P;
  const int64_t row = blockIdx.x, stride = layout.stride();
  const int64_t first = static_cast<int64_t>(threadIdx.x) * width;
  const int64_t step = static_cast<int64_t>(blockDim.x) * width;
  const A n = static_cast<A>(layout.channels);
  const T* from = t.residual == nullptr ? t.x : t.sum;
  A mean[S] = {}, sums[S] = {}, v[S], rstd[S];
  if constexpr (centred) {
    for (int64_t i = first; i < layout.channels; i += step) {
      A values[width][S];
      load_input<S, width>(t, layout.at(row, i), stride, values);
      JACHESS_UNROLL
      for (int w = 0; w < width; ++w) {
        JACHESS_UNROLL
        for (int s = 0; s < S; ++s) mean[s] += values[w][s];
      }
    }
    block_sum<S>(mean);
    JACHESS_UNROLL
    for (int s = 0; s < S; ++s) mean[s] /= n;
  }
  for (int64_t i = first; i < layout.channels; i += step) {
    A c[width][S];
    if constexpr (centred) {
      load_packs<S, width>(from + layout.at(row, i), stride, c);
    } else {
      load_input<S, width>(t, layout.at(row, i), stride, c);
    }
    subtract<centred, S, width>(mean, c);
    JACHESS_UNROLL
    for (int w = 0; w < width; ++w) square_jet_add<q, P>(c[w], sums);
  }
  block_sum<S>(sums);
  square_jet_finish<q, P>(sums, n, v);
  rsqrt_jet<q, P>(v, eps, rstd);

  for (int64_t i = first; i < layout.channels; i += step) {
    A c[width][S], z[width][S];
    load_packs<S, width>(from + layout.at(row, i), stride, c);
    subtract<centred, S, width>(mean, c);
    JACHESS_UNROLL
    for (int w = 0; w < width; ++w) {
      product_jet<q, P>(c[w], rstd, z[w]);
      if (t.weight != nullptr) {
        const A scale = t.weight[i + w];
        JACHESS_UNROLL
        for (int s = 0; s < S; ++s) z[w][s] *= scale;
      }
      if (centred && t.bias != nullptr) z[w][0] += t.bias[i + w];
    }
    store_packs<S, width>(t.y + layout.at(row, i), stride, z);
  }
  if (threadIdx.x == 0) {
    JACHESS_UNROLL
    for (int s = 0; s < S; ++s) {
      if constexpr (centred) t.mean[s * layout.rows + row] = mean[s];
      t.rstd[s * layout.rows + row] = rstd[s];
    }
  }
}

// Adds the weight gradients of `width` channels; c and g as the row has them, g before the weight.
template <bool centred, int q, int P, int width, typename A>
__device__ inline void add_weight_gradients(const A (*c)[1 + q + P], const A (*g)[1 + q + P],
                                            const A* rstd, A* gweight, A* gbias) {
  JACHESS_UNROLL
  for (int w = 0; w < width; ++w) {
    A z[1 + q + P], sum = A(0);
    product_jet<q, P>(c[w], rstd, z);
    JACHESS_UNROLL
    for (int s = 0; s < 1 + q + P; ++s) sum += g[w][s] * z[s];
    gweight[w] += sum;
    if constexpr (centred) gbias[w] += g[w][0];
  }
}

template <int S, int width, typename A>
__device__ inline void scale_gradients(const A* weight, A (*g)[S]) {
  if (weight == nullptr) return;
  JACHESS_UNROLL
  for (int w = 0; w < width; ++w) {
    const A scale = weight[w];
    JACHESS_UNROLL
    for (int s = 0; s < S; ++s) g[w][s] *= scale;
  }
}

template <typename T, typename A, int q, int P, int width, bool centred>
__global__ void __launch_bounds__(kMaxNormThreads)
    norm_backward_kernel(NormBackwardPointers<T, A> t, NormLayout layout) {
  constexpr int S = 1 + q + P;
  const int64_t stride = layout.stride();
  const int64_t first = static_cast<int64_t>(threadIdx.x) * width;
  const int64_t step = static_cast<int64_t>(blockDim.x) * width;
  const A n = static_cast<A>(layout.channels);
  A* gweight = t.partial;
  if (gweight != nullptr) gweight += (centred ? 2 : 1) * blockIdx.x * layout.channels;
  for (int64_t row = blockIdx.x; row < layout.rows; row += gridDim.x) {
    A mean[S] = {}, rstd[S], square[S], centring[S] = {};
    A sums[centred ? 2 * S : S] = {};  // of the gradient in rstd's streams; of g times the weight
    JACHESS_UNROLL
    for (int s = 0; s < S; ++s) {
      if constexpr (centred) mean[s] = t.mean[s * layout.rows + row];
      rstd[s] = t.rstd[s * layout.rows + row];
    }
    for (int64_t i = first; i < layout.channels; i += step) {
      A c[width][S], g[width][S];
      load_packs<S, width>(t.x + layout.at(row, i), stride, c);
      load_packs<S, width>(t.gy + layout.at(row, i), stride, g);
      subtract<centred, S, width>(mean, c);
      scale_gradients<S, width>(t.weight == nullptr ? nullptr : t.weight + i, g);
      JACHESS_UNROLL
      for (int w = 0; w < width; ++w) {
        product_jet_backward_add<q, P>(c[w], g[w], sums);
        if constexpr (centred) {
          JACHESS_UNROLL
          for (int s = 0; s < S; ++s) sums[S + s] += g[w][s];
        }
      }
    }
    block_sum<(centred ? 2 * S : S)>(sums);
    rsqrt_jet_backward<q, P>(rstd, sums, square);
    if constexpr (centred) product_jet_backward_add<q, P>(rstd, sums + S, centring);
    JACHESS_UNROLL
    for (int s = 0; s < S; ++s) {
      square[s] *= A(2) / n;
      centring[s] /= -n;
    }
    for (int64_t i = first; i < layout.channels; i += step) {
      A c[width][S], g[width][S], gc[width][S];
      load_packs<S, width>(t.x + layout.at(row, i), stride, c);
      load_packs<S, width>(t.gy + layout.at(row, i), stride, g);
      subtract<centred, S, width>(mean, c);
      if (gweight != nullptr)
        add_weight_gradients<centred, q, P, width>(c, g, rstd, gweight + i,
                                                   gweight + layout.channels + i);
      scale_gradients<S, width>(t.weight == nullptr ? nullptr : t.weight + i, g);
      if (t.gsum != nullptr) {
        load_packs<S, width>(t.gsum + layout.at(row, i), stride, gc);
      } else {
        JACHESS_UNROLL
        for (int w = 0; w < width; ++w) {
          JACHESS_UNROLL
          for (int s = 0; s < S; ++s) gc[w][s] = A(0);
        }
      }
      JACHESS_UNROLL
      for (int w = 0; w < width; ++w) {
        JACHESS_UNROLL
        for (int s = 0; s < S; ++s) gc[w][s] += centring[s];
        product_jet_backward_add<q, P>(rstd, g[w], gc[w]);
        product_jet_backward_add<q, P>(c[w], square, gc[w]);
      }
      store_packs<S, width>(t.gx + layout.at(row, i), stride, gc);
    }
  }
}

constexpr int kSumChannels = 32, kSumSegments = 8;

// Adds the blocks' partials [blocks, kinds, channels] of one kind: each of
// kSumSegments threads of a channel adds every kSumSegments-th, then one adds theirs in order.
template <typename A>
__global__ void __launch_bounds__(kSumChannels* kSumSegments)
    sum_partials_kernel(const A* partial, int64_t blocks, int64_t kinds, int64_t kind,
                        int64_t channels, A* out) {
  __shared__ A segments[kSumSegments][kSumChannels];
  const int lane = threadIdx.x % kSumChannels, segment = threadIdx.x / kSumChannels;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kSumChannels + lane;
  A sum = A(0);
  if (i < channels) {
    for (int64_t b = segment; b < blocks; b += kSumSegments)
      sum += partial[(b * kinds + kind) * channels + i];
  }
  segments[segment][lane] = sum;
  __syncthreads();
  if (segment != 0 || i >= channels) return;
  for (int k = 1; k < kSumSegments; ++k) sum += segments[k][lane];
  out[i] = sum;
}

// Enough threads for a row, in whole warps.
int norm_threads(int64_t channels, int width) {
  const int64_t groups = (channels + width - 1) / width;
  const int64_t threads = (groups + kWarp - 1) / kWarp * kWarp;
  return static_cast<int>(threads < kMaxNormThreads ? threads : kMaxNormThreads);
}

template <bool centred>
int launch_norm(NormShape shape, NormBuffers b, double eps, Queue queue) {
  const NormLayout layout = {shape.rows, shape.channels};
  const auto run = [&](auto* typed, auto q, auto P, auto width) {
    using T = std::remove_pointer_t<decltype(typed)>;
    using A = accumulate_t<T>;
    const NormForwardPointers<T, A> t = {static_cast<const T*>(b.x),
                                         static_cast<const T*>(b.residual),
                                         static_cast<const A*>(b.weight),
                                         static_cast<const A*>(b.bias),
                                         static_cast<T*>(b.y),
                                         static_cast<T*>(b.sum),
                                         static_cast<A*>(b.mean),
                                         static_cast<A*>(b.rstd)};
    constexpr int w = decltype(width)::value;
    return launch(norm_kernel<T, A, decltype(q)::value, decltype(P)::value, w, centred>, shape.rows,
                  norm_threads(shape.channels, w), queue, t, static_cast<A>(eps), layout);
  };
  return dispatch_packs(shape.jet, shape.channels, run, b.x, b.residual, b.y, b.sum);
}

template <bool centred>
int launch_norm_backward(NormShape shape, NormBackwardBuffers b, Queue queue) {
  const NormLayout layout = {shape.rows, shape.channels};
  const int64_t most = b.partial != nullptr ? kNormBlocks : shape.rows;
  const int64_t blocks = shape.rows < most ? shape.rows : most;
  const auto run = [&](auto* typed, auto q, auto P, auto width) {
    using T = std::remove_pointer_t<decltype(typed)>;
    using A = accumulate_t<T>;
    const NormBackwardPointers<T, A> t = {
        static_cast<const T*>(b.gy),   static_cast<const T*>(b.gsum),
        static_cast<const T*>(b.x),    static_cast<const A*>(b.weight),
        static_cast<const A*>(b.mean), static_cast<const A*>(b.rstd),
        static_cast<T*>(b.gx),         static_cast<A*>(b.partial)};
    constexpr int w = decltype(width)::value, kinds = centred ? 2 : 1;
    int error =
        launch(norm_backward_kernel<T, A, decltype(q)::value, decltype(P)::value, w, centred>,
               blocks, norm_threads(shape.channels, w), queue, t, layout);
    void* const results[] = {b.gweight, b.gbias};
    for (int kind = 0; kind < kinds && error == 0 && b.partial != nullptr; ++kind) {
      error = launch(sum_partials_kernel<A>, (shape.channels + kSumChannels - 1) / kSumChannels,
                     kSumChannels * kSumSegments, queue, static_cast<const A*>(b.partial), blocks,
                     static_cast<int64_t>(kinds), static_cast<int64_t>(kind), shape.channels,
                     static_cast<A*>(results[kind]));
    }
    return error;
  };
  return dispatch_packs(shape.jet, shape.channels, run, b.gy, b.gsum, b.x, b.gx);
}

}  // namespace

int norm_jet_cuda(NormShape shape, NormBuffers buffers, double eps, Queue queue) {
  return (shape.centred ? launch_norm<true> : launch_norm<false>)(shape, buffers, eps, queue);
}

int norm_jet_backward_cuda(NormShape shape, NormBackwardBuffers buffers, Queue queue) {
  return (shape.centred ? launch_norm_backward<true> : launch_norm_backward<false>)(shape, buffers,
                                                                                    queue);
}

}  // namespace jachess
