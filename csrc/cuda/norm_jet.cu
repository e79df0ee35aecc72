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
//
// Of rows whose parameters have an entry for several neighbouring elements (`grouped`: the channels
// of a group norm), the backward's first sweep goes channel by channel, and partial is
// [blocks, weight and bias, channels of a row].
#include "pack.h"

namespace jachess {
namespace {

constexpr int kMaxThreads = 256;
constexpr size_t kMostSharedSums = 32 * 1024;  // bytes: more would cost blocks of a multiprocessor

// A parameter's entries, whatever type they are stored in; `otherwise` where it is not given.
template <bool grouped>
struct Parameter {
  static constexpr int kStreams = 1;
  static constexpr bool kWritten = false;
  const NormParameter& parameter;
  float otherwise;
  int64_t start;      // of the row's class
  int64_t positions;  // that share an entry, if grouped

  template <typename... Anything>
  __device__ inline void store(const Anything&...) const {}

  template <int W, typename A>
  __device__ inline void load(int64_t i, int64_t valid, const Elements&,
                              JetPack<A, W, 1>& to) const {
    const int64_t entry = grouped ? i / positions : i;  // of a pack, once: a slow division
    const auto load_as = [&](auto* typed) {
      using T = const std::remove_pointer_t<decltype(typed)>;
      if constexpr (grouped) {
        const Elements apart = {false, parameter.storage == Storage::f16};
        const T* from = static_cast<T*>(parameter.data) + start + entry;
        int64_t position = i - entry * positions;
        JACHESS_UNROLL
        for (int w = 0; w < W; ++w) {
          if (w < valid) read(*from, apart, to.at[w][0]);
          if (++position < positions) continue;
          position = 0;
          ++from;
        }
      } else {
        const Streams<1, T> from(parameter.data, start + entry, 0);
        const bool aligned = reinterpret_cast<uintptr_t>(from.data) % (W * sizeof(T)) == 0;
        from.load(0, valid, {aligned && valid >= W, parameter.storage == Storage::f16}, to);
      }
    };
    JACHESS_UNROLL
    for (int w = 0; w < W; ++w) to.at[w][0] = otherwise;
    if (parameter.data != nullptr) dispatch_bytes(parameter.storage, load_as);
  }
};

// How many entries a parameter has for a row.
template <bool grouped>
JACHESS_HD int64_t entries_of(const NormShape& shape) {
  return grouped ? shape.channels / shape.positions : shape.channels;
}

template <typename T, int q, int P, bool grouped>
__global__ void __launch_bounds__(kMaxThreads)
    norm_kernel(const __grid_constant__ NormShape shape, const __grid_constant__ NormBuffers b,
                double eps, const __grid_constant__ Elements elements) {
  using A = accumulate_t<T>;
  constexpr int S = 1 + q + P;
  const int64_t n = shape.channels, start = blockIdx.x * n, stride = shape.jet.n;
  const Row<T> row = {n, threadIdx.x, blockDim.x, elements};
  bool added = b.residual == nullptr;
  const Streams<S, const T> x(b.x, start, stride), residual(b.residual, start, stride);
  // Not __restrict__: read after the same thread wrote it.
  const Streams<S, const T> from(added ? b.x : b.sum, start, stride);

  // Over x, or x + residual rounded to the storage type, which the first sweep writes to sum.
  const auto sweep = [&](const auto& f) {
    const auto pass_on = [&](int64_t, const A* jet) { f(jet); };
    if (added) return row.sweep(pass_on, from);
    const auto add = [&](int64_t i, const A* jet, const A* other, A* sum) {
      JACHESS_UNROLL
      for (int s = 0; s < S; ++s) {
        T rounded;
        write(jet[s] + other[s], elements, rounded);
        read(rounded, elements, sum[s]);
      }
      if (i < n) f(sum);
    };
    row.sweep(add, x, residual, Streams<S, T>(b.sum, start, stride));
    added = true;
  };

  A mean[S] = {}, sums[S] = {}, v[S], rstd[S];
  const auto centre = [&](const A* jet, A* c) {
    JACHESS_UNROLL
    for (int s = 0; s < S; ++s) c[s] = jet[s] - mean[s];
  };
  if (shape.centred) {
    sweep([&](const A* jet) {
      JACHESS_UNROLL
      for (int s = 0; s < S; ++s) mean[s] += jet[s];
    });
    block_reduce<Add, S>(mean);
    JACHESS_UNROLL
    for (int s = 0; s < S; ++s) mean[s] /= static_cast<A>(n);
  }
  sweep([&](const A* jet) {
    A c[S];
    centre(jet, c);
    square_jet_add<q, P>(c, sums);
  });
  block_reduce<Add, S>(sums);
  square_jet_finish<q, P>(sums, static_cast<A>(n), v);
  rsqrt_jet<q, P>(v, static_cast<A>(eps), shape.centred, rstd);

  const int64_t of_class = blockIdx.x % shape.classes * entries_of<grouped>(shape);
  const Parameter<grouped> weights = {b.weight, 1, of_class, shape.positions};
  const Parameter<grouped> biases = {b.bias, 0, of_class, shape.positions};
  const auto normalise = [&](int64_t, const A* jet, const A* weight, const A* bias, A* y) {
    A c[S];
    centre(jet, c);
    product_jet<q, P>(c, rstd, y);
    JACHESS_UNROLL
    for (int s = 0; s < S; ++s) y[s] *= weight[0];
    y[0] += bias[0];
  };
  row.sweep(normalise, from, weights, biases, Streams<S, T>(b.y, start, stride));
  if (threadIdx.x != 0) return;
  JACHESS_UNROLL
  for (int s = 0; s < S; ++s) {
    if (shape.centred) static_cast<A*>(b.mean)[s * shape.rows + blockIdx.x] = mean[s];
    static_cast<A*>(b.rstd)[s * shape.rows + blockIdx.x] = rstd[s];
  }
}

// Left to itself, the compiler aims at 64 registers where it can, and spills for it.
template <typename T, int q, int P, bool grouped>
__global__ void __launch_bounds__(kMaxThreads, P > 0 ? 2 : 3)
    norm_backward_kernel(const __grid_constant__ NormShape shape,
                         const __grid_constant__ NormBackwardBuffers b,
                         const __grid_constant__ Elements elements, bool shared_sums) {
  using A = accumulate_t<T>;
  constexpr int S = 1 + q + P;
  const int64_t n = shape.channels, stride = shape.jet.n, entries = entries_of<grouped>(shape);
  const Row<T> row = {n, threadIdx.x, blockDim.x, elements};
  // The weight's sums over the block's rows, and the bias', in shared memory where they fit: a
  // thread's own channels alone. If grouped, each is added by the one thread that has it.
  A* partial = static_cast<A*>(b.partial);
  if (partial != nullptr) partial += (shape.centred ? 2 : 1) * blockIdx.x * entries;
  A* kept = shared_sums ? reinterpret_cast<A*>(dynamic_shared_memory()) : partial;
  if (grouped) kept = nullptr;
  using Sums = Streams<1, A, true>;
  const Sums weight_sums(kept, 0, 0), bias_sums(shape.centred ? kept : nullptr, n, 0);
  // A division calls a subroutine, around which registers go to memory: not within the loop.
  const A inverse = A(1) / static_cast<A>(n);
  const auto clear = [](int64_t, A* weight, A* bias) { *weight = *bias = A(0); };
  row.sweep(clear, weight_sums, bias_sums);
  for (int64_t number = blockIdx.x; number < shape.rows; number += gridDim.x) {
    A mean[S] = {}, rstd[S], square[S], centring[S] = {};
    A sums[2 * S] = {};  // of the gradient in rstd's streams; of gy times the weight
    JACHESS_UNROLL
    for (int s = 0; s < S; ++s) {
      if (shape.centred) mean[s] = static_cast<const A*>(b.mean)[s * shape.rows + number];
      rstd[s] = static_cast<const A*>(b.rstd)[s * shape.rows + number];
    }
    const Streams<S, const T> x(b.x, number * n, stride), gy(b.gy, number * n, stride);
    const Streams<S, const T> gsum(b.gsum, number * n, stride);
    const Parameter<grouped> weights = {b.weight, 1, number % shape.classes * entries,
                                        shape.positions};
    // The centred x, and gy times the weight.
    const auto prepare = [&](const A* jet, const A* g, A weight, A* c, A* scaled) {
      JACHESS_UNROLL
      for (int s = 0; s < S; ++s) {
        c[s] = jet[s] - mean[s];
        scaled[s] = weight * g[s];
      }
    };
    const auto add_up = [&](int64_t, const A* jet, const A* g, const A* weight) {
      A c[S], scaled[S];
      prepare(jet, g, weight[0], c, scaled);
      product_jet_backward_add<q, P>(c, scaled, sums);
      JACHESS_UNROLL
      for (int s = 0; s < S; ++s) sums[S + s] += scaled[s];
    };
    if constexpr (grouped) {
      // A channel's sums are without its weight, which all of them share, and its own gradient is
      // their product with rstd. A channel is swept by the block if that is enough for all threads
      // or there are fewer channels than warps, else by a warp.
      const bool whole = shape.positions >= Row<T>::W * blockDim.x || entries * kWarp < blockDim.x;
      const int64_t team = whole ? blockDim.x : kWarp;
      const bool aligned = elements.aligned && shape.positions % Row<T>::W == 0;
      const Row<T> channel = {shape.positions, threadIdx.x % team, team, {aligned, elements.half}};
      const NormParameter none = {nullptr, Storage::f32};
      A total[2 * S] = {};
      for (int64_t k = threadIdx.x / team; k < entries; k += blockDim.x / team) {
        const int64_t first = number * n + k * shape.positions;
        JACHESS_UNROLL
        for (int s = 0; s < 2 * S; ++s) sums[s] = A(0);
        channel.sweep(add_up, Streams<S, const T>(b.x, first, stride),
                      Streams<S, const T>(b.gy, first, stride), Parameter<false>{none, 1});
        JetPack<A, 1, 1> weight;
        Parameter<false>{b.weight, 1, weights.start + k}.load(0, 1, elements, weight);
        JACHESS_UNROLL
        for (int s = 0; s < 2 * S; ++s) total[s] += weight.at[0][0] * sums[s];
        if (partial == nullptr) continue;
        A gradients[2] = {A(0), sums[S]};
        JACHESS_UNROLL
        for (int s = 0; s < S; ++s) gradients[0] += rstd[s] * sums[s];
        whole ? block_reduce<Add, 2>(gradients) : warp_reduce<Add, 2>(gradients);
        if (threadIdx.x % team != 0) continue;
        const bool added = number != blockIdx.x;
        A *to = partial + k, *to_bias = to + entries;
        *to = added ? *to + gradients[0] : gradients[0];
        if (shape.centred) *to_bias = added ? *to_bias + gradients[1] : gradients[1];
      }
      JACHESS_UNROLL
      for (int s = 0; s < 2 * S; ++s) sums[s] = total[s];
    } else {
      row.sweep(add_up, x, gy, weights);
    }
    block_reduce<Add, 2 * S>(sums);
    rsqrt_jet_backward<q, P>(rstd, sums, square);
    product_jet_backward_add<q, P>(rstd, sums + S, centring);
    JACHESS_UNROLL
    for (int s = 0; s < S; ++s) {
      square[s] *= A(2) * inverse;
      centring[s] = shape.centred ? centring[s] * -inverse : A(0);
    }
    const auto differentiate = [&](int64_t, const A* jet, const A* g, const A* weight,
                                   const A* direct, A* gx, A* weight_sum, A* bias_sum) {
      A c[S], scaled[S];
      prepare(jet, g, weight[0], c, scaled);
      if (kept != nullptr) {
        A z[S];
        product_jet<q, P>(c, rstd, z);
        JACHESS_UNROLL
        for (int s = 0; s < S; ++s) *weight_sum += g[s] * z[s];
        *bias_sum += g[0];
      }
      JACHESS_UNROLL
      for (int s = 0; s < S; ++s) gx[s] = direct[s] + centring[s];
      product_jet_backward_add<q, P>(rstd, scaled, gx);
      product_jet_backward_add<q, P>(c, square, gx);
    };
    row.sweep(differentiate, x, gy, weights, gsum, Streams<S, T>(b.gx, number * n, stride),
              weight_sums, bias_sums);
  }
  if (grouped || kept == partial) return;
  const auto pass_on = [](int64_t, A* weight, A* bias, A* to, A* to_bias) {
    *to = *weight;
    *to_bias = *bias;
  };
  row.sweep(pass_on, weight_sums, bias_sums, Streams<1, A>(partial, 0, 0),
            Streams<1, A>(shape.centred ? partial : nullptr, n, 0));
}

constexpr int kSumColumns = 32, kSumSegments = 8;

// Adds the partials [blocks, columns] of every class' blocks, the columns being gweight's `entries`
// and then gbias': each of kSumSegments threads of a column adds every kSumSegments-th, then one
// adds theirs in order.
template <typename A>
__global__ void __launch_bounds__(kSumColumns* kSumSegments)
    sum_partials_kernel(const A* partial, int64_t blocks, int64_t classes, int64_t columns,
                        int64_t entries, A* gweight, A* gbias) {
  __shared__ A segments[kSumSegments][kSumColumns];
  const int lane = threadIdx.x % kSumColumns, segment = threadIdx.x / kSumColumns;
  const int64_t of_class = blockIdx.x % classes;
  const int64_t i = static_cast<int64_t>(blockIdx.x) / classes * kSumColumns + lane;
  A sum = A(0);
  if (i < columns)
    for (int64_t b = segment; b < blocks / classes; b += kSumSegments)
      sum += partial[(b * classes + of_class) * columns + i];
  segments[segment][lane] = sum;
  __syncthreads();
  if (segment != 0 || i >= columns) return;
  for (int k = 1; k < kSumSegments; ++k) sum += segments[k][lane];
  (i < entries ? gweight + i : gbias + i - entries)[of_class * entries] = sum;
}

// Enough threads for a row, in whole warps.
int threads_of(int64_t channels, int pack) {
  const int64_t threads = ceil_divide(ceil_divide(channels, pack), kWarp) * kWarp;
  return static_cast<int>(threads < kMaxThreads ? threads : kMaxThreads);
}

// Calls f(null pointer, Int<q>, Int<P>, whether grouped).
template <typename F>
int dispatch_norms(const NormShape& shape, const F& f) {
  return dispatch_jets(shape.jet, [&](auto* typed, auto q, auto P) {
    return shape.positions == 1 ? f(typed, q, P, Int<0>{}) : f(typed, q, P, Int<1>{});
  });
}

}  // namespace

int norm_jet_cuda(NormShape shape, NormBuffers b, double eps, Queue queue) {
  return dispatch_norms(shape, [&](auto* typed, auto q, auto P, auto grouped) {
    using T = std::remove_pointer_t<decltype(typed)>;
    const Elements elements =
        elements_of<T>(shape.jet.storage, shape.channels, b.x, b.residual, b.y, b.sum);
    return launch(norm_kernel<T, decltype(q)::value, decltype(P)::value, decltype(grouped)::value>,
                  shape.rows, threads_of(shape.channels, kPack<T>), queue, shape, b, eps, elements);
  });
}

int norm_jet_backward_cuda(NormShape shape, NormBackwardBuffers b, Queue queue) {
  const int64_t blocks = b.partial != nullptr ? norm_blocks(shape) : shape.rows;
  const int64_t entries = shape.channels / shape.positions;
  const int64_t columns = (shape.centred ? 2 : 1) * entries;
  return dispatch_norms(shape, [&](auto* typed, auto q, auto P, auto grouped) {
    using T = std::remove_pointer_t<decltype(typed)>;
    using A = accumulate_t<T>;
    const Elements elements =
        elements_of<T>(shape.jet.storage, shape.channels, b.gy, b.gsum, b.x, b.gx);
    const size_t bytes = sizeof(A) * static_cast<size_t>(columns);
    const bool shared = b.partial != nullptr && bytes <= kMostSharedSums && !grouped;
    const int error = launch_with_shared(
        norm_backward_kernel<T, decltype(q)::value, decltype(P)::value, decltype(grouped)::value>,
        blocks, threads_of(shape.channels, kPack<T>), shared ? bytes : 0, queue, shape, b, elements,
        shared);
    if (error != 0 || b.partial == nullptr) return error;
    return launch(sum_partials_kernel<A>, ceil_divide(columns, kSumColumns) * shape.classes,
                  kSumColumns * kSumSegments, queue, static_cast<const A*>(b.partial), blocks,
                  shape.classes, columns, entries, static_cast<A*>(b.gweight),
                  static_cast<A*>(b.gbias));
  });
}

}  // namespace jachess
