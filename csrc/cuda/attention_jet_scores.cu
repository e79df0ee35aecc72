// CUDA kernel of jachess::attention_jet_scores: weights k p and scores' gradients gs, as the
// backward has them (attention_jet_backward.cu), of a chunk of queries, to memory in 16 bits. The
// gradients are then products of plain matrices, made elsewhere.
//
// A block owns up to 64 queries of a head and goes over the keys. With no results to sum up the
// registers suffice for everything, whatever the heads' size: two warps share a strip of 16
// queries, each with half of a tile's keys.
#include "attention_launch.h"

namespace jachess {
namespace {

// Writes those columns of a lane's fragments that lie within the `rows` rows and `keys` columns
// that there are from `to` on.
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
        BFloat16* at = to + s * chunk.stream + down * chunk.line + column;
        if (column + 1 < keys) {
          *reinterpret_cast<uint32_t*>(at) = pair_of<BFloat16>(pair[0], pair[1]);
        } else {
          convert(pair[0], *at);
        }
      }
    }
  }
}

template <int S, int share>
__global__ void __launch_bounds__(kMostWarps * share * kWarp, 1)
    scores_kernel(const __grid_constant__ AttentionArguments args,
                  const __grid_constant__ ScoreChunk chunk) {
  using T = BFloat16;
  constexpr int N = attention_tile(S), K = share * N;
  const AttentionPlan& plan = args.plan;
  const ScoreRules& rules = args.rules;
  const int warp = static_cast<int>(threadIdx.x) / kWarp, half = warp % share;
  const int strip = warp / share * kStrip, rows = plan.warps * kStrip;
  const int below = static_cast<int>(blockIdx.x) % plan.tiles * rows;  // the chunk's first row
  const int of_chunk = static_cast<int>(blockIdx.x) / plan.tiles;      // its first head
  const int64_t head = chunk.first_head + of_chunk;
  const ScorePlace first = {static_cast<int>(head / rules.heads),
                            static_cast<int>(head % rules.heads),
                            static_cast<int>(chunk.first_row) + below, 0};

  char* memory = dynamic_shared_memory();
  const auto tile_at = [&](int offset, int tile_rows, int line) {
    return Tile<T>{reinterpret_cast<T*>(memory + offset), tile_rows, line};
  };
  const auto load_rows = [&](const JetHeads& x, int of, int count, int size, int from,
                             const Tile<T>& to, int depth, int shift) {
    load_tile<S>(to, rows_of<T>(x, first.batch, of, count, size, args.aligned), from, 0, depth,
                 shift);
  };
  const auto stage_at = [&](int stage) { return plan.first_stage + stage * plan.stage; };
  const Tile<T> queries = tile_at(0, rows, plan.line);
  const Tile<T> cotangents = tile_at(plan.own_second, rows, plan.second_line);
  float* jets = reinterpret_cast<float*>(memory + plan.own_jets);  // of l and R, [2][S][rows]
  const int64_t all_heads = static_cast<int64_t>(args.batch) * rules.heads;
  for (int n = threadIdx.x; n < 2 * S * rows; n += blockDim.x) {
    const int query = first.query + n % rows;
    const int64_t at = (n / rows % S * all_heads + head) * rules.queries + query;
    if (query < rules.queries)
      copy_async_4(jets + n, (n < S * rows ? args.stats : args.shares) + at);
  }
  load_rows(args.own, first.head, rules.queries, args.size, first.query, queries, plan.depth,
            plan.shift);
  load_rows(args.own_second, first.head, rules.queries, args.value_size, first.query, cotangents,
            plan.second_depth, plan.second_shift);

  ScoreTile<N, false> tile(rules, memory + plan.scratch + warp * (plan.own_scratch / share));
  const int rows_left = static_cast<int>(chunk.rows) - below - strip;
  const int64_t start = (of_chunk * chunk.rows + below + strip) * chunk.line;
  const int keys = static_cast<int>(chunk.keys), key_head = first.head / args.group;
  go_over(
      (keys + K - 1) / K, plan.stages == 2, [](int step) { return step; },
      [&](int step, int stage) {
        const ScorePlace place = {first.batch, first.head, first.query, step * K};
        if (!tile_in_band(rules, place, rows, K)) return;  // zeros, of which nothing is read
        load_rows(args.other, key_head, rules.keys, args.size, step * K,
                  tile_at(stage_at(stage), K, plan.line), plan.depth, plan.shift);
        load_rows(args.other_second, key_head, rules.keys, args.value_size, step * K,
                  tile_at(stage_at(stage) + plan.second, K, plan.second_line), plan.second_depth,
                  plan.second_shift);
      },
      [&](int step, int stage) {
        const int key = step * K + half * N;
        const ScorePlace place = {first.batch, first.head, first.query + strip, key};
        float weights[S][N / 8][4] = {}, grads[S][N / 8][4] = {};
        if (tile_in_band(rules, place, kStrip, N)) {
          const auto jet = [&](int which, int s, int n, int e) {
            return jets[(which * S + s) * rows + strip + tile.query_of(n, e)];
          };
          const auto half_of = [&](int offset, int line) {
            Tile<T> all = tile_at(stage_at(stage) + offset, K, line);
            all.data = all.at(0, half * N, 0);
            return all;
          };
          tile.fill(rules, place);
          multiply_tokens<Sides::factors, S, N>(queries, strip, half_of(0, plan.line), plan.depth,
                                                weights);
          weigh<S, false, N>(
              rules, tile, [&](int s, int n, int e) { return jet(0, s, n, e); }, weights);
          multiply_tokens<Sides::row_cotangent, S, N>(
              cotangents, strip, half_of(plan.second, plan.second_line), plan.second_depth, grads);
          differentiate<S, false, N>(
              rules, tile, [&](int s, int n, int e) { return jet(1, s, n, e); }, weights, grads);
          if (tile.dropped) {
            for_each_jet(weights, [&](int n, int e, const float*, float* weight) {
              scale_jet<S>(tile.factor(rules, n, e), weight);
            });
          }
        }
        write_scores<S, N>(weights, chunk, static_cast<T*>(chunk.weights) + start + key, rows_left,
                           keys - key);
        write_scores<S, N>(grads, chunk, static_cast<T*>(chunk.grads) + start + key, rows_left,
                           keys - key);
      });
}

