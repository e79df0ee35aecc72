// CUDA kernels of jachess::ntk_gram. A block has a tile of positions, counted through all samples.
//
//     shared memory, 2 or 3 stages            registers of 2 x 4 warps
//     left  [128 or 64 rows, 128 bytes]  \\    inputs' products      [64 or 32, 32] a warp
//     right [128 columns, 128 bytes]     //    cotangents', per pair of outputs
//     then  [rows, columns]  <-  both, multiplied  ->  sums per pair of samples  ->  scratch
//
// Where there are fewer tiles than multiprocessors, several blocks share one, each with some of the
// pairs of outputs.
//
// Features go by in stages of 128 bytes, layer after layer; the next ones are on their way while
// one is multiplied, on the tensor cores. A sample may reach over several tiles, so each tile
// leaves its own sums, and a second kernel adds those of a pair of samples in their order: the
// result does not depend on the order in which blocks run. float64 has no kernel.
#include <algorithm>

#include "mma.h"

namespace jachess {
namespace {

constexpr int kThreads = 256;
constexpr int kWarpsDown = 2, kWarpsAcross = 4;
constexpr int kMostLayers = 8;  // of one launch; more are added up

// Of a row of a side; sample -1: there is none.
struct Place {
  int32_t sample, position;
};

template <typename T>
struct GramTile {
  // mma tiles of a warp; the accumulators of both Gram matrices must fit the registers
  static constexpr int kDown = sizeof(T) == 2 ? 4 : 2, kAcross = 4;
  static constexpr int kRows = kWarpsDown * kDown * kMmaRows;
  static constexpr int kColumns = kWarpsAcross * kAcross * kMmaColumns;
  static constexpr int kDepth = 128 / sizeof(T);               // features in shared memory
  static constexpr int kLength = kDepth + 16 / sizeof(T);      // of a row there: other banks
  static constexpr int kStage = (kRows + kColumns) * kLength;  // numbers of one stage
  static constexpr int kLine = kColumns + 4;                   // of a row of products
  static constexpr size_t kProductBytes = sizeof(float) * kRows * kLine;

  struct Sums {
    float at[kDown][kAcross][4];
  };

  // Behind the stages: the places of the tile's rows and columns.
  static size_t shared_bytes(int stages) {
    const size_t bytes = sizeof(T) * kStage * static_cast<size_t>(stages);
    return sizeof(Place) * (kRows + kColumns) + (bytes > kProductBytes ? bytes : kProductBytes);
  }
};

// A side as the kernel sees it.
struct DeviceSide {
  int64_t samples, positions, rows;    // rows: positions of all samples
  int64_t tiles, segments;             // segments: most samples that a tile meets
  int tile;                            // rows of one
  bool aligned;                        // every row starts, and ends, at a multiple of 16 bytes
  GramRows operands[1 + kMostLayers];  // inputs, then cotangents
};

struct DeviceProblem {
  DeviceSide left, right;
  int64_t outputs;
  int64_t parts, each;  // blocks of a tile, and the pairs of outputs of one of them
  int layers, stages;
  int lanes;            // that add the columns of one sample, a power of two
  bool symmetric, add;  // add: to what the result holds
};

// ---- operands -------------------------------------------------------------------------------

// Where a product of one pair of outputs is: layer, and feature in it.
struct Feature {
  int layer;
  int64_t at;
};

// The rows that are multiplied: those of the operands [first, end) of a side, of one output.
struct Factor {
  const DeviceSide& side;
  int first, end;
  int64_t output;

