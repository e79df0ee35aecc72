// CUDA kernels of jachess::ntk_gram. A block has a tile of positions, counted through all samples.
//
//     shared memory, 2 or 3 stages            registers of 2 x 4 warps
//     left  [128 or 64 rows, 128 bytes]  \\    inputs' products      [64 or 32, 32] a warp
//     right [128 columns, 128 bytes]     //    cotangents', per pair of outputs
//     then  [rows, columns]  <-  both, multiplied  ->  sums per pair of samples  ->  scratch
//
// Features go by in stages of 128 bytes, layer after layer; the next ones are on their way while
// one is multiplied, on the tensor cores. A sample may reach over several tiles, so each tile
// leaves its own sums, and a second kernel adds those of a pair of samples in their order: the
// result does not depend on the order in which blocks run.
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
  static constexpr size_t kProductBytes = sizeof(accumulate_t<T>) * kRows * kLine;

  // Behind the stages: the places of the tile's rows and columns.
  static size_t place_bytes() { return sizeof(Place) * (kRows + kColumns); }
  static size_t shared_bytes(int stages) {
    const size_t bytes = sizeof(T) * kStage * static_cast<size_t>(stages);
    return place_bytes() + (bytes > kProductBytes ? bytes : kProductBytes);
  }
};

// A side as the kernel sees it.
struct DeviceSide {
  int64_t positions, rows;  // rows: positions of all samples
  bool aligned;             // every row starts, and ends, at a multiple of 16 bytes
  int64_t segments;         // most samples that a tile meets
  GramRows inputs, cotangents[kMostLayers];
};

struct DeviceProblem {
  DeviceSide left, right;
  int64_t outputs, left_samples, right_samples, tiles_across;
  int tile_rows, tile_columns;
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

// The rows that are multiplied: those of inputs, or of all layers' cotangents of one output.
struct Factor {
  const GramRows* rows;
  int64_t output;
};

template <typename T>
__device__ inline void advance(const Factor& factor, int layers, Feature& f) {
  f.at += GramTile<T>::kDepth;
  while (f.layer < layers && f.at >= factor.rows[f.layer].size) f = {f.layer + 1, 0};
}

// The first feature there is.
__device__ inline Feature first_feature(const Factor& factor, int layers) {
  Feature f = {0, 0};
  while (f.layer < layers && factor.rows[f.layer].size == 0) ++f.layer;
  return f;
}

__device__ inline void find_places(const DeviceSide& side, int64_t first, int count,
                                   Place* places) {
  for (int row = threadIdx.x; row < count; row += kThreads) {
    const int64_t r = first + row, sample = r / side.positions;
    places[row] = {r < side.rows ? static_cast<int32_t>(sample) : -1,
                   static_cast<int32_t>(r - sample * side.positions)};
  }
}

// Starts loading the rows at `count` places, kDepth features from f.at on; zeros beyond what there
// is.
template <typename T>
__device__ inline void load_rows(const DeviceSide& side, const Factor& factor, const Feature& f,
                                 const Place* places, int count, T* to) {
  using Tile = GramTile<T>;
  const GramRows& rows = factor.rows[f.layer];
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
  side.aligned ? each(std::true_type{}) : each(std::false_type{});
}

// ---- products -------------------------------------------------------------------------------

template <typename T>
using GramSums = accumulate_t<T>[GramTile<T>::kDown][GramTile<T>::kAcross][4];

template <typename T>
__device__ inline void multiply_stage(const T* stage, int width, GramSums<T>& sums) {
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
        M::multiply_add(sums[i][j], a[i], b[0]);
        M::multiply_add(sums[i][j + 1], a[i], b[1]);
      }
    }
  }
}