template <int S, int share>
int launch_scores(AttentionArguments args, const AttentionProblem& problem, const ScoreChunk& chunk,
                  Queue queue) {
  constexpr int N = attention_tile(S);
  AttentionPlan& plan = args.plan;
  plan.depth = depth_of(args.size);
  plan.second_depth = round_up(args.value_size, 16);
  if (!make_plan<BFloat16, S, share * N>(
          chunk.rows, 2, Jets::own, share * scratch_of<S>(problem, N, problem.softcap != 0),
          shared_memory_limit(queue.device), plan, kResident / share))
    return kNoTileFits;
  return launch_with_shared(scores_kernel<S, share>, chunk.heads * plan.tiles,
                            plan.warps * share * kWarp, static_cast<size_t>(plan.bytes), queue,
                            args, chunk);
}

}  // namespace

int attention_jet_scores_cuda(const AttentionProblem& problem, JetHeads gy, const void* stats,
                              const void* shares, ScoreChunk chunk, Queue queue) {
  if (problem.storage != Storage::bf16 || problem.q > 2) return kNoTileFits;
  AttentionArguments args = attention_arguments(problem, const_cast<void*>(stats));
  args.shares = static_cast<const float*>(shares);
  args.own = problem.query;
  args.own_second = gy;
  args.other = problem.key;
  args.other_second = problem.value;
  args.aligned = backward_aligned<BFloat16>(problem, gy);
  return dispatch_attention_streams(problem, [&](auto streams) {
    constexpr int S = decltype(streams)::value;
    const int error = launch_scores<S, 2>(args, problem, chunk, queue);
    return error == kNoTileFits ? launch_scores<S, 1>(args, problem, chunk, queue) : error;
  });
}

}  // namespace jachess
