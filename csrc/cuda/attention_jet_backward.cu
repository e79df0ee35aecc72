// CUDA kernels of jachess::attention_jet_backward. The tiles of scores are computed anew from the
// saved jet of l = log Σ e^score: with z = s − l the weights are the jet p of e^z. With ⊗ᵀ for the
// transposed jet product (jet_math.h), ȳ for the gradient of y, and k for dropout's factors:
//
//     gp = k (ȳ ⊗ᵀ v),   R = Σ_d ȳ ⊗ᵀ y,   gs = p ⊗ᵀ (gp − R)   (R: through the normaliser l),
//     v̄ = (k p) ⊗ᵀ ȳ,   q̄ = scale gs ⊗ᵀ k,   k̄ = scale gs ⊗ᵀ q.
//
// One kernel computes R. One kernel serves four roles, a launch each: its blocks own up to 64
// tokens of a head, 16 a warp, and go over the others. Blocks that own queries write q̄; those that
// own keys go over the queries of all heads that share the key, and write k̄, v̄ or, with one
// direction in bfloat16 or float32, whose registers hold the sums of both, the two. So no sum is
// made by more than one block, and the result is the same run to run.
//
//     role     own tokens     other tokens        registers of a warp, every stream
//     query    q, ȳ           k, v                p, then gs  [16, N]    q̄ [16, V]
//     key      k, v           q, ȳ, and l, R      p, then gs  [16, N]    k̄ [16, V]
//     value    k              q, ȳ, and l         p           [16, N]    v̄ [16, V]
//     both     k, v           q, ȳ, and l, R      p, then gs  [16, N]    k̄, v̄ [16, V] each
//
// Own tokens lie in shared memory throughout, others in one stage of N = 16 or 32 or, where they
// fit, in two, so that the next tile is loaded behind the products of this one. V is 16 to 128, and
// wider results are shared out over blocks.
#include "attention_launch.h"

