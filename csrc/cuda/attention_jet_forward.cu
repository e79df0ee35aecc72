// CUDA kernel of jachess::attention_jet: a block takes up to 64 queries of one head, 16 a warp, and
// goes over the keys tile by tile. The jets of numerator and denominator,
//
//     N = Σ e^{s−c} v,   L = Σ e^{s−c},   y = N / L,
//
// are kept with the online softmax: c is near the jet of log L over what a query has seen so far. y
// does not depend on c, but the terms of N and L that cancel in N / L are then small, which matters
// once they are rounded to 16 bits.
//
//     shared memory, every stream      registers of a warp, every stream
//     queries  [warps x 16, size]      scores, then weights  [16, N]
//     keys     [N, size]      (x 2)    N                     [16, V]
//     values   [N, V]         (x 2)    centre, L             per row
//
// N is 16 to 64; V is 32 to 128, and wider values are shared out over blocks. The next tile of keys
// and values is loaded behind the products of this one where two fit. With two directions in
// bfloat16 and values wider than V = 64, two warps share a strip of queries: each has the scores of
// half of a tile's keys and, with the weights of all of them, half of the columns.
#include "attention_launch.h"

namespace jachess {
namespace {

// Value columns of a warp, by what fits its registers.
template <typename T, int S>
constexpr int kWidest = sizeof(T) == 4 ? (S == 2 ? 64 : 32) : (S == 2 ? 128 : 64);

// Fragments along the heads that a warp multiplies at a time, likewise.
template <typename T>
constexpr int kDeep = sizeof(T) == 2 ? 2 : 1;

// What a lane knows of its two rows, g and g + 8; the sums are its own columns'.
template <int S>
struct RowState {
  float centre[2][S] = {{kMinusInfinity}, {kMinusInfinity}};
  float sum[2][S] = {};
};

// A row's centre follows a score that is larger than its primal part by more than this: weights
// stay below e^4, and rows are seldom centred anew. In float16 at every rise: where tangents are
// large, terms that cancel in N / L are the smaller the nearer the centre is.
template <typename T>
constexpr float kHeadroom = std::is_same_v<T, Half> ? 0.0f : 4.0f;

// A centre's primal part to subtract: 0 rather than the −inf of a query that has seen nothing yet,
// whose weights and sums then become zeros and not NaN.
__device__ inline float base_of(float centre) { return centre == kMinusInfinity ? 0 : centre; }

// What the warps that share a strip tell each other, in the strip's shared memory: weights
// [S][16][2 N], each warp those of its own keys, and behind a row's weights, in what keeps rows in
// different banks, numbers of the row.
template <typename T, int S, int N, int share>
struct Exchange {
  static constexpr int kLine = share * N + 8;
  static constexpr int kBytes = share > 1 ? S * kStrip * kLine * static_cast<int>(sizeof(T)) : 0;
  Tile<T> weights;
  int pair, half;

