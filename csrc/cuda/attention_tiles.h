// Tiles of the attention kernels: from global to shared memory, and the products of tiles' jets.
//
// A tile of rows lies in shared memory as [S][rows][ld]. A block has eight warps. The results of a
// product are cut into units (a stream, some rows, some columns), shared out over the warps from
// the streams with most terms to those with fewest, back and forth, so that the sums are even.
#pragma once

#include "attention_terms.h"
#include "mma.h"

namespace jachess {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kMostColumns = 32;   // columns of a tile of scores
constexpr int kSpan = 32;          // columns of an output unit, and what head sizes are padded to
constexpr int kScoreColumns = 16;  // columns of a unit of scores
constexpr int kBankShift = 4;      // entries by which rows of sums lie apart from a multiple of 16

JACHESS_HD constexpr int round_up(int n, int multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// Length of a row of `width` elements in shared memory: 16 bytes more, so that rows of a fragment
// lie in different banks.
template <typename T>
JACHESS_HD constexpr int padded(int width) {
  return width + 16 / static_cast<int>(sizeof(T));
}

// How much of a head a tile holds in shared memory: all of it, loaded once, or pieces in turn.
struct HeadCut {
  bool whole;
  int depth;  // of a piece
};
constexpr HeadCut kHeadCuts[] = {{true, 0}, {false, 64}, {false, 32}};

// Unit number `round` of this warp.
__device__ inline int unit_of_warp(int round) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  return round * kWarps + (round % 2 ? kWarps - 1 - warp : warp);
}

template <typename T>
struct Tile {
  T* data;
  int rows, ld;  // rows per stream

  __device__ inline T* at(int stream, int row, int column) const {
    return data + (stream * rows + row) * ld + column;
  }
};

// Rows of one head in global memory.
template <typename T>
struct Rows {
  const T* data;
  int64_t stream, row;  // strides
  int count, size;      // rows and columns there are
  bool aligned;         // every row starts, and ends, at a multiple of 16 bytes
};

template <typename T>
inline bool is_aligned(const JetHeads& x, int64_t size) {
  const int64_t bytes = static_cast<int64_t>(sizeof(T));
  return ((reinterpret_cast<intptr_t>(x.data) | x.stream * bytes | x.batch * bytes |
           x.head * bytes | x.token * bytes | size * bytes) &
          15) == 0;
}

template <typename T>
__device__ inline Rows<T> rows_of(const JetHeads& x, int batch, int head, int count, int size,
                                  bool aligned) {
  return {static_cast<const T*>(x.data) + batch * x.batch + head * x.head,
          x.stream,
          x.token,
          count,
          size,
          aligned};
}

// Starts loading columns [column, column + width) of `tile.rows` rows from `first` of every stream;
// zeros beyond what there is. Done after copy_async_commit, copy_async_wait and __syncthreads.
template <typename T>
__device__ inline void load_tile(const Tile<T>& tile, const Rows<T>& from, int streams, int first,
                                 int column, int width) {
  const int group = from.aligned ? 16 / static_cast<int>(sizeof(T)) : 1;
  const int per_row = width / group;
  // Divided once; from there a thread goes kThreads pieces on, by additions.
  const int lines = kThreads / per_row, pieces = kThreads - lines * per_row;
  const int line = static_cast<int>(threadIdx.x) / per_row;
  int piece = static_cast<int>(threadIdx.x) - line * per_row;
  int s = line / tile.rows, r = line - s * tile.rows;
  const auto go_on = [&] {
    piece += pieces;
    r += lines;
    if (piece >= per_row) {
      piece -= per_row;
      ++r;
    }
    while (r >= tile.rows) {
      r -= tile.rows;
      ++s;
    }
  };
  for (; s < streams; go_on()) {
    const int c = piece * group;
    T* to = tile.at(s, r, c);
    const bool inside = first + r < from.count && column + c < from.size;
    const T* source = from.data + s * from.stream + (first + r) * from.row + column + c;
    if (inside && from.aligned) {
      copy_async_16(to, source);
    } else if (inside) {
      *to = *source;
    } else {
      for (int i = 0; i < group; ++i) to[i] = T{};
    }
  }
}

// scores[s][row][column] (+)= Σ terms rows_a[row] · columns_b[column] over `width` entries.
template <int unit_rows, typename T, typename A>
__device__ inline void multiply_scores(const Tile<T>& rows, const Tile<T>& columns, int width,
                                       const TermTable& terms, int streams, bool accumulate,
                                       const Tile<A>& scores) {
  using M = Mma<T>;
  constexpr int blocks = unit_rows / kMmaRows;
  const int across = columns.rows / kScoreColumns, down = rows.rows / unit_rows;
  const int per_stream = across * down, units = streams * per_stream;
  const int g = lane_index() / 4, t = lane_index() % 4;
  for (int round = 0; round * kWarps < units; ++round) {
    const int unit = unit_of_warp(round);
    if (unit >= units) continue;
    const int s = terms.order[unit / per_stream], place = unit % per_stream;
    const int row = place / across * unit_rows, column = place % across * kScoreColumns;
    A c[blocks][2][4] = {};
    for (int term = 0; term < terms.count[s]; ++term) {
      const T* a_tile = rows.at(terms.row[s][term], row, 0);
      const T* b_tile = columns.at(terms.column[s][term], column, 0);
#pragma unroll 2
      for (int k = 0; k < width; k += M::kDepth) {
        typename M::A a[blocks];
        typename M::B b[2];
        JACHESS_UNROLL
        for (int m = 0; m < blocks; ++m)
          M::load_a(a_tile + m * kMmaRows * rows.ld + k, rows.ld, a[m]);
        M::load_b_by_column(b_tile + k, columns.ld, b);
        JACHESS_UNROLL
        for (int m = 0; m < blocks; ++m) {
          M::multiply_add(c[m][0], a[m], b[0]);
          M::multiply_add(c[m][1], a[m], b[1]);
        }
      }
    }
    JACHESS_UNROLL
    for (int m = 0; m < blocks; ++m) {
      JACHESS_UNROLL
      for (int e = 0; e < 8; ++e) {
        A* to = scores.at(s, row + m * kMmaRows + g + e % 4 / 2 * 8,
                          column + e / 4 * kMmaColumns + 2 * t + e % 2);
        *to = accumulate ? *to + c[m][e / 4][e % 4] : c[m][e / 4][e % 4];
      }
    }
  }
}

// Where the sums of one output unit belong.
struct UnitPlace {
  int stream, row, column;
};

// The sums of an output jet [S][rows][width], held by the warps' registers: unit number k of this
// warp in sum[k], as accumulators of 16 x 8 blocks.
template <int unit_rows, int most_units, typename A>
struct OutputSums {
  static constexpr int kBlocks = unit_rows / kMmaRows;
  static constexpr int kUnits = most_units;
  static constexpr int kPieces = kSpan / kMmaColumns;
  A sum[most_units][kBlocks][kPieces][4];

