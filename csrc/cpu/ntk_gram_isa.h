// Form A of the NTK on tiles of positions: for JACHESS_ISA. A file that includes this has set it,
// JACHESS_VECTOR_BYTES, and the compiler's target; what all instruction sets share was included
// before that.
//
// A tile is the product of a block of positions on the left and one on the right. The Gram matrix
// of the inputs is computed once per tile, then, pair of outputs by pair of outputs, that of the
// cotangents; the two are multiplied and summed while they lie in the cache. Operands are packed
// kGramDepth features at a time, in the accumulation type.
#pragma once

#include "attention_pack.h"

namespace jachess {
namespace JACHESS_ISA {

constexpr int64_t kGramDepth = 256;  // features packed at a time
constexpr int64_t kGramOutputs = 2;  // outputs a side that are packed at a time

// Consecutive rows of a plan.
struct GramBlock {
  const GramRow* rows;
  int64_t count;
};

// ---- packing --------------------------------------------------------------------------------

template <typename Stored>
const Stored* gram_row(const GramRows& from, int64_t output, const GramRow& row, int64_t k) {
  return static_cast<const Stored*>(from.data) + output * from.output + row.sample * from.sample +
         row.position * from.position + k;
}

// n numbers of a row, converted; zeros up to `padded`.
template <typename T, typename Stored>
JACHESS_HD void copy_row(const Stored* from, int64_t n, int64_t padded, T* to) {
  if (n == padded && padded == kPanel<T>) {
#pragma omp simd
    for (int64_t l = 0; l < kPanel<T>; ++l) convert(from[l], to[l]);
    return;
  }
  for (int64_t l = 0; l < n; ++l) convert(from[l], to[l]);
  for (int64_t l = n; l < padded; ++l) to[l] = T(0);
}

// Features [k, k + n) of the block's rows, as [rows / kRows][n / kPanel][kRows][kPanel].
template <typename T>
JACHESS_ONCE void pack_left(const GramRows& from, Storage storage, int64_t output, GramBlock block,
                            int64_t k, int64_t n, T* to) {
  dispatch_storage<T>(storage, [&](auto* typed) {
    using Stored = std::remove_pointer_t<decltype(typed)>;
    const int64_t tile = round_up(n, kPanel<T>) * kRows;
    for (int64_t r = 0; r < round_up(block.count, kRows); ++r) {
      const bool real = r < block.count;
      const Stored* row = real ? gram_row<Stored>(from, output, block.rows[r], k) : nullptr;
      T* out = to + r / kRows * tile + r % kRows * kPanel<T>;
      for (int64_t at = 0; at < n; at += kPanel<T>)
        copy_row<T, Stored>(row + at, real ? (n - at < kPanel<T> ? n - at : kPanel<T>) : 0,
                            kPanel<T>, out + at * kRows);
    }
  });
}

// The same transposed, as panels [rows / kPanel][n][kPanel]; every panel has kGramDepth features.
template <typename T>
JACHESS_ONCE void pack_right(const GramRows& from, Storage storage, int64_t output, GramBlock block,
                             int64_t k, int64_t n, T* to) {
  constexpr int half = ZipOf<T>::lanes;
  dispatch_storage<T>(storage, [&](auto* typed) {
    using Stored = std::remove_pointer_t<decltype(typed)>;
    alignas(64) T square[kPanel<T> * kPanel<T>];
    for (int64_t r = 0; r < block.count; r += kPanel<T>) {
      T* panel = to + r * kGramDepth;
      for (int64_t at = 0; at < n; at += kPanel<T>) {
        const int64_t features = n - at < kPanel<T> ? n - at : kPanel<T>;
        for (int64_t i = 0; i < kPanel<T>; ++i) {
          const bool real = r + i < block.count;
          const Stored* row =
              real ? gram_row<Stored>(from, output, block.rows[r + i], k + at) : nullptr;
          copy_row<T, Stored>(row, real ? features : 0, kPanel<T>, square + i * kPanel<T>);
        }
        for (int i = 0; i < 2; ++i) {
          for (int j = 0; j < 2; ++j)
            transpose_square(square + half * (i * kPanel<T> + j),
                             panel + at * kPanel<T> + half * (j * kPanel<T> + i));
        }
      }
    }
  });
}

// ---- tiles ----------------------------------------------------------------------------------

// The sums of a tile, as [rows / kRows][columns / kPanel][kRows][kPanel].
template <typename T>
struct GramSums {
  T* data;
  int64_t panels;
  T* at(int64_t row, int64_t panel) const {  // of a multiple of kRows
    return data + (row * panels + panel * kRows) * kPanel<T>;
  }
  // One row of a panel.
  const T* row(int64_t r, int64_t panel) const {
    return at(r - r % kRows, panel) + r % kRows * kPanel<T>;
  }
};

// Rows and columns of one tile. upper: of the pairs of samples only those with the right one not
// before the left one are wanted.
struct GramTile {
  GramBlock rows, columns;
  bool upper;

