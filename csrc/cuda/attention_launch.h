// What the attention kernels share around their products: how a launch cuts its work, the loop over
// tiles, and the results. A block owns up to 64 tokens of a head, 16 a warp, and goes over others:
//
//     shared memory   own tokens (and second operands)   a stage, or two       a warp's scratch
//                     [S][warps x 16][depth]             [S][N][depth], twice  ScoreTile, if needed
//     loop            next tile on its way | wait | products of this one, softmax | next
//
// The first operand makes the scores, the second their gradients or the results. Jets of l and R
// (attention_jet_backward.cu) lie beside the queries they belong to. Wider results than a warp's
// registers hold are shared out over blocks.
#pragma once

#include <algorithm>

#include "attention_elements.h"

namespace jachess {

constexpr int kMostWarps = 4;
constexpr int kResident = 8;  // warps of 255 registers that a multiprocessor holds

// How a launch cuts its work, and where everything lies in shared memory (bytes).
struct AttentionPlan {
  int warps, stages;         // of a block; tiles of other tokens in shared memory at a time
  int depth, second_depth;   // entries of a token's operands there
  int line, second_line;     // length of a row of both, with what keeps rows in other banks
  int shift, second_shift;   // tile_shift of both
  int chunks, tiles;         // blocks that share own tokens, V result columns each; tiles of own
  int own_second, own_jets;  // places
  int first_stage, scratch;  // places
  int own_scratch;           // bytes of a warp's
  int stage, second, jets;   // bytes of a stage; places in it
  int bytes;
};

// "Own" are the tokens of the block's tile, "other" those it goes over.
struct AttentionArguments {
  ScoreRules rules;
  AttentionPlan plan;
  JetHeads own, own_second, other, other_second;
  JetHeads out, value_out;  // y, q̄ or k̄; v̄ of the backward
  float* stats;             // [S, batch, heads, queries]: the jet of log Σ e^score
  const float* shares;      // likewise: R
  int batch, group, size, value_size;
  bool aligned;  // all operands' rows
};

inline AttentionArguments attention_arguments(const AttentionProblem& problem, void* stats) {
  AttentionArguments args = {};
  args.rules = score_rules(problem);
  args.stats = static_cast<float*>(stats);
  args.batch = static_cast<int>(problem.batch);
  args.group = static_cast<int>(problem.heads / problem.key_heads);
  args.size = static_cast<int>(problem.size);
  args.value_size = static_cast<int>(problem.value_size);
  return args;
}

// Entries of a token in shared memory: whole fragments, one of zeros where heads have no entries.
inline int depth_of(int size) { return round_up(size > 0 ? size : 1, 16); }

// Bytes of a warp's scratch: none where there is no mask and no dropout. capped: whether the scores
// of a soft cap are kept, of S streams.
template <int S>
int scratch_of(const AttentionProblem& problem, int tile, bool capped) {
  if (capped) return attention_scratch(tile, S);
  const bool needed = problem.mask.kind != MaskKind::none || problem.dropout_p > 0;
  return needed ? attention_scratch(tile, 0) : 0;
}

// Plans with `depth`, `second_depth` and `chunks` given, for tiles of N other tokens: of what fits
// a block, the most warps that a multiprocessor holds, then two stages, then the largest block;
// false where nothing does. own: tokens of a head; kept: how many operands of own tokens stay in
// shared memory; jets: whose jets lie there, own queries' or others'; scratch: bytes of a strip's;
// resident: strips whose registers a multiprocessor holds.
enum class Jets { none, own, other };
template <typename T, int S, int N>
bool make_plan(int64_t own, int kept, Jets jets, int scratch, size_t limit, AttentionPlan& plan,
               int resident = kResident) {
  constexpr int jet = 2 * S * static_cast<int>(sizeof(float));
  constexpr int element = static_cast<int>(sizeof(T));
  plan.line = attention_row(element, plan.depth) / element;
  plan.second_line = attention_row(element, plan.second_depth) / element;
  const int row = S * element * plan.line, second_row = S * element * plan.second_line;
  plan.shift = tile_shift<T>(plan.depth);
  plan.second_shift = tile_shift<T>(plan.second_depth);
  plan.own_scratch = scratch;
  plan.second = N * row;
  plan.jets = plan.second + N * second_row;
  plan.stage = plan.jets + (jets == Jets::other ? N * jet : 0);
  const AttentionPlan sizes = plan;
  int best = 0;
  for (int warps = kMostWarps; warps > 0; warps /= 2) {
    if (warps > 1 && own <= warps / 2 * kStrip) continue;
    for (int stages = 2; stages > 0; --stages) {
      AttentionPlan next = sizes;
      next.warps = warps;
      next.stages = stages;
      const int rows = warps * kStrip;
      next.tiles = static_cast<int>((own + rows - 1) / rows);
      next.own_second = rows * row;
      next.own_jets = next.own_second + (kept == 2 ? rows * second_row : 0);
      next.first_stage = next.own_jets + (jets == Jets::own ? rows * jet : 0);
      next.scratch = next.first_stage + stages * plan.stage;
      next.bytes = next.scratch + warps * scratch;
      const size_t bytes = static_cast<size_t>(next.bytes);
      if (bytes > limit) continue;
      // A multiprocessor has 1 kB more than a block may take, and keeps 1 kB of each for itself.
      const int blocks = static_cast<int>((limit + 1024) / (bytes + 1024));
      const int worth = 4 * warps * std::min(blocks, resident / warps) + stages;
      if (worth > best) plan = next;
      best = std::max(best, worth);
    }
  }
  return best > 0;
}

// Whether all rows of a tensor of heads of `size` are aligned.
template <typename T>
bool heads_aligned(const JetHeads& x, int64_t size) {
  return is_aligned<T>(x.data, x.stream, x.batch, x.head, x.token, size);
}

// Whether those of all that the backward loads are.
template <typename T>
bool backward_aligned(const AttentionProblem& problem, const JetHeads& gy) {
  return heads_aligned<T>(problem.query, problem.size) &&
         heads_aligned<T>(problem.key, problem.size) &&
         heads_aligned<T>(problem.value, problem.value_size) &&
         heads_aligned<T>(gy, problem.value_size);
}

// Calls f(Int<S>).
template <typename F>
int dispatch_attention_streams(const AttentionProblem& problem, const F& f) {
  const int streams = 1 + problem.q + problem.pairs;
  if (streams == 2) return f(Int<2>{});
  return streams == 3 ? f(Int<3>{}) : f(Int<4>{});
}

// Calls f(null pointer of the storage type, Int<S>); kNoTileFits for what the kernels do not serve.
template <typename F>
int dispatch_attention(const AttentionProblem& problem, const F& f) {
  if (problem.q > 2) return kNoTileFits;
  return dispatch_products(problem.storage, [&](auto* typed) {
    return dispatch_attention_streams(problem, [&](auto streams) { return f(typed, streams); });
  });
}

// ---- on the device ------------------------------------------------------------------------------

// What a block owns: tokens from `first` on of head `owner`, columns of the result from `column`.
// last_first: of a head's tiles, the last ones start first. The last queries of a causal head see
// most keys, and the first keys most queries; what starts last should be short.
struct BlockPlace {
  int first, owner, batch, column;

