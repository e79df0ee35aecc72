// Form A of the NTK on tiles of positions: for JACHESS_ISA. A file that includes this has set it,
// JACHESS_VECTOR_BYTES, and the compiler's target; what all instruction sets share was included
// before that.
//
// A tile is the product of a block of positions on the left and one on the right. The Gram matrix
// of the inputs is computed once per tile, then, pair of outputs by pair of outputs, that of the
// cotangents; the two are multiplied and summed while they lie in the cache. Operands are packed
// kGramDepth features at a time, in the accumulation type.
#pragma once

#include "pack_panels.h"

namespace jachess {
namespace JACHESS_ISA {

constexpr int64_t kGramAhead = 4;  // rows that are asked for ahead

// Consecutive rows of a plan.
struct GramBlock {
  const GramRow* rows;
  int64_t count;
};

template <typename Stored>
const Stored* gram_row(const GramRows& from, int64_t output, const GramRow& row, int64_t k) {
  return static_cast<const Stored*>(from.data) + output * from.output + row.sample * from.sample +
         row.position * from.position + k;
}

// Asks for n numbers of a row that will be read soon: rows lie too far apart, and are too short,
// for the processor to foresee them.
template <typename Stored>
JACHESS_HD void prefetch_row(const GramRows& from, int64_t output, GramBlock block, int64_t r,
                             int64_t k, int64_t n) {
  if (r >= block.count) return;
  const Stored* row = gram_row<Stored>(from, output, block.rows[r], k);
  for (int64_t l = 0; l < n; l += 64 / static_cast<int64_t>(sizeof(Stored)))
    __builtin_prefetch(row + l);
}

// n numbers of a row, converted, and zeros up to the next panel.
template <typename T, typename Stored>
JACHESS_HD void copy_row(const Stored* from, int64_t n, T* to) {
#pragma omp simd
  for (int64_t l = 0; l < n; ++l) convert(from[l], to[l]);
  for (int64_t l = n; l < round_up(n, kPanel<T>); ++l) to[l] = T(0);
}

constexpr int64_t kGramDepth = 256;  // features packed at a time
constexpr int64_t kGramOutputs = 2;  // outputs a side that are packed at a time

// ---- packing --------------------------------------------------------------------------------

// Features [k, k + n) of the block's rows, as [rows / kRows][n / kPanel][kRows][kPanel].
template <typename T>
JACHESS_ONCE void pack_left(const GramRows& from, Storage storage, int64_t output, GramBlock block,
                            int64_t k, int64_t n, T* to) {
  dispatch_storage<T>(storage, [&](auto* typed) {
    using Stored = std::remove_pointer_t<decltype(typed)>;
    const int64_t tile = round_up(n, kPanel<T>) * kRows, whole = n - n % kPanel<T>;
    for (int64_t r = 0; r < round_up(block.count, kRows); ++r) {
      T* out = to + r / kRows * tile + r % kRows * kPanel<T>;
      if (r >= block.count) {
        for (int64_t at = 0; at < n; at += kPanel<T>)
          for (int64_t l = 0; l < kPanel<T>; ++l) out[at * kRows + l] = T(0);
        continue;
      }
      prefetch_row<Stored>(from, output, block, r + kGramAhead, k, n);
      const Stored* row = gram_row<Stored>(from, output, block.rows[r], k);
      for (int64_t at = 0; at < whole; at += kPanel<T>)
        copy_row<T, Stored>(row + at, kPanel<T>, out + at * kRows);
      if (whole < n) copy_row<T, Stored>(row + whole, n - whole, out + whole * kRows);
    }
  });
}

// Where rows that are to be transposed lie apart, so that they fall into different cache sets.
template <typename T>
constexpr int64_t kGramStride = kGramDepth + kPanel<T>;

// The same transposed, as panels [rows / kPanel][kGramDepth][kPanel]; lines: room for one panel's
// rows.
template <typename T>
JACHESS_ONCE void pack_right(const GramRows& from, Storage storage, int64_t output, GramBlock block,
                             int64_t k, int64_t n, T* lines, T* to) {
  constexpr int64_t half = ZipOf<T>::lanes;
  dispatch_storage<T>(storage, [&](auto* typed) {
    using Stored = std::remove_pointer_t<decltype(typed)>;
    for (int64_t r = 0; r < block.count; r += kPanel<T>) {
      for (int64_t i = 0; i < kPanel<T>; ++i) {
        T* line = lines + i * kGramStride<T>;
        if (r + i < block.count) {
          prefetch_row<Stored>(from, output, block, r + i + kGramAhead, k, n);
          copy_row<T, Stored>(gram_row<Stored>(from, output, block.rows[r + i], k), n, line);
        } else {
          for (int64_t l = 0; l < round_up(n, kPanel<T>); ++l) line[l] = T(0);
        }
      }
      T* panel = to + r * kGramDepth;
      for (int64_t at = 0; at < n; at += half) {
        transpose_square(lines + at, kGramStride<T>, panel + at * kPanel<T>);
        transpose_square(lines + half * kGramStride<T> + at, kGramStride<T>,
                         panel + at * kPanel<T> + half);
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
    for (int v = 0; v < TileVector<T>::per_panel; ++v)
      vector_at(line + panel * kPanel<T>, v) = sum[v];
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
      while (first < tile.columns.count && tile.columns.rows[first].sample < rows.sample) ++first;
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
  // rows, columns: the largest tile's, multiples of kRows and kPanel.
  GramPairs(const GramProblem& p, const GramWork& work, T* result, int64_t rows, int64_t columns)
      : p_(p),
        work_(work),
        result_{p, result},
        left_pack_(rows * kGramDepth),
        right_pack_(columns * kGramDepth),
        tile_(rows * columns),
        left_(kGramOutputs * left_pack_),
        right_(kGramOutputs * right_pack_),
        lines_(kPanel<T> * kGramStride<T>),
        gram_(tile_),
        products_(kGramOutputs * kGramOutputs * tile_),
        line_(columns) {}

  // Groups larger than a tile are cut evenly.
  static int64_t tile_rows(const GramGroup& group) { return cut(group.size(), kGramLeft, kRows); }
  static int64_t tile_columns(const GramGroup& group) {
    return cut(group.size(), kGramRight, kPanel<T>);
  }

  void run(const GramPair& pair) {
    const int64_t down = tile_rows(pair.left), across = tile_columns(pair.right);
    if (down < pair.left.size() || across < pair.right.size()) return run_tiles(pair, down, across);
    run_tile(tile_of(pair, pair.left.begin, down, pair.right.begin, across), [this](int64_t c,
                                                                                    int64_t d) {
      return [this, c, d](int64_t n, int64_t m, double sum) { result_.write(c, n, d, m, sum); };
    });
  }

 private:
  static int64_t cut(int64_t size, int64_t most, int64_t multiple) {
    const int64_t pieces = (size + most - 1) / most;
    return round_up((size + pieces - 1) / pieces, multiple);
  }
  GramTile tile_of(const GramPair& pair, int64_t row, int64_t down, int64_t column,
                   int64_t across) const {
    const int64_t rows = pair.left.end - row, columns = pair.right.end - column;
    return {{work_.left + row, rows < down ? rows : down},
            {work_.right + column, columns < across ? columns : across},
            pair.upper};
  }

  // One of the groups takes several tiles, so it is one sample: sums over tiles are kept for the
  // samples of the other.
  void run_tiles(const GramPair& pair, int64_t down, int64_t across) {
    const GramGroup &left = pair.left, &right = pair.right;
    const int64_t n0 = work_.left[left.begin].sample, m0 = work_.right[right.begin].sample;
    const int64_t width = work_.right[right.end - 1].sample - m0 + 1;
    const int64_t samples = (work_.left[left.end - 1].sample - n0 + 1) * width;
    const AlignedBuffer<double> sums(p_.outputs * p_.outputs * samples);
    const auto of = [&](int64_t c, int64_t d) { return sums + (c * p_.outputs + d) * samples; };
    for (int64_t i = 0; i < p_.outputs * p_.outputs * samples; ++i) sums[i] = 0;
    for (int64_t row = left.begin; row < left.end; row += down) {
      for (int64_t column = right.begin; column < right.end; column += across) {
        run_tile(tile_of(pair, row, down, column, across), [&](int64_t c, int64_t d) {
          double* to = of(c, d);
          return [=](int64_t n, int64_t m, double sum) { to[(n - n0) * width + m - m0] += sum; };
        });
      }
    }
    for (int64_t c = 0; c < p_.outputs; ++c) {
      for (int64_t d = 0; d < p_.outputs; ++d) {
        for (int64_t i = 0; i < samples; ++i) {
          const int64_t n = n0 + i / width, m = m0 + i % width;
          if (!pair.upper || n <= m) result_.write(c, n, d, m, of(c, d)[i]);
        }
      }
    }
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
      pack_right<T>(b, p_.storage, 0, tile.columns, k, n, lines_, right_);
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
    return {products_ + (i * kGramOutputs + j) * tile_, panels};
  }

  // The cotangents' Gram matrices of outputs c.. and d.., all layers added up.
  void multiply_outputs(const GramTile& tile, int64_t c, int64_t d, int64_t panels) {
    bool add = false;
    for (int64_t l = 0; l < p_.layers; ++l) {
      const GramRows &a = p_.left.cotangents[l], &b = p_.right.cotangents[l];
      for (int64_t k = 0; k < a.size; k += kGramDepth) {
        const int64_t n = a.size - k < kGramDepth ? a.size - k : kGramDepth;
        for (int64_t i = 0; i < outputs_from(c); ++i)
          pack_left<T>(a, p_.storage, c + i, tile.rows, k, n, left_ + i * left_pack_);
        for (int64_t j = 0; j < outputs_from(d); ++j)
          pack_right<T>(b, p_.storage, d + j, tile.columns, k, n, lines_, right_ + j * right_pack_);
        for (int64_t i = 0; i < outputs_from(c); ++i)
          for (int64_t j = 0; j < outputs_from(d); ++j)
            multiply_packed<T>(tile, left_ + i * left_pack_, right_ + j * right_pack_, n, add,
                               product(i, j, panels));
        add = true;
      }
    }
  }

  const GramProblem& p_;
  const GramWork& work_;
  const GramResult<T> result_;
  const int64_t left_pack_, right_pack_, tile_;  // numbers of one
  const AlignedBuffer<T> left_, right_, lines_, gram_, products_, line_;
};

template <typename T>
void run_gram_typed(const GramProblem& p, const GramWork& work, int64_t begin, int64_t end,
                    void* result) {
  int64_t rows = 0, columns = 0;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t down = GramPairs<T>::tile_rows(work.pairs[i].left);
    const int64_t across = GramPairs<T>::tile_columns(work.pairs[i].right);
    rows = down > rows ? down : rows;
    columns = across > columns ? across : columns;
  }
  GramPairs<T> pairs(p, work, static_cast<T*>(result), rows, columns);
  for (int64_t i = begin; i < end; ++i) pairs.run(work.pairs[i]);
}

inline void run_gram(const GramProblem& p, const GramWork& work, int64_t begin, int64_t end,
                     void* result) {
  if (p.storage == Storage::f64) {
    run_gram_typed<double>(p, work, begin, end, result);
  } else {
    run_gram_typed<float>(p, work, begin, end, result);
  }
}

}  // namespace JACHESS_ISA
}  // namespace jachess
