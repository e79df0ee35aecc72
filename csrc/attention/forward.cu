// CUDA kernel of jachess::attention_jet: up to 64 queries of one head, 16 a warp, are resident in a
// block, and the keys and values are streamed, tile by tile. The jets of numerator and denominator,
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
// N is 16 to 64; V is 32 to 128, and blocks divide wider values. The next tile of keys and values
// is loaded during the products of this one where two fit. With two directions in bfloat16 and
// values wider than V = 64, two warps share 16 queries: each makes the scores of half of a tile's
// keys and, with the weights of all of them, half of the columns.
#include "mainloop.h"

namespace jachess {
namespace {

// What a lane knows of its two rows, g and g + 8; the sums are its own columns'.
template <int S>
struct RowState {
  float centre[2][S] = {{kMinusInfinity}, {kMinusInfinity}};
  float sum[2][S] = {};
};

// A row is rescaled, to a new centre, where a score exceeds the primal of its centre by more than
// this: weights stay below e^4, and rows are seldom rescaled. In float16 at every rise: where
// tangents are large, terms that cancel in N / L are the smaller the nearer the centre is.
template <typename T>
constexpr float kHeadroom = std::is_same_v<T, Half> ? 0.0f : 4.0f;

// What is subtracted from the primal scores of a row of this centre: 0 rather than the −inf of a
// query that has seen nothing yet, whose weights and sums then become zeros and not NaN.
__device__ inline float base_of(float centre) { return centre == kMinusInfinity ? 0 : centre; }

// What two warps that share 16 queries exchange, in the queries' scratch: weights [S][16][2 N],
// each warp those of its half of the keys, and numbers of a row, which lie in the padding behind
// the row's weights.
template <typename T, int S, int N, int warps_per_tile>
struct WarpPair {
  static constexpr int kLd = warps_per_tile * N + 8;
  static constexpr int kBytes =
      warps_per_tile > 1 ? S * kWarpRows * kLd * static_cast<int>(sizeof(T)) : 0;
  Tile<T> weights;
  int pair, half;