  __device__ inline BlockPlace(const AttentionPlan& plan, int owners, int columns,
                               bool last_first) {
    int block = static_cast<int>(blockIdx.x);
    column = block % plan.chunks * columns;
    block /= plan.chunks;
    const int tile = block % plan.tiles;
    first = (last_first ? plan.tiles - 1 - tile : tile) * plan.warps * kStrip;
    block /= plan.tiles;
    owner = block % owners;
    batch = block / owners;
  }
};

// Goes over the tiles next(0), next(... + 1) and so on, below `steps`: load(step, stage) starts to
// load one, use(step, stage) makes its products, `ahead` behind those of the tile before.
template <typename Next, typename Load, typename Use>
__device__ inline void go_over(int steps, bool ahead, const Next& next, const Load& load,
                               const Use& use) {
  int step = -1, stage = 0;  // before the first tile there is nothing to multiply
  while (step < steps) {
    const int following = next(step + 1), loaded = ahead ? following : step;
    if (loaded >= 0 && loaded < steps) load(loaded, ahead ? 1 - stage : stage);
    copy_async_commit();
    if (step >= 0) {
      if (ahead) {
        copy_async_wait<1>();
      } else {
        copy_async_wait<0>();
      }
      __syncthreads();
      use(step, stage);
      __syncthreads();
    }
    if (ahead) stage = 1 - stage;
    step = following;
  }
  copy_async_wait<0>();
}

// The powers of two that multiply a lane's two rows of weights, and with them what they have summed
// up, before they are rounded to T: 1 but for float16. Its range would hold neither the
// second-order stream of a weight whose score has tangents beyond 256 nor, to 11 bits, the
// gradients of scores that thousands of others share a row with.
template <typename T>
struct RowUnits {
  static constexpr bool kNeeded = std::is_same_v<T, Half>;
  static constexpr float kFirst = kNeeded ? 1099511627776.0f : 1.0f;  // 2^40: lowered at need
  static constexpr float kLargest = 32768.0f;  // that a row's weights come to, times its unit

