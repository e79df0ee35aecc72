// CUDA kernels of jachess::attention_jet_backward. The tiles of scores are computed anew from the
// saved jet of l = log Σ e^score: with z = s − l the weights are the jet p of e^z. With ⊗ᵀ for the
// transposed jet product (jet_math.h), ȳ for the gradient of y, and k for dropout's factors:
//
//     gp = k (ȳ ⊗ᵀ v),   δ = Σ_d ȳ ⊗ᵀ y,   gs = p ⊗ᵀ (gp − δ)   (δ: through the normaliser l),
//     v̄ = (k p) ⊗ᵀ ȳ,   q̄ = scale gs ⊗ᵀ k,   k̄ = scale gs ⊗ᵀ q.
//
// One kernel computes δ. One kernel serves four roles, a launch each: up to 64 tokens of a head, 16
// a warp, are resident in a block, and the others are streamed. Where queries are resident, it
// writes q̄; where keys are, the queries of all heads that share the key are streamed, and it writes
// k̄, v̄ or, with one direction in bfloat16 or float32, whose registers hold the sums of both, the
// two. So no sum is made by more than one block, and the result is the same run to run.
//
//     role     resident       streamed            registers of a warp, every stream
//     query    q, ȳ, and l, δ k, v                p, then gs  [16, N]    q̄ [16, V]
//     key      k, v           q, ȳ, and l, δ      p, then gs  [16, N]    k̄ [16, V]
//     value    k              q, ȳ, and l         p           [16, N]    v̄ [16, V]
//     both     k, v           q, ȳ, and l, δ      p, then gs  [16, N]    k̄, v̄ [16, V] each
//
// Streamed tiles of N = 16 or 32 tokens pass through one stage or, where they fit, through two, so
// that the next tile is loaded during the products of this one. V is 16 to 128, and blocks divide
// wider results.
#include "mainloop.h"

namespace jachess {
namespace {

enum class Role { query, key, value, both };

// A block's tiles, as one of its warps sees them. The accumulators are not in here: beside arrays,
// the compiler would not keep these in registers.
template <typename T, int S, int V, Role role>
struct BackwardTiles {
  static constexpr bool keys_resident = role != Role::query;
  static constexpr bool needs_grads = role != Role::value;
  static constexpr bool needs_values = role == Role::value || role == Role::both;
  static constexpr int N = backward_streamed_rows(S, V, role == Role::query);
  using Scores = float[S][N / 8][4];
  using Sums = float[S][V / 8][4];

  const AttentionArguments& args;
  const SmemLayout& smem;
  const ScoreRules& rules;
  const int warp, warp_row, rows, resident_count, streamed_count;
  const BlockCoord block;
  char* const memory;
  const Tile<T> resident_qk, resident_vo;
  const int steps_per_head, steps;  // a step is a streamed tile of one of the heads

  __device__ inline explicit BackwardTiles(const AttentionArguments& arguments)
      : args(arguments),
        smem(args.smem),
        rules(args.rules),
        warp(static_cast<int>(threadIdx.x) / kWarp),
        warp_row(warp * kWarpRows),
        rows(smem.warps * kWarpRows),
        resident_count(keys_resident ? rules.keys : rules.queries),
        streamed_count(keys_resident ? rules.queries : rules.keys),
        block(smem, keys_resident ? rules.heads / args.group : rules.heads, V, !keys_resident),
        memory(dynamic_shared_memory()),
        resident_qk(tile_at(0, rows, smem.ld_qk)),
        resident_vo(tile_at(smem.resident_vo_offset, rows, smem.ld_vo)),
        steps_per_head((streamed_count + N - 1) / N),
        steps((keys_resident ? args.group : 1) * steps_per_head) {}

