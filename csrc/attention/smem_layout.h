// How a launch of the attention kernels divides its work, and the layout of a block's shared
// memory. Up to 64 tokens of a head, 16 a warp, stay in it (resident); tiles of N tokens pass
// through one stage of it, or two (streamed, by the loop of mainloop.h):
//
//     shared memory   resident qk (and vo)   a stage, or two: qk and vo   a warp's scratch
//                     [S][warps x 16][ld]    [S][N][ld] each              ScoreTile, if needed
//     loop            start to load the next tile | wait | products of this one, softmax | next
//
// qk, q or k, are the operands of the scores; vo, v or the gradient of the output, those of the
// results or of the weights' gradients. Jets of l and δ (backward.cu), the
// statistics, lie beside the queries they belong to. Blocks divide the columns of results that are
// wider than a warp's registers hold.
#pragma once

#include <algorithm>

#include "score_tile.h"

namespace jachess {

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

}  // namespace jachess