  bool is_wanted(int64_t row, int64_t column, int64_t width) const {
    if (!upper) return true;
    const int64_t last = column + width < columns.count ? column + width : columns.count;
    return rows.rows[row].sample <= columns.rows[last - 1].sample;
  }
};

// sums (+)= left right over n packed features.
template <typename T>
void multiply_packed(const GramTile& tile, T* left, T* right, int64_t n, bool add,
                     GramSums<T> sums) {
  const Panels<T> b = {right, 0, kGramDepth * kPanel<T>};
  const Terms one = {{{0, 0}}, 1};
  const int64_t size = round_up(n, kPanel<T>) * kRows;
  for (int64_t column = 0; column < tile.columns.count; column += kPanel<T>) {
    const int64_t panel = column / kPanel<T>;
    for (int64_t row = 0; row < tile.rows.count; row += kRows) {
      if (!tile.is_wanted(row, column, kPanel<T>)) continue;
      const Panels<T> a = {left + row / kRows * size, 0, kRows * kPanel<T>};
      if (add) {
        multiply_by_rows<true>(a, 0, b, panel, one, 0, n, sums.at(row, panel));
      } else {
        multiply_by_rows<false>(a, 0, b, panel, one, 0, n, sums.at(row, panel));
      }
    }
  }
}

// Rows [begin, end) of a block that belong to one sample.
struct GramSegment {
  int64_t sample, begin, end;
};

inline GramSegment segment_at(GramBlock block, int64_t begin) {
  int64_t end = begin + 1;
  while (end < block.count && block.rows[end].sample == block.rows[begin].sample) ++end;
  return {block.rows[begin].sample, begin, end};
}

// line = sum over the segment's rows of gram * product, from column `first` on.
template <typename T>
JACHESS_ONCE void multiply_rows(const GramSegment& rows, int64_t first, int64_t columns,
                                GramSums<T> gram, GramSums<T> product, T* line) {
  using V = typename TileVector<T>::type;
  for (int64_t panel = first / kPanel<T>; panel * kPanel<T> < columns; ++panel) {
    V sum[TileVector<T>::per_panel] = {};
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      JACHESS_UNROLL
      for (int v = 0; v < TileVector<T>::per_panel; ++v)
        sum[v] += vector_at(const_cast<T*>(gram.row(r, panel)), v) *
                  vector_at(const_cast<T*>(product.row(r, panel)), v);
    }
    JACHESS_UNROLL
    for (int v = 0; v < TileVector<T>::per_panel; ++v) vector_at(line + panel * kPanel<T>, v) = sum[v];
  }
}

// Calls sink(left sample, right sample, sum of gram * product) for every pair that is wanted.
template <typename T, typename Sink>
void sum_by_sample(const GramTile& tile, GramSums<T> gram, GramSums<T> product, T* line,
                   const Sink& sink) {
  for (int64_t r = 0; r < tile.rows.count;) {
    const GramSegment rows = segment_at(tile.rows, r);
    r = rows.end;
    int64_t first = 0;
    if (tile.upper)
      while (tile.columns.rows[first].sample < rows.sample) ++first;
    multiply_rows(rows, first, tile.columns.count, gram, product, line);
    for (int64_t c = first; c < tile.columns.count;) {
      const GramSegment columns = segment_at(tile.columns, c);
      double sum = 0;
      for (c = columns.begin; c < columns.end; ++c) sum += line[c];
      sink(rows.sample, columns.sample, sum);
    }
  }
}

// ---- pairs of groups ------------------------------------------------------------------------

// The result [C, N, C, M].
template <typename T>
struct GramResult {
  const GramProblem& p;
  T* data;