  // Whether there is something of f on: it moves to the next layer where one has ended.
  __device__ inline bool reaches(Feature& f) const {
    while (f.layer < end && f.at >= side.operands[f.layer].size) f = {f.layer + 1, 0};
    return f.layer < end;
  }
};

__device__ inline void find_places(const DeviceSide& side, int64_t first, Place* places) {
  for (int row = threadIdx.x; row < side.tile; row += kThreads) {
    const int64_t r = first + row, sample = r / side.positions;
    places[row] = {r < side.rows ? static_cast<int32_t>(sample) : -1,
                   static_cast<int32_t>(r - sample * side.positions)};
  }
}

// Starts loading the rows at `count` places, kDepth features from f.at on; zeros beyond what there
// is.
template <typename T, int count>
__device__ inline void load_rows(const Factor& factor, const Feature& f, const Place* places,
                                 T* to) {
  using Tile = GramTile<T>;
  const GramRows& rows = factor.side.operands[f.layer];
  const T* data = static_cast<const T*>(rows.data) + factor.output * rows.output + f.at;
  const auto each = [&](auto aligned) {
    constexpr int group = decltype(aligned)::value ? 16 / static_cast<int>(sizeof(T)) : 1;
    constexpr int per_row = Tile::kDepth / group;  // divides kThreads: k is the thread's own
    const int k = static_cast<int>(threadIdx.x) % per_row * group;
    const bool some = f.at + k < rows.size;
#pragma unroll group> 1 ? 4 : 1
    for (int row = static_cast<int>(threadIdx.x) / per_row; row < count;
         row += kThreads / per_row) {
      const Place place = places[row];
      const bool inside = some && place.sample >= 0;
      const T* from =
          data + (inside ? place.sample * rows.sample + place.position * rows.position + k : 0);
      T* target = to + row * Tile::kLength + k;
      if constexpr (group > 1) {
        copy_async_16(target, from, inside);
      } else {
        *target = inside ? *from : T{};
      }
    }
  };
  factor.side.aligned ? each(std::true_type{}) : each(std::false_type{});
}

// ---- products -------------------------------------------------------------------------------

template <typename T>
__device__ inline void multiply_stage(const T* stage, int width, typename GramTile<T>::Sums& sums) {
  using Tile = GramTile<T>;
  using M = Mma<T>;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const T* a_rows = stage + warp / kWarpsAcross * Tile::kDown * kMmaRows * Tile::kLength;
  const T* b_rows = stage + Tile::kRows * Tile::kLength +
                    warp % kWarpsAcross * Tile::kAcross * kMmaColumns * Tile::kLength;
#pragma unroll 1
  for (int k = 0; k < width; k += M::kDepth) {
    typename M::A a[Tile::kDown];
    JACHESS_UNROLL
    for (int i = 0; i < Tile::kDown; ++i)
      M::load_a(a_rows + i * kMmaRows * Tile::kLength + k, Tile::kLength, a[i]);
    JACHESS_UNROLL
    for (int j = 0; j < Tile::kAcross; j += 2) {
      typename M::B b[2];
      M::load_b_by_column(b_rows + j * kMmaColumns * Tile::kLength + k, Tile::kLength, b);
      JACHESS_UNROLL
      for (int i = 0; i < Tile::kDown; ++i) {
        M::multiply_add(sums.at[i][j], a[i], b[0]);
        M::multiply_add(sums.at[i][j + 1], a[i], b[1]);
      }
    }
  }
}

// The tile's products of two factors over all their layers and features. While one stage is
// multiplied, the next ones are on their way.
template <typename T>
__device__ inline typename GramTile<T>::Sums multiply(const Factor& left, const Factor& right,
                                                      int stages, const Place* places, T* shared) {
  using Tile = GramTile<T>;
  typename Tile::Sums sums = {};
  Feature loading = {left.first, 0}, multiplying = loading;
  int load_stage = 0, stage = 0;
  for (int missing = stages - 1; left.reaches(multiplying);) {  // to be loaded before the first
    if (missing <= 0) {
      if (stages == 2) {
        copy_async_wait<0>();
      } else {
        copy_async_wait<1>();
      }
      __syncthreads();  // this stage is there, and all have done with the one before, to be loaded
    }
    if (left.reaches(loading)) {
      T* to = shared + load_stage * Tile::kStage;
      load_rows<T, Tile::kRows>(left, loading, places, to);
      load_rows<T, Tile::kColumns>(right, loading, places + Tile::kRows,
                                   to + Tile::kRows * Tile::kLength);
      loading.at += Tile::kDepth;
    }
    copy_async_commit();
    load_stage = load_stage + 1 == stages ? 0 : load_stage + 1;
    if (missing-- > 0) continue;
    const int64_t rest = left.side.operands[multiplying.layer].size - multiplying.at;
    multiply_stage<T>(shared + stage * Tile::kStage,
                      rest < Tile::kDepth ? static_cast<int>(rest) : Tile::kDepth, sums);
    multiplying.at += Tile::kDepth;
    stage = stage + 1 == stages ? 0 : stage + 1;
  }
  copy_async_wait<0>();
  __syncthreads();  // the stages may be written over
  return sums;
}

// ---- sums per pair of samples -----------------------------------------------------------------

// The rows of a side that a tile has: how many, and the position of the first in its sample.
struct Strip {
  int64_t position;
  int rows;
};

__device__ inline Strip strip_of(const DeviceSide& side, int64_t first) {
  const int64_t rest = side.rows - first;
  return {first % side.positions, rest < side.tile ? static_cast<int>(rest) : side.tile};
}

// Rows [begin, end) of a tile that belong to one sample.
struct Segment {
  int begin, end;
};

// Segment `number` of a strip; empty where there is none.
__device__ inline Segment segment_of(const DeviceSide& side, const Strip& strip, int number) {
  int64_t begin = number * side.positions - strip.position, end = begin + side.positions;
  begin = begin < 0 ? 0 : begin;
  end = end < strip.rows ? end : strip.rows;
  return {static_cast<int>(begin), static_cast<int>(end < begin ? begin : end)};
}

// products [kRows][kLine] = gram * sums, element by element; 0 where the cotangents' product is, so
// that positions without cotangents add nothing even where their inputs are infinite.
template <typename T>
__device__ inline void store_products(const typename GramTile<T>::Sums& gram,
                                      const typename GramTile<T>::Sums& sums, float* products) {
  using Tile = GramTile<T>;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int g = lane_index() / 4, t = lane_index() % 4;
  const int row = warp / kWarpsAcross * Tile::kDown * kMmaRows + g;
  const int column = warp % kWarpsAcross * Tile::kAcross * kMmaColumns + 2 * t;
  JACHESS_UNROLL
  for (int n = 0; n < Tile::kDown * Tile::kAcross * 4; ++n) {
    const int i = n / (4 * Tile::kAcross), j = n / 4 % Tile::kAcross, e = n % 4;
    const float product = sums.at[i][j][e];
    products[(row + i * kMmaRows + e / 2 * 8) * Tile::kLine + column + j * kMmaColumns + e % 2] =
        product == 0 ? 0 : gram.at[i][j][e] * product;
  }
}

// out[left segment][right segment] = sums of the products, in the order of rows, then of columns.
template <typename T>
__device__ inline void sum_segments(const DeviceProblem& p, const Strip& left, const Strip& right,
                                    float* products, float* out) {
  using Tile = GramTile<T>;
  const int down = static_cast<int>(p.left.segments), across = static_cast<int>(p.right.segments);
  __syncthreads();
  for (int i = threadIdx.x; i < down * Tile::kColumns; i += kThreads) {
    const Segment rows = segment_of(p.left, left, i / Tile::kColumns);
    float* line = products + i % Tile::kColumns;
    float sum = 0;
    for (int r = rows.begin; r < rows.end; ++r) sum += line[r * Tile::kLine];
    if (rows.begin < rows.end) line[rows.begin * Tile::kLine] = sum;
  }
  __syncthreads();
  // A group of lanes for each pair of samples; whole warps stay together.
  const int pairs = down * across, lane = static_cast<int>(threadIdx.x) % p.lanes;
  for (int begin = 0; begin < pairs; begin += kThreads / p.lanes) {
    const int pair = begin + static_cast<int>(threadIdx.x) / p.lanes;
    float sum = 0;
    if (pair < pairs) {
      const Segment rows = segment_of(p.left, left, pair / across);
      const Segment columns = segment_of(p.right, right, pair % across);
      if (rows.begin < rows.end)
        for (int c = columns.begin + lane; c < columns.end; c += p.lanes)
          sum += products[rows.begin * Tile::kLine + c];
    }
    for (int offset = p.lanes / 2; offset > 0; offset /= 2)
      sum += __shfl_xor_sync(0xFFFFFFFFu, sum, offset);
    if (pair < pairs && lane == 0) out[pair] = sum;
  }
  __syncthreads();  // before the products' memory takes operands again
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    gram_kernel(const __grid_constant__ DeviceProblem p, float* __restrict__ scratch) {
  using Tile = GramTile<T>;
  const DeviceSide &left = p.left, &right = p.right;
  const int64_t tile = blockIdx.x / p.parts;
  const int64_t row = tile / right.tiles * Tile::kRows;
  const int64_t column = tile % right.tiles * Tile::kColumns;
  if (p.symmetric) {  // only pairs of samples with the right one not before the left one are wanted
    const int64_t end = column + Tile::kColumns;
    const int64_t last = (end < right.rows ? end : right.rows) - 1;
    if (last / right.positions < row / left.positions) return;
  }
  Place* places = reinterpret_cast<Place*>(dynamic_shared_memory());
  T* shared = reinterpret_cast<T*>(places + Tile::kRows + Tile::kColumns);
  float* products = reinterpret_cast<float*>(shared);
  find_places(left, row, places);
  find_places(right, column, places + Tile::kRows);
  __syncthreads();
  const typename Tile::Sums gram =
      multiply<T>({left, 0, 1, 0}, {right, 0, 1, 0}, p.stages, places, shared);
  const Strip rows = strip_of(left, row), columns = strip_of(right, column);
  const int64_t pairs = left.segments * right.segments, all = p.outputs * p.outputs;
  const int64_t begin = blockIdx.x % p.parts * p.each;
  const int64_t end = begin + p.each < all ? begin + p.each : all;
  float* out = scratch + (tile * all + begin) * pairs;
  for (int64_t n = begin; n < end; ++n) {
    const typename Tile::Sums sums =
        multiply<T>({left, 1, 1 + p.layers, n / p.outputs}, {right, 1, 1 + p.layers, n % p.outputs},
                    p.stages, places, shared);
    store_products<T>(gram, sums, products);
    sum_segments<T>(p, rows, columns, products, out);
    out += pairs;
  }
}

// The tiles that a sample reaches over, and how many samples the first of them meets before it.
struct Reach {
  int64_t first, last;
  int before;
};

template <int tile>
__device__ inline Reach reach_of(const DeviceSide& side, int64_t sample) {
  const int64_t row = sample * side.positions, first = row / tile;
  const int positions = side.positions < tile ? static_cast<int>(side.positions) : tile;
  const int rows = static_cast<int>(row - first * tile);
  return {first, (row + side.positions - 1) / tile, (rows + positions - 1) / positions};
}

// Row [c, n] of the result [C, N, C, M] per block: sums over the tiles that the two samples reach
// over.
template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    gram_sum_kernel(const __grid_constant__ DeviceProblem p, const float* __restrict__ scratch,
                    float* __restrict__ result) {
  using Tile = GramTile<T>;
  const DeviceSide &left = p.left, &right = p.right;
  const unsigned samples = static_cast<unsigned>(right.samples);
  const unsigned width = static_cast<unsigned>(p.outputs) * samples;
  const int64_t c = blockIdx.x / left.samples, n = blockIdx.x % left.samples;
  const Reach down = reach_of<Tile::kRows>(left, n);
  for (unsigned at = threadIdx.x; at < width; at += kThreads) {
    const int64_t d = at / samples, m = at % samples;
    if (p.symmetric && (m < n || (m == n && d < c))) continue;
    const Reach across = reach_of<Tile::kColumns>(right, m);
    double sum = 0;
    for (int64_t i = down.first; i <= down.last; ++i) {
      for (int64_t j = across.first; j <= across.last; ++j) {
        const int64_t tile = ((i * right.tiles + j) * p.outputs + c) * p.outputs + d;
        const int above = i == down.first ? down.before : 0;
        const int before = j == across.first ? across.before : 0;
        sum += scratch[(tile * left.segments + above) * right.segments + before];
      }
    }
    float* target = result + static_cast<int64_t>(blockIdx.x) * width + at;
    if (p.add) sum += *target;
    *target = static_cast<float>(sum);
    if (p.symmetric) result[((d * left.samples + m) * p.outputs + c) * right.samples + n] = *target;
  }
}

// ---- host -----------------------------------------------------------------------------------

template <typename T>
DeviceSide device_side(const GramSide& side, int64_t layers, int tile) {
  const int64_t rows = side.samples * side.positions, most = 2 + (tile - 2) / side.positions;
  DeviceSide device = {side.samples,
                       side.positions,
                       rows,
                       ceil_divide(rows, tile),
                       most < side.samples ? most : side.samples,
                       tile,
                       true,
                       {side.inputs}};
  for (int64_t l = -1; l < layers; ++l) {
    const GramRows& r = l < 0 ? side.inputs : side.cotangents[l];
    device.aligned &= is_aligned<T>(r.data, r.output, r.sample, r.position, r.size);
  }
  return device;
}

template <typename T>
DeviceProblem device_problem(const GramProblem& p) {
  DeviceProblem device = {device_side<T>(p.left, p.layers, GramTile<T>::kRows),
                          device_side<T>(p.right, p.layers, GramTile<T>::kColumns), p.outputs};
  device.lanes = 1;
  while (device.lanes < kWarp && 2 * device.lanes <= p.right.positions) device.lanes *= 2;
  device.symmetric = p.symmetric;
  return device;
}

// Shares the pairs of outputs of a tile out among blocks, as long as no multiprocessor gets two.
void share_pairs(DeviceProblem& p, int multiprocessors) {
  int64_t tiles = p.left.tiles * p.right.tiles;
  if (p.symmetric) tiles = (tiles + p.right.tiles) / 2;  // the others have nothing to do
  const int64_t pairs = p.outputs * p.outputs, most = multiprocessors / tiles;
  p.each = ceil_divide(pairs, most < 1 ? 1 : most);
  p.parts = ceil_divide(pairs, p.each);
}

}  // namespace

GramScratch ntk_gram_scratch(const GramProblem& problem) {
  GramScratch scratch = {};
  dispatch_products(problem.storage, [&](auto* typed) {
    const DeviceProblem p = device_problem<std::remove_pointer_t<decltype(typed)>>(problem);
    const int64_t tiles = p.left.tiles * p.right.tiles;
    const int64_t rows = p.outputs * p.left.samples, width = p.outputs * p.right.samples;
    scratch = {tiles * p.outputs * p.outputs * p.left.segments * p.right.segments,
               std::max({tiles, rows, width})};
    return 0;
  });
  return scratch;
}

int ntk_gram_cuda(const GramProblem& problem, float* scratch, float* result, Queue queue) {
  return dispatch_products(problem.storage, [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    DeviceProblem p = device_problem<T>(problem);
    const size_t limit = shared_memory_limit(queue.device);
    p.stages = GramTile<T>::shared_bytes(3) <= limit ? 3 : 2;
    const size_t bytes = GramTile<T>::shared_bytes(p.stages);
    if (bytes > limit) return kNoTileFits;
    share_pairs(p, multiprocessors(queue.device));
    int error = 0;
    for (int64_t first = 0; first < problem.layers && error == 0; first += kMostLayers) {
      const int64_t rest = problem.layers - first;
      p.layers = static_cast<int>(rest < kMostLayers ? rest : kMostLayers);
      p.add = first > 0;
      for (int l = 0; l < p.layers; ++l) {
        p.left.operands[1 + l] = problem.left.cotangents[first + l];
        p.right.operands[1 + l] = problem.right.cotangents[first + l];
      }
      error = launch_with_shared(gram_kernel<T>, p.left.tiles * p.right.tiles * p.parts, kThreads,
                                 bytes, queue, p, scratch);
      if (error == 0)
        error = launch(gram_sum_kernel<T>, p.outputs * p.left.samples, kThreads, queue, p, scratch,
                       result);
    }
    return error;
  });
}

}  // namespace jachess