  // Where one of the warps leaves numbers of one of a lane's two rows, so many of it: a largest
  // score behind the first stream's weights, S sums behind the second's or the third's.
  __device__ inline float* room(int of, int row, int half) const {
    T* behind = weights.at(0, lane_index() / 4, share * N);
    float* first = reinterpret_cast<float*>(behind + 8 * row * kLine);
    constexpr int stream = kStrip * kLine * static_cast<int>(sizeof(T)) / 4;
    return of == 1 ? first + half : first + (1 + half) * stream;
  }
  // Combines the values of a lane's rows from `first` on, which four lanes share, with those of the
  // strip's other warp, which calls it too.
  template <typename How, int rows, int count>
  __device__ inline void combine(float (&values)[rows][count], int first = 0) const {
    if constexpr (share > 1) {
      JACHESS_UNROLL
      for (int n = 0; n < rows * count; ++n) {
        if (lane_index() % 4 == 0)
          room(count, first + n / count, half)[n % count] = values[n / count][n % count];
      }
      sync_pair(pair);
      JACHESS_UNROLL
      for (int n = 0; n < rows * count; ++n) {
        float& value = values[n / count][n % count];
        value = How()(value, room(count, first + n / count, 1 - half)[n % count]);
      }
    }
  }
  // Shows the other warp this one's weights, and waits for its.
  __device__ inline void show(const float (&w)[S][N / 8][4]) const {
    T* mine = weights.at(0, lane_index() / 4, half * N + lane_index() % 4 * 2);
    JACHESS_UNROLL
    for (int n = 0; n < S * N / 4; ++n) {  // two columns of one of the rows
      const int s = n / (N / 4), block = n / 2 % (N / 8), row = n % 2;
      const float* from = &w[s][block][2 * row];
      *reinterpret_cast<uint32_t*>(mine + (s * kStrip + 8 * row) * kLine + 8 * block) =
          pair_of<T>(from[0], from[1]);
    }
    sync_pair(pair);
  }
};

// The jet of the weight of a score, `scale` times `score`.
template <int S>
__device__ inline void weight_of(const float* score, float scale, float base, const float* centre,
                                 float* weight) {
  float s[S];
  s[0] = scale * score[0] - base;
  JACHESS_UNROLL
  for (int k = 1; k < S; ++k) s[k] = scale * score[k] - centre[k];
  exp_jet<S>(s, weight);
}

// Centres the rows whose largest score rises: at that score, and at the other streams of log L over
// what they have seen, this tile included. What they have summed up so far is multiplied by the jet
// of e^{old − new centre}.
template <int S, int N, int V, typename Exchange>
__device__ inline void centre_rows(float (&w)[S][N / 8][4], float scale, const bool (&rises)[2],
                                   const float (&top)[2][1], const Exchange& exchange,
                                   RowState<S>& state, float (&sums)[S][V / 8][4]) {
  constexpr int q = kDirections<S>, P = kPairs<S>;
  float factor[2][S];
  JACHESS_UNROLL
  for (int row = 0; row < 2; ++row) {
    float* centre = state.centre[row];
    float moved[S] = {}, totals[1][S], *total = totals[0];
    JACHESS_UNROLL
    for (int s = 1; s < S; ++s) moved[s] = centre[s];
    moved[0] = rises[row] ? top[row][0] : centre[0];
    const float base = base_of(moved[0]), shrink = fast_exp(centre[0] - base);
    JACHESS_UNROLL
    for (int s = 0; s < S; ++s) total[s] = shrink * state.sum[row][s];
    for_each_jet(w, [&](int, int e, const float* score, float*) {
      if (e / 2 != row) return;
      float seen[S];
      weight_of<S>(score, scale, base, moved, seen);
      JACHESS_UNROLL
      for (int s = 0; s < S; ++s) total[s] += seen[s];
    });
    warp_reduce<Add, S, 4>(total);
    exchange.template combine<Add>(totals, row);
    const float inverse = 1.0f / total[0];
    float shift[S];
    pointwise_jet<q, P>(inverse, -inverse * inverse, total, shift);
    JACHESS_UNROLL
    for (int s = 1; s < S; ++s) {
      shift[s] = rises[row] ? -shift[s] : 0;
      centre[s] -= shift[s];
    }
    shift[0] = centre[0] - base;
    exp_jet<S>(shift, factor[row]);
    centre[0] = moved[0];
    float old[S];
    JACHESS_UNROLL
    for (int s = 0; s < S; ++s) old[s] = state.sum[row][s];
    product_jet<q, P>(factor[row], old, state.sum[row]);
  }
  for_each_jet(sums, [&](int, int e, const float* old, float* jet) {
    product_jet<q, P>(factor[e / 2], old, jet);
  });
}

// From the scores' products to the weights, in place; the denominators' sums; and, where rows are
// centred anew, the numerators'.
template <typename T, int S, int N, int V, typename Exchange>
__device__ inline void weigh_scores(const ScoreRules& rules, const ScoreTile<N, false>& tile,
                                    const Exchange& exchange, float (&w)[S][N / 8][4],
                                    RowState<S>& state, float (&sums)[S][V / 8][4]) {
  // Scaled first where it must be, in every tile of the launch alike, so that a query's weights are
  // the same to the bit in a tile that hides something and in one that does not.
  float scale = rules.scale;
  if (rules.softcap != 0 || rules.numbers || !(scale > 0)) {
    for_each_jet(w, [&](int, int, const float*, float* jet) {
      scale_jet<S>(scale, jet);
      if (rules.softcap != 0) cap_score<S>(rules.softcap, jet);
    });
    scale = 1;
  }
  if (tile.changed) {
    for_each_jet(w, [&](int n, int e, const float*, float* jet) {
      const float added = tile.added(rules, n, e);
      jet[0] += added;  // NaN − ∞ is NaN
      JACHESS_UNROLL
      for (int k = 1; k < S; ++k) jet[k] = added == kMinusInfinity ? 0 : jet[k];
    });
  }

  float top[2][1] = {{kMinusInfinity}, {kMinusInfinity}}, base[2];
  for_each_score<N>([&](int n, int e) { top[e / 2][0] = ::fmaxf(w[0][n][e], top[e / 2][0]); });
  bool rises[2];
  warp_reduce<Larger, 2, 4>(&top[0][0]);
  exchange.template combine<Larger>(top);
  JACHESS_UNROLL
  for (int row = 0; row < 2; ++row) {
    top[row][0] *= scale;
    rises[row] = top[row][0] > state.centre[row][0] + kHeadroom<T>;
  }
  if (__any_sync(0xFFFFFFFFu, rises[0] || rises[1]))
    centre_rows<S, N, V>(w, scale, rises, top, exchange, state, sums);

  JACHESS_UNROLL
  for (int row = 0; row < 2; ++row) base[row] = base_of(state.centre[row][0]);
  recompute(scale);  // else its products are shared with centre_rows, and no longer fused below
  for_each_jet(w, [&](int, int e, const float* score, float* weight) {
    weight_of<S>(score, scale, base[e / 2], state.centre[e / 2], weight);
    JACHESS_UNROLL
    for (int k = 0; k < S; ++k) state.sum[e / 2][k] += weight[k];
  });
  if (tile.dropped) {
    for_each_jet(w, [&](int n, int e, const float*, float* weight) {
      scale_jet<S>(tile.factor(rules, n, e), weight);
    });
  }
}

// The jet of log Σ e^score: that of log L, and c. A query that saw no key has −∞ and zeros, as on
// the CPU.
template <int S>
__device__ inline void write_stats(const AttentionArguments& args, const ScorePlace& place,
                                   const RowState<S>& state) {
  const int64_t heads = static_cast<int64_t>(args.batch) * args.rules.heads;
  const int64_t head = static_cast<int64_t>(place.batch) * args.rules.heads + place.head;
  JACHESS_UNROLL
  for (int row = 0; row < 2; ++row) {
    const int query = place.query + lane_index() / 4 + 8 * row;
    if (lane_index() % 4 != 0 || query >= args.rules.queries) continue;
    const float* sum = state.sum[row];
    float out[S] = {kMinusInfinity};
    if (sum[0] != 0) {
      const float inverse = 1.0f / sum[0];
      pointwise_jet<kDirections<S>, kPairs<S>>(inverse, -inverse * inverse, sum, out);
      out[0] = ::log(sum[0]);
      JACHESS_UNROLL
      for (int s = 0; s < S; ++s) out[s] += state.centre[row][s];
    }
    JACHESS_UNROLL
    for (int s = 0; s < S; ++s)
      args.stats[(s * heads + head) * args.rules.queries + query] = out[s];
  }
}

template <typename T, int S, int N, int V, int share>
__global__ void __launch_bounds__(kMostWarps * share * kWarp, 1)
    forward_kernel(const __grid_constant__ AttentionArguments args) {
  constexpr int K = share * N;  // keys of a tile
  const AttentionPlan& plan = args.plan;
  const ScoreRules& rules = args.rules;
  const int warp = static_cast<int>(threadIdx.x) / kWarp, half = warp % share;
  const int strip = warp / share * kStrip, rows = plan.warps * kStrip;
  const BlockPlace block(plan, rules.heads, share * V, true);
  const int key_head = block.owner / args.group;
  const ScorePlace first = {block.batch, block.owner, block.first, 0};
  const auto place_of = [&](int step, int below) {
    return ScorePlace{first.batch, first.head, first.query + below, step * K};
  };

  char* memory = dynamic_shared_memory();
  const Tile<T> queries = {reinterpret_cast<T*>(memory), rows, plan.line};
  char* scratch = memory + plan.scratch + warp / share * plan.own_scratch;
  const Exchange<T, S, N, share> exchange = {
      {reinterpret_cast<T*>(scratch), kStrip, Exchange<T, S, N, share>::kLine}, warp / share, half};
  scratch += exchange.kBytes;
  ScoreTile<N, false> tile(rules, scratch + half * (plan.own_scratch - exchange.kBytes) / share);
  const auto tile_at = [&](int stage, int offset, int line) {
    char* start = memory + plan.first_stage + stage * plan.stage + offset;
    return Tile<T>{reinterpret_cast<T*>(start), K, line};
  };
  const auto keys_of = [&](int stage) { return tile_at(stage, 0, plan.line); };
  const auto values_of = [&](int stage) { return tile_at(stage, plan.second, plan.second_line); };

  BlockPlace own = block;  // with this warp's columns
  own.column += half * V;
  float sums[S][V / 8][4] = {};
  RowState<S> state;
  RowUnits<T> units;
  const auto rows_at = [&](const JetHeads& x, int head, int count, int size) {
    return rows_of<T>(x, block.batch, head, count, size, args.aligned);
  };
  struct Others {
    Rows<T> keys, values;
  };
  const auto others = [&] {
    return Others{rows_at(args.other, key_head, rules.keys, args.size),
                  rows_at(args.other_second, key_head, rules.keys, args.value_size)};
  };
  const Others kept = others();
  load_tile<S>(queries, rows_at(args.own, block.owner, rules.queries, args.size), block.first, 0,
               plan.depth, plan.shift);
  const int steps = (rules.keys + K - 1) / K;
  go_over(
      steps, plan.stages == 2,
      [&](int step) {
        while (step < steps && !tile_takes_part(rules, place_of(step, 0), rows, K)) ++step;
        return step;
      },
      [&](int step, int stage) {
        // In float32 the registers do not suffice to keep them.
        const Others from = sizeof(T) == 4 ? others() : kept;
        load_tile<S>(keys_of(stage), from.keys, step * K, 0, plan.depth, plan.shift);
        load_tile<S>(values_of(stage), from.values, step * K, block.column, plan.second_depth,
                     plan.second_shift);
      },
      [&](int step, int stage) {
        ScorePlace place = place_of(step, strip);
        if (!tile_in_band(rules, place, kStrip, K)) return;
        place.key += half * N;
        Tile<T> scored = keys_of(stage);
        scored.data = scored.at(0, half * N, 0);
        float weights[S][N / 8][4] = {};
        tile.fill(rules, place);
        multiply_tokens<Sides::factors, S, N, kDeep<T>>(queries, strip, scored, plan.depth,
                                                        weights);
        weigh_scores<T, S, N, V>(rules, tile, exchange, weights, state, sums);
        units.template apply<S, N, V>(weights, sums);
        const int width = args.value_size - own.column;
        if constexpr (share > 1) {
          exchange.show(weights);
          const auto shown = [&](int s, int n, typename Mma<T>::A& a) {
            Mma<T>::load_a(exchange.weights.at(s, 0, n), exchange.kLine, a);
          };
          multiply_weights_of<Sides::factors, S, K, V>(shown, values_of(stage), half * V, width,
                                                       sums);
        } else {
          multiply_weights<Sides::factors, S, N, V>(weights, values_of(stage), 0, width, sums);
        }
      });

  JACHESS_UNROLL
  for (int row = 0; row < 2; ++row) warp_reduce<Add, S, 4>(state.sum[row]);
  exchange.template combine<Add>(state.sum);
  if (own.column == 0) write_stats<S>(args, place_of(0, strip), state);
  write_strip<T, S, V>(sums, units, args.out, own, strip, rules.queries, args.value_size,
                       [&](int row, float* jet) { quotient_jet<S>(state.sum[row], jet); });
}

template <typename T, int S, int N, int V, int share>
int launch_forward(AttentionArguments args, const AttentionProblem& problem, Queue queue) {
  const int value_size = round_up(args.value_size, 16), columns = share * V;
  AttentionPlan& plan = args.plan;
  plan.depth = depth_of(args.size);
  plan.second_depth = value_size < columns ? value_size : columns;
  plan.chunks = value_size > 0 ? (value_size + columns - 1) / columns : 1;  // for the statistics
  const int scratch = Exchange<T, S, N, share>::kBytes + share * scratch_of<S>(problem, N, false);
  if (!make_plan<T, S, share * N>(problem.queries, 1, Jets::none, scratch,
                                  shared_memory_limit(queue.device), plan, kResident / share))
    return kNoTileFits;
  // With one strip a block, and one block a multiprocessor, the warps would be too few.
  if (share > 1 && plan.warps == 1 && problem.queries > kStrip) return kNoTileFits;
  args.aligned = heads_aligned<T>(problem.query, problem.size) &&
                 heads_aligned<T>(problem.key, problem.size) &&
                 heads_aligned<T>(problem.value, problem.value_size);
  const int64_t blocks = problem.batch * problem.heads * plan.tiles * plan.chunks;
  return launch_with_shared(forward_kernel<T, S, N, V, share>, blocks, plan.warps * share * kWarp,
                            static_cast<size_t>(plan.bytes), queue, args);
}

}  // namespace

int attention_jet_cuda(const AttentionProblem& problem, JetHeads y, void* stats, Queue queue) {
  AttentionArguments args = attention_arguments(problem, stats);
  args.own = problem.query;
  args.other = problem.key;
  args.other_second = problem.value;
  args.out = y;
  return dispatch_attention(problem, [&](auto* typed, auto streams) {
    using T = std::remove_pointer_t<decltype(typed)>;
    constexpr int S = decltype(streams)::value, N = attention_tile(S), V = kWidest<T, S>;
    if constexpr (V == 128) {
      // With sums for 64 columns, the registers hold the scores of twice as many keys.
      if (problem.value_size <= 64 && problem.size <= 64) {
        const int error = launch_forward<T, S, 2 * N, 64, 1>(args, problem, queue);
        if (error != kNoTileFits) return error;
      }
      if (problem.value_size <= 64) return launch_forward<T, S, N, 64, 1>(args, problem, queue);
    }
    if constexpr (S == 4 && std::is_same_v<T, BFloat16>) {
      if (problem.value_size > V) {
        const int error = launch_forward<T, S, N, V, 2>(args, problem, queue);
        if (error != kNoTileFits) return error;
      }
    }
    return launch_forward<T, S, N, V, 1>(args, problem, queue);
  });
}

}  // namespace jachess
