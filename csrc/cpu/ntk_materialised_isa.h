// Form B of the NTK: gradients written piece by piece and multiplied while they lie in the cache;
// for JACHESS_ISA. A file that includes this has set it, JACHESS_VECTOR_BYTES, and the compiler's
// target; what all instruction sets share was included before that.
//
// A panel's lanes are gradients, not features: a group of 16 (float64: 8) gradients G_{n,c} is
// written at once, number by number, from operands packed the same way, and what is written is
// at once both factors of the product, in panels, without a transposition.
#pragma once

#include "ntk_rows.h"

namespace jachess {
namespace JACHESS_ISA {

// A tile of gradients fills the registers: rows x columns vectors, of 32 or 16.
constexpr int kTileRows = JACHESS_VECTOR_BYTES == 64 ? 4 : 3;
constexpr int kTileColumns = JACHESS_VECTOR_BYTES == 64 ? 6 : 4;
constexpr int64_t kPositions = 64;      // at a time, so that tiles' operands stay in the caches
constexpr int64_t kProductDepth = 128;  // numbers of a gradient, so that two panels stay in L1

template <typename T>
MaterialisedTile tile_of() {
  return {kPanel<T>, kTileRows, kTileColumns};
}

// Where a group's packed tiles begin, of a pack with `tiles` tiles of `width` features.
template <typename T>
T* packed_group(void* data, GradientBlock block, int64_t group, int64_t tiles, int64_t width) {
  const int64_t before = block.groups[group].before - block.groups[0].before;
  return static_cast<T*>(data) + before * tiles * width * kPanel<T>;
}

// ---- packing --------------------------------------------------------------------------------

// One position of every gradient of a group as rows of a square to be transposed; zeros where a
// gradient has no such position.
template <typename T, typename Stored>
void copy_position(const FeatureRange& from, const GradientGroup& group, int64_t t, T* lines) {
  constexpr int64_t stride = kFeaturesPacked + kPanel<T>;
  for (int64_t lane = 0; lane < kPanel<T>; ++lane) {
    T* line = lines + lane * stride;
    if (lane >= group.count || t >= group.vectors[lane].count) {
      for (int64_t k = 0; k < round_up(from.count, kPanel<T>); ++k) line[k] = T(0);
      continue;
    }
    const GradientVector& vector = group.vectors[lane];
    const GramBlock rows = {vector.rows, vector.count};
    prefetch_row<Stored>(*from.from, vector.output, rows, t + 1, from.first, from.count);
    copy_row<T, Stored>(gram_row<Stored>(*from.from, vector.output, rows.rows[t], from.first),
                        from.count, line);
  }
}

// A range of features of a group, as [tile][longest][width][panel]; zeros fill the last tile.
template <typename T>
JACHESS_ONCE void pack_group(const FeatureRange& from, Storage storage, const GradientGroup& group,
                             int64_t width, T* to) {
  constexpr int64_t half = ZipOf<T>::lanes, panel = kPanel<T>;
  constexpr int64_t stride = kFeaturesPacked + panel;
  alignas(64) T lines[panel * stride], square[panel * panel];
  const auto out = [&](int64_t feature, int64_t t) {
    return to + ((feature / width * group.longest + t) * width + feature % width) * panel;
  };
  for (int64_t t = 0; t < group.longest; ++t) {
    dispatch_storage<T>(storage, [&](auto* typed) {
      copy_position<T, std::remove_pointer_t<decltype(typed)>>(from, group, t, lines);
    });
    for (int64_t at = 0; at < from.count; at += panel) {
      for (int64_t i = 0; i < 2; ++i)
        for (int64_t j = 0; j < 2; ++j)
          transpose_square(lines + half * i * stride + at + half * j, stride,
                           square + half * j * panel + half * i);
      for (int64_t k = at; k < from.count && k < at + panel; ++k)
        std::memcpy(out(k, t), square + (k - at) * panel, panel * sizeof(T));
    }
    for (int64_t k = from.count; k < round_up(from.count, width); ++k)
      std::memset(static_cast<void*>(out(k, t)), 0, panel * sizeof(T));
  }
}

template <typename T>
void pack_items(const MaterialisedWork& work, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const MaterialisedPacking& item = work.packing[i];
    const MaterialisedSide& side = work.sides[item.side];
    const int64_t width = item.is_input ? kTileColumns : kTileRows;
    const int64_t tiles = item.is_input ? work.region.columns : work.region.rows;
    void* data = item.is_input ? side.inputs : side.cotangents;
    const GradientGroup& group = side.block.groups[item.group];
    T* to = packed_group<T>(data, side.block, item.group, tiles, width);
    pack_group<T>(item.features, work.storage, group, width,
                  to + item.features.tile * group.longest * width * kPanel<T>);
  }
}

// ---- writing gradients ----------------------------------------------------------------------

// out[r, c] (+)= sum over t < n of delta[t, r] a[t, c], lane by lane.
template <bool add, typename T>
JACHESS_ONCE void write_gradients(T* delta, T* a, int64_t n, T* out) {
  using V = typename TileVector<T>::type;
  for (int v = 0; v < TileVector<T>::per_panel; ++v) {
    V sum[kTileRows][kTileColumns];
    JACHESS_UNROLL
    for (int r = 0; r < kTileRows; ++r) {
      JACHESS_UNROLL
      for (int c = 0; c < kTileColumns; ++c)
        sum[r][c] = add ? vector_at(out + (r * kTileColumns + c) * kPanel<T>, v) : V{};
    }
    for (int64_t t = 0; t < n; ++t) {
      V column[kTileColumns];
      JACHESS_UNROLL
      for (int c = 0; c < kTileColumns; ++c)
        column[c] = vector_at(a + (t * kTileColumns + c) * kPanel<T>, v);
      JACHESS_UNROLL
      for (int r = 0; r < kTileRows; ++r) {
        const V row = vector_at(delta + (t * kTileRows + r) * kPanel<T>, v);
        JACHESS_UNROLL
        for (int c = 0; c < kTileColumns; ++c) sum[r][c] += row * column[c];
      }
    }
    JACHESS_UNROLL
    for (int r = 0; r < kTileRows; ++r) {
      JACHESS_UNROLL
      for (int c = 0; c < kTileColumns; ++c)
        vector_at(out + (r * kTileColumns + c) * kPanel<T>, v) = sum[r][c];
    }
  }
}

// Tiles [row, row + rows) x [column, column + columns) of the region.
struct MaterialisedPiece {
  int64_t row, rows, column, columns;
  int64_t size() const { return rows * columns * kTileRows * kTileColumns; }
};

inline MaterialisedPiece piece_at(const MaterialisedRegion& region, int64_t i) {
  const int64_t row = i / region.across() * region.piece_rows;
  const int64_t column = i % region.across() * region.piece_columns;
  const int64_t down = region.rows - row, across = region.columns - column;
  return {row, down < region.piece_rows ? down : region.piece_rows, column,
          across < region.piece_columns ? across : region.piece_columns};
}

// A piece of every gradient of one side, as panels [group][number][panel].
template <typename T>
void write_piece(const MaterialisedWork& work, const MaterialisedSide& side,
                 const MaterialisedPiece& piece, T* out) {
  constexpr int64_t tile = kTileRows * kTileColumns * kPanel<T>;
  for (int64_t g = 0; g < side.block.count; ++g, out += piece.size() * kPanel<T>) {
    const int64_t longest = side.block.groups[g].longest;
    T* deltas = packed_group<T>(side.cotangents, side.block, g, work.region.rows, kTileRows);
    T* inputs = packed_group<T>(side.inputs, side.block, g, work.region.columns, kTileColumns);
    for (int64_t t = 0; t < longest; t += kPositions) {
      const int64_t n = longest - t < kPositions ? longest - t : kPositions;
      for (int64_t r = 0; r < piece.rows; ++r) {
        T* delta = deltas + ((piece.row + r) * longest + t) * kTileRows * kPanel<T>;
        for (int64_t c = 0; c < piece.columns; ++c) {
          T* a = inputs + ((piece.column + c) * longest + t) * kTileColumns * kPanel<T>;
          T* to = out + (r * piece.columns + c) * tile;
          if (t > 0) {
            write_gradients<true>(delta, a, n, to);
          } else {
            write_gradients<false>(delta, a, n, to);
          }
        }
      }
    }
  }
}

// ---- multiplying ----------------------------------------------------------------------------

// sums [pairs][panel][panel] = the pairs' products over one piece of n numbers.
template <typename T>
void multiply_piece(const GroupPairs& pairs, T* left, T* right, int64_t n, T* sums) {
  const Panels<T> a = {left, 0, n * kPanel<T>}, b = {right, 0, n * kPanel<T>};
  const Terms one = {{{0, 0}}, 1};
  for (int64_t begin = 0; begin < n; begin += kProductDepth) {
    const int64_t end = n - begin < kProductDepth ? n : begin + kProductDepth;
    for (int64_t i = 0; i < pairs.left; ++i) {
      for (int64_t j = pairs.first(i); j < pairs.right; ++j) {
        T* to = sums + pairs.index(i, j) * kPanel<T> * kPanel<T>;
        for (int64_t row = 0; row < kPanel<T>; row += kRows) {
          if (begin > 0) {
            multiply_by_columns<true>(a, i * kPanel<T> + row, b, j, one, begin, end,
                                      to + row * kPanel<T>);
          } else {
            multiply_by_columns<false>(a, i * kPanel<T> + row, b, j, one, begin, end,
                                       to + row * kPanel<T>);
          }
        }
      }
    }
  }
}

template <typename T>
void multiply_shares(const MaterialisedWork& work, int64_t begin, int64_t end) {
  const MaterialisedRegion& region = work.region;
  const bool symmetric = work.pairs.symmetric;
  const int64_t most = region.piece_rows * region.piece_columns * tile_of<T>().size() * kPanel<T>;
  const int64_t size = work.pairs.count() * kPanel<T> * kPanel<T>;
  const AlignedBuffer<T> left(most * work.pairs.left), sums(size);
  const AlignedBuffer<T> other(symmetric ? 0 : most * work.pairs.right);
  T* right = symmetric ? left : other;
  for (int64_t share = begin; share < end; ++share) {
    double* total = work.sums + share * size;
    const int64_t last = (share + 1) * region.pieces() / work.shares;
    for (int64_t i = share * region.pieces() / work.shares; i < last; ++i) {
      const MaterialisedPiece piece = piece_at(region, i);
      write_piece<T>(work, work.sides[0], piece, left);
      if (!symmetric) write_piece<T>(work, work.sides[1], piece, right);
      multiply_piece<T>(work.pairs, left, right, piece.size(), sums);
      for (int64_t k = 0; k < size; ++k) total[k] += sums[k];
    }
  }
}

// ---- what is called from outside ------------------------------------------------------------

inline void pack_any(const MaterialisedWork& work, int64_t begin, int64_t end) {
  if (work.storage == Storage::f64) return pack_items<double>(work, begin, end);
  pack_items<float>(work, begin, end);
}

inline void multiply_any(const MaterialisedWork& work, int64_t begin, int64_t end) {
  if (work.storage == Storage::f64) return multiply_shares<double>(work, begin, end);
  multiply_shares<float>(work, begin, end);
}

inline const MaterialisedKernels& materialised_kernels() {
  static const MaterialisedKernels kernels = {tile_of<double>(), tile_of<float>(), pack_any,
                                              multiply_any};
  return kernels;
}

}  // namespace JACHESS_ISA
}  // namespace jachess
