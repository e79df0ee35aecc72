// CUDA kernel of jachess::attention_jet_scores: weights k p and scores' gradients gs, as the
// backward has them (backward.cu), of a chunk of queries, to memory in 16 bits. The
// gradients are then products of plain matrices, made elsewhere.
//
// Up to 64 queries of a head are resident in a block, and keys and values are streamed. With no
// results to sum up the registers suffice for everything, whatever the heads' size: two warps share
// 16 queries, each with half of a tile's keys.
#include "mainloop.h"

namespace jachess {
namespace {

// Writes a lane's fragments to `to`, the first row and key of the warp's tile; `rows` and `keys`
// are what is left of the chunk from there on.
template <int S, int N>
__device__ inline void write_scores(const float (&scores)[S][N / 8][4], const ScoreChunk& chunk,
                                    BFloat16* to, int rows, int keys) {
  JACHESS_UNROLL
  for (int n = 0; n < N / 8; ++n) {
    JACHESS_UNROLL
    for (int row = 0; row < 2; ++row) {
      const int down = lane_index() / 4 + 8 * row, column = 8 * n + lane_index() % 4 * 2;
      if (down >= rows || column >= keys) continue;
      JACHESS_UNROLL
      for (int s = 0; s < S; ++s) {
        const float* pair = &scores[s][n][2 * row];
        BFloat16* at = to + s * chunk.stream + down * chunk.ld + column;
        if (column + 1 < keys) {
          *reinterpret_cast<uint32_t*>(at) = pair_of<BFloat16>(pair[0], pair[1]);
        } else {
          convert(pair[0], *at);
        }
      }
    }
  }
}

// A block's tiles, as one of its warps sees them.
template <int S, int warps_per_tile>
struct ScoresTiles {
  using T = BFloat16;
  static constexpr int N = attention_streamed_rows(S), K = warps_per_tile * N;
  using Scores = float[S][N / 8][4];

  const AttentionArguments& args;
  const ScoreChunk& chunk;
  const SmemLayout& smem;
  const ScoreRules& rules;
  const int warp, half, warp_row, rows, steps;
  const int chunk_row, chunk_head;  // of the block's first query, within the chunk
  const int64_t head;               // which counts over batch and heads
  const ScoreCoord first;
  char* const memory;
  const Tile<T> queries, cotangents;
  float* const stats;  // jets of l and δ, [2][S][rows]

  __device__ inline ScoresTiles(const AttentionArguments& arguments, const ScoreChunk& queries_of)
      : args(arguments),
        chunk(queries_of),
        smem(args.smem),
        rules(args.rules),
        warp(static_cast<int>(threadIdx.x) / kWarp),
        half(warp % warps_per_tile),
        warp_row(warp / warps_per_tile * kWarpRows),
        rows(smem.warps * kWarpRows),
        steps((static_cast<int>(chunk.keys) + K - 1) / K),
        chunk_row(static_cast<int>(blockIdx.x) % smem.resident_tiles * rows),
        chunk_head(static_cast<int>(blockIdx.x) / smem.resident_tiles),
        head(chunk.first_head + chunk_head),
        first{static_cast<int>(head / rules.heads), static_cast<int>(head % rules.heads),
              static_cast<int>(chunk.first_row) + chunk_row, 0},
        memory(dynamic_shared_memory()),
        queries(tile_at(0, rows, smem.ld_qk)),
        cotangents(tile_at(smem.resident_vo_offset, rows, smem.ld_vo)),
        stats(reinterpret_cast<float*>(memory + smem.resident_stats_offset)) {}

  __device__ inline Tile<T> tile_at(int offset, int tile_rows, int ld) const {
    return {reinterpret_cast<T*>(memory + offset), tile_rows, ld};
  }
  __device__ inline Tile<T> streamed_at(int stage, int offset, int ld) const {
    return tile_at(smem.stages_offset + stage * smem.stage_bytes + offset, K, ld);
  }
  // The keys or values that are this warp's.
  __device__ inline Tile<T> half_of(int stage, int offset, int ld) const {
    Tile<T> tile = streamed_at(stage, offset, ld);
    tile.data = tile.at(0, half * N, 0);
    return tile;
  }
  __device__ inline void load_rows(const JetHeads& x, int head, int count, int size, int from,
                                   const Tile<T>& to, int dim, int log2_threads) const {
    load_tile<S>(to, rows_of<T>(x, first.batch, head, count, size, args.aligned), from, 0, dim,
                 log2_threads);
  }