namespace jachess {
namespace {

enum class Role { query, key, value, both };

// Columns of each of a warp's results, and other tokens that it goes over at a time, by what fits
// its registers; with one direction in 16 bits, heads above 64 take twice the columns.
template <typename T, int S>
constexpr int kWidest = sizeof(T) == 4 ? (S == 4 ? 16 : 32) : 64;
template <int S, int V, Role role>
constexpr int kTile = role == Role::query && V == 128 ? 16 : attention_tile(S);

template <typename T, int S, int V, Role role>
__global__ void __launch_bounds__(kMostWarps* kWarp, 1)
    tiles_kernel(const __grid_constant__ AttentionArguments args) {
  constexpr int N = kTile<S, V, role>;
  constexpr bool of_keys = role != Role::query;
  const AttentionPlan& plan = args.plan;
  const ScoreRules& rules = args.rules;
  const int warp = static_cast<int>(threadIdx.x) / kWarp, strip = warp * kStrip;
  const int rows = plan.warps * kStrip;
  const int own_count = of_keys ? rules.keys : rules.queries;
  const int other_count = of_keys ? rules.queries : rules.keys;
  const BlockPlace block(plan, of_keys ? rules.heads / args.group : rules.heads, V, !of_keys);

  char* memory = dynamic_shared_memory();
  const auto tile_at = [&](int offset, int tile_rows, int line) {
    return Tile<T>{reinterpret_cast<T*>(memory + offset), tile_rows, line};
  };
  const Tile<T> own = tile_at(0, rows, plan.line);
  const Tile<T> own_second = tile_at(plan.own_second, rows, plan.second_line);
  const auto stage_at = [&](int stage) { return plan.first_stage + stage * plan.stage; };
  const auto other_of = [&](int stage) { return tile_at(stage_at(stage), N, plan.line); };
  const auto other_second_of = [&](int stage) {
    return tile_at(stage_at(stage) + plan.second, N, plan.second_line);
  };
  // Jets of l and R of some queries, [2][S][count]: of a tile's, or of the block's own.
  const auto jets_at = [&](int offset) { return reinterpret_cast<float*>(memory + offset); };
  ScoreTile<N, of_keys> tile(rules, memory + plan.scratch + warp * plan.own_scratch);
  const int64_t all_heads = static_cast<int64_t>(args.batch) * rules.heads;
  const auto load_jets = [&](float* to, int count, int head, int query) {
    for (int n = threadIdx.x; n < 2 * S * count; n += blockDim.x) {
      const int64_t row =
          n / count % S * all_heads + static_cast<int64_t>(block.batch) * rules.heads + head;
      if (query + n % count < rules.queries)
        copy_async_4(to + n, (n < S * count ? args.stats : args.shares) + row * rules.queries +
                                 query + n % count);
    }
  };
  const auto load_rows = [&](const JetHeads& x, int head, int count, int size, int from,
                             const Tile<T>& to, int depth, int shift) {
    load_tile<S>(to, rows_of<T>(x, block.batch, head, count, size, args.aligned), from, 0, depth,
                 shift);
  };

  // A step is a tile of other tokens of one of the heads that the block goes over.
  const int per_head = (other_count + N - 1) / N, steps = (of_keys ? args.group : 1) * per_head;
  const auto head_of = [&](int step) {
    return of_keys ? block.owner * args.group + step / per_head : block.owner;
  };
  const auto place_of = [&](int step, int below) {
    const int other = step % per_head * N, own_token = block.first + below;
    return ScorePlace{block.batch, head_of(step), of_keys ? other : own_token,
                      of_keys ? own_token : other};
  };

  load_rows(args.own, block.owner, own_count, args.size, block.first, own, plan.depth, plan.shift);
  if constexpr (role != Role::value)
    load_rows(args.own_second, block.owner, own_count, args.value_size, block.first, own_second,
              plan.second_depth, plan.second_shift);
  if constexpr (!of_keys) load_jets(jets_at(plan.own_jets), rows, block.owner, block.first);
  float sums[S][V / 8][4] = {}, value_sums[S][V / 8][4] = {};  // of q̄ or k̄, and of v̄
  RowUnits<T> units, value_units;
  go_over(
      steps, plan.stages == 2,
      [&](int step) {
        while (step < steps &&
               !tile_takes_part(rules, place_of(step, 0), of_keys ? N : rows, of_keys ? rows : N))
          ++step;
        return step;
      },
      [&](int step, int stage) {
        const int head = head_of(step), token = step % per_head * N;
        const int other_head = of_keys ? head : head / args.group;
        load_rows(args.other, other_head, other_count, args.size, token, other_of(stage),
                  plan.depth, plan.shift);
        load_rows(args.other_second, other_head, other_count, args.value_size, token,
                  other_second_of(stage), plan.second_depth, plan.second_shift);
        if constexpr (of_keys) load_jets(jets_at(stage_at(stage) + plan.jets), N, head, token);
      },
      [&](int step, int stage) {
        const ScorePlace place = place_of(step, strip);
        if (!tile_in_band(rules, place, of_keys ? N : kStrip, of_keys ? kStrip : N)) return;
        const float* jets =
            of_keys ? jets_at(stage_at(stage) + plan.jets) : jets_at(plan.own_jets) + strip;
        const auto jet = [&](int which, int s, int n, int e) {
          return jets[(which * S + s) * (of_keys ? N : rows) + tile.query_of(n, e)];
        };
        float weights[S][N / 8][4] = {};
        tile.fill(rules, place);
        multiply_tokens<Sides::factors, S, N>(own, strip, other_of(stage), plan.depth, weights);
        weigh<S, of_keys, N>(
            rules, tile, [&](int s, int n, int e) { return jet(0, s, n, e); }, weights);
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
              kept, other_second_of(stage), block.column, args.value_size - block.column,
              value_sums);
        }
        if constexpr (role != Role::value) {
          float grads[S][N / 8][4] = {};
          multiply_tokens<of_keys ? Sides::column_cotangent : Sides::row_cotangent, S, N>(
              own_second, strip, other_second_of(stage), plan.second_depth, grads);
          differentiate<S, of_keys, N>(
              rules, tile, [&](int s, int n, int e) { return jet(1, s, n, e); }, weights, grads);
          units.template apply<S, N, V>(grads, sums);
          multiply_weights<Sides::row_cotangent, S, N, V>(grads, other_of(stage), block.column,
                                                          args.size - block.column, sums);
        }
      });
  const auto unchanged = [](int, float*) {};
  if constexpr (role != Role::value)
    write_strip<T, S, V>(sums, units, args.out, block, strip, own_count, args.size, unchanged);
  if constexpr (role == Role::value || role == Role::both)
    write_strip<T, S, V>(value_sums, value_units, args.value_out, block, strip, own_count,
                         args.value_size, unchanged);
}