  __device__ inline void clear() {
    JACHESS_UNROLL
    for (int k = 0; k < most_units; ++k) {
      JACHESS_UNROLL
      for (int e = 0; e < kBlocks * kPieces * 4; ++e)
        sum[k][e / (4 * kPieces)][e / 4 % kPieces][e % 4] = A(0);
    }
  }

  // How many units there are, and where unit number k of this warp lies; false if it has none.
  static __device__ inline bool place(int k, const TermTable& terms, int streams, int rows,
                                      int width, UnitPlace& at) {
    const int across = width / kSpan, per_stream = across * (rows / unit_rows);
    const int unit = unit_of_warp(k);
    if (unit >= streams * per_stream) return false;
    const int rest = unit % per_stream;
    at = {terms.order[unit / per_stream], rest / across * unit_rows, rest % across * kSpan};
    return true;
  }

  // The rows of sum[k] times factor[row].
  __device__ inline void scale_rows(int k, const A* factor) {
    const int g = lane_index() / 4;
    JACHESS_UNROLL
    for (int m = 0; m < kBlocks; ++m) {
      const A above = factor[m * kMmaRows + g], below = factor[m * kMmaRows + g + 8];
      JACHESS_UNROLL
      for (int p = 0; p < kPieces; ++p) {
        sum[k][m][p][0] *= above;
        sum[k][m][p][1] *= above;
        sum[k][m][p][2] *= below;
        sum[k][m][p][3] *= below;
      }
    }
  }

  // sum[k] += Σ terms weights_a[row][n] columns_b[n][column], n over `depth` rows of `columns`,
  // which hold the output's columns from `first` on.
  template <typename T>
  __device__ inline void add(int k, const UnitPlace& at, const Tile<T>& weights,
                             const Tile<T>& columns, int depth, int first, const TermTable& terms) {
    using M = Mma<T>;
    for (int term = 0; term < terms.count[at.stream]; ++term) {
      const T* a_tile = weights.at(terms.row[at.stream][term], at.row, 0);
      const T* b_tile = columns.at(terms.column[at.stream][term], 0, at.column - first);
#pragma unroll 1
      for (int n = 0; n < depth; n += M::kDepth) {
        typename M::A a[kBlocks];
        JACHESS_UNROLL
        for (int m = 0; m < kBlocks; ++m)
          M::load_a(a_tile + m * kMmaRows * weights.ld + n, weights.ld, a[m]);
        JACHESS_UNROLL
        for (int p = 0; p < kPieces; p += 2) {
          typename M::B b[2];
          M::load_b_by_row(b_tile + n * columns.ld + p * kMmaColumns, columns.ld, b);
          JACHESS_UNROLL
          for (int m = 0; m < kBlocks; ++m) {
            M::multiply_add(sum[k][m][p], a[m], b[0]);
            M::multiply_add(sum[k][m][p + 1], a[m], b[1]);
          }
        }
      }
    }
  }

  // Writes sum[k] to columns [0, kSpan) of a tile.
  __device__ inline void store(int k, const UnitPlace& at, const Tile<A>& to) const {
    const int g = lane_index() / 4, t = lane_index() % 4;
    JACHESS_UNROLL
    for (int m = 0; m < kBlocks; ++m) {
      JACHESS_UNROLL
      for (int e = 0; e < 4 * kPieces; ++e)
        *to.at(at.stream, at.row + m * kMmaRows + g + e % 4 / 2 * 8,
               e / 4 * kMmaColumns + 2 * t + e % 2) = sum[k][m][e / 4][e % 4];
    }
  }
};

}  // namespace jachess
