// Tiles of the attention kernels: from global to shared memory, and the products of jets that a
// warp makes of them.
//
// A tile of tokens lies in shared memory as [S][tokens][ld]. A warp has 16 rows of the scores, and
// keeps all streams of them and of their results in registers:
//
//                    N columns of a tile            V columns of the result
//      16 rows   [  scores, weights [S]  ]   x   [  values [S]: N x V  ]
//
// Every fragment of an operand is loaded once, and all its products with other streams are made
// from it. Stream s is the derivative along the directions whose bits are set in s (q <= 2).
#pragma once

#include "../cuda/mma.h"
#include "problem.h"
#include "tile_sizes.h"

namespace jachess {

JACHESS_HD constexpr int round_up(int n, int multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

template <typename T>
struct Tile {
  T* data;
  int rows, ld;  // rows per stream

  __device__ inline T* at(int stream, int row, int column) const {
    return data + (stream * rows + row) * ld + column;
  }
};

// Rows [token][column] of one head in global memory.
template <typename T>
struct Rows {
  const T* data;
  int64_t stream, row;  // strides
  int count, size;      // number of rows, and of columns
  bool aligned;         // every row starts, and ends, at a multiple of 16 bytes
};

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

// Elements of an asynchronous copy of 16 bytes.
template <typename T>
constexpr int kPiece = 16 / static_cast<int>(sizeof(T));

// log2 of the threads that load a row of `width` elements side by side: one for each piece, rounded
// up to a power of two, and at most a warp.
template <typename T>
int log2_threads_per_row(int width) {
  int log2_threads = 0;
  while (log2_threads < 5 && kPiece<T> << log2_threads < width) ++log2_threads;
  return log2_threads;
}

// load_tile in pieces of `group` elements, 2^log2_threads threads a row.
template <int S, int group, typename T>
__device__ inline void load_pieces(const Tile<T>& tile, const Rows<T>& from, int first, int column,
                                   int width, int log2_threads) {
  const int thread = static_cast<int>(threadIdx.x),
            down = static_cast<int>(blockDim.x) >> log2_threads;
  const int start = thread >> log2_threads;
#pragma unroll 1
  for (int c = (thread & ((1 << log2_threads) - 1)) * group; c < width;
       c += group << log2_threads) {
    const int rows = column + c < from.size ? from.count - first : 0;
    const T* source = from.data + (first + start) * from.row + column + c;
    T* to = tile.at(0, start, c);
#pragma unroll 1
    for (int r = start; r < tile.rows; r += down) {
      const bool inside = r < rows;
      JACHESS_UNROLL
      for (int s = 0; s < S; ++s) {
        T* const piece = to + s * tile.rows * tile.ld;
        if constexpr (group > 1) {
          copy_async_16(piece, inside ? source + s * from.stream : from.data, inside);
        } else {
          *piece = inside ? source[s * from.stream] : T{};
        }
      }
      source += down * from.row;
      to += down * tile.ld;
    }
  }
}

// Starts loading columns [column, column + width) of `tile.rows` rows from `first` of every stream;
// zeros beyond the ends. log2_threads: log2_threads_per_row of the width. Done after
// copy_async_commit, copy_async_wait and __syncthreads.
template <int S, typename T>
__device__ inline void load_tile(const Tile<T>& tile, const Rows<T>& from, int first, int column,
                                 int width, int log2_threads) {
  if (from.aligned) {
    load_pieces<S, kPiece<T>>(tile, from, first, column, width, log2_threads);
  } else {
    load_pieces<S, 1>(tile, from, first, column, width, 5);
  }
}

// ---- products of jets ---------------------------------------------------------------------------

// What a product of two streams adds to: both are factors (Leibniz), or one side is a cotangent of
// the result and the sum is the gradient of the other factor.
enum class Sides { factors, row_cotangent, column_cotangent };

// The stream of the result that stream `row` of the rows times stream `column` of the columns
// belongs to; -1 if none.
template <Sides sides, int S>
JACHESS_HD constexpr int result_stream(int row, int column) {
  if (sides == Sides::factors) return (row & column) == 0 && (row | column) < S ? row | column : -1;
  if (sides == Sides::row_cotangent) return (column & row) == column ? row ^ column : -1;
  return (column & row) == row ? row ^ column : -1;
}

// sums[..][p], [..][p + 1] += every product of the streams of a with two blocks of eight columns,
// which load(stream, blocks) loads, each once.
template <Sides sides, int S, typename M, int blocks, typename Load>
__device__ inline void multiply_streams(const typename M::A (&a)[S], const Load& load, int p,
                                        float (&sums)[S][blocks][4]) {
  JACHESS_UNROLL
  for (int column = 0; column < S; ++column) {
    typename M::B b[2];
    load(column, b);
    JACHESS_UNROLL
    for (int row = 0; row < S; ++row) {
      const int s = result_stream<sides, S>(row, column);
      if (s < 0) continue;
      M::multiply_add(sums[s][p], a[row], b[0]);
      M::multiply_add(sums[s][p + 1], a[row], b[1]);
    }
  }
}

// Scores of a warp's rows from `warp_row` on and N tokens: sums[s][n] += Σ rows[row] · columns[n]
// over `dim` entries, `at_once` fragments at a time.
template <Sides sides, int S, int N, int at_once = 1, typename T>
__device__ inline void multiply_tokens(Tile<T> rows, int warp_row, Tile<T> columns, int dim,
                                       float (&sums)[S][N / 8][4]) {
  using M = Mma<T>;
  recompute(rows.ld);
  recompute(columns.ld);
#pragma unroll at_once
  for (int k = 0; k < dim; k += M::kDepth) {
    typename M::A a[S];
    JACHESS_UNROLL
    for (int s = 0; s < S; ++s) M::load_a(rows.at(s, warp_row, k), rows.ld, a[s]);
    JACHESS_UNROLL
    for (int n = 0; n < N; n += 16) {
      const auto load = [&](int s, typename M::B(&b)[2]) {
        M::load_b_by_column(columns.at(s, n, k), columns.ld, b);
      };
      multiply_streams<sides, S, M>(a, load, n / 8, sums);
    }
  }
}

// Results of a warp's rows: sums[s][v] += Σ weights[n] tokens[n][column + v] over N tokens, for v <
// `width` <= V; weights_of(s, n, a) makes an operand of the weights from n on.
template <Sides sides, int S, int N, int V, typename T, typename Weights>
__device__ inline void multiply_weights_of(const Weights& weights_of, Tile<T> tokens, int column,
                                           int width, float (&sums)[S][V / 8][4]) {
  using M = Mma<T>;
  recompute(tokens.ld);
  JACHESS_UNROLL
  for (int n = 0; n < N; n += M::kDepth) {
    typename M::A a[S];
    JACHESS_UNROLL
    for (int s = 0; s < S; ++s) weights_of(s, n, a[s]);
    JACHESS_UNROLL
    for (int v = 0; v < V; v += 16) {
      if (v >= width) continue;
      const auto load = [&](int s, typename M::B(&b)[2]) {
        M::load_b_by_row(tokens.at(s, n, column + v), tokens.ld, b);
      };
      multiply_streams<sides, S, M>(a, load, v / 8, sums);
    }
  }
}

// The same with weights in registers.
template <Sides sides, int S, int N, int V, typename T>
__device__ inline void multiply_weights(const float (&weights)[S][N / 8][4], Tile<T> tokens,
                                        int column, int width, float (&sums)[S][V / 8][4]) {
  multiply_weights_of<sides, S, N, V>(
      [&](int s, int n, typename Mma<T>::A& a) { Mma<T>::from_sums(&weights[s][n / 8], a); },
      tokens, column, width, sums);
}

}  // namespace jachess
