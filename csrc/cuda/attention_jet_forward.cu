// CUDA kernel of jachess::attention_jet: a block takes a tile of queries of one head and goes over
// the keys tile by tile. The jets of numerator and denominator,
//
//     N = Σ e^{s−c} v,   L = Σ e^{s−c},   y = N / L,
//
// are kept with the online softmax: c_0 is the largest score so far. The other streams of c are
// their weighted means over the first tile a query sees; y does not depend on c, but the terms of N
// and L that cancel in N / L are then small, which matters once they are rounded to 16 bits.
//
// Per tile: products for the scores' jet into shared memory; the weights' jet in place of it (or
// beside it, for 16-bit operands); products with the values, whose sums stay in registers.
#include "attention_elements.h"

namespace jachess {
namespace {

// How a launch cuts its work, and where everything lies in shared memory (bytes).
struct ForwardPlan {
  int rows, columns;  // queries and keys of a tile
  int depth;          // entries of a query or key in shared memory at a time
  int span;           // value columns of a block
  int chunks;         // blocks that share a tile of queries, a span each
  int width;          // value columns in shared memory at a time
  bool whole;         // depth and width are all there is: each tile is loaded once
  int score_ld, weight_ld;
  int query, key, value, scores, weights, bytes;  // the queries' state comes first
};

template <typename A>
struct ForwardArguments {
  ScoreRules<A> rules;
  TermTable terms;
  StreamMap map;
  ForwardPlan plan;
  JetHeads query, key, value, y;
  A* stats;
  int streams, batch, group, size, value_size, tiles;
  bool aligned;
};

template <typename T, int rows>
struct ForwardShape {
  using A = accumulate_t<T>;
  static constexpr int kUnitRows = rows >= 32 ? 32 : 16;
  // A warp's sums: 128 registers of a thread, or 64 for double.
  static constexpr int kUnits = sizeof(A) == 8 ? 2 : 4;
  static constexpr int kThreadsPerRow = kThreads / rows;
  static constexpr int kColumnsPerThread = kMostColumns / kThreadsPerRow;
  using Sums = OutputSums<kUnitRows, kUnits, A>;
};

// State of each of the block's queries, in shared memory, and reductions over a row's threads.
template <int rows, int S, typename A>
struct RowState {
  A* data;
  __device__ inline A& top(int row) const { return data[row]; }
  __device__ inline A* shrink() const { return data + rows; }  // what the sums so far lose
  __device__ inline A& denominator(int s, int row) const { return data[(2 + s) * rows + row]; }
  __device__ inline A& centre(int s, int row) const { return data[(2 + S + s) * rows + row]; }
  static constexpr int kCount = (2 + 2 * S) * rows;