  __device__ inline Tile<T> tile_at(int offset, int tile_rows, int ld) const {
    return {reinterpret_cast<T*>(memory + offset), tile_rows, ld};
  }
  __device__ inline int stage_at(int stage) const {
    return smem.stages_offset + stage * smem.stage_bytes;
  }
  __device__ inline Tile<T> streamed_qk_of(int stage) const {
    return tile_at(stage_at(stage), N, smem.ld_qk);
  }
  __device__ inline Tile<T> streamed_vo_of(int stage) const {
    return tile_at(stage_at(stage) + smem.streamed_vo_offset, N, smem.ld_vo);
  }
  // Jets of l and δ, [2][S][count]: of resident or of streamed queries.
  __device__ inline float* resident_stats() const {
    return reinterpret_cast<float*>(memory + smem.resident_stats_offset);
  }
  __device__ inline float* streamed_stats_of(int stage) const {
    return reinterpret_cast<float*>(memory + stage_at(stage) + smem.streamed_stats_offset);
  }
  __device__ inline int head_of(int step) const {
    return keys_resident ? block.head * args.group + step / steps_per_head : block.head;
  }
  __device__ inline ScoreCoord coord_of(int step, int row) const {
    const int streamed_token = step % steps_per_head * N, resident_token = block.first + row;
    return {block.batch, head_of(step), keys_resident ? streamed_token : resident_token,
            keys_resident ? resident_token : streamed_token};
  }

  __device__ inline void load_rows(const JetHeads& x, int head, int count, int size, int from,
                                   const Tile<T>& to, int dim, int log2_threads) const {
    load_tile<S>(to, rows_of<T>(x, block.batch, head, count, size, args.aligned), from, 0, dim,
                 log2_threads);
  }
  __device__ inline void load_stats_of(int head, int query, int count, float* to) const {
    load_stats<S>(args, static_cast<int64_t>(block.batch) * rules.heads + head, query, count, to);
  }
  __device__ inline void load_resident() const {
    load_rows(args.resident_qk, block.head, resident_count, args.size, block.first, resident_qk,
              smem.dim_qk, smem.log2_threads_qk);
    if constexpr (needs_grads)
      load_rows(args.resident_vo, block.head, resident_count, args.value_size, block.first,
                resident_vo, smem.dim_vo, smem.log2_threads_vo);
    if constexpr (!keys_resident) load_stats_of(block.head, block.first, rows, resident_stats());
  }

  __device__ inline int next(int step) const {
    while (step < steps && !tile_takes_part(rules, coord_of(step, 0), keys_resident ? N : rows,
                                            keys_resident ? rows : N))
      ++step;
    return step;
  }
  __device__ inline void load(int step, int stage) const {
    const int head = head_of(step), token = step % steps_per_head * N;
    const int streamed_head = keys_resident ? head : head / args.group;
    load_rows(args.streamed_qk, streamed_head, streamed_count, args.size, token,
              streamed_qk_of(stage), smem.dim_qk, smem.log2_threads_qk);
    load_rows(args.streamed_vo, streamed_head, streamed_count, args.value_size, token,
              streamed_vo_of(stage), smem.dim_vo, smem.log2_threads_vo);
    if constexpr (keys_resident) load_stats_of(head, token, N, streamed_stats_of(stage));
  }