// sums = the tile's products of two factors over all their layers and features. While one stage is
// multiplied, the next ones are on their way.
template <typename T>
__device__ inline void multiply(const DeviceProblem& p, const Factor& left, const Factor& right,
                                int layers, const Place* places, T* shared, GramSums<T>& sums) {
  using Tile = GramTile<T>;
  JACHESS_UNROLL
  for (int e = 0; e < Tile::kDown * Tile::kAcross * 4; ++e)
    sums[e / (4 * Tile::kAcross)][e / 4 % Tile::kAcross][e % 4] = 0;
  Feature loading = first_feature(left, layers), multiplying = loading;
  int load_stage = 0, stage = 0;
  const auto load_next = [&] {
    if (loading.layer < layers) {
      T* to = shared + load_stage * Tile::kStage;
      load_rows(p.left, left, loading, places, Tile::kRows, to);
      load_rows(p.right, right, loading, places + Tile::kRows, Tile::kColumns,
                to + Tile::kRows * Tile::kLength);
      advance<T>(left, layers, loading);
    }
    copy_async_commit();
    load_stage = load_stage + 1 == p.stages ? 0 : load_stage + 1;
  };
  int missing = p.stages - 1;  // to be loaded before the first is multiplied
  while (multiplying.layer < layers) {
    if (missing == 0) {
      if (p.stages == 2) {
        copy_async_wait<0>();
      } else {
        copy_async_wait<1>();
      }
      __syncthreads();  // this stage is there, and all have done with the one before, to be loaded
    }
    load_next();
    if (missing > 0) {
      --missing;
      continue;
    }
    const int64_t rest = left.rows[multiplying.layer].size - multiplying.at;
    multiply_stage(shared + stage * Tile::kStage,
                   rest < Tile::kDepth ? static_cast<int>(rest) : Tile::kDepth, sums);
    advance<T>(left, layers, multiplying);
    stage = stage + 1 == p.stages ? 0 : stage + 1;
  }
  copy_async_wait<0>();
  __syncthreads();  // the stages may be written over
}

// ---- sums per pair of samples -----------------------------------------------------------------

// Rows [begin, end) of a tile that belong to one sample.
struct Segment {
  int begin, end;
};

// Segment `number` of the tile of `count` rows from `first` on; empty where there is none.
__device__ inline Segment segment_of(const DeviceSide& side, int64_t first, int count, int number) {
  const int64_t sample = first / side.positions + number;
  int64_t begin = sample * side.positions - first, end = begin + side.positions;
  const int64_t rows = side.rows - first < count ? side.rows - first : count;
  begin = begin < 0 ? 0 : begin;
  end = end < rows ? end : rows;
  return {static_cast<int>(begin), static_cast<int>(end < begin ? begin : end)};
}

// products [kRows][kLine] = gram * sums, element by element; 0 where the cotangents' product is, so
// that positions without cotangents add nothing even where their inputs are infinite.
template <typename T>
__device__ inline void store_products(const GramSums<T>& gram, const GramSums<T>& sums,
                                      accumulate_t<T>* products) {
  using Tile = GramTile<T>;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int g = lane_index() / 4, t = lane_index() % 4;
  const int row = warp / kWarpsAcross * Tile::kDown * kMmaRows + g;
  const int column = warp % kWarpsAcross * Tile::kAcross * kMmaColumns + 2 * t;
  JACHESS_UNROLL
  for (int i = 0; i < Tile::kDown; ++i) {
    JACHESS_UNROLL
    for (int j = 0; j < Tile::kAcross; ++j) {
      JACHESS_UNROLL
      for (int e = 0; e < 4; ++e) {
        accumulate_t<T>* to =
            products + (row + i * kMmaRows + e / 2 * 8) * Tile::kLine + column + j * kMmaColumns;
        to[e % 2] = sums[i][j][e] == 0 ? accumulate_t<T>(0) : gram[i][j][e] * sums[i][j][e];
      }
    }
  }
}