  static __device__ inline A sum_of_row(A value) {
    JACHESS_UNROLL
    for (int offset = kThreads / rows / 2; offset > 0; offset /= 2)
      value += __shfl_xor_sync(0xFFFFFFFFu, value, offset);
    return value;
  }
  static __device__ inline A largest_of_row(A value) {
    JACHESS_UNROLL
    for (int offset = kThreads / rows / 2; offset > 0; offset /= 2) {
      const A other = __shfl_xor_sync(0xFFFFFFFFu, value, offset);
      value = other > value ? other : value;
    }
    return value;
  }
};

// From the scores' jets of a tile to the weights', and the denominator's sums. Each query belongs
// to a few neighbouring threads.
template <typename T, int rows, int q, int P, typename A>
__device__ inline void weigh_scores(const ForwardArguments<A>& args, ScorePlace place,
                                    const Tile<A>& scores, const Tile<T>& weights,
                                    const RowState<rows, 1 + q + P, A>& state) {
  constexpr int S = 1 + q + P;
  using Shape = ForwardShape<T, rows>;
  constexpr int per_row = Shape::kThreadsPerRow, count = Shape::kColumnsPerThread;
  const ScoreRules<A>& rules = args.rules;
  const int row = threadIdx.x / per_row, first = threadIdx.x % per_row;
  place.query += row;
  const int first_key = place.key;

  A x[count], top = minus_infinity<A>();  // primal scores
  JACHESS_UNROLL
  for (int k = 0; k < count; ++k) {
    const int column = first + k * per_row;
    place.key = first_key + column;
    x[k] = minus_infinity<A>();
    if (column < args.plan.columns) {
      A s = rules.scale * *scores.at(0, row, column);
      if (rules.softcap != A(0)) s = softcap_derivatives(s, rules.softcap).f0;
      x[k] = s + offset_of_score(rules, place);  // NaN − ∞ is NaN, as in torch
    }
    top = x[k] > top ? x[k] : top;
  }
  const A before = state.top(row);
  top = state.largest_of_row(top);
  top = before > top ? before : top;
  // Against 0 rather than −inf, a query that has seen nothing yet gets zeros and not NaN.
  const A base = top == minus_infinity<A>() ? A(0) : top;

  A centre[S];
  JACHESS_UNROLL
  for (int s = 0; s < S; ++s) centre[s] = state.centre(s, row);
  const bool fresh = before == minus_infinity<A>() && top != minus_infinity<A>();
  if (__any_sync(0xFFFFFFFFu, fresh)) {
    A sums[S] = {};
    JACHESS_UNROLL
    for (int k = 0; k < count; ++k) {
      if (x[k] == minus_infinity<A>()) continue;
      A s[S];
      load_element<q, P>(scores, args.map, row, first + k * per_row, rules.scale, s);
      cap_score<q, P>(rules.softcap, s);
      const A e = exp_nonpositive(x[k] - base);
      sums[0] += e;
      JACHESS_UNROLL
      for (int n = 1; n < S; ++n) sums[n] += e * s[n];
    }
    JACHESS_UNROLL
    for (int n = 0; n < S; ++n) sums[n] = state.sum_of_row(sums[n]);
    JACHESS_UNROLL
    for (int n = 1; n < S; ++n) centre[n] = fresh ? sums[n] / sums[0] : centre[n];
  }

  A sums[S] = {};
  JACHESS_UNROLL
  for (int k = 0; k < count; ++k) {
    const int column = first + k * per_row;
    if (column >= args.plan.columns) continue;
    place.key = first_key + column;
    A e[S] = {};
    if (x[k] != minus_infinity<A>()) {
      A s[S];
      load_element<q, P>(scores, args.map, row, column, rules.scale, s);
      cap_score<q, P>(rules.softcap, s);
      JACHESS_UNROLL
      for (int n = 1; n < S; ++n) s[n] -= centre[n];
      e[0] = exp_nonpositive(x[k] - base);
      pointwise_jet<q, P>(e[0], e[0], s, e);
      JACHESS_UNROLL
      for (int n = 0; n < S; ++n) sums[n] += e[n];
      const A factor = dropout_factor(rules, place);
      JACHESS_UNROLL
      for (int n = 0; n < S; ++n) e[n] *= factor;
    }
    store_element<q, P>(weights, args.map, row, column, e);
  }
  const A shrink = exp_nonpositive(before - base);
  JACHESS_UNROLL
  for (int n = 0; n < S; ++n) sums[n] = state.sum_of_row(sums[n]);
  if (first == 0) {
    state.top(row) = top;
    state.shrink()[row] = shrink;
    JACHESS_UNROLL
    for (int n = 0; n < S; ++n) {
      state.denominator(n, row) = state.denominator(n, row) * shrink + sums[n];
      state.centre(n, row) = centre[n];
    }
  }
}

// The quotient's jet of 32 value columns, from the numerator's in `sums`, to global memory.
template <typename T, int rows, int q, int P, typename A>
__device__ inline void write_quotient(const ForwardArguments<A>& args, const ScorePlace& place,
                                      int column, const Tile<A>& numerator,
                                      const RowState<rows, 1 + q + P, A>& state) {
  constexpr int S = 1 + q + P;
  T* y = static_cast<T*>(args.y.data) + place.batch * args.y.batch + place.head * args.y.head;
  for (int n = threadIdx.x; n < rows * kSpan; n += kThreads) {
    const int row = n / kSpan, c = n % kSpan;
    if (place.query + row >= args.rules.queries || column + c >= args.value_size) continue;
    A top[S], bottom[S], out[S] = {};
    load_element<q, P>(numerator, args.map, row, c, A(1), top);
    JACHESS_UNROLL
    for (int s = 0; s < S; ++s) bottom[s] = state.denominator(s, row);
    if (bottom[0] != A(0)) quotient_jet<q, P>(top, bottom, out);
    JACHESS_UNROLL
    for (int s = 0; s < S; ++s) {
      if (args.map.at[s] >= 0)
        convert(
            out[s],
            y[args.map.at[s] * args.y.stream + (place.query + row) * args.y.token + column + c]);
    }
  }
}

// The jet of log Σ e^score: that of log L, and c. A query that saw no key has −∞ and zeros, as on
// the CPU.
template <int rows, int q, int P, typename A>
__device__ inline void write_stats(const ForwardArguments<A>& args, const ScorePlace& place,
                                   const RowState<rows, 1 + q + P, A>& state) {
  constexpr int S = 1 + q + P;
  const int row = threadIdx.x, query = place.query + row;
  if (row >= rows || query >= args.rules.queries) return;
  const int64_t heads = static_cast<int64_t>(args.batch) * args.rules.heads;
  const int64_t head = static_cast<int64_t>(place.batch) * args.rules.heads + place.head;
  A sum[S], out[S] = {minus_infinity<A>()};
  JACHESS_UNROLL
  for (int s = 0; s < S; ++s) sum[s] = state.denominator(s, row);
  if (sum[0] != A(0)) {
    const A inverse = A(1) / sum[0];
    pointwise_jet<q, P>(inverse, -inverse * inverse, sum, out);
    out[0] = state.top(row) + ::log(sum[0]);
    JACHESS_UNROLL
    for (int s = 1; s < S; ++s) out[s] += state.centre(s, row);
  }
  JACHESS_UNROLL
  for (int s = 0; s < S; ++s) {
    if (args.map.at[s] >= 0)
      args.stats[(args.map.at[s] * heads + head) * args.rules.queries + query] = out[s];
  }
}

template <typename T, int rows, int q, int P>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const __grid_constant__ ForwardArguments<accumulate_t<T>> args) {
  using A = accumulate_t<T>;
  using Shape = ForwardShape<T, rows>;
  using Sums = typename Shape::Sums;
  using State = RowState<rows, 1 + q + P, A>;
  const ForwardPlan& plan = args.plan;
  const int streams = args.streams;

  int block = static_cast<int>(blockIdx.x);
  const int chunk = block % plan.chunks;
  block /= plan.chunks;
  const int first_query = block % args.tiles * rows;
  block /= args.tiles;
  const int head = block % args.rules.heads, batch = block / args.rules.heads;
  const ScorePlace place = {batch, head, first_query, 0};

  char* memory = dynamic_shared_memory();
  const State state = {reinterpret_cast<A*>(memory)};
  const auto tile_at = [&](int offset, int tile_rows, int ld) {
    return Tile<T>{reinterpret_cast<T*>(memory + offset), tile_rows, ld};
  };
  const Tile<T> query_tile = tile_at(plan.query, rows, padded<T>(plan.depth));
  const Tile<T> key_tile = tile_at(plan.key, plan.columns, padded<T>(plan.depth));
  const Tile<T> value_tile = tile_at(plan.value, plan.columns, padded<T>(plan.width));
  const Tile<T> weights = tile_at(plan.weights, rows, plan.weight_ld);
  const Tile<A> scores = {reinterpret_cast<A*>(memory + plan.scores), rows, plan.score_ld};
  // At the end, sums take the place of the operands.
  const Tile<A> numerator = {reinterpret_cast<A*>(memory + plan.query), rows, kSpan + kBankShift};

  const Rows<T> queries =
      rows_of<T>(args.query, batch, head, args.rules.queries, args.size, args.aligned);
  const Rows<T> keys =
      rows_of<T>(args.key, batch, head / args.group, args.rules.keys, args.size, args.aligned);
  const Rows<T> values = rows_of<T>(args.value, batch, head / args.group, args.rules.keys,
                                    args.value_size, args.aligned);
  const int first_column = chunk * plan.span;
  const int left_over = round_up(args.value_size, kSpan) - first_column;
  const int span = plan.span < left_over ? plan.span : left_over;

  for (int n = threadIdx.x; n < State::kCount; n += kThreads)
    state.data[n] = n < rows ? minus_infinity<A>() : A(0);
  Sums sums;
  sums.clear();

  // The first key of the next tile that takes part, or the number of keys.
  const auto next_tile = [&](int key) {
    while (key < args.rules.keys &&
           !tile_takes_part(args.rules, batch, head, first_query, rows, key, plan.columns))
      key += plan.columns;
    return key;
  };
  const auto load_keys = [&](int key) {
    if (plan.whole && key < args.rules.keys) load_tile(key_tile, keys, streams, key, 0, plan.depth);
    copy_async_commit();
  };
  const auto load_values = [&](int key) {
    if (plan.whole && key < args.rules.keys)
      load_tile(value_tile, values, streams, key, first_column, plan.width);
    copy_async_commit();
  };

  if (plan.whole) load_tile(query_tile, queries, streams, first_query, 0, plan.depth);
  int key = next_tile(0);
  load_keys(key);
  load_values(key);
  while (key < args.rules.keys) {
    ScorePlace tile_place = place;
    tile_place.key = key;
    if (plan.whole) {
      copy_async_wait<1>();
      __syncthreads();
      multiply_scores<Shape::kUnitRows>(query_tile, key_tile, plan.depth, args.terms, streams,
                                        false, scores);
      __syncthreads();
    } else {
      for (int column = 0; column == 0 || column < args.size; column += plan.depth) {
        load_tile(query_tile, queries, streams, first_query, column, plan.depth);
        load_tile(key_tile, keys, streams, key, column, plan.depth);
        copy_async_commit();
        copy_async_wait<0>();
        __syncthreads();
        multiply_scores<Shape::kUnitRows>(query_tile, key_tile, plan.depth, args.terms, streams,
                                          column > 0, scores);
        __syncthreads();
      }
    }
    const int next = next_tile(key + plan.columns);
    load_keys(next);
    weigh_scores<T, rows, q, P>(args, tile_place, scores, weights, state);
    for (int column = 0; column < span; column += plan.width) {
      if (plan.whole) {
        copy_async_wait<1>();
      } else {
        load_tile(value_tile, values, streams, key, first_column + column, plan.width);
        copy_async_commit();
        copy_async_wait<0>();
      }
      __syncthreads();
      JACHESS_UNROLL
      for (int k = 0; k < Shape::kUnits; ++k) {
        UnitPlace at;
        if (!Sums::place(k, args.terms, streams, rows, span, at)) continue;
        if (at.column < column || at.column >= column + plan.width) continue;
        sums.scale_rows(k, state.shrink() + at.row);
        sums.add(k, at, weights, value_tile, plan.columns, column, args.terms);
      }
      __syncthreads();
    }
    load_values(next);
    key = next;
  }
  copy_async_wait<0>();
  __syncthreads();

  for (int column = 0; column < span; column += kSpan) {
    JACHESS_UNROLL
    for (int k = 0; k < Shape::kUnits; ++k) {
      UnitPlace at;
      if (Sums::place(k, args.terms, streams, rows, span, at) && at.column == column)
        sums.store(k, at, numerator);
    }
    __syncthreads();
    write_quotient<T, rows, q, P>(args, place, first_column + column, numerator, state);
    __syncthreads();
  }
  if (chunk == 0) write_stats<rows, q, P>(args, place, state);
}

// The plan for tiles of this many rows and columns, if the sums fit the registers.
template <typename T, int rows, int S>
ForwardPlan make_plan(const AttentionProblem& problem, int columns, HeadCut cut) {
  using A = accumulate_t<T>;
  using Sizes = ForwardShape<T, rows>;
  const int streams = 1 + problem.q + problem.pairs;
  const int all = round_up(static_cast<int>(problem.size), kSpan);
  const int all_values = round_up(static_cast<int>(problem.value_size), kSpan);
  const int most = Sizes::kUnits * kWarps / (streams * (rows / Sizes::kUnitRows)) * kSpan;
  ForwardPlan plan = {};
  plan.rows = rows;
  plan.columns = columns;
  plan.whole = cut.whole;
  plan.depth = cut.whole || cut.depth > all ? all : cut.depth;
  plan.chunks = (all_values + most - 1) / most;
  plan.span = round_up((all_values + plan.chunks - 1) / plan.chunks, kSpan);
  plan.chunks = (all_values + plan.span - 1) / plan.span;
  plan.width = cut.whole || cut.depth > plan.span ? plan.span : cut.depth;
  const int element = sizeof(T), wide = sizeof(A);
  plan.score_ld = columns + kBankShift;
  plan.weight_ld = element == wide ? plan.score_ld : padded<T>(columns);
  plan.query = RowState<rows, S, A>::kCount * wide;
  plan.key = plan.query + streams * rows * padded<T>(plan.depth) * element;
  plan.value = plan.key + streams * columns * padded<T>(plan.depth) * element;
  plan.scores = plan.value + streams * columns * padded<T>(plan.width) * element;
  const int after = plan.scores + streams * rows * plan.score_ld * wide;
  plan.weights = element == wide ? plan.scores : after;
  const int operands = element == wide ? after : after + streams * rows * plan.weight_ld * element;
  const int sums = plan.query + streams * rows * (kSpan + kBankShift) * wide;
  plan.bytes = operands > sums ? operands : sums;
  return plan;
}

template <typename T, int rows, int q, int P>
int launch_forward(const AttentionProblem& problem, const ForwardPlan& plan, JetHeads y,
                   void* stats, Queue queue) {
  using A = accumulate_t<T>;
  ForwardArguments<A> args;
  args.rules = score_rules<A>(problem);
  args.terms = product_terms(problem.q, problem.pairs);
  args.map = stream_map(q, problem.q, problem.pairs);
  args.plan = plan;
  args.query = problem.query;
  args.key = problem.key;
  args.value = problem.value;
  args.y = y;
  args.stats = static_cast<A*>(stats);
  args.streams = 1 + problem.q + problem.pairs;
  args.batch = static_cast<int>(problem.batch);
  args.group = static_cast<int>(problem.heads / problem.key_heads);
  args.size = static_cast<int>(problem.size);
  args.value_size = static_cast<int>(problem.value_size);
  args.tiles = static_cast<int>((problem.queries + rows - 1) / rows);
  args.aligned = is_aligned<T>(problem.query, problem.size) &&
                 is_aligned<T>(problem.key, problem.size) &&
                 is_aligned<T>(problem.value, problem.value_size);
  const int64_t blocks = problem.batch * problem.heads * args.tiles * plan.chunks;
  return launch_with_shared(forward_kernel<T, rows, q, P>, blocks, kThreads,
                            static_cast<size_t>(plan.bytes), queue, args);
}

// Starts the kernel with the largest tile that fits: whole heads in shared memory first, then heads
// in pieces.
template <typename T, int q, int P>
int attention_forward(const AttentionProblem& problem, JetHeads y, void* stats, Queue queue) {
  constexpr int S = 1 + q + P;
  const size_t limit = shared_memory_limit(queue.device);
  for (const HeadCut cut : kHeadCuts) {
    for (const int columns : {32, 16}) {
      const auto run_if_it_fits = [&](auto rows_, int& error) {
        constexpr int rows = decltype(rows_)::value;
        if (rows > 32 && problem.queries <= rows / 2) return false;
        const ForwardPlan plan = make_plan<T, rows, S>(problem, columns, cut);
        if (static_cast<size_t>(plan.bytes) > limit) return false;
        error = launch_forward<T, rows, q, P>(problem, plan, y, stats, queue);
        return true;
      };
      int error = 0;
      if constexpr (sizeof(T) <= 4 && q <= 2) {
        if (run_if_it_fits(Int<64>{}, error)) return error;
      }
      if (run_if_it_fits(Int<sizeof(T) <= 4 ? 32 : 16>{}, error)) return error;
    }
  }
  return kNoTileFits;
}

}  // namespace

int attention_jet_cuda(const AttentionProblem& problem, JetHeads y, void* stats, Queue queue) {
  return dispatch_storage(problem.storage, [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    // Two compiled numbers of streams serve all: a jet that has fewer reads zeros for the rest.
    if (problem.q <= 2) return attention_forward<T, 2, 1>(problem, y, stats, queue);
    return attention_forward<T, 4, 6>(problem, y, stats, queue);
  });
}

}  // namespace jachess