// R = Σ_d ȳ ⊗ᵀ y, a warp per query.
template <typename T, int S>
__global__ void __launch_bounds__(kMostWarps* kWarp)
    shares_kernel(const __grid_constant__ AttentionArguments args, JetHeads gy, JetHeads y,
                  Elements elements, float* __restrict__ shares) {
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
    if (threadIdx.x % kWarp == 0) shares[s * all + index] = sums[s];
  }
}

template <typename T, int S, int V, Role role>
int launch_tiles(AttentionArguments args, const AttentionProblem& problem, const JetHeads& gy,
                 const JetHeads& out, Queue queue) {
  constexpr bool of_keys = role != Role::query;
  constexpr int N = kTile<S, V, role>;
  AttentionPlan& plan = args.plan;
  plan.depth = depth_of(args.size);
  plan.second_depth = round_up(args.value_size, 16);
  int columns = role == Role::value ? plan.second_depth : plan.depth;
  if (role == Role::both && plan.second_depth > columns) columns = plan.second_depth;
  plan.chunks = (columns + V - 1) / V;
  if (!make_plan<T, S, N>(of_keys ? problem.keys : problem.queries, role == Role::value ? 1 : 2,
                          of_keys ? Jets::other : Jets::own,
                          scratch_of<S>(problem, N, problem.softcap != 0),
                          shared_memory_limit(queue.device), plan))
    return kNoTileFits;
  args.own = of_keys ? problem.key : problem.query;
  args.own_second = of_keys ? problem.value : gy;
  args.other = of_keys ? problem.query : problem.key;
  args.other_second = of_keys ? gy : problem.value;
  args.out = out;
  const int64_t owners = problem.batch * (of_keys ? problem.key_heads : problem.heads);
  return launch_with_shared(tiles_kernel<T, S, V, role>, owners * plan.tiles * plan.chunks,
                            plan.warps * kWarp, static_cast<size_t>(plan.bytes), queue, args);
}

template <typename T, int S, int V, Role... roles>
int launch_roles(const AttentionArguments& args, const AttentionProblem& problem,
                 const JetHeads& gy, const JetHeads& gquery, const JetHeads& gkey, Queue queue) {
  int error = 0;
  const auto launch_one = [&](auto launch, const JetHeads& out) {
    if (error == 0) error = launch(args, problem, gy, out, queue);
  };
  (launch_one(launch_tiles<T, S, V, roles>, roles == Role::query ? gquery : gkey), ...);
  return error;
}

}  // namespace

int attention_jet_shares_cuda(const AttentionProblem& problem, JetHeads gy, JetHeads y,
                              void* shares, Queue queue) {
  const AttentionArguments args = attention_arguments(problem, nullptr);
  return dispatch_attention(problem, [&](auto* typed, auto streams) {
    using T = std::remove_pointer_t<decltype(typed)>;
    using Stored = std::conditional_t<sizeof(T) == 2, Bits16, T>;
    const int64_t queries = problem.batch * problem.heads * problem.queries;
    return launch(shares_kernel<Stored, decltype(streams)::value>, ceil_divide(queries, kMostWarps),
                  kMostWarps * kWarp, queue, args, gy, y,
                  Elements{false, problem.storage == Storage::f16}, static_cast<float*>(shares));
  });
}

int attention_jet_backward_cuda(const AttentionProblem& problem, JetHeads gy, const void* stats,
                                const void* shares, JetHeads gquery, JetHeads gkey, JetHeads gvalue,
                                Queue queue) {
  AttentionArguments args = attention_arguments(problem, const_cast<void*>(stats));
  args.shares = static_cast<const float*>(shares);
  return dispatch_attention(problem, [&](auto* typed, auto streams) {
    using T = std::remove_pointer_t<decltype(typed)>;
    constexpr int S = decltype(streams)::value;
    args.aligned = backward_aligned<T>(problem, gy);
    constexpr int V = kWidest<T, S>;
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