  // Where warp `half` leaves `count` numbers of one of a lane's two rows: a largest score behind
  // the first stream's weights, S sums behind the second's or the third's.
  __device__ inline float* padding(int count, int row, int half) const {
    T* behind = weights.at(0, lane_index() / 4, warps_per_tile * N);
    float* first = reinterpret_cast<float*>(behind + 8 * row * kLd);
    constexpr int stream = kWarpRows * kLd * static_cast<int>(sizeof(T)) / 4;
    return count == 1 ? first + half : first + (1 + half) * stream;
  }
  // Combines the values of a lane's rows from `first` on, which four lanes share, with those of the
  // other warp; both call it.
  template <typename How, int rows, int count>
  __device__ inline void combine(float (&values)[rows][count], int first = 0) const {
    if constexpr (warps_per_tile > 1) {
      JACHESS_UNROLL
      for (int n = 0; n < rows * count; ++n) {
        if (lane_index() % 4 == 0)
          padding(count, first + n / count, half)[n % count] = values[n / count][n % count];
      }
      sync_pair(pair);
      JACHESS_UNROLL
      for (int n = 0; n < rows * count; ++n) {
        float& value = values[n / count][n % count];
        value = How()(value, padding(count, first + n / count, 1 - half)[n % count]);
      }
    }
  }
  // Writes this warp's weights, and waits for those of the other.
  __device__ inline void exchange(const float (&w)[S][N / 8][4]) const {
    T* mine = weights.at(0, lane_index() / 4, half * N + lane_index() % 4 * 2);
    JACHESS_UNROLL
    for (int n = 0; n < S * N / 4; ++n) {  // two columns of one of the rows
      const int s = n / (N / 4), block = n / 2 % (N / 8), row = n % 2;
      const float* from = &w[s][block][2 * row];
      *reinterpret_cast<uint32_t*>(mine + (s * kWarpRows + 8 * row) * kLd + 8 * block) =
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

// Moves the centre of the rows whose largest score rises: to that score, and to the other streams
// of log L over the keys so far, this tile's included. The sums so far are multiplied by the jet of
// e^{old − new centre}.
template <int S, int N, int V, typename Pair>
__device__ inline void rescale_rows(float (&w)[S][N / 8][4], float scale, const bool (&rises)[2],
                                    const float (&top)[2][1], const Pair& warp_pair,
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
    warp_pair.template combine<Add>(totals, row);
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

// Computes the weights from q · k, in place, and adds them to the denominators; where rows are
// rescaled, also rescales the numerators' sums.
template <typename T, int S, int N, int V, typename Pair>
__device__ inline void online_softmax(const ScoreRules& rules, const ScoreTile<N, false>& tile,
                                      const Pair& warp_pair, float (&w)[S][N / 8][4],
                                      RowState<S>& state, float (&sums)[S][V / 8][4]) {
  // Scaled first where it must be, in every tile of the launch alike, so that a query's weights are
  // the same to the bit in a tile that hides something and in one that does not.
  float scale = rules.scale;
  if (rules.softcap != 0 || rules.adds_bias || !(scale > 0)) {
    for_each_jet(w, [&](int, int, const float*, float* jet) {
      scale_jet<S>(scale, jet);
      if (rules.softcap != 0) cap_score<S>(rules.softcap, jet);
    });
    scale = 1;
  }
  if (tile.changed) {
    for_each_jet(w, [&](int n, int e, const float*, float* jet) {
      const float bias = tile.bias_of(rules, n, e);
      jet[0] += bias;  // NaN − ∞ is NaN
      JACHESS_UNROLL
      for (int k = 1; k < S; ++k) jet[k] = bias == kMinusInfinity ? 0 : jet[k];
    });
  }

  float top[2][1] = {{kMinusInfinity}, {kMinusInfinity}}, base[2];
  for_each_score<N>([&](int n, int e) { top[e / 2][0] = ::fmaxf(w[0][n][e], top[e / 2][0]); });
  bool rises[2];
  warp_reduce<Larger, 2, 4>(&top[0][0]);
  warp_pair.template combine<Larger>(top);
  JACHESS_UNROLL
  for (int row = 0; row < 2; ++row) {
    top[row][0] *= scale;
    rises[row] = top[row][0] > state.centre[row][0] + kHeadroom<T>;
  }
  if (__any_sync(0xFFFFFFFFu, rises[0] || rises[1]))
    rescale_rows<S, N, V>(w, scale, rises, top, warp_pair, state, sums);

  JACHESS_UNROLL
  for (int row = 0; row < 2; ++row) base[row] = base_of(state.centre[row][0]);
  recompute(scale);  // else its products are shared with rescale_rows, and no longer fused below
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
__device__ inline void write_stats(const AttentionArguments& args, const ScoreCoord& coord,
                                   const RowState<S>& state) {
  const int64_t heads = static_cast<int64_t>(args.batch) * args.rules.heads;
  const int64_t head = static_cast<int64_t>(coord.batch) * args.rules.heads + coord.head;
  JACHESS_UNROLL
  for (int row = 0; row < 2; ++row) {
    const int query = coord.query + lane_index() / 4 + 8 * row;
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

// A block's tiles, as one of its warps sees them. The accumulators are not in here: beside arrays,
// the compiler would not keep these in registers.
template <typename T, int S, int N, int V, int warps_per_tile>
struct ForwardTiles {
  static constexpr int K = warps_per_tile * N;  // keys of a streamed tile
  using Pair = WarpPair<T, S, N, warps_per_tile>;
  struct Streamed {
    Rows<T> keys, values;
  };

  const AttentionArguments& args;
  const SmemLayout& smem;
  const ScoreRules& rules;
  const int warp, half, warp_row, rows, steps;
  const BlockCoord block;
  BlockCoord output;  // from this warp's columns on
  char* const memory;
  const Tile<T> queries;
  const Pair warp_pair;
  char* const score_scratch;
  const Streamed streamed;

  __device__ inline explicit ForwardTiles(const AttentionArguments& arguments)
      : args(arguments),
        smem(args.smem),
        rules(args.rules),
        warp(static_cast<int>(threadIdx.x) / kWarp),
        half(warp % warps_per_tile),
        warp_row(warp / warps_per_tile * kWarpRows),
        rows(smem.warps * kWarpRows),
        steps((rules.keys + K - 1) / K),
        block(smem, rules.heads, warps_per_tile * V, true),
        output(block),
        memory(dynamic_shared_memory()),
        queries{reinterpret_cast<T*>(memory), rows, smem.ld_qk},
        warp_pair{{reinterpret_cast<T*>(pair_scratch()), kWarpRows, Pair::kLd},
                  warp / warps_per_tile,
                  half},
        score_scratch(pair_scratch() + Pair::kBytes +
                      half * (smem.scratch_bytes - Pair::kBytes) / warps_per_tile),
        streamed(streamed_rows()) {
    output.column += half * V;
  }

  __device__ inline char* pair_scratch() const {
    return memory + smem.scratch_offset + warp / warps_per_tile * smem.scratch_bytes;
  }
  __device__ inline Rows<T> rows_at(const JetHeads& x, int head, int count, int size) const {
    return rows_of<T>(x, block.batch, head, count, size, args.aligned);
  }
  __device__ inline Streamed streamed_rows() const {
    const int head = block.head / args.group;
    return {rows_at(args.streamed_qk, head, rules.keys, args.size),
            rows_at(args.streamed_vo, head, rules.keys, args.value_size)};
  }
  __device__ inline Tile<T> tile_at(int stage, int offset, int ld) const {
    char* start = memory + smem.stages_offset + stage * smem.stage_bytes + offset;
    return {reinterpret_cast<T*>(start), K, ld};
  }
  __device__ inline Tile<T> keys_of(int stage) const { return tile_at(stage, 0, smem.ld_qk); }
  __device__ inline Tile<T> values_of(int stage) const {
    return tile_at(stage, smem.streamed_vo_offset, smem.ld_vo);
  }
  __device__ inline ScoreCoord coord_of(int step, int row) const {
    return {block.batch, block.head, block.first + row, step * K};
  }

  __device__ inline void load_queries() const {
    load_tile<S>(queries, rows_at(args.resident_qk, block.head, rules.queries, args.size),
                 block.first, 0, smem.dim_qk, smem.log2_threads_qk);
  }
  __device__ inline int next(int step) const {
    while (step < steps && !tile_takes_part(rules, coord_of(step, 0), rows, K)) ++step;
    return step;
  }
  __device__ inline void load(int step, int stage) const {
    // In float32 the registers do not suffice to keep them.
    const Streamed from = sizeof(T) == 4 ? streamed_rows() : streamed;
    load_tile<S>(keys_of(stage), from.keys, step * K, 0, smem.dim_qk, smem.log2_threads_qk);
    load_tile<S>(values_of(stage), from.values, step * K, block.column, smem.dim_vo,
                 smem.log2_threads_vo);
  }
  __device__ inline void compute(int step, int stage, ScoreTile<N, false>& tile, RowState<S>& state,
                                 RowUnits<T>& units, float (&sums)[S][V / 8][4]) const {
    ScoreCoord coord = coord_of(step, warp_row);
    if (!tile_in_band(rules, coord, kWarpRows, K)) return;
    coord.key += half * N;
    Tile<T> scored = keys_of(stage);
    scored.data = scored.at(0, half * N, 0);
    float weights[S][N / 8][4] = {};
    tile.fill(rules, coord);
    multiply_tokens<Sides::factors, S, N, kForwardFragments<T>>(queries, warp_row, scored,
                                                                smem.dim_qk, weights);
    online_softmax<T, S, N, V>(rules, tile, warp_pair, weights, state, sums);
    units.template apply<S, N, V>(weights, sums);
    const int width = args.value_size - output.column;
    if constexpr (warps_per_tile > 1) {
      warp_pair.exchange(weights);
      const auto exchanged = [&](int s, int n, typename Mma<T>::A& a) {
        Mma<T>::load_a(warp_pair.weights.at(s, 0, n), warp_pair.kLd, a);
      };
      multiply_weights_of<Sides::factors, S, K, V>(exchanged, values_of(stage), half * V, width,
                                                   sums);
    } else {
      multiply_weights<Sides::factors, S, N, V>(weights, values_of(stage), 0, width, sums);
    }
  }
  // Writes the statistics and the results of the warp's queries.
  __device__ inline void finish(RowState<S>& state, const RowUnits<T>& units,
                                const float (&sums)[S][V / 8][4]) const {
    JACHESS_UNROLL
    for (int row = 0; row < 2; ++row) warp_reduce<Add, S, 4>(state.sum[row]);
    warp_pair.template combine<Add>(state.sum);
    if (output.column == 0) write_stats<S>(args, coord_of(0, warp_row), state);
    store_tile<T, S, V>(sums, units, args.out, output, warp_row, rules.queries, args.value_size,
                        [&](int row, float* jet) { quotient_jet<S>(state.sum[row], jet); });
  }
};

template <typename T, int S, int N, int V, int warps_per_tile>
__global__ void __launch_bounds__(kMostWarps * warps_per_tile * kWarp, 1)
    forward_kernel(const __grid_constant__ AttentionArguments args) {
  const ForwardTiles<T, S, N, V, warps_per_tile> tiles(args);
  ScoreTile<N, false> tile(args.rules, tiles.score_scratch);
  float sums[S][V / 8][4] = {};
  RowState<S> state;
  RowUnits<T> units;
  tiles.load_queries();
  mainloop(
      tiles.steps, args.smem.stages == 2, [&](int step) { return tiles.next(step); },
      [&](int step, int stage) { tiles.load(step, stage); },
      [&](int step, int stage) { tiles.compute(step, stage, tile, state, units, sums); });
  tiles.finish(state, units, sums);
}

template <typename T, int S, int N, int V, int warps_per_tile>
int launch_forward(AttentionArguments args, const AttentionProblem& problem, Queue queue) {
  const int value_size = round_up(args.value_size, 16), columns = warps_per_tile * V;
  SmemLayout& smem = args.smem;
  smem.dim_qk = padded_head_dim(args.size);
  smem.dim_vo = value_size < columns ? value_size : columns;
  smem.column_blocks =
      value_size > 0 ? (value_size + columns - 1) / columns : 1;  // for the statistics
  const int scratch = WarpPair<T, S, N, warps_per_tile>::kBytes +
                      warps_per_tile * scratch_bytes_of<S>(problem, N, false);
  if (!choose_layout<T, S, warps_per_tile * N>(problem.queries, 1, RowStats::none, scratch,
                                               shared_memory_limit(queue.device), smem,
                                               kResidentWarps / warps_per_tile))
    return kNoTileFits;
  // With 16 queries a block, and one block a multiprocessor, the warps would be too few.
  if (warps_per_tile > 1 && smem.warps == 1 && problem.queries > kWarpRows) return kNoTileFits;
  args.aligned = heads_aligned<T>(problem.query, problem.size) &&
                 heads_aligned<T>(problem.key, problem.size) &&
                 heads_aligned<T>(problem.value, problem.value_size);
  const int64_t blocks = problem.batch * problem.heads * smem.resident_tiles * smem.column_blocks;
  return launch_with_shared(forward_kernel<T, S, N, V, warps_per_tile>, blocks,
                            smem.warps * warps_per_tile * kWarp,
                            static_cast<size_t>(smem.smem_bytes), queue, args);
}

}  // namespace

int attention_jet_cuda(const AttentionProblem& problem, JetHeads y, void* stats, Queue queue) {
  AttentionArguments args = attention_arguments(problem, stats);
  args.resident_qk = problem.query;
  args.streamed_qk = problem.key;
  args.streamed_vo = problem.value;
  args.out = y;
  return dispatch_attention(problem, [&](auto* typed, auto streams) {
    using T = std::remove_pointer_t<decltype(typed)>;
    constexpr int S = decltype(streams)::value, N = attention_streamed_rows(S),
                  V = kForwardColumns<T, S>;
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
