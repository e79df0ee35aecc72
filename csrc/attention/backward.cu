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

template <typename T, int S, int V, Role role>
__global__ void __launch_bounds__(kMostWarps* kWarp, 1)
    backward_kernel(const __grid_constant__ AttentionArguments args) {
  constexpr int N = backward_streamed_rows(S, V, role == Role::query);
  constexpr bool keys_resident = role != Role::query;
  const SmemLayout& smem = args.smem;
  const ScoreRules& rules = args.rules;
  const int warp = static_cast<int>(threadIdx.x) / kWarp, warp_row = warp * kWarpRows;
  const int rows = smem.warps * kWarpRows;
  const int resident_count = keys_resident ? rules.keys : rules.queries;
  const int streamed_count = keys_resident ? rules.queries : rules.keys;
  const BlockCoord block(smem, keys_resident ? rules.heads / args.group : rules.heads, V,
                         !keys_resident);

  char* memory = dynamic_shared_memory();
  const auto tile_at = [&](int offset, int tile_rows, int ld) {
    return Tile<T>{reinterpret_cast<T*>(memory + offset), tile_rows, ld};
  };
  const Tile<T> resident_qk = tile_at(0, rows, smem.ld_qk);
  const Tile<T> resident_vo = tile_at(smem.resident_vo_offset, rows, smem.ld_vo);
  const auto stage_at = [&](int stage) { return smem.stages_offset + stage * smem.stage_bytes; };
  const auto streamed_qk_of = [&](int stage) { return tile_at(stage_at(stage), N, smem.ld_qk); };
  const auto streamed_vo_of = [&](int stage) {
    return tile_at(stage_at(stage) + smem.streamed_vo_offset, N, smem.ld_vo);
  };
  // Jets of l and δ, [2][S][count]: of resident or of streamed queries.
  const auto stats_at = [&](int offset) { return reinterpret_cast<float*>(memory + offset); };
  ScoreTile<N, keys_resident> tile(rules, memory + smem.scratch_offset + warp * smem.scratch_bytes);
  const int64_t all_heads = static_cast<int64_t>(args.batch) * rules.heads;
  const auto load_stats = [&](float* to, int count, int head, int query) {
    for (int n = threadIdx.x; n < 2 * S * count; n += blockDim.x) {
      const int64_t row =
          n / count % S * all_heads + static_cast<int64_t>(block.batch) * rules.heads + head;
      if (query + n % count < rules.queries)
        copy_async_4(to + n, (n < S * count ? args.stats : args.delta) + row * rules.queries +
                                 query + n % count);
    }
  };
  const auto load_rows = [&](const JetHeads& x, int head, int count, int size, int from,
                             const Tile<T>& to, int dim, int log2_threads) {
    load_tile<S>(to, rows_of<T>(x, block.batch, head, count, size, args.aligned), from, 0, dim,
                 log2_threads);
  };

  // A step is a streamed tile of one of the heads that share the key.
  const int per_head = (streamed_count + N - 1) / N,
            steps = (keys_resident ? args.group : 1) * per_head;
  const auto head_of = [&](int step) {
    return keys_resident ? block.head * args.group + step / per_head : block.head;
  };
  const auto coord_of = [&](int step, int row) {
    const int streamed_token = step % per_head * N, resident_token = block.first + row;
    return ScoreCoord{block.batch, head_of(step), keys_resident ? streamed_token : resident_token,
                      keys_resident ? resident_token : streamed_token};
  };

  load_rows(args.resident_qk, block.head, resident_count, args.size, block.first, resident_qk,
            smem.dim_qk, smem.log2_threads_qk);
  if constexpr (role != Role::value)
    load_rows(args.resident_vo, block.head, resident_count, args.value_size, block.first,
              resident_vo, smem.dim_vo, smem.log2_threads_vo);
  if constexpr (!keys_resident)
    load_stats(stats_at(smem.resident_stats_offset), rows, block.head, block.first);
  float sums[S][V / 8][4] = {}, value_sums[S][V / 8][4] = {};  // of q̄ or k̄, and of v̄
  RowUnits<T> units, value_units;
  mainloop(
      steps, smem.stages == 2,
      [&](int step) {
        while (step < steps && !tile_takes_part(rules, coord_of(step, 0), keys_resident ? N : rows,
                                                keys_resident ? rows : N))
          ++step;
        return step;
      },
      [&](int step, int stage) {
        const int head = head_of(step), token = step % per_head * N;
        const int streamed_head = keys_resident ? head : head / args.group;
        load_rows(args.streamed_qk, streamed_head, streamed_count, args.size, token,
                  streamed_qk_of(stage), smem.dim_qk, smem.log2_threads_qk);
        load_rows(args.streamed_vo, streamed_head, streamed_count, args.value_size, token,
                  streamed_vo_of(stage), smem.dim_vo, smem.log2_threads_vo);
        if constexpr (keys_resident)
          load_stats(stats_at(stage_at(stage) + smem.streamed_stats_offset), N, head, token);
      },
      [&](int step, int stage) {
        const ScoreCoord coord = coord_of(step, warp_row);
        if (!tile_in_band(rules, coord, keys_resident ? N : kWarpRows,
                          keys_resident ? kWarpRows : N))
          return;
        const float* stats = keys_resident ? stats_at(stage_at(stage) + smem.streamed_stats_offset)
                                           : stats_at(smem.resident_stats_offset) + warp_row;
        const auto stat = [&](int which, int s, int n, int e) {
          return stats[(which * S + s) * (keys_resident ? N : rows) + tile.query_of(n, e)];
        };
        float weights[S][N / 8][4] = {};
        tile.fill(rules, coord);
        multiply_tokens<Sides::factors, S, N>(resident_qk, warp_row, streamed_qk_of(stage),
                                              smem.dim_qk, weights);
        recompute_weights<S, keys_resident, N>(
            rules, tile, [&](int s, int n, int e) { return stat(0, s, n, e); }, weights);
        if constexpr (role == Role::value || role == Role::both) {
          float kept[S][N / 8][4];
          for_each_score<N>([&](int n, int e) {
            JACHESS_UNROLL
            for (int s = 0; s < S; ++s) kept[s][n][e] = weights[s][n][e];
          });
          if (tile.dropped) {
            for_each_jet(kept, [&](int n, int e, const float*, float* weight) {
              scale_jet<S>(tile.factor(rules, n, e), weight);
            });
          }
          value_units.template apply<S, N, V>(kept, value_sums);
          multiply_weights<Sides::column_cotangent, S, N, V>(
              kept, streamed_vo_of(stage), block.column, args.value_size - block.column,
              value_sums);
        }
        if constexpr (role != Role::value) {
          float grads[S][N / 8][4] = {};
          multiply_tokens<keys_resident ? Sides::column_cotangent : Sides::row_cotangent, S, N>(
              resident_vo, warp_row, streamed_vo_of(stage), smem.dim_vo, grads);
          score_gradients<S, keys_resident, N>(
              rules, tile, [&](int s, int n, int e) { return stat(1, s, n, e); }, weights, grads);
          units.template apply<S, N, V>(grads, sums);
          multiply_weights<Sides::row_cotangent, S, N, V>(
              grads, streamed_qk_of(stage), block.column, args.size - block.column, sums);
        }
      });
  const auto unchanged = [](int, float*) {};
  if constexpr (role != Role::value)
    store_tile<T, S, V>(sums, units, args.out, block, warp_row, resident_count, args.size,
                        unchanged);
  if constexpr (role == Role::value || role == Role::both)
    store_tile<T, S, V>(value_sums, value_units, args.value_out, block, warp_row, resident_count,
                        args.value_size, unchanged);
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
