// Sizes of the CUDA kernels' tiles, and what limits each. No torch and no CUDA header.
//
// Registers limit most of them: a lane has 255, and of a warp's [16, N] scores or [16, V] results
// of S streams it holds S N / 2 or S V / 2. 60 and more go to operands, addresses and rows' sums.
#pragma once

#include "../dtypes.h"

namespace jachess {

// Queries or keys of a warp: the rows of the tensor cores' products (kMmaRows).
constexpr int kWarpRows = 16;

// Sets of 16 resident rows in a block, at most: with 128 threads of 255 registers, a
// multiprocessor's 65,536 suffice for two blocks.
constexpr int kMostWarps = 4;

// Warps of 255 registers that a multiprocessor holds: 65,536 / (32 x 256).
constexpr int kResidentWarps = 8;

// Tokens of a streamed tile: 32 registers of scores for two streams and for four. The backward
// keeps the scores' gradients beside them, as many again.
JACHESS_HD constexpr int attention_streamed_rows(int streams) { return streams == 2 ? 32 : 16; }

// The same in the backward, which takes half for the gradients of queries in 128 columns: their
// sums take 128 registers.
JACHESS_HD constexpr int backward_streamed_rows(int streams, int columns, bool queries_resident) {
  return queries_resident && columns == 128 ? 16 : attention_streamed_rows(streams);
}

// Value columns of a warp in the forward: 96 to 128 registers of sums in 16 bits, and 48 to 64 in
// float32, whose operands take twice the registers, each being split in two.
template <typename T, int S>
constexpr int kForwardColumns = sizeof(T) == 4 ? (S == 2 ? 64 : 32) : (S == 2 ? 128 : 64);

// Columns of each of a warp's results in the backward: 64 to 128 registers of sums in 16 bits, 32
// to 48 in float32. With two streams a warp can have twice the columns, or the sums of two results.
template <typename T, int S>
constexpr int kBackwardColumns = sizeof(T) == 4 ? (S == 4 ? 16 : 32) : 64;

// Fragments along the head dimension that a warp of the forward multiplies at a time: in 16 bits
// the second is loaded during the products of the first; in float32 there are no registers for it.
template <typename T>
constexpr int kForwardFragments = sizeof(T) == 2 ? 2 : 1;

// Bytes of a row of one stream in shared memory: whole fragments, and 16 bytes more, so that rows
// of a fragment lie in different banks.
JACHESS_HD constexpr int attention_row_bytes(int element, int size) {
  return (size + 15) / 16 * 16 * element + 16;
}

// Bytes of a warp's scratch: bias and dropout bits of its scores of `streamed_rows` tokens
// (ScoreTile of score_tile.h: 4 x 16 (N + 8) + 16 N / 4 bytes, at most 100 N from N = 16 on), and
// `streams` streams of the scores themselves, which the backward of a soft cap needs once more.
JACHESS_HD constexpr int attention_scratch_bytes(int streamed_rows, int streams) {
  return streamed_rows * (100 + 64 * streams);
}

// The least shared memory of a block, in bytes: one warp's resident tokens and one streamed tile,
// two operands each, two jets per streamed query, as in the backward of the keys, and the scratch.
JACHESS_HD constexpr int attention_least_bytes(int element, int streams, int size, int value_size) {
  const int rows = attention_row_bytes(element, size) + attention_row_bytes(element, value_size);
  const int streamed_rows = attention_streamed_rows(streams);
  return streams * ((kWarpRows + streamed_rows) * rows +
                    2 * streamed_rows * static_cast<int>(sizeof(float))) +
         attention_scratch_bytes(streamed_rows, streams);
}

}  // namespace jachess