  float unit[2] = {kFirst, kFirst};

  // Multiplies the weights; where a row has one that is larger than all before, its unit is
  // lowered, and its sums follow. A row's unit depends on nothing but its own weights.
  template <int S, int N, int V>
  __device__ inline void apply(float (&weights)[S][N / 8][4], float (&sums)[S][V / 8][4]) {
    if constexpr (kNeeded) {
      float top[2] = {}, factor[2];
      for_each_score<N>([&](int n, int e) {
        JACHESS_UNROLL
        for (int s = 0; s < S; ++s) top[e / 2] = ::fmaxf(::fabsf(weights[s][n][e]), top[e / 2]);
      });
      if (__any_sync(0xFFFFFFFFu, top[0] * unit[0] > kLargest || top[1] * unit[1] > kLargest)) {
        JACHESS_UNROLL
        for (int row = 0; row < 2; ++row) {
          warp_reduce<Larger, 1, 4>(&top[row]);
          // 2^13 over the power of two below the row's largest, which leaves it room to rise
          const uint32_t exponent = float_to_bits(top[row]) & 0x7F800000u;
          const float fitting = bits_to_float((267u << 23) - exponent);
          const float next = top[row] * unit[row] > kLargest ? fitting : unit[row];
          factor[row] = next / unit[row];
          unit[row] = next;
        }
        for_each_jet(
            sums, [&](int, int e, const float*, float* jet) { scale_jet<S>(factor[e / 2], jet); });
      }
      for_each_jet(weights,
                   [&](int, int e, const float*, float* jet) { scale_jet<S>(unit[e / 2], jet); });
    }
  }

  // Takes the unit of a row's sums away again.
  template <int S>
  __device__ inline void remove(int row, float (&jet)[S]) const {
    scale_jet<S>(1 / unit[row], jet);
  }
};

// Writes a strip's results: f(row, jet) of each entry's sums, row being 0 or 1 of a lane's two.
template <typename T, int S, int V, typename F>
__device__ inline void write_strip(const float (&sums)[S][V / 8][4], const RowUnits<T>& units,
                                   const JetHeads& out, const BlockPlace& block, int strip,
                                   int count, int size, const F& f) {
  T* to = static_cast<T*>(out.data) + block.batch * out.batch + block.owner * out.head;
  JACHESS_UNROLL
  for (int v = 0; v < V / 8; ++v) {
    JACHESS_UNROLL
    for (int e = 0; e < 4; ++e) {
      const int token = block.first + strip + lane_index() / 4 + e / 2 * 8;
      const int column = block.column + 8 * v + lane_index() % 4 * 2 + e % 2;
      if (token >= count || column >= size) continue;
      float jet[S];
      JACHESS_UNROLL
      for (int s = 0; s < S; ++s) jet[s] = sums[s][v][e];
      units.remove(e / 2, jet);
      f(e / 2, jet);
      JACHESS_UNROLL
      for (int s = 0; s < S; ++s) convert(jet[s], to[s * out.stream + token * out.token + column]);
    }
  }
}

}  // namespace jachess
