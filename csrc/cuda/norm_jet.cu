// CUDA kernels of jachess::layer_norm_jet (centred) and jachess::rms_norm_jet, bound by memory.
//
//     forward, a block a row           thread t: elements 4t .. 4t + 3, + 4 x threads ..., all
//     streams x [S, row] (+ residual)  ->  sum  ->  mean [S]  ->  sums of squares [S]  ->  rstd [S]
//     ->  y
//
//     backward, a block many rows
//     x, gy [S, row]  ->  sums of gy z [S]  ->  gx (+ gsum);   gy z summed over the block's rows
//     partial [blocks, weight and bias, channels]  ->  gweight, gbias    (second kernel, in order)
//
// A row is read again from the caches for each sweep; sums over a row go through shared memory
// (block_reduce). The result is the same run to run: no two blocks add to one number.
#include "pack.h"

namespace jachess {
namespace {

constexpr int kMaxThreads = 256;

struct ForwardArguments {
  NormShape shape;
  NormBuffers buffers;
  double eps;
  Elements elements;
};

struct BackwardArguments {
  NormShape shape;
  NormBackwardBuffers buffers;
  Elements elements;
};

// A parameter's entries from i on, whatever type it is stored in; `otherwise` where it is not
// given.
template <int W, typename A>
__device__ inline void load_parameter(const NormParameter& parameter, int64_t i, int64_t valid,
                                      A otherwise, A (&out)[W]) {
  A loaded[W][1];
  const auto load = [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    const T* from = static_cast<const T*>(parameter.data) + i;
    const bool aligned = reinterpret_cast<uintptr_t>(from) % (W * sizeof(T)) == 0;
    load_packs<1, W>(from, 0, valid, {aligned && valid >= W, parameter.storage == Storage::f16},
                     loaded);
  };
  if (parameter.data == nullptr) {
    JACHESS_UNROLL
    for (int w = 0; w < W; ++w) loaded[w][0] = otherwise;
  } else if (parameter.storage == Storage::f64) {
    load(static_cast<double*>(nullptr));
  } else if (parameter.storage == Storage::f32) {
    load(static_cast<float*>(nullptr));
  } else {
    load(static_cast<Bits16*>(nullptr));
  }
  JACHESS_UNROLL
  for (int w = 0; w < W; ++w) out[w] = loaded[w][0];
}

template <int S, int W, typename A>
__device__ inline void subtract(const A* mean, int64_t valid, A (*values)[S]) {
  JACHESS_UNROLL
  for (int w = 0; w < W; ++w) {
    JACHESS_UNROLL
    for (int s = 0; s < S; ++s) values[w][s] = w < valid ? values[w][s] - mean[s] : A(0);
  }
}

template <typename T, int q, int P>
__global__ void __launch_bounds__(kMaxThreads)
    norm_kernel(const __grid_constant__ ForwardArguments args) {
  using A = accumulate_t<T>;
  constexpr int S = 1 + q + P, W = kPack<T>;
  const NormShape& shape = args.shape;
  const NormBuffers& b = args.buffers;
  const int64_t row = blockIdx.x, n = shape.channels, stride = shape.jet.n;
  const int64_t first = static_cast<int64_t>(threadIdx.x) * W;
  const int64_t step = static_cast<int64_t>(blockDim.x) * W;
  const T* x = static_cast<const T*>(b.x) + row * n;
  const T* residual = static_cast<const T*>(b.residual);
  T* sum = static_cast<T*>(b.sum) + row * n;
  bool added = residual == nullptr;
  const T* from = added ? x : sum;  // not __restrict__: read after the same thread wrote it

  // x, or x + residual rounded to the storage type, which the first sweep writes to sum.
  const auto load = [&](int64_t i, A(*values)[S]) {
    if (added) return load_packs<S, W>(from + i, stride, n - i, args.elements, values);
    A other[W][S];
    load_packs<S, W>(x + i, stride, n - i, args.elements, values);
    load_packs<S, W>(residual + row * n + i, stride, n - i, args.elements, other);
    JACHESS_UNROLL
    for (int w = 0; w < W; ++w) {
      JACHESS_UNROLL
      for (int s = 0; s < S; ++s) {
        T rounded;
        write(values[w][s] + other[w][s], args.elements, rounded);
        read(rounded, args.elements, values[w][s]);
      }
    }
    store_packs<S, W>(sum + i, stride, n - i, args.elements, values);
  };

  A mean[S] = {}, sums[S] = {}, v[S], rstd[S];
  if (shape.centred) {
    for (int64_t i = first; i < n; i += step) {
      A values[W][S];
      load(i, values);
      JACHESS_UNROLL
      for (int w = 0; w < W; ++w) {
        JACHESS_UNROLL
        for (int s = 0; s < S; ++s) mean[s] += values[w][s];
      }
    }
    added = true;
    block_reduce<Add, S>(mean);
    JACHESS_UNROLL
    for (int s = 0; s < S; ++s) mean[s] /= static_cast<A>(n);
  }
  for (int64_t i = first; i < n; i += step) {
    A c[W][S];
    load(i, c);
    subtract<S, W>(mean, n - i, c);
    JACHESS_UNROLL
    for (int w = 0; w < W; ++w) square_jet_add<q, P>(c[w], sums);
  }
  added = true;
  block_reduce<Add, S>(sums);
  square_jet_finish<q, P>(sums, static_cast<A>(n), v);
  rsqrt_jet<q, P>(v, static_cast<A>(args.eps), rstd);

  for (int64_t i = first; i < n; i += step) {
    A c[W][S], z[W][S], weight[W], bias[W];
    load(i, c);
    load_parameter<W>(b.weight, i, n - i, A(1), weight);
    load_parameter<W>(b.bias, i, n - i, A(0), bias);
    subtract<S, W>(mean, n - i, c);
    JACHESS_UNROLL
    for (int w = 0; w < W; ++w) {
      product_jet<q, P>(c[w], rstd, z[w]);
      JACHESS_UNROLL
      for (int s = 0; s < S; ++s) z[w][s] *= weight[w];
      z[w][0] += bias[w];
    }
    store_packs<S, W>(static_cast<T*>(b.y) + row * n + i, stride, n - i, args.elements, z);
  }
  if (threadIdx.x != 0) return;
  JACHESS_UNROLL
  for (int s = 0; s < S; ++s) {
    if (shape.centred) static_cast<A*>(b.mean)[s * shape.rows + row] = mean[s];
    static_cast<A*>(b.rstd)[s * shape.rows + row] = rstd[s];
  }
}

template <typename T, int q, int P>
__global__ void __launch_bounds__(kMaxThreads)
    norm_backward_kernel(const __grid_constant__ BackwardArguments args) {
  using A = accumulate_t<T>;
  constexpr int S = 1 + q + P, W = kPack<T>;
  const NormShape& shape = args.shape;
  const NormBackwardBuffers& b = args.buffers;
  const int64_t n = shape.channels, stride = shape.jet.n;
  const int64_t step = static_cast<int64_t>(blockDim.x) * W;
  A* partial = static_cast<A*>(b.partial);
  if (partial != nullptr) partial += (shape.centred ? 2 : 1) * blockIdx.x * n;
  const auto load = [&](const void* from, int64_t row, int64_t i, A(*values)[S]) {
    load_packs<S, W>(static_cast<const T*>(from) + row * n + i, stride, n - i, args.elements,
                     values);
  };
  for (int64_t row = blockIdx.x; row < shape.rows; row += gridDim.x) {
    const bool first_row = row == blockIdx.x;
    A mean[S] = {}, rstd[S], square[S], centring[S] = {};
    A sums[2 * S] = {};  // of the gradient in rstd's streams; of g times the weight
    JACHESS_UNROLL
    for (int s = 0; s < S; ++s) {
      if (shape.centred) mean[s] = static_cast<const A*>(b.mean)[s * shape.rows + row];
      rstd[s] = static_cast<const A*>(b.rstd)[s * shape.rows + row];
    }
    // The centred row, and gy times the weight.
    const auto load_row = [&](int64_t i, A(*c)[S], A(*g)[S], A(*scaled)[S]) {
      A weight[W];
      load(b.x, row, i, c);
      load(b.gy, row, i, g);
      load_parameter<W>(b.weight, i, n - i, A(1), weight);
      subtract<S, W>(mean, n - i, c);
      JACHESS_UNROLL
      for (int w = 0; w < W; ++w) {
        JACHESS_UNROLL
        for (int s = 0; s < S; ++s) scaled[w][s] = weight[w] * g[w][s];
      }
    };
    for (int64_t i = static_cast<int64_t>(threadIdx.x) * W; i < n; i += step) {
      A c[W][S], g[W][S], scaled[W][S];
      load_row(i, c, g, scaled);
      JACHESS_UNROLL
      for (int w = 0; w < W; ++w) {
        product_jet_backward_add<q, P>(c[w], scaled[w], sums);
        JACHESS_UNROLL
        for (int s = 0; s < S; ++s) sums[S + s] += scaled[w][s];
      }
    }
    block_reduce<Add, 2 * S>(sums);
    rsqrt_jet_backward<q, P>(rstd, sums, square);
    product_jet_backward_add<q, P>(rstd, sums + S, centring);
    JACHESS_UNROLL
    for (int s = 0; s < S; ++s) {
      square[s] *= A(2) / static_cast<A>(n);
      centring[s] = shape.centred ? centring[s] / -static_cast<A>(n) : A(0);
    }
    for (int64_t i = static_cast<int64_t>(threadIdx.x) * W; i < n; i += step) {
      A c[W][S], g[W][S], scaled[W][S], gc[W][S] = {};
      load_row(i, c, g, scaled);
      if (partial != nullptr) {
        JACHESS_UNROLL
        for (int w = 0; w < W; ++w) {
          if (i + w >= n) continue;
          A z[S], sum = A(0);
          product_jet<q, P>(c[w], rstd, z);
          JACHESS_UNROLL
          for (int s = 0; s < S; ++s) sum += g[w][s] * z[s];
          A* weight = partial + i + w;
          *weight = first_row ? sum : *weight + sum;
          if (shape.centred) weight[n] = first_row ? g[w][0] : weight[n] + g[w][0];
        }
      }
      if (b.gsum != nullptr) load(b.gsum, row, i, gc);
      JACHESS_UNROLL
      for (int w = 0; w < W; ++w) {
        JACHESS_UNROLL
        for (int s = 0; s < S; ++s) gc[w][s] += centring[s];
        product_jet_backward_add<q, P>(rstd, scaled[w], gc[w]);
        product_jet_backward_add<q, P>(c[w], square, gc[w]);
      }
      store_packs<S, W>(static_cast<T*>(b.gx) + row * n + i, stride, n - i, args.elements, gc);
    }
  }
}

constexpr int kSumColumns = 32, kSumSegments = 8;

// Adds the blocks' partials [blocks, columns], the columns being gweight's and then gbias': each of
// kSumSegments threads of a column adds every kSumSegments-th, then one adds theirs in order.
template <typename A>
__global__ void __launch_bounds__(kSumColumns* kSumSegments)
    sum_partials_kernel(const A* partial, int64_t blocks, int64_t columns, int64_t channels,
                        A* gweight, A* gbias) {
  __shared__ A segments[kSumSegments][kSumColumns];
  const int lane = threadIdx.x % kSumColumns, segment = threadIdx.x / kSumColumns;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kSumColumns + lane;
  A sum = A(0);
  if (i < columns)
    for (int64_t b = segment; b < blocks; b += kSumSegments) sum += partial[b * columns + i];
  segments[segment][lane] = sum;
  __syncthreads();
  if (segment != 0 || i >= columns) return;
  for (int k = 1; k < kSumSegments; ++k) sum += segments[k][lane];
  (i < channels ? gweight[i] : gbias[i - channels]) = sum;
}

// Enough threads for a row, in whole warps.
int threads_of(int64_t channels, int pack) {
  const int64_t threads = ceil_divide(ceil_divide(channels, pack), kWarp) * kWarp;
  return static_cast<int>(threads < kMaxThreads ? threads : kMaxThreads);
}

}  // namespace

int norm_jet_cuda(NormShape shape, NormBuffers b, double eps, Queue queue) {
  return dispatch_jets(shape.jet, [&](auto* typed, auto q, auto P) {
    using T = std::remove_pointer_t<decltype(typed)>;
    const Elements elements =
        elements_of<T>(shape.jet.storage, shape.channels, b.x, b.residual, b.y, b.sum);
    return launch(norm_kernel<T, decltype(q)::value, decltype(P)::value>, shape.rows,
                  threads_of(shape.channels, kPack<T>), queue,
                  ForwardArguments{shape, b, eps, elements});
  });
}

int norm_jet_backward_cuda(NormShape shape, NormBackwardBuffers b, Queue queue) {
  const int64_t most = b.partial != nullptr ? kNormBlocks : shape.rows;
  const int64_t blocks = shape.rows < most ? shape.rows : most;
  return dispatch_jets(shape.jet, [&](auto* typed, auto q, auto P) {
    using T = std::remove_pointer_t<decltype(typed)>;
    using A = accumulate_t<T>;
    const Elements elements =
        elements_of<T>(shape.jet.storage, shape.channels, b.gy, b.gsum, b.x, b.gx);
    const int error =
        launch(norm_backward_kernel<T, decltype(q)::value, decltype(P)::value>, blocks,
               threads_of(shape.channels, kPack<T>), queue, BackwardArguments{shape, b, elements});
    if (error != 0 || b.partial == nullptr) return error;
    const int64_t columns = (shape.centred ? 2 : 1) * shape.channels;
    return launch(sum_partials_kernel<A>, ceil_divide(columns, kSumColumns),
                  kSumColumns * kSumSegments, queue, static_cast<const A*>(b.partial), blocks,
                  columns, shape.channels, static_cast<A*>(b.gweight), static_cast<A*>(b.gbias));
  });
}

}  // namespace jachess