  // Adds the weights' products with ȳ to the sums of v̄.
  __device__ inline void add_values(int stage, const ScoreTile<N, keys_resident>& tile,
                                    const Scores& weights, RowUnits<T>& units, Sums& sums) const {
    Scores kept;
    for_each_score<N>([&](int n, int e) {
      JACHESS_UNROLL
      for (int s = 0; s < S; ++s) kept[s][n][e] = weights[s][n][e];
    });
    if (tile.dropped) {
      for_each_jet(kept, [&](int n, int e, const float*, float* weight) {
        scale_jet<S>(tile.factor(rules, n, e), weight);
      });
    }
    units.template apply<S, N, V>(kept, sums);
    multiply_weights<Sides::column_cotangent, S, N, V>(kept, streamed_vo_of(stage), block.column,
                                                       args.value_size - block.column, sums);
  }
  __device__ inline void compute(int step, int stage, ScoreTile<N, keys_resident>& tile,
                                 RowUnits<T>& units, Sums& sums, RowUnits<T>& value_units,
                                 Sums& value_sums) const {
    const ScoreCoord coord = coord_of(step, warp_row);
    if (!tile_in_band(rules, coord, keys_resident ? N : kWarpRows, keys_resident ? kWarpRows : N))
      return;
    const float* stats = keys_resident ? streamed_stats_of(stage) : resident_stats() + warp_row;
    const auto stat = [&](int which, int s, int n, int e) {
      return stats[(which * S + s) * (keys_resident ? N : rows) + tile.query_of(n, e)];
    };
    Scores weights = {};
    tile.fill(rules, coord);
    multiply_tokens<Sides::factors, S, N>(resident_qk, warp_row, streamed_qk_of(stage), smem.dim_qk,
                                          weights);
    recompute_weights<S, keys_resident, N>(
        rules, tile, [&](int s, int n, int e) { return stat(0, s, n, e); }, weights);
    if constexpr (needs_values) add_values(stage, tile, weights, value_units, value_sums);
    if constexpr (needs_grads) {
      Scores grads = {};
      multiply_tokens<keys_resident ? Sides::column_cotangent : Sides::row_cotangent, S, N>(
          resident_vo, warp_row, streamed_vo_of(stage), smem.dim_vo, grads);
      score_gradients<S, keys_resident, N>(
          rules, tile, [&](int s, int n, int e) { return stat(1, s, n, e); }, weights, grads);
      units.template apply<S, N, V>(grads, sums);
      multiply_weights<Sides::row_cotangent, S, N, V>(grads, streamed_qk_of(stage), block.column,
                                                      args.size - block.column, sums);
    }
  }
  __device__ inline void finish(const RowUnits<T>& units, const Sums& sums,
                                const RowUnits<T>& value_units, const Sums& value_sums) const {
    const auto unchanged = [](int, float*) {};
    if constexpr (needs_grads)
      store_tile<T, S, V>(sums, units, args.out, block, warp_row, resident_count, args.size,
                          unchanged);
    if constexpr (needs_values)
      store_tile<T, S, V>(value_sums, value_units, args.value_out, block, warp_row, resident_count,
                          args.value_size, unchanged);
  }
};

template <typename T, int S, int V, Role role>
__global__ void __launch_bounds__(kMostWarps* kWarp, 1)
    backward_kernel(const __grid_constant__ AttentionArguments args) {
  using Tiles = BackwardTiles<T, S, V, role>;
  const Tiles tiles(args);
  ScoreTile<Tiles::N, Tiles::keys_resident> tile(
      args.rules, tiles.memory + args.smem.scratch_offset + tiles.warp * args.smem.scratch_bytes);
  tiles.load_resident();
  float sums[S][V / 8][4] = {}, value_sums[S][V / 8][4] = {};  // of q̄ or k̄, and of v̄
  RowUnits<T> units, value_units;
  mainloop(
      tiles.steps, args.smem.stages == 2, [&](int step) { return tiles.next(step); },
      [&](int step, int stage) { tiles.load(step, stage); },
      [&](int step, int stage) {
        tiles.compute(step, stage, tile, units, sums, value_units, value_sums);
      });
  tiles.finish(units, sums, value_units, value_sums);
}

// δ = Σ_d ȳ ⊗ᵀ y, a warp per query.
template <typename T, int S>
__global__ void __launch_bounds__(kMostWarps* kWarp)
    delta_kernel(const __grid_constant__ AttentionArguments args, JetHeads gy, JetHeads y,
                 Elements elements, float* __restrict__ delta) {
  const int heads = args.rules.heads, queries = args.rules.queries;
  const int64_t all = static_cast<int64_t>(args.batch) * heads * queries;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kMostWarps + threadIdx.x / kWarp;
  if (index >= all) return;
  const int64_t query = index % queries, head = index / queries % heads,
                batch = index / queries / heads;
  const auto at = [&](const JetHeads& x, int s, int d) {
    const T* data = static_cast<const T*>(x.data);
    float value;
    read(data[s * x.stream + batch * x.batch + head * x.head + query * x.token + d], elements,
         value);
    return value;
  };
  float sums[S] = {};
  for (int d = threadIdx.x % kWarp; d < args.value_size; d += kWarp) {
    float g[S], v[S];
    JACHESS_UNROLL
    for (int s = 0; s < S; ++s) {
      g[s] = at(gy, s, d);
      v[s] = at(y, s, d);
    }
    product_jet_backward_add<kDirections<S>, kPairs<S>>(v, g, sums);
  }
  warp_reduce<Add, S>(sums);
  JACHESS_UNROLL
  for (int s = 0; s < S; ++s) {
    if (threadIdx.x % kWarp == 0) delta[s * all + index] = sums[s];
  }
}

template <typename T, int S, int V, Role role>
int launch_role(AttentionArguments args, const AttentionProblem& problem, const JetHeads& gy,
                const JetHeads& out, Queue queue) {
  constexpr bool keys_resident = role != Role::query;
  constexpr int N = backward_streamed_rows(S, V, role == Role::query);
  SmemLayout& smem = args.smem;
  smem.dim_qk = padded_head_dim(args.size);
  smem.dim_vo = round_up(args.value_size, 16);
  int columns = role == Role::value ? smem.dim_vo : smem.dim_qk;
  if (role == Role::both && smem.dim_vo > columns) columns = smem.dim_vo;
  smem.column_blocks = (columns + V - 1) / V;
  if (!choose_layout<T, S, N>(keys_resident ? problem.keys : problem.queries,
                              role == Role::value ? 1 : 2,
                              keys_resident ? RowStats::streamed : RowStats::resident,
                              scratch_bytes_of<S>(problem, N, problem.softcap != 0),
                              shared_memory_limit(queue.device), smem))
    return kNoTileFits;
  args.resident_qk = keys_resident ? problem.key : problem.query;
  args.resident_vo = keys_resident ? problem.value : gy;
  args.streamed_qk = keys_resident ? problem.query : problem.key;
  args.streamed_vo = keys_resident ? gy : problem.value;
  args.out = out;
  const int64_t heads = problem.batch * (keys_resident ? problem.key_heads : problem.heads);
  return launch_with_shared(backward_kernel<T, S, V, role>,
                            heads * smem.resident_tiles * smem.column_blocks, smem.warps * kWarp,
                            static_cast<size_t>(smem.smem_bytes), queue, args);
}

template <typename T, int S, int V, Role... roles>
int launch_roles(const AttentionArguments& args, const AttentionProblem& problem,
                 const JetHeads& gy, const JetHeads& gquery, const JetHeads& gkey, Queue queue) {
  int error = 0;
  const auto launch_one = [&](auto launch, const JetHeads& out) {
    if (error == 0) error = launch(args, problem, gy, out, queue);
  };
  (launch_one(launch_role<T, S, V, roles>, roles == Role::query ? gquery : gkey), ...);
  return error;
}

}  // namespace

int attention_jet_delta_cuda(const AttentionProblem& problem, JetHeads gy, JetHeads y, void* delta,
                             Queue queue) {
  const AttentionArguments args = attention_arguments(problem, nullptr);
  return dispatch_attention(problem, [&](auto* typed, auto streams) {
    using T = std::remove_pointer_t<decltype(typed)>;
    using Stored = std::conditional_t<sizeof(T) == 2, Bits16, T>;
    const int64_t queries = problem.batch * problem.heads * problem.queries;
    return launch(delta_kernel<Stored, decltype(streams)::value>, ceil_divide(queries, kMostWarps),
                  kMostWarps * kWarp, queue, args, gy, y,
                  Elements{false, problem.storage == Storage::f16}, static_cast<float*>(delta));
  });
}

int attention_jet_backward_cuda(const AttentionProblem& problem, JetHeads gy, const void* stats,
                                const void* delta, JetHeads gquery, JetHeads gkey, JetHeads gvalue,
                                Queue queue) {
  AttentionArguments args = attention_arguments(problem, const_cast<void*>(stats));
  args.delta = static_cast<const float*>(delta);
  return dispatch_attention(problem, [&](auto* typed, auto streams) {
    using T = std::remove_pointer_t<decltype(typed)>;
    constexpr int S = decltype(streams)::value;
    args.aligned = backward_aligned<T>(problem, gy);
    constexpr int V = kBackwardColumns<T, S>;
    args.value_out = gvalue;
    if constexpr (S == 2 && sizeof(T) == 2) {
      if (problem.size > V || problem.value_size > V)
        return launch_roles<T, S, 2 * V, Role::query, Role::key, Role::value>(args, problem, gy,
                                                                              gquery, gkey, queue);
    }
    // The units of float16 take the registers that both gradients need.
    if constexpr (S == 2 && !RowUnits<T>::kNeeded) {
      return launch_roles<T, S, V, Role::query, Role::both>(args, problem, gy, gquery, gkey, queue);
    } else {
      return launch_roles<T, S, V, Role::query, Role::key, Role::value>(args, problem, gy, gquery,
                                                                        gkey, queue);
    }
  });
}

}  // namespace jachess