  void write(int64_t c, int64_t n, int64_t d, int64_t m, double value) const {
    const int64_t outputs = p.outputs, left = p.left.samples, right = p.right.samples;
    if (p.symmetric) {
      if (n == m && c > d) return;  // the mirror image of (d, c)
      data[((d * left + m) * outputs + c) * right + n] = static_cast<T>(value);
    }
    data[((c * left + n) * outputs + d) * right + m] = static_cast<T>(value);
  }
};

template <typename T>
class GramPairs {
 public:
  GramPairs(const GramProblem& p, const GramRow* left, const GramRow* right, T* result)
      : p_(p),
        left_rows_(left),
        right_rows_(right),
        result_{p, result},
        left_(kGramOutputs * kGramBlock * kGramDepth),
        right_(kGramOutputs * kGramBlock * kGramDepth),
        gram_(kGramBlock * kGramBlock),
        products_(kGramOutputs * kGramOutputs * kGramBlock * kGramBlock),
        line_(kGramBlock) {}

  // diagonal: both groups are the same one.
  void run(GramGroup left, GramGroup right, bool diagonal) {
    const int64_t down = block_rows(left), across = block_rows(right);
    if (down >= left.end - left.begin && across >= right.end - right.begin) {
      const GramTile tile = {block(left_rows_, left, left.begin, down),
                             block(right_rows_, right, right.begin, across), diagonal};
      return run_tile(tile, [this](int64_t c, int64_t d) {
        return [this, c, d](int64_t n, int64_t m, double sum) { result_.write(c, n, d, m, sum); };
      });
    }
    run_tiles(left, right, down, across);
  }

 private:
  // Groups larger than a block are cut evenly.
  static int64_t block_rows(GramGroup group) {
    const int64_t rows = group.end - group.begin, blocks = (rows + kGramBlock - 1) / kGramBlock;
    return round_up((rows + blocks - 1) / blocks, kRows);
  }
  static GramBlock block(const GramRow* rows, GramGroup group, int64_t begin, int64_t size) {
    return {rows + begin, group.end - begin < size ? group.end - begin : size};
  }

  // One of the groups takes several blocks, so it is one sample: sums over tiles are kept for the
  // samples of the other.
  void run_tiles(GramGroup left, GramGroup right, int64_t down, int64_t across) {
    const int64_t n0 = left_rows_[left.begin].sample, m0 = right_rows_[right.begin].sample;
    const int64_t width = right_rows_[right.end - 1].sample - m0 + 1;
    const int64_t samples = (left_rows_[left.end - 1].sample - n0 + 1) * width;
    const AlignedBuffer<double> sums(p_.outputs * p_.outputs * samples);
    const auto of = [&](int64_t c, int64_t d) { return sums + (c * p_.outputs + d) * samples; };
    for (int64_t i = 0; i < p_.outputs * p_.outputs * samples; ++i) sums[i] = 0;
    for (int64_t row = left.begin; row < left.end; row += down) {
      for (int64_t column = right.begin; column < right.end; column += across) {
        const GramTile tile = {block(left_rows_, left, row, down),
                               block(right_rows_, right, column, across), false};
        run_tile(tile, [&](int64_t c, int64_t d) {
          double* to = of(c, d);
          return [=](int64_t n, int64_t m, double sum) { to[(n - n0) * width + m - m0] += sum; };
        });
      }
    }
    for (int64_t c = 0; c < p_.outputs; ++c)
      for (int64_t d = 0; d < p_.outputs; ++d)
        for (int64_t i = 0; i < samples; ++i)
          result_.write(c, n0 + i / width, d, m0 + i % width, of(c, d)[i]);
  }

