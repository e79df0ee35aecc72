// How form B of the NTK on the CPU is cut: gradients into groups, groups into blocks, a layer's
// weights into regions, blocks and shares. It follows from the operands and the workspace alone,
// never from the number of threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "ntk_gram_plan.h"

namespace jachess {

constexpr int64_t kMostGroups = 48;          // of a block: its kernel is kept in double, per share
constexpr int64_t kMostShares = 64;          // more threads than this find no work
constexpr int64_t kFewestPieces = 16;        // of a region, so that several threads find work
constexpr int64_t kPieceBytes = 512 * 1024;  // of every gradient's piece together: half of an L2
constexpr int64_t kFewestTiles = 24;         // of a piece; fewer read their operands too often
constexpr int64_t kMostTiles = 128;
constexpr double kPieceSide = 16;         // numbers written for one that is read; about half a side
constexpr int64_t kFeaturesPacked = 192;  // at a time; whole tiles of 3, 4 or 6

inline int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }

// What a kernel was compiled for: numbers in a panel, and features of cotangents (rows) and inputs
// (columns) of the tiles in which gradients are written.
struct MaterialisedTile {
  int64_t panel, rows, columns;
  int64_t size() const { return rows * columns; }
};

// The gradient of one output of one sample: the positions that count.
struct GradientVector {
  int64_t output, sample;
  const GramRow* rows;
  int64_t count;
};

// At most a panel of gradients, side by side in its lanes. longest: most positions of one of them;
// before: of all groups in front of it, added up.
struct GradientGroup {
  const GradientVector* vectors;
  int64_t count, longest, before;
};

// Gradients that are not zero, those of samples with many positions first, so that the members of
// a group are about as long.
inline std::vector<GradientVector> gradient_vectors(const std::vector<GramRow>& rows,
                                                    int64_t outputs) {
  std::vector<GradientVector> samples;
  for (const GramRow& row : rows) {
    if (samples.empty() || samples.back().sample != row.sample)
      samples.push_back({0, row.sample, &row, 0});
    ++samples.back().count;
  }
  std::stable_sort(
      samples.begin(), samples.end(),
      [](const GradientVector& a, const GradientVector& b) { return a.count > b.count; });
  std::vector<GradientVector> vectors;
  for (const GradientVector& of : samples)
    for (int64_t c = 0; c < outputs; ++c) vectors.push_back({c, of.sample, of.rows, of.count});
  return vectors;
}

inline std::vector<GradientGroup> gradient_groups(const std::vector<GradientVector>& vectors,
                                                  int64_t panel) {
  std::vector<GradientGroup> groups;
  const int64_t count = static_cast<int64_t>(vectors.size());
  int64_t before = 0;
  for (int64_t at = 0; at < count; at += panel) {
    const GradientVector* first = vectors.data() + at;
    groups.push_back({first, std::min(panel, count - at), first->count, before});
    before += first->count;
  }
  return groups;
}

// Consecutive groups of one side.
struct GradientBlock {
  const GradientGroup* groups;
  int64_t count;
  int64_t positions() const {
    return groups[count - 1].before + groups[count - 1].longest - groups[0].before;
  }
};

inline std::vector<GradientBlock> gradient_blocks(const std::vector<GradientGroup>& groups) {
  std::vector<GradientBlock> blocks;
  const int64_t count = static_cast<int64_t>(groups.size());
  const int64_t pieces = ceil_div(count, kMostGroups);
  for (int64_t i = 0; i < pieces; ++i) {
    const int64_t begin = i * count / pieces, end = (i + 1) * count / pieces;
    blocks.push_back({groups.data() + begin, end - begin});
  }
  return blocks;
}

// The pairs of groups whose product is wanted; of a block with itself those with right >= left.
struct GroupPairs {
  int64_t left, right;
  bool symmetric;
  int64_t count() const { return symmetric ? left * (left + 1) / 2 : left * right; }
  int64_t first(int64_t i) const { return symmetric ? i : 0; }
  int64_t index(int64_t i, int64_t j) const {
    return symmetric ? i * left - i * (i - 1) / 2 + j - i : i * right + j;
  }
};

// ---- features -------------------------------------------------------------------------------