  __device__ inline void load_resident() const {
    load_stats<S>(args, head, first.query, rows, stats);
    load_rows(args.resident_qk, first.head, rules.queries, args.size, first.query, queries,
              smem.dim_qk, smem.log2_threads_qk);
    load_rows(args.resident_vo, first.head, rules.queries, args.value_size, first.query, cotangents,
              smem.dim_vo, smem.log2_threads_vo);
  }
  __device__ inline void load(int step, int stage) const {
    const ScoreCoord coord = {first.batch, first.head, first.query, step * K};
    if (!tile_in_band(rules, coord, rows, K)) return;  // zeros, of which nothing is read
    const int key_head = first.head / args.group;
    load_rows(args.streamed_qk, key_head, rules.keys, args.size, step * K,
              streamed_at(stage, 0, smem.ld_qk), smem.dim_qk, smem.log2_threads_qk);
    load_rows(args.streamed_vo, key_head, rules.keys, args.value_size, step * K,
              streamed_at(stage, smem.streamed_vo_offset, smem.ld_vo), smem.dim_vo,
              smem.log2_threads_vo);
  }
  __device__ inline void compute(const ScoreCoord& coord, int stage, ScoreTile<N, false>& tile,
                                 Scores& weights, Scores& grads) const {
    const auto stat = [&](int which, int s, int n, int e) {
      return stats[(which * S + s) * rows + warp_row + tile.query_of(n, e)];
    };
    tile.fill(rules, coord);
    multiply_tokens<Sides::factors, S, N>(queries, warp_row, half_of(stage, 0, smem.ld_qk),
                                          smem.dim_qk, weights);
    recompute_weights<S, false, N>(
        rules, tile, [&](int s, int n, int e) { return stat(0, s, n, e); }, weights);
    multiply_tokens<Sides::row_cotangent, S, N>(cotangents, warp_row,
                                                half_of(stage, smem.streamed_vo_offset, smem.ld_vo),
                                                smem.dim_vo, grads);
    score_gradients<S, false, N>(
        rules, tile, [&](int s, int n, int e) { return stat(1, s, n, e); }, weights, grads);
    if (tile.dropped) {
      for_each_jet(weights, [&](int n, int e, const float*, float* weight) {
        scale_jet<S>(tile.factor(rules, n, e), weight);
      });
    }
  }
  // Computes the warp's scores of a tile, zeros where all are hidden, and writes them.
  __device__ inline void compute_and_write(int step, int stage, ScoreTile<N, false>& tile) const {
    const int key = step * K + half * N;
    const ScoreCoord coord = {first.batch, first.head, first.query + warp_row, key};
    Scores weights = {}, grads = {};
    if (tile_in_band(rules, coord, kWarpRows, N)) compute(coord, stage, tile, weights, grads);
    const int rows_left = static_cast<int>(chunk.rows) - chunk_row - warp_row;
    const int keys_left = static_cast<int>(chunk.keys) - key;
    const int64_t at = (chunk_head * chunk.rows + chunk_row + warp_row) * chunk.ld + key;
    write_scores<S, N>(weights, chunk, static_cast<T*>(chunk.weights) + at, rows_left, keys_left);
    write_scores<S, N>(grads, chunk, static_cast<T*>(chunk.grads) + at, rows_left, keys_left);
  }
};

template <int S, int warps_per_tile>
__global__ void __launch_bounds__(kMostWarps * warps_per_tile * kWarp, 1)
    scores_kernel(const __grid_constant__ AttentionArguments args,
                  const __grid_constant__ ScoreChunk chunk) {
  using Tiles = ScoresTiles<S, warps_per_tile>;
  const Tiles tiles(args, chunk);
  const int scratch = tiles.warp * (args.smem.scratch_bytes / warps_per_tile);
  ScoreTile<Tiles::N, false> tile(args.rules, tiles.memory + args.smem.scratch_offset + scratch);
  tiles.load_resident();
  mainloop(
      tiles.steps, args.smem.stages == 2, [](int step) { return step; },
      [&](int step, int stage) { tiles.load(step, stage); },
      [&](int step, int stage) { tiles.compute_and_write(step, stage, tile); });
}

template <int S, int warps_per_tile>
int launch_scores(AttentionArguments args, const AttentionProblem& problem, const ScoreChunk& chunk,
                  Queue queue) {
  constexpr int N = attention_streamed_rows(S);
  SmemLayout& smem = args.smem;
  smem.dim_qk = padded_head_dim(args.size);
  smem.dim_vo = round_up(args.value_size, 16);
  if (!choose_layout<BFloat16, S, warps_per_tile * N>(
          chunk.rows, 2, RowStats::resident,
          warps_per_tile * scratch_bytes_of<S>(problem, N, problem.softcap != 0),
          shared_memory_limit(queue.device), smem, kResidentWarps / warps_per_tile))
    return kNoTileFits;
  return launch_with_shared(scores_kernel<S, warps_per_tile>, chunk.heads * smem.resident_tiles,
                            smem.warps * warps_per_tile * kWarp,
                            static_cast<size_t>(smem.smem_bytes), queue, args, chunk);
}

}  // namespace

int attention_jet_scores_cuda(const AttentionProblem& problem, JetHeads gy, const void* stats,
                              const void* delta, ScoreChunk chunk, Queue queue) {
  if (problem.storage != Storage::bf16 || problem.q > 2) return kNoTileFits;
  AttentionArguments args = attention_arguments(problem, const_cast<void*>(stats));
  args.delta = static_cast<const float*>(delta);
  args.resident_qk = problem.query;
  args.resident_vo = gy;
  args.streamed_qk = problem.key;
  args.streamed_vo = problem.value;
  args.aligned = backward_aligned<BFloat16>(problem, gy);
  return dispatch_attention_streams(problem, [&](auto streams) {
    constexpr int S = decltype(streams)::value;
    const int error = launch_scores<S, 2>(args, problem, chunk, queue);
    return error == kNoTileFits ? launch_scores<S, 1>(args, problem, chunk, queue) : error;
  });
}

}  // namespace jachess