// out[left segment][right segment] = sums of the products, in the order of rows, then of columns.
template <typename T>
__device__ inline void sum_segments(const DeviceProblem& p, int64_t row, int64_t column,
                                    accumulate_t<T>* products, accumulate_t<T>* out) {
  using Tile = GramTile<T>;
  using A = accumulate_t<T>;
  const int down = static_cast<int>(p.left.segments), across = static_cast<int>(p.right.segments);
  __syncthreads();
  for (int i = threadIdx.x; i < down * Tile::kColumns; i += kThreads) {
    const Segment rows = segment_of(p.left, row, Tile::kRows, i / Tile::kColumns);
    A* line = products + i % Tile::kColumns;
    A sum = A(0);
    for (int r = rows.begin; r < rows.end; ++r) sum += line[r * Tile::kLine];
    if (rows.begin < rows.end) line[rows.begin * Tile::kLine] = sum;
  }
  __syncthreads();
  // A group of lanes for each pair of samples; whole warps stay together.
  const int pairs = down * across, lane = static_cast<int>(threadIdx.x) % p.lanes;
  for (int begin = 0; begin < pairs; begin += kThreads / p.lanes) {
    const int pair = begin + static_cast<int>(threadIdx.x) / p.lanes;
    A sum = A(0);
    if (pair < pairs) {
      const Segment rows = segment_of(p.left, row, Tile::kRows, pair / across);
      const Segment columns = segment_of(p.right, column, Tile::kColumns, pair % across);
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
    gram_kernel(const __grid_constant__ DeviceProblem p, accumulate_t<T>* __restrict__ scratch) {
  using Tile = GramTile<T>;
  using A = accumulate_t<T>;
  const int64_t row = static_cast<int64_t>(blockIdx.x) / p.tiles_across * Tile::kRows;
  const int64_t column = static_cast<int64_t>(blockIdx.x) % p.tiles_across * Tile::kColumns;
  if (p.symmetric) {  // only pairs of samples with the right one not before the left one are wanted
    const int64_t end = column + Tile::kColumns;
    const int64_t last = (end < p.right.rows ? end : p.right.rows) - 1;
    if (last / p.right.positions < row / p.left.positions) return;
  }
  Place* places = reinterpret_cast<Place*>(dynamic_shared_memory());
  T* shared = reinterpret_cast<T*>(places + Tile::kRows + Tile::kColumns);
  A* products = reinterpret_cast<A*>(shared);
  find_places(p.left, row, Tile::kRows, places);
  find_places(p.right, column, Tile::kColumns, places + Tile::kRows);
  __syncthreads();
  GramSums<T> gram, sums;
  multiply<T>(p, {&p.left.inputs, 0}, {&p.right.inputs, 0}, 1, places, shared, gram);
  const int64_t pairs = p.left.segments * p.right.segments;
  A* out = scratch + blockIdx.x * p.outputs * p.outputs * pairs;
  for (int64_t c = 0; c < p.outputs; ++c) {
    for (int64_t d = 0; d < p.outputs; ++d) {
      multiply<T>(p, {p.left.cotangents, c}, {p.right.cotangents, d}, p.layers, places, shared,
                  sums);
      store_products<T>(gram, sums, products);
      sum_segments<T>(p, row, column, products, out);
      out += pairs;
    }
  }
}

// One element of the result [C, N, C, M] per thread: the sum over the tiles that the two samples
// reach over.
template <typename A>
__global__ void __launch_bounds__(kThreads, 1)
    gram_sum_kernel(const __grid_constant__ DeviceProblem p, const A* __restrict__ scratch,
                    A* __restrict__ result) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t m = at % p.right_samples, d = at / p.right_samples % p.outputs;
  const int64_t n = at / (p.right_samples * p.outputs) % p.left_samples;
  const int64_t c = at / (p.right_samples * p.outputs * p.left_samples);
  if (c >= p.outputs) return;
  if (p.symmetric && (m < n || (m == n && d < c))) return;
  const int64_t top = n * p.left.positions / p.tile_rows;
  const int64_t bottom = ((n + 1) * p.left.positions - 1) / p.tile_rows;
  const int64_t begin = m * p.right.positions / p.tile_columns;
  const int64_t end = ((m + 1) * p.right.positions - 1) / p.tile_columns;
  double sum = 0;
  for (int64_t i = top; i <= bottom; ++i) {
    for (int64_t j = begin; j <= end; ++j) {
      const int64_t tile = ((i * p.tiles_across + j) * p.outputs + c) * p.outputs + d;
      const int64_t left = n - i * p.tile_rows / p.left.positions;
      const int64_t right = m - j * p.tile_columns / p.right.positions;
      sum += scratch[(tile * p.left.segments + left) * p.right.segments + right];
    }
  }
  if (p.add) sum += result[at];
  result[at] = static_cast<A>(sum);
  if (p.symmetric)
    result[((d * p.left_samples + m) * p.outputs + c) * p.right_samples + n] = static_cast<A>(sum);
}

// ---- host -----------------------------------------------------------------------------------

template <typename T>
bool rows_aligned(const GramRows& rows) {
  return is_aligned<T>(rows.data, rows.output, rows.sample, rows.position, rows.size);
}

template <typename T>
DeviceSide device_side(const GramSide& side, int64_t layers, int tile) {
  const int64_t most = 2 + (tile - 2) / side.positions;
  DeviceSide device = {};
  device.positions = side.positions;
  device.rows = side.samples * side.positions;
  device.segments = most < side.samples ? most : side.samples;
  device.inputs = side.inputs;
  device.aligned = rows_aligned<T>(side.inputs);
  for (int64_t l = 0; l < layers; ++l) device.aligned &= rows_aligned<T>(side.cotangents[l]);
  return device;
}

template <typename T>
DeviceProblem device_problem(const GramProblem& p) {
  DeviceProblem device = {};
  device.left = device_side<T>(p.left, p.layers, GramTile<T>::kRows);
  device.right = device_side<T>(p.right, p.layers, GramTile<T>::kColumns);
  device.outputs = p.outputs;
  device.left_samples = p.left.samples;
  device.right_samples = p.right.samples;
  device.tiles_across = ceil_divide(device.right.rows, GramTile<T>::kColumns);
  device.tile_rows = GramTile<T>::kRows;
  device.tile_columns = GramTile<T>::kColumns;
  device.lanes = 1;
  while (device.lanes < kWarp && 2 * device.lanes <= p.right.positions) device.lanes *= 2;
  device.symmetric = p.symmetric;
  return device;
}

template <typename T>
int64_t tiles(const DeviceProblem& p) {
  return ceil_divide(p.left.rows, GramTile<T>::kRows) * p.tiles_across;
}

template <typename T>
int run(const GramProblem& problem, void* scratch, void* result, Queue queue) {
  using A = accumulate_t<T>;
  DeviceProblem p = device_problem<T>(problem);
  const size_t limit = shared_memory_limit(queue.device);
  p.stages = GramTile<T>::shared_bytes(3) <= limit ? 3 : 2;
  const size_t bytes = GramTile<T>::shared_bytes(p.stages);
  if (bytes > limit) return kNoTileFits;
  const int64_t elements = p.outputs * p.left_samples * p.outputs * p.right_samples;
  for (int64_t first = 0; first < problem.layers; first += kMostLayers) {
    const int64_t rest = problem.layers - first;
    p.layers = static_cast<int>(rest < kMostLayers ? rest : kMostLayers);
    p.add = first > 0;
    for (int l = 0; l < p.layers; ++l) {
      p.left.cotangents[l] = problem.left.cotangents[first + l];
      p.right.cotangents[l] = problem.right.cotangents[first + l];
    }
    int error = launch_with_shared(gram_kernel<T>, tiles<T>(p), kThreads, bytes, queue, p,
                                   static_cast<A*>(scratch));
    if (error != 0) return error;
    error = launch(gram_sum_kernel<A>, ceil_divide(elements, kThreads), kThreads, queue, p,
                   static_cast<const A*>(scratch), static_cast<A*>(result));
    if (error != 0) return error;
  }
  return 0;
}

}  // namespace

GramScratch ntk_gram_scratch(const GramProblem& problem) {
  GramScratch scratch = {};
  dispatch_storage(problem.storage, [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    const DeviceProblem p = device_problem<T>(problem);
    const int64_t pairs = p.outputs * p.outputs * p.left.segments * p.right.segments;
    const int64_t elements = p.outputs * p.left_samples * p.outputs * p.right_samples;
    const int64_t blocks = tiles<T>(p), sums = ceil_divide(elements, kThreads);
    scratch = {blocks * pairs, blocks > sums ? blocks : sums};
    return 0;
  });
  return scratch;
}

int ntk_gram_cuda(const GramProblem& problem, void* scratch, void* result, Queue queue) {
  return dispatch_storage(problem.storage, [&](auto* typed) {
    return run<std::remove_pointer_t<decltype(typed)>>(problem, scratch, result, queue);
  });
}

}  // namespace jachess
