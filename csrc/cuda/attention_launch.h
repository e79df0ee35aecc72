// What the attention kernels have in common beside their products: the layout of shared memory, the
// loop over tiles, and the writing of results. Up to 64 tokens of a head, 16 a warp, stay in a
// block's shared memory (resident); tiles of N tokens pass through one stage of it, or two
// (streamed):
//
//     shared memory   resident qk (and vo)   a stage, or two: qk and vo   a warp's scratch
//                     [S][warps x 16][ld]    [S][N][ld] each              ScoreTile, if needed
//     loop            start to load the next tile | wait | products of this one, softmax | next
//
// qk, q or k, are the operands of the scores; vo, v or the gradient of the output, those of the
// results or of the weights' gradients. Jets of l and δ (attention_jet_backward.cu), the
// statistics, lie beside the queries they belong to. Blocks divide the columns of results that are
// wider than a warp's registers hold.
#pragma once

#include <algorithm>

#include "attention_elements.h"

namespace jachess {

constexpr int kMostWarps = 4;
constexpr int kResidentWarps = 8;  // warps of 255 registers that a multiprocessor holds

// How a launch divides its work, and the layout of a block's shared memory, in bytes.
struct SmemLayout {
  int warps, stages;                     // of a block: sets of 16 resident rows; streamed tiles
  int dim_qk, dim_vo;                    // entries of a token, padded to whole fragments
  int ld_qk, ld_vo;                      // elements from row to row, so that banks differ
  int log2_threads_qk, log2_threads_vo;  // threads that load a row
  int column_blocks;                     // blocks that divide the columns of a tile's results
  int resident_tiles;                    // of a head
  // Of a block; resident qk begins at 0.
  int resident_vo_offset, resident_stats_offset, stages_offset, scratch_offset;
  int scratch_bytes;  // of a set of 16 resident rows
  // Of a stage; streamed qk begins at 0.
  int stage_bytes, streamed_vo_offset, streamed_stats_offset;
  int smem_bytes;  // of a block
};

struct AttentionArguments {
  ScoreRules rules;
  SmemLayout smem;
  JetHeads resident_qk, resident_vo, streamed_qk, streamed_vo;
  JetHeads out, value_out;  // y, q̄ or k̄; v̄ of the backward
  float* stats;             // [S, batch, heads, queries]: the jet of log Σ e^score
  const float* delta;       // of the same shape: δ
  int batch, group, size, value_size;
  bool aligned;  // whether all rows of the operands are, to 16 bytes
};

inline AttentionArguments attention_arguments(const AttentionProblem& problem, void* stats) {
  AttentionArguments args = {};
  args.rules = score_rules(problem);
  args.stats = static_cast<float*>(stats);
  args.batch = static_cast<int>(problem.batch);
  args.group = static_cast<int>(problem.heads / problem.key_heads);
  args.size = static_cast<int>(problem.size);
  args.value_size = static_cast<int>(problem.value_size);
  return args;
}

// Entries of a token's q or k in shared memory: whole fragments, one of zeros where there are none.
inline int padded_head_dim(int size) { return round_up(size > 0 ? size : 1, 16); }

// Bytes of a warp's scratch for tiles of `streamed_rows` tokens; 0 where there is no mask and no
// dropout. keep_scores: whether S streams of scores are kept, for the backward of a soft cap.
template <int S>
int scratch_bytes_of(const AttentionProblem& problem, int streamed_rows, bool keep_scores) {
  if (keep_scores) return attention_scratch_bytes(streamed_rows, S);
  const bool needed = problem.mask.kind != MaskKind::none || problem.dropout_p > 0;
  return needed ? attention_scratch_bytes(streamed_rows, 0) : 0;
}

// Completes a layout whose dim_qk, dim_vo and column_blocks are set, for streamed tiles of N
// tokens: of the layouts that fit, the one of most warps on a multiprocessor, then of two stages,
// then of the largest block; false where none fits. tokens: of a head, that are resident in turn;
// operands: 1 where qk alone is resident, 2 with vo; stats: on which side the statistics lie;
// scratch: bytes of a set of 16 resident rows; warps_per_sm: sets of 16 rows whose registers a
// multiprocessor holds.
enum class RowStats { none, resident, streamed };
template <typename T, int S, int N>
bool choose_layout(int64_t tokens, int operands, RowStats stats, int scratch, size_t limit,
                   SmemLayout& smem, int warps_per_sm = kResidentWarps) {
  constexpr int jet = 2 * S * static_cast<int>(sizeof(float));
  constexpr int element = static_cast<int>(sizeof(T));
  smem.ld_qk = attention_row_bytes(element, smem.dim_qk) / element;
  smem.ld_vo = attention_row_bytes(element, smem.dim_vo) / element;
  const int row_qk = S * element * smem.ld_qk, row_vo = S * element * smem.ld_vo;
  smem.log2_threads_qk = log2_threads_per_row<T>(smem.dim_qk);
  smem.log2_threads_vo = log2_threads_per_row<T>(smem.dim_vo);
  smem.scratch_bytes = scratch;
  smem.streamed_vo_offset = N * row_qk;
  smem.streamed_stats_offset = smem.streamed_vo_offset + N * row_vo;
  smem.stage_bytes = smem.streamed_stats_offset + (stats == RowStats::streamed ? N * jet : 0);
  const SmemLayout fixed = smem;
  int best = 0;
  for (int warps = kMostWarps; warps > 0; warps /= 2) {
    if (warps > 1 && tokens <= warps / 2 * kWarpRows) continue;
    for (int stages = 2; stages > 0; --stages) {
      SmemLayout trial = fixed;
      trial.warps = warps;
      trial.stages = stages;
      const int rows = warps * kWarpRows;
      trial.resident_tiles = static_cast<int>((tokens + rows - 1) / rows);
      trial.resident_vo_offset = rows * row_qk;
      trial.resident_stats_offset = trial.resident_vo_offset + (operands == 2 ? rows * row_vo : 0);
      trial.stages_offset =
          trial.resident_stats_offset + (stats == RowStats::resident ? rows * jet : 0);
      trial.scratch_offset = trial.stages_offset + stages * smem.stage_bytes;
      trial.smem_bytes = trial.scratch_offset + warps * scratch;
      const size_t bytes = static_cast<size_t>(trial.smem_bytes);
      if (bytes > limit) continue;
      // A multiprocessor has 1 kB more than a block may take, and keeps 1 kB of each for itself.
      const int blocks = static_cast<int>((limit + 1024) / (bytes + 1024));
      const int worth = 4 * warps * std::min(blocks, warps_per_sm / warps) + stages;
      if (worth > best) smem = trial;
      best = std::max(best, worth);
    }
  }
  return best > 0;
}

// Whether all rows, of `size` elements, are aligned to 16 bytes.
template <typename T>
bool heads_aligned(const JetHeads& x, int64_t size) {
  return is_aligned<T>(x.data, x.stream, x.batch, x.head, x.token, size);
}

// The same of everything that the backward loads.
template <typename T>
bool backward_aligned(const AttentionProblem& problem, const JetHeads& gy) {
  return heads_aligned<T>(problem.query, problem.size) &&
         heads_aligned<T>(problem.key, problem.size) &&
         heads_aligned<T>(problem.value, problem.value_size) &&
         heads_aligned<T>(gy, problem.value_size);
}

// Calls f(Int<S>).
template <typename F>
int dispatch_attention_streams(const AttentionProblem& problem, const F& f) {
  const int streams = 1 + problem.q + problem.pairs;
  if (streams == 2) return f(Int<2>{});
  return streams == 3 ? f(Int<3>{}) : f(Int<4>{});
}

// Calls f(null pointer of the storage type, Int<S>); kNoTileFits for what the kernels do not take.
template <typename F>
int dispatch_attention(const AttentionProblem& problem, const F& f) {
  if (problem.q > 2) return kNoTileFits;
  return dispatch_products(problem.storage, [&](auto* typed) {
    return dispatch_attention_streams(problem, [&](auto streams) { return f(typed, streams); });
  });
}

// ---- on the device ------------------------------------------------------------------------------

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
