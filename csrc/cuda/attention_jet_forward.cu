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
// N is 16 or 32; V is 32 to 128, and wider values are shared out over blocks. The next tile of keys
// and values is loaded behind the products of this one where two fit.
#include "attention_elements.h"

namespace jachess {
namespace {

// How a launch cuts its work, and where everything lies in shared memory (bytes).
struct ForwardPlan {
  Cut cut;
  int depth;                 // entries of a query or key: its size, rounded up
  int width;                 // value columns in shared memory
  int chunks;                // blocks that share a tile of queries, V value columns each
  int stage, value;          // bytes of keys and values of a tile; the values' place in it
  int first_stage, scratch;  // places
};

struct ForwardArguments {
  ScoreRules rules;
  ForwardPlan plan;
  JetHeads query, key, value, y;
  float* stats;
  int batch, group, size, value_size, tiles;
  bool aligned;
};

// Value columns of a warp, by what fits its registers.
template <typename T, int S>
constexpr int kWidest = sizeof(T) == 4 ? (S == 2 ? 64 : 32) : (S == 2 ? 128 : 64);

// What a lane knows of its two rows, g and g + 8; the sums are its own columns'.
template <int S>
struct RowState {
  float centre[2][S] = {{kMinusInfinity}, {kMinusInfinity}};
  float sum[2][S] = {};
};

// A row's centre follows a score that is larger than its primal part by more than this: weights
// stay below e^4, and rows are seldom centred anew.
constexpr float kHeadroom = 4.0f;

// Calls f(block, element) for every score of a lane.
template <int N, typename F>
__device__ inline void for_each_score(const F& f) {
  JACHESS_UNROLL
  for (int n = 0; n < N / 8; ++n) {
    JACHESS_UNROLL
    for (int e = 0; e < 4; ++e) f(n, e);
  }
}

// The jet of the weight of a score, zeros where it takes no part.
template <int S, int N>
__device__ inline void weight_of(const float (&w)[S][N / 8][4], int n, int e, const float* centre,
                                 float* weight) {
  float s[S];
  JACHESS_UNROLL
  for (int k = 0; k < S; ++k) s[k] = w[k][n][e] - centre[k];
  exp_jet<S>(s, weight);
  JACHESS_UNROLL
  for (int k = 0; k < S; ++k) weight[k] = w[0][n][e] == kMinusInfinity ? 0 : weight[k];
}

// Centres the rows whose largest score rises: at that score, and at the other streams of log L over
// what they have seen, this tile included. What they have summed up so far is multiplied by the jet
// of e^{old − new centre}.
template <int S, int N, int V>
__device__ inline void centre_rows(const float (&w)[S][N / 8][4], const bool (&rises)[2],
                                   const float (&top)[2], RowState<S>& state,
                                   float (&sums)[S][V / 8][4]) {
  constexpr int q = kDirections<S>, P = kPairs<S>;
  float factor[2][S];
  JACHESS_UNROLL
  for (int row = 0; row < 2; ++row) {
    float* centre = state.centre[row];
    float moved[S] = {}, seen[S], total[S];
    JACHESS_UNROLL
    for (int s = 1; s < S; ++s) moved[s] = centre[s];
    moved[0] = rises[row] ? top[row] : centre[0];
    // Against 0 rather than −inf, a query that has seen nothing yet gets zeros and not NaN.
    const float base = moved[0] == kMinusInfinity ? 0 : moved[0];
    const float shrink = exp_nonpositive(centre[0] - base);
    JACHESS_UNROLL
    for (int s = 0; s < S; ++s) total[s] = shrink * state.sum[row][s];
    for_each_score<N>([&](int n, int e) {
      if (e / 2 != row) return;
      weight_of<S, N>(w, n, e, moved, seen);
      JACHESS_UNROLL
      for (int s = 0; s < S; ++s) total[s] += seen[s];
    });
    JACHESS_UNROLL
    for (int s = 0; s < S; ++s) total[s] = sum_of_row(total[s]);
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
  JACHESS_UNROLL
  for (int v = 0; v < V / 8; ++v) {
    JACHESS_UNROLL
    for (int e = 0; e < 4; ++e) {
      float old[S], scaled[S];
      JACHESS_UNROLL
      for (int s = 0; s < S; ++s) old[s] = sums[s][v][e];
      product_jet<q, P>(factor[e / 2], old, scaled);
      JACHESS_UNROLL
      for (int s = 0; s < S; ++s) sums[s][v][e] = scaled[s];
    }
  }
}

// From the scores' products to the weights, in place; the denominators' sums; and, where rows are
// centred anew, the numerators'.
template <int S, int N, int V>
__device__ inline void weigh_scores(const ScoreRules& rules, const ScoreTile<S, false>& tile,
                                    float (&w)[S][N / 8][4], RowState<S>& state,
                                    float (&sums)[S][V / 8][4]) {
  for_each_score<N>([&](int n, int e) {
    JACHESS_UNROLL
    for (int k = 0; k < S; ++k) w[k][n][e] *= rules.scale;
  });
  if (rules.softcap != 0) {
    for_each_score<N>([&](int n, int e) {
      float s[S];
      JACHESS_UNROLL
      for (int k = 0; k < S; ++k) s[k] = w[k][n][e];
      cap_score<S>(rules.softcap, s);
      JACHESS_UNROLL
      for (int k = 0; k < S; ++k) w[k][n][e] = s[k];
    });
  }
  if (tile.masked)
    for_each_score<N>([&](int n, int e) { w[0][n][e] += tile.added(n, e); });  // NaN − ∞ is NaN

  float top[2] = {kMinusInfinity, kMinusInfinity};
  for_each_score<N>(
      [&](int n, int e) { top[e / 2] = w[0][n][e] > top[e / 2] ? w[0][n][e] : top[e / 2]; });
  bool rises[2];
  JACHESS_UNROLL
  for (int row = 0; row < 2; ++row) {
    top[row] = largest_of_row(top[row]);
    rises[row] = top[row] > state.centre[row][0] + kHeadroom;
  }
  if (__any_sync(0xFFFFFFFFu, rises[0] || rises[1]))
    centre_rows<S, N, V>(w, rises, top, state, sums);

  for_each_score<N>([&](int n, int e) {
    float weight[S];
    weight_of<S, N>(w, n, e, state.centre[e / 2], weight);
    JACHESS_UNROLL
    for (int k = 0; k < S; ++k) {
      w[k][n][e] = weight[k];
      state.sum[e / 2][k] += weight[k];
    }
  });
  if (tile.dropped) {
    for_each_score<N>([&](int n, int e) {
      const float factor = tile.factor(rules, n, e);
      JACHESS_UNROLL
      for (int s = 0; s < S; ++s) w[s][n][e] *= factor;
    });
  }
}

// The jet of log Σ e^score: that of log L, and c. A query that saw no key has −∞ and zeros, as on
// the CPU.
template <int S>
__device__ inline void write_stats(const ForwardArguments& args, const ScorePlace& place,
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

template <typename T, int S, int V>
__global__ void __launch_bounds__(kMostWarps* kWarp, 1)
    forward_kernel(const __grid_constant__ ForwardArguments args) {
  constexpr int N = attention_tile(S);
  const ForwardPlan& plan = args.plan;
  const ScoreRules& rules = args.rules;
  const int warp = static_cast<int>(threadIdx.x) / kWarp, strip = warp * kStrip;
  const int rows = plan.cut.warps * kStrip;

  int block = static_cast<int>(blockIdx.x);
  const int chunk = block % plan.chunks;
  block /= plan.chunks;
  const int first_query = block % args.tiles * rows;
  block /= args.tiles;
  const int head = block % rules.heads, batch = block / rules.heads;
  const int first_column = chunk * V, width = args.value_size - first_column;

  char* memory = dynamic_shared_memory();
  const Tile<T> queries = {reinterpret_cast<T*>(memory), rows, padded<T>(plan.depth)};
  char* stages = memory + plan.first_stage;
  ScoreTile<S, false> tile(memory + plan.scratch + warp * attention_scratch(S, false));
  const auto keys_of = [&](int stage) {
    return Tile<T>{reinterpret_cast<T*>(stages + stage * plan.stage), N, queries.ld};
  };
  const auto values_of = [&](int stage) {
    return Tile<T>{reinterpret_cast<T*>(stages + stage * plan.stage + plan.value), N,
                   padded<T>(plan.width)};
  };
  const Rows<T> all_queries =
      rows_of<T>(args.query, batch, head, rules.queries, args.size, args.aligned);
  // The first key of the next tile that takes part, or the number of keys.
  const auto next_tile = [&](int key) {
    while (key < rules.keys && !tile_takes_part(rules, {batch, head, first_query, key}, rows, N))
      key += N;
    return key;
  };
  const auto load = [&](int key, int stage) {
    if (key < rules.keys) {
      const int key_head = head / args.group;
      load_tile<S>(keys_of(stage),
                   rows_of<T>(args.key, batch, key_head, rules.keys, args.size, args.aligned), key,
                   0, plan.depth);
      load_tile<S>(
          values_of(stage),
          rows_of<T>(args.value, batch, key_head, rules.keys, args.value_size, args.aligned), key,
          first_column, plan.width);
    }
    copy_async_commit();
  };

  float sums[S][V / 8][4] = {};
  RowState<S> state;
  load_tile<S>(queries, all_queries, first_query, 0, plan.depth);
  const bool ahead = plan.cut.stages == 2;
  int key = -N, stage = 0;  // before the first tile there is nothing to multiply
  while (key < rules.keys) {
    const int next = next_tile(key + N);
    if (ahead) load(next, 1 - stage);
    if (key >= 0) {
      if (ahead) {
        copy_async_wait<1>();
      } else {
        copy_async_wait<0>();
      }
      __syncthreads();
      const ScorePlace place = {batch, head, first_query + strip, key};
      if (tile_in_band(rules, place, kStrip, N)) {
        float weights[S][N / 8][4] = {};
        tile.fill(rules, place);
        multiply_tokens<Sides::factors, S, N>(queries, strip, keys_of(stage), plan.depth, weights);
        weigh_scores<S, N, V>(rules, tile, weights, state, sums);
        multiply_weights<Sides::factors, S, N, V>(weights, values_of(stage), 0, width, sums);
      }
      __syncthreads();
    }
    if (ahead) {
      stage = 1 - stage;
    } else {
      load(next, stage);
    }
    key = next;
  }
  copy_async_wait<0>();

  JACHESS_UNROLL
  for (int row = 0; row < 2; ++row) {
    JACHESS_UNROLL
    for (int s = 0; s < S; ++s) state.sum[row][s] = sum_of_row(state.sum[row][s]);
  }
  if (chunk == 0) write_stats<S>(args, {batch, head, first_query + strip, 0}, state);
  const int g = lane_index() / 4, t = lane_index() % 4;
  T* y = static_cast<T*>(args.y.data) + batch * args.y.batch + head * args.y.head + first_column;
  JACHESS_UNROLL
  for (int v = 0; v < V / 8; ++v) {
    JACHESS_UNROLL
    for (int e = 0; e < 4; ++e) {
      const int query = first_query + strip + g + e / 2 * 8, column = 8 * v + 2 * t + e % 2;
      if (query >= rules.queries || column >= width) continue;
      float top[S], out[S] = {};
      JACHESS_UNROLL
      for (int s = 0; s < S; ++s) top[s] = sums[s][v][e];
      if (state.sum[e / 2][0] != 0) quotient_jet<S>(top, state.sum[e / 2], out);
      JACHESS_UNROLL
      for (int s = 0; s < S; ++s)
        convert(out[s], y[s * args.y.stream + query * args.y.token + column]);
    }
  }
}

template <typename T, int S, int V>
int launch_forward(ForwardArguments args, const AttentionProblem& problem, Queue queue) {
  const int element = sizeof(T), value_size = round_up(static_cast<int>(problem.value_size), 16);
  ForwardPlan& plan = args.plan;
  plan.depth = round_up(static_cast<int>(problem.size), Mma<T>::kDepth);
  plan.chunks = (value_size + V - 1) / V;
  plan.width = value_size < V ? value_size : V;
  plan.value = S * attention_tile(S) * padded<T>(plan.depth) * element;
  plan.stage = plan.value + S * attention_tile(S) * padded<T>(plan.width) * element;
  const auto bytes = [&](int warps, int stages) {
    plan.first_stage = S * warps * kStrip * padded<T>(plan.depth) * element;
    plan.scratch = plan.first_stage + stages * plan.stage;
    return plan.scratch + warps * attention_scratch(S, false);
  };
  if (!choose_cut(shared_memory_limit(queue.device), problem.queries, bytes, plan.cut))
    return kNoTileFits;
  const int rows = plan.cut.warps * kStrip;
  args.tiles = static_cast<int>((problem.queries + rows - 1) / rows);
  args.aligned = is_aligned<T>(problem.query, problem.size) &&
                 is_aligned<T>(problem.key, problem.size) &&
                 is_aligned<T>(problem.value, problem.value_size);
  const int64_t blocks = problem.batch * problem.heads * args.tiles * plan.chunks;
  return launch_with_shared(forward_kernel<T, S, V>, blocks, plan.cut.warps * kWarp,
                            static_cast<size_t>(plan.cut.bytes), queue, args);
}

}  // namespace

int attention_jet_cuda(const AttentionProblem& problem, JetHeads y, void* stats, Queue queue) {
  ForwardArguments args = {};
  args.rules = score_rules(problem);
  args.query = problem.query;
  args.key = problem.key;
  args.value = problem.value;
  args.y = y;
  args.stats = static_cast<float*>(stats);
  args.batch = static_cast<int>(problem.batch);
  args.group = static_cast<int>(problem.heads / problem.key_heads);
  args.size = static_cast<int>(problem.size);
  args.value_size = static_cast<int>(problem.value_size);
  return dispatch_attention(problem, [&](auto* typed, auto streams) {
    using T = std::remove_pointer_t<decltype(typed)>;
    constexpr int S = decltype(streams)::value, V = kWidest<T, S>;
    if constexpr (V == 128) {
      if (problem.value_size <= 64) return launch_forward<T, S, 64>(args, problem, queue);
    }
    return launch_forward<T, S, V>(args, problem, queue);
  });
}

}  // namespace jachess
