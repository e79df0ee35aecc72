// CUDA kernels of jachess::attention_jet_backward. The tiles of scores are computed anew from the
// saved jet of l = log Σ e^score: with z = s − l the weights are the jet p of e^z. With ⊗ᵀ for the
// transposed jet product (jet_math.h), ȳ for the gradient of y, and k for dropout's factors:
//
//     gp = k (ȳ ⊗ᵀ v),   R = Σ_d ȳ ⊗ᵀ y,   gs = p ⊗ᵀ (gp − R)   (R: through the normaliser l),
//     v̄ = (k p) ⊗ᵀ ȳ,   q̄ = scale gs ⊗ᵀ k,   k̄ = scale gs ⊗ᵀ q.
//
// One kernel computes R. Then one kernel serves two roles: blocks that own a tile of queries and go
// over the keys write q̄; blocks that own a tile of keys and go over the queries of all heads that
// share it write k̄ and v̄. So no sum is made by more than one block, and the result is the same
// run to run.
#include "attention_elements.h"

namespace jachess {
namespace {

// How a launch cuts its work, and where everything lies in shared memory (bytes). "Own" are the
// tokens of the block's tile, "other" those it goes over.
struct BackwardPlan {
  int rows, columns;  // own and other tokens of a tile
  int depth;          // entries of a token in shared memory at a time
  int span, chunks;   // output columns of a block, and how many blocks share a tile
  bool whole;         // depth is all there is: each tile is loaded once
  int score_ld, operand_ld;
  int own, own_second, other, other_second, scores, score_grads, weights, operand_grads, bytes;
};

template <typename A>
struct BackwardArguments {
  ScoreRules<A> rules;
  TermTable scores;       // own x other -> scores
  TermTable score_grads;  // own x other -> gradient of the weights
  TermTable first;        // gradient of the scores x other -> q̄ or k̄
  TermTable second;       // weights x other -> v̄
  StreamMap map;
  BackwardPlan plan;
  JetHeads own, own_second, other, other_second;  // query, gy | key, value; or the other way round
  JetHeads out, out_second;
  const A* stats;
  const A* shares;
  int streams, batch, group, size, value_size, tiles;
  bool aligned;
};

template <typename T, bool of_keys>
struct BackwardShape {
  using A = accumulate_t<T>;
  static constexpr int kRows = sizeof(A) == 8 ? 16 : 32;
  // A warp's sums of each output: 64 or 128 registers of a thread; 11 streams need two units.
  static constexpr int kUnits = sizeof(A) == 8 || of_keys ? 2 : 4;
  using Sums = OutputSums<kRows, kUnits, A>;
};

// Jets of l and R of a tile's queries, [2][S][queries] in shared memory.
template <int S, typename A>
struct QueryJets {
  A* data;
  int count;
  __device__ inline A& normaliser(int s, int query) const { return data[s * count + query]; }
  __device__ inline A& share(int s, int query) const { return data[(S + s) * count + query]; }
};

template <int q, int P, typename A>
__device__ inline void load_query_jets(const BackwardArguments<A>& args, const ScorePlace& place,
                                       const QueryJets<1 + q + P, A>& jets) {
  constexpr int S = 1 + q + P;
  const int64_t heads = static_cast<int64_t>(args.batch) * args.rules.heads;
  const int64_t head = static_cast<int64_t>(place.batch) * args.rules.heads + place.head;
  for (int n = threadIdx.x; n < S * jets.count; n += kThreads) {
    const int s = n / jets.count, query = n % jets.count;
    const bool there = args.map.at[s] >= 0 && place.query + query < args.rules.queries;
    const int64_t at = (args.map.at[s] * heads + head) * args.rules.queries + place.query + query;
    jets.normaliser(s, query) = there ? args.stats[at] : A(0);
    jets.share(s, query) = there ? args.shares[at] : A(0);
  }
}

// From the jets of a tile's scores and of its weights' gradients to the weights (as operands for v̄)
// and the scores' gradients (as operands for q̄ or k̄).
template <bool of_keys, int q, int P, typename T, typename A>
__device__ inline void differentiate_scores(const BackwardArguments<A>& args,
                                            const ScorePlace& first, const Tile<A>& scores,
                                            const Tile<A>& score_grads, const Tile<T>& weights,
                                            const Tile<T>& operand_grads,
                                            const QueryJets<1 + q + P, A>& jets) {
  constexpr int S = 1 + q + P;
  const ScoreRules<A>& rules = args.rules;
  for (int n = threadIdx.x; n < scores.rows * kMostColumns; n += kThreads) {
    const int row = n / kMostColumns, column = n % kMostColumns;
    if (column >= args.plan.columns) continue;
    const int query = of_keys ? column : row;
    ScorePlace place = first;
    place.query += query;
    place.key += of_keys ? row : column;
    const A offset = offset_of_score(rules, place);
    A p[S] = {}, gs[S] = {};
    if (offset != minus_infinity<A>()) {
      A s[S], z[S], gp[S];
      load_element<q, P>(scores, args.map, row, column, rules.scale, s);
      JACHESS_UNROLL
      for (int k = 0; k < S; ++k) z[k] = s[k];
      cap_score<q, P>(rules.softcap, z);
      z[0] += offset;
      JACHESS_UNROLL
      for (int k = 0; k < S; ++k) z[k] -= jets.normaliser(k, query);
      p[0] = exp_nonpositive(z[0]);
      pointwise_jet<q, P>(p[0], p[0], z, p);

      const A factor = dropout_factor(rules, place);
      load_element<q, P>(score_grads, args.map, row, column, factor, gp);
      JACHESS_UNROLL
      for (int k = 0; k < S; ++k) gp[k] -= jets.share(k, query);
      product_jet_backward_add<q, P>(p, gp, gs);
      if (rules.softcap != A(0)) {
        const Derivatives<A> d = softcap_derivatives(s[0], rules.softcap);
        A uncapped[S];
        pointwise_jet_backward<q, P>(d.f1, d.f2, d.f3, s, gs, uncapped);
        JACHESS_UNROLL
        for (int k = 0; k < S; ++k) gs[k] = uncapped[k];
      }
      JACHESS_UNROLL
      for (int k = 0; k < S; ++k) {
        p[k] *= factor;
        gs[k] *= rules.scale;
      }
    }
    if constexpr (of_keys) store_element<q, P>(weights, args.map, row, column, p);
    store_element<q, P>(operand_grads, args.map, row, column, gs);
  }
}

// Writes the sums of one output, through shared memory so that rows are written whole.
template <int rows, typename Sums, typename T, typename A>
__device__ inline void write_sums(const Sums& sums, const TermTable& terms, int streams,
                                  int first_column, int span, int size, const Tile<A>& buffer,
                                  const JetHeads& out, int batch, int head, int first, int count) {
  T* to = static_cast<T*>(out.data) + batch * out.batch + head * out.head;
  for (int column = 0; column < span; column += kSpan) {
    __syncthreads();
    JACHESS_UNROLL
    for (int k = 0; k < Sums::kUnits; ++k) {
      UnitPlace at;
      if (Sums::place(k, terms, streams, rows, span, at) && at.column == column)
        sums.store(k, at, buffer);
    }
    __syncthreads();
    for (int n = threadIdx.x; n < streams * rows * kSpan; n += kThreads) {
      const int line = n / kSpan, c = n % kSpan, s = line / rows, row = line % rows;
      const int at = first_column + column + c;
      if (first + row < count && at < size)
        convert(*buffer.at(s, row, c), to[s * out.stream + (first + row) * out.token + at]);
    }
  }
}

template <typename T, int q, int P, bool of_keys>
__global__ void __launch_bounds__(kThreads)
    tiles_kernel(const __grid_constant__ BackwardArguments<accumulate_t<T>> args) {
  using A = accumulate_t<T>;
  using Shape = BackwardShape<T, of_keys>;
  using Sums = typename Shape::Sums;
  constexpr int rows = Shape::kRows;
  const BackwardPlan& plan = args.plan;
  const int streams = args.streams;
  const int owners = of_keys ? args.rules.heads / args.group : args.rules.heads;
  const int own_count = of_keys ? args.rules.keys : args.rules.queries;
  const int other_count = of_keys ? args.rules.queries : args.rules.keys;

  int block = static_cast<int>(blockIdx.x);
  const int chunk = block % plan.chunks;
  block /= plan.chunks;
  const int first = block % args.tiles * rows;
  block /= args.tiles;
  const int owner = block % owners, batch = block / owners;

  char* memory = dynamic_shared_memory();
  const int ld = padded<T>(plan.depth);
  const auto tile_at = [&](int offset, int tile_rows, int tile_ld) {
    return Tile<T>{reinterpret_cast<T*>(memory + offset), tile_rows, tile_ld};
  };
  const auto sums_at = [&](int offset, int sums_ld) {
    return Tile<A>{reinterpret_cast<A*>(memory + offset), rows, sums_ld};
  };
  const QueryJets<1 + q + P, A> jets = {reinterpret_cast<A*>(memory),
                                        of_keys ? plan.columns : rows};
  const Tile<T> own = tile_at(plan.own, rows, ld);
  const Tile<T> own_second = tile_at(plan.own_second, rows, ld);
  const Tile<T> other = tile_at(plan.other, plan.columns, ld);
  const Tile<T> other_second = tile_at(plan.other_second, plan.columns, ld);
  const Tile<A> scores = sums_at(plan.scores, plan.score_ld);
  const Tile<A> score_grads = sums_at(plan.score_grads, plan.score_ld);
  const Tile<T> weights = tile_at(plan.weights, rows, plan.operand_ld);
  const Tile<T> operand_grads = tile_at(plan.operand_grads, rows, plan.operand_ld);
  // At the end, sums take the place of the operands.
  const Tile<A> output = sums_at(plan.own, kSpan + kBankShift);

  const Rows<T> own_rows = rows_of<T>(args.own, batch, owner, own_count, args.size, args.aligned);
  const Rows<T> own_second_rows =
      rows_of<T>(args.own_second, batch, owner, own_count, args.value_size, args.aligned);
  const int first_column = chunk * plan.span;
  const auto span_of = [&](int size) {
    const int left_over = round_up(size, kSpan) - first_column;
    return left_over < 0 ? 0 : plan.span < left_over ? plan.span : left_over;
  };
  const int span = span_of(args.size), second_span = span_of(args.value_size);

  Sums sums, second_sums;
  sums.clear();
  if constexpr (of_keys) second_sums.clear();
  if (plan.whole) {
    load_tile(own, own_rows, streams, first, 0, plan.depth);
    load_tile(own_second, own_second_rows, streams, first, 0, plan.depth);
  }
  if constexpr (!of_keys) load_query_jets<q, P>(args, {batch, owner, first, 0}, jets);

  const int visits = of_keys ? args.group : 1;
  for (int visit = 0; visit < visits; ++visit) {
    const int head = of_keys ? owner * args.group + visit : owner;
    const int other_head = of_keys ? head : head / args.group;
    const Rows<T> other_rows =
        rows_of<T>(args.other, batch, other_head, other_count, args.size, args.aligned);
    const Rows<T> other_second_rows = rows_of<T>(args.other_second, batch, other_head, other_count,
                                                 args.value_size, args.aligned);
    for (int step = 0; step < other_count; step += plan.columns) {
      const ScorePlace place = {batch, head, of_keys ? step : first, of_keys ? first : step};
      const int queries = of_keys ? plan.columns : rows, keys = of_keys ? rows : plan.columns;
      if (!tile_takes_part(args.rules, batch, head, place.query, queries, place.key, keys))
        continue;
      // Columns [column, column + depth) of both sides' tokens, and their products.
      const auto add_products = [&](const Tile<T>& a, const Rows<T>& a_rows, const Tile<T>& b,
                                    const Rows<T>& b_rows, const TermTable& terms,
                                    const Tile<A>& to) {
        for (int column = 0; column == 0 || column < a_rows.size; column += plan.depth) {
          if (!plan.whole) {
            load_tile(a, a_rows, streams, first, column, plan.depth);
            load_tile(b, b_rows, streams, step, column, plan.depth);
            copy_async_commit();
            copy_async_wait<0>();
            __syncthreads();
          }
          multiply_scores<rows>(a, b, plan.depth, terms, streams, column > 0, to);
          if (!plan.whole) __syncthreads();
        }
      };
      if (plan.whole) {
        load_tile(other, other_rows, streams, step, 0, plan.depth);
        load_tile(other_second, other_second_rows, streams, step, 0, plan.depth);
        copy_async_commit();
        copy_async_wait<0>();
      }
      if constexpr (of_keys) load_query_jets<q, P>(args, place, jets);
      __syncthreads();
      add_products(own, own_rows, other, other_rows, args.scores, scores);
      add_products(own_second, own_second_rows, other_second, other_second_rows, args.score_grads,
                   score_grads);
      __syncthreads();
      differentiate_scores<of_keys, q, P>(args, place, scores, score_grads, weights, operand_grads,
                                          jets);
      __syncthreads();

      const auto add_outputs = [&](Sums& to, const Tile<T>& operand, const Tile<T>& b,
                                   const Rows<T>& b_rows, int width, const TermTable& terms) {
        const int piece = plan.whole ? width : plan.depth;
        for (int column = 0; column < width; column += piece) {
          if (!plan.whole) {
            load_tile(b, b_rows, streams, step, first_column + column, plan.depth);
            copy_async_commit();
            copy_async_wait<0>();
            __syncthreads();
          }
          const int loaded = plan.whole ? -first_column : column;
          JACHESS_UNROLL
          for (int k = 0; k < Shape::kUnits; ++k) {
            UnitPlace at;
            if (!Sums::place(k, terms, streams, rows, width, at)) continue;
            if (at.column < column || at.column >= column + piece) continue;
            to.add(k, at, operand, b, plan.columns, loaded, terms);
          }
          if (!plan.whole) __syncthreads();
        }
      };
      add_outputs(sums, operand_grads, other, other_rows, span, args.first);
      if constexpr (of_keys)
        add_outputs(second_sums, weights, other_second, other_second_rows, second_span,
                    args.second);
      __syncthreads();
    }
  }
  copy_async_commit();
  copy_async_wait<0>();
  write_sums<rows, Sums, T>(sums, args.first, streams, first_column, span, args.size, output,
                            args.out, batch, owner, first, own_count);
  if constexpr (of_keys)
    write_sums<rows, Sums, T>(second_sums, args.second, streams, first_column, second_span,
                              args.value_size, output, args.out_second, batch, owner, first,
                              own_count);
}

// R = Σ_d ȳ ⊗ᵀ y, a warp per query.
template <typename T, int q, int P, typename A>
__global__ void __launch_bounds__(kThreads)
    shares_kernel(JetHeads gy, JetHeads y, StreamMap map, int batch, int heads, int queries,
                  int size, A* __restrict__ shares) {
  constexpr int S = 1 + q + P;
  const int64_t all = static_cast<int64_t>(batch) * heads * queries;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (index >= all) return;
  const int64_t query = index % queries, head = index / queries % heads,
                b = index / queries / heads;
  const auto at = [&](const JetHeads& x, int s) {
    return static_cast<const T*>(x.data) + s * x.stream + b * x.batch + head * x.head +
           query * x.token;
  };
  A sums[S] = {};
  for (int d = threadIdx.x % kWarp; d < size; d += kWarp) {
    A g[S] = {}, v[S] = {};
    JACHESS_UNROLL
    for (int s = 0; s < S; ++s) {
      if (map.at[s] < 0) continue;
      convert(at(gy, map.at[s])[d], g[s]);
      convert(at(y, map.at[s])[d], v[s]);
    }
    product_jet_backward_add<q, P>(v, g, sums);
  }
  warp_sum<S>(sums);
  JACHESS_UNROLL
  for (int s = 0; s < S; ++s) {
    if (threadIdx.x % kWarp == 0 && map.at[s] >= 0) shares[map.at[s] * all + index] = sums[s];
  }
}

template <typename T, bool of_keys, int S>
BackwardPlan make_plan(const AttentionProblem& problem, int columns, HeadCut cut) {
  using A = accumulate_t<T>;
  using Shape = BackwardShape<T, of_keys>;
  constexpr int rows = Shape::kRows;
  const int streams = 1 + problem.q + problem.pairs;
  const int64_t longest = problem.size > problem.value_size ? problem.size : problem.value_size;
  const int all = round_up(static_cast<int>(longest), kSpan);
  const int own_size = round_up(static_cast<int>(problem.size), kSpan);
  const int outputs = of_keys ? all : own_size > 0 ? own_size : kSpan;
  const int most = Shape::kUnits * kWarps / streams * kSpan;
  BackwardPlan plan = {};
  plan.rows = rows;
  plan.columns = columns;
  plan.whole = cut.whole;
  plan.depth = cut.whole || cut.depth > all ? all : cut.depth;
  plan.chunks = (outputs + most - 1) / most;
  plan.span = round_up((outputs + plan.chunks - 1) / plan.chunks, kSpan);
  plan.chunks = (outputs + plan.span - 1) / plan.span;
  const int element = sizeof(T), wide = sizeof(A), row_bytes = padded<T>(plan.depth) * element;
  const int own = streams * rows * row_bytes, other = streams * columns * row_bytes;
  plan.score_ld = columns + kBankShift;
  plan.operand_ld = element == wide ? plan.score_ld : padded<T>(columns);
  plan.own = 2 * S * (of_keys ? columns : rows) * wide;
  // In pieces, the second operands of each side follow the first in the same place.
  plan.own_second = plan.own + (cut.whole ? own : 0);
  plan.other = plan.own_second + own;
  plan.other_second = plan.other + (cut.whole ? other : 0);
  plan.scores = plan.other_second + other;
  plan.score_grads = plan.scores + streams * rows * plan.score_ld * wide;
  const int after = plan.score_grads + streams * rows * plan.score_ld * wide;
  const int operand = streams * rows * plan.operand_ld * element;
  plan.operand_grads = element == wide ? plan.score_grads : after;
  plan.weights = element == wide ? plan.scores : after + operand;
  const int operands = element == wide ? after : after + (of_keys ? 2 : 1) * operand;
  const int sums = plan.own + streams * rows * (kSpan + kBankShift) * wide;
  plan.bytes = operands > sums ? operands : sums;
  return plan;
}

template <typename T, int q, int P, bool of_keys>
int launch_tiles(const AttentionProblem& problem, const JetHeads& gy, const void* stats,
                 const void* shares, const JetHeads& out, const JetHeads& out_second, Queue queue) {
  using A = accumulate_t<T>;
  constexpr int rows = BackwardShape<T, of_keys>::kRows;
  const size_t limit = shared_memory_limit(queue.device);
  BackwardArguments<A> args;
  bool found = false;
  for (const HeadCut cut : kHeadCuts) {
    for (const int columns : {32, 16}) {
      if (found) continue;
      args.plan = make_plan<T, of_keys, 1 + q + P>(problem, columns, cut);
      found = static_cast<size_t>(args.plan.bytes) <= limit;
    }
  }
  if (!found) return kNoTileFits;
  const TermTable product = product_terms(problem.q, problem.pairs);
  const TermTable gradient = gradient_terms(problem.q, problem.pairs);
  args.rules = score_rules<A>(problem);
  args.scores = product;
  args.score_grads = of_keys ? gradient.swapped() : gradient;
  args.first = gradient;
  args.second = gradient.swapped();
  args.map = stream_map(q, problem.q, problem.pairs);
  args.own = of_keys ? problem.key : problem.query;
  args.own_second = of_keys ? problem.value : gy;
  args.other = of_keys ? problem.query : problem.key;
  args.other_second = of_keys ? gy : problem.value;
  args.out = out;
  args.out_second = out_second;
  args.stats = static_cast<const A*>(stats);
  args.shares = static_cast<const A*>(shares);
  args.streams = 1 + problem.q + problem.pairs;
  args.batch = static_cast<int>(problem.batch);
  args.group = static_cast<int>(problem.heads / problem.key_heads);
  args.size = static_cast<int>(problem.size);
  args.value_size = static_cast<int>(problem.value_size);
  const int64_t own = of_keys ? problem.keys : problem.queries;
  args.tiles = static_cast<int>((own + rows - 1) / rows);
  args.aligned =
      is_aligned<T>(problem.query, problem.size) && is_aligned<T>(problem.key, problem.size) &&
      is_aligned<T>(problem.value, problem.value_size) && is_aligned<T>(gy, problem.value_size);
  const int64_t owners = problem.batch * (of_keys ? problem.key_heads : problem.heads);
  return launch_with_shared(tiles_kernel<T, q, P, of_keys>, owners * args.tiles * args.plan.chunks,
                            kThreads, static_cast<size_t>(args.plan.bytes), queue, args);
}

template <typename T, int q, int P>
int attention_backward(const AttentionProblem& problem, const JetHeads& gy, const JetHeads& y,
                       const void* stats, void* shares, const JetHeads& gquery,
                       const JetHeads& gkey, const JetHeads& gvalue, Queue queue) {
  using A = accumulate_t<T>;
  const int64_t queries = problem.batch * problem.heads * problem.queries;
  int error =
      launch(shares_kernel<T, q, P, A>, (queries + kWarps - 1) / kWarps, kThreads, queue, gy, y,
             stream_map(q, problem.q, problem.pairs), static_cast<int>(problem.batch),
             static_cast<int>(problem.heads), static_cast<int>(problem.queries),
             static_cast<int>(problem.value_size), static_cast<A*>(shares));
  if (error == 0)
    error = launch_tiles<T, q, P, false>(problem, gy, stats, shares, gquery, gquery, queue);
  if (error == 0)
    error = launch_tiles<T, q, P, true>(problem, gy, stats, shares, gkey, gvalue, queue);
  return error;
}

}  // namespace

int attention_jet_backward_cuda(const AttentionProblem& problem, JetHeads gy, JetHeads y,
                                const void* stats, void* shares, JetHeads gquery, JetHeads gkey,
                                JetHeads gvalue, Queue queue) {
  return dispatch_storage(problem.storage, [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    if (problem.q <= 2)
      return attention_backward<T, 2, 1>(problem, gy, y, stats, shares, gquery, gkey, gvalue,
                                         queue);
    return attention_backward<T, 4, 6>(problem, gy, y, stats, shares, gquery, gkey, gvalue, queue);
  });
}

}  // namespace jachess