// A range of one operand's features that is packed at a time. tile: its first one in the region.
struct FeatureRange {
  const GramRows* from;
  int64_t first, count, tile;
};

inline int64_t tile_count(const GramRows* operands, int64_t n, int64_t width) {
  int64_t tiles = 0;
  for (int64_t i = 0; i < n; ++i) tiles += ceil_div(operands[i].size, width);
  return tiles;
}

// Of the operands' tiles, counted one operand after another, those in [begin, end).
inline std::vector<FeatureRange> feature_ranges(const GramRows* operands, int64_t n, int64_t width,
                                                int64_t begin, int64_t end) {
  std::vector<FeatureRange> ranges;
  int64_t before = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t tiles = ceil_div(operands[i].size, width);
    const int64_t last = std::min(tiles, end - before);
    for (int64_t tile = std::max<int64_t>(0, begin - before); tile < last;) {
      const int64_t next = std::min(last, tile + kFeaturesPacked / width);
      const int64_t first = tile * width;
      ranges.push_back({operands + i, first, std::min(next * width, operands[i].size) - first,
                        before + tile - begin});
      tile = next;
    }
    before += tiles;
  }
  return ranges;
}

// ---- regions, pieces, shares ----------------------------------------------------------------

// A region of the weights, whose operands are packed at a time, and the pieces it is cut into; all
// in tiles.
struct MaterialisedRegion {
  int64_t rows, columns, piece_rows, piece_columns;
  int64_t across() const { return ceil_div(columns, piece_columns); }
  int64_t pieces() const { return ceil_div(rows, piece_rows) * across(); }
};

// positions: of all groups, each as long as its longest member; groups: of both sides.
inline MaterialisedRegion plan_region(const MaterialisedTile& tile, int64_t rows, int64_t columns,
                                      int64_t groups, int64_t positions, int64_t bytes) {
  const int64_t number = 64 / tile.panel;
  const auto packed = [&] {
    return (rows * tile.rows + columns * tile.columns) * positions * tile.panel * number;
  };
  while (packed() > bytes && std::max(rows, columns) > 8) {
    int64_t& longer = rows * tile.rows > columns * tile.columns ? rows : columns;
    longer = ceil_div(longer, 2);
  }
  const int64_t tile_bytes = groups * tile.panel * number * tile.size();
  const int64_t area = std::clamp(kPieceBytes / tile_bytes, kFewestTiles, kMostTiles);
  const double square = std::sqrt(static_cast<double>(area * tile.rows) / tile.columns);
  int64_t across = std::clamp<int64_t>(static_cast<int64_t>(square), 1, columns);
  int64_t down = std::clamp<int64_t>(area / across, 1, rows);
  across = std::clamp<int64_t>(area / down, 1, columns);
  while (ceil_div(rows, down) * ceil_div(columns, across) < kFewestPieces && down * across > 6) {
    int64_t& longer = down * tile.rows > across * tile.columns ? down : across;
    longer = ceil_div(longer, 2);
  }
  return {rows, columns, down, across};
}

// Shares of the pieces: each has sums of its own, which are added in order.
inline int64_t share_count(const MaterialisedTile& tile, int64_t pairs, int64_t pieces,
                           int64_t bytes) {
  const int64_t sums = pairs * tile.panel * tile.panel * static_cast<int64_t>(sizeof(double));
  return std::clamp<int64_t>(bytes / sums, 1, std::min(kMostShares, pieces));
}

// ---- what the kernels are told --------------------------------------------------------------

// Operands of one side, packed: [group][tile][its longest][width][panel].
struct MaterialisedSide {
  GradientBlock block;
  void *cotangents, *inputs;
};

// What is packed at a time: a range of features of one group's cotangents or inputs.
struct MaterialisedPacking {
  int side;
  int64_t group;
  bool is_input;
  FeatureRange features;
};

struct MaterialisedWork {
  Storage storage;
  MaterialisedSide sides[2];  // the first alone where symmetric
  GroupPairs pairs;
  MaterialisedRegion region;
  const MaterialisedPacking* packing;
  int64_t shares;
  double* sums;  // [shares][pairs][panel][panel], added to
};

}  // namespace jachess