  // sink_of(c, d) takes the sums of one pair of outputs.
  template <typename SinkOf>
  void run_tile(const GramTile& tile, const SinkOf& sink_of) {
    const int64_t panels = (tile.columns.count + kPanel<T> - 1) / kPanel<T>;
    const GramSums<T> gram = {gram_, panels};
    const GramRows &a = p_.left.inputs, &b = p_.right.inputs;
    for (int64_t k = 0; k < a.size; k += kGramDepth) {
      const int64_t n = a.size - k < kGramDepth ? a.size - k : kGramDepth;
      pack_left<T>(a, p_.storage, 0, tile.rows, k, n, left_);
      pack_right<T>(b, p_.storage, 0, tile.columns, k, n, right_);
      multiply_packed<T>(tile, left_, right_, n, k > 0, gram);
    }
    for (int64_t c = 0; c < p_.outputs; c += kGramOutputs) {
      for (int64_t d = 0; d < p_.outputs; d += kGramOutputs) {
        multiply_outputs(tile, c, d, panels);
        for (int64_t i = c; i < c + outputs_from(c); ++i)
          for (int64_t j = d; j < d + outputs_from(d); ++j)
            sum_by_sample<T>(tile, gram, product(i - c, j - d, panels), line_, sink_of(i, j));
      }
    }
  }

  int64_t outputs_from(int64_t c) const {
    return p_.outputs - c < kGramOutputs ? p_.outputs - c : kGramOutputs;
  }
  GramSums<T> product(int64_t i, int64_t j, int64_t panels) const {
    return {products_ + (i * kGramOutputs + j) * kGramBlock * kGramBlock, panels};
  }

  // The cotangents' Gram matrices of outputs c.. and d.., all layers added up.
  void multiply_outputs(const GramTile& tile, int64_t c, int64_t d, int64_t panels) {
    constexpr int64_t pack = kGramBlock * kGramDepth;
    bool add = false;
    for (int64_t l = 0; l < p_.layers; ++l) {
      const GramRows &a = p_.left.cotangents[l], &b = p_.right.cotangents[l];
      for (int64_t k = 0; k < a.size; k += kGramDepth) {
        const int64_t n = a.size - k < kGramDepth ? a.size - k : kGramDepth;
        for (int64_t i = 0; i < outputs_from(c); ++i)
          pack_left<T>(a, p_.storage, c + i, tile.rows, k, n, left_ + i * pack);
        for (int64_t j = 0; j < outputs_from(d); ++j)
          pack_right<T>(b, p_.storage, d + j, tile.columns, k, n, right_ + j * pack);
        for (int64_t i = 0; i < outputs_from(c); ++i)
          for (int64_t j = 0; j < outputs_from(d); ++j)
            multiply_packed<T>(tile, left_ + i * pack, right_ + j * pack, n, add,
                               product(i, j, panels));
        add = true;
      }
    }
  }

  const GramProblem& p_;
  const GramRow *left_rows_, *right_rows_;
  const GramResult<T> result_;
  const AlignedBuffer<T> left_, right_, gram_, products_, line_;
};

template <typename T>
void run_gram_typed(const GramProblem& p, GramWork left, GramWork right, int64_t begin,
                    int64_t end, void* result) {
  GramPairs<T> pairs(p, left.rows, right.rows, static_cast<T*>(result));
  const int64_t across = right.group_count;
  int64_t i = 0, row_begin = 0;  // number of the first pair of row i
  for (int64_t at = begin; at < end; ++at) {
    while (at >= row_begin + (p.symmetric ? across - i : across)) {
      row_begin += p.symmetric ? across - i : across;
      ++i;
    }
    const int64_t j = at - row_begin + (p.symmetric ? i : 0);
    pairs.run(left.groups[i], right.groups[j], p.symmetric && i == j);
  }
}

inline void run_gram(const GramProblem& p, GramWork left, GramWork right, int64_t begin,
                     int64_t end, void* result) {
  if (p.storage == Storage::f64) {
    run_gram_typed<double>(p, left, right, begin, end, result);
  } else {
    run_gram_typed<float>(p, left, right, begin, end, result);
  }
}

}  // namespace JACHESS_ISA
}  // namespace jachess
