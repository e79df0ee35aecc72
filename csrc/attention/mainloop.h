// What the attention kernels have in common on the device: a block's coordinates, the loop over
// streamed tiles, the units of float16, and the writing of results.
#pragma once

#include "smem_layout.h"

namespace jachess {

// A block's resident tokens, of `head` from `first` on, and its columns of the result, from
// `column` on. last_first: of a head's tiles, the last ones start first. The last queries of a
// causal head see most keys, and the first keys most queries; what starts last should be short.
struct BlockCoord {
  int first, head, batch, column;

  __device__ inline BlockCoord(const SmemLayout& smem, int heads, int columns, bool last_first) {
    int block = static_cast<int>(blockIdx.x);
    column = block % smem.column_blocks * columns;
    block /= smem.column_blocks;
    const int tile = block % smem.resident_tiles;
    first = (last_first ? smem.resident_tiles - 1 - tile : tile) * smem.warps * kWarpRows;
    block /= smem.resident_tiles;
    head = block % heads;
    batch = block / heads;
  }
};

// The loop over the streamed tiles next(0), next(... + 1) and so on, below `steps`: load(step,
// stage) starts to load one, use(step, stage) computes with it; where `ahead`, the next one is
// loaded meanwhile, into another stage.
template <typename Next, typename Load, typename Use>
__device__ inline void mainloop(int steps, bool ahead, const Next& next, const Load& load,
                                const Use& use) {
  int step = -1, stage = 0;  // before the first tile
  while (step < steps) {
    const int following = next(step + 1), loaded = ahead ? following : step;
    if (loaded >= 0 && loaded < steps) load(loaded, ahead ? 1 - stage : stage);
    copy_async_commit();
    if (step >= 0) {
      if (ahead) {
        copy_async_wait<1>();
      } else {
        copy_async_wait<0>();
      }
      __syncthreads();
      use(step, stage);
      __syncthreads();
    }
    if (ahead) stage = 1 - stage;
    step = following;
  }
  copy_async_wait<0>();
}

// Starts loading the jets of l and δ of `count` queries from `query` on, [2][S][count]. head:
// counts over batch and heads.
template <int S>
__device__ inline void load_stats(const AttentionArguments& args, int64_t head, int query,
                                  int count, float* to) {
  const int64_t all_heads = static_cast<int64_t>(args.batch) * args.rules.heads;
  for (int n = threadIdx.x; n < 2 * S * count; n += blockDim.x) {
    const int64_t row = n / count % S * all_heads + head;
    if (query + n % count < args.rules.queries)
      copy_async_4(to + n, (n < S * count ? args.stats : args.delta) + row * args.rules.queries +
                               query + n % count);
  }
}

// The powers of two that multiply a lane's two rows of weights, and with them what they have summed
// up, before they are rounded to T: 1 but for float16. Its range would hold neither the
// second-order stream of a weight whose score has tangents beyond 256 nor, to 11 bits, the
// gradients of scores that thousands of others share a row with.
template <typename T>
struct RowUnits {
  static constexpr bool kNeeded = std::is_same_v<T, Half>;
  static constexpr float kFirst = kNeeded ? 1099511627776.0f : 1.0f;  // 2^40: lowered at need
  static constexpr float kLargest = 32768.0f;  // that a row's weights come to, times its unit

  float unit[2] = {kFirst, kFirst};

  // Multiplies the weights; where a row has one that is larger than all before, its unit is
  // lowered, and its sums follow. A row's unit depends on nothing but its own weights.
  template <int S, int N, int V>
  __device__ inline void apply(float (&weights)[S][N / 8][4], float (&sums)[S][V / 8][4]) {
    if constexpr (kNeeded) {
      float top[2] = {}, factor[2];
      for_each_score<N>([&](int n, int e) {
        JACHESS_UNROLL
        for (int s = 0; s < S; ++s) top[e / 2] = ::fmaxf(::fabsf(weights[s][n][e]), top[e / 2]);
      });
      if (__any_sync(0xFFFFFFFFu, top[0] * unit[0] > kLargest || top[1] * unit[1] > kLargest)) {
        JACHESS_UNROLL
        for (int row = 0; row < 2; ++row) {
          warp_reduce<Larger, 1, 4>(&top[row]);
          // 2^13 over the power of two below the row's largest, which leaves it room to rise
          const uint32_t exponent = float_to_bits(top[row]) & 0x7F800000u;
          const float fitting = bits_to_float((267u << 23) - exponent);
          const float next = top[row] * unit[row] > kLargest ? fitting : unit[row];
          factor[row] = next / unit[row];
          unit[row] = next;
        }
        for_each_jet(
            sums, [&](int, int e, const float*, float* jet) { scale_jet<S>(factor[e / 2], jet); });
      }
      for_each_jet(weights,
                   [&](int, int e, const float*, float* jet) { scale_jet<S>(unit[e / 2], jet); });
    }
  }

  // Takes the unit of a row's sums away again.
  template <int S>
  __device__ inline void remove(int row, float (&jet)[S]) const {
    scale_jet<S>(1 / unit[row], jet);
  }
};

// Writes the results of a warp's rows: f(row, jet) of each entry's sums, in place; row is 0 or 1,
// of a lane's two.
template <typename T, int S, int V, typename F>
__device__ inline void store_tile(const float (&sums)[S][V / 8][4], const RowUnits<T>& units,
                                  const JetHeads& out, const BlockCoord& block, int warp_row,
                                  int count, int size, const F& f) {
  T* to = static_cast<T*>(out.data) + block.batch * out.batch + block.head * out.head;
  JACHESS_UNROLL
  for (int v = 0; v < V / 8; ++v) {
    JACHESS_UNROLL
    for (int e = 0; e < 4; ++e) {
      const int token = block.first + warp_row + lane_index() / 4 + e / 2 * 8;
      const int column = block.column + 8 * v + lane_index() % 4 * 2 + e % 2;
      if (token >= count || column >= size) continue;
      float jet[S];
      JACHESS_UNROLL
      for (int s = 0; s < S; ++s) jet[s] = sums[s][v][e];
      units.remove(e / 2, jet);
      f(e / 2, jet);
      JACHESS_UNROLL
      for (int s = 0; s < S; ++s) convert(jet[s], to[s * out.stream + token * out.token + column]);
    }
  }
}

}  // namespace jachess
