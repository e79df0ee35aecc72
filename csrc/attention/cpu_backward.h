// Backward of attention on the CPU, for JACHESS_ISA: chunks of keys against blocks of queries.
//
// The weights are recomputed from the scores and the saved statistics. One item owns a range of
// keys of one key head: it alone sums their gradients, in the order of the query heads and blocks.
// The queries' gradients are summed over chunks, in order; where a key head is split over several
// items, each has a partial sum of its own and these are added in order. How it is split depends on
// the shape alone, so the bits do not depend on the number of threads.
#pragma once

#include "../cpu/pack_panels.h"
#include "cpu_softmax.h"

namespace jachess {
namespace JACHESS_ISA {

constexpr int64_t kBackwardQueries = 64;  // a block
constexpr int64_t kBackwardKeys = 128;    // a chunk

template <int q, int P, typename T>
class AttentionBackward {
 public:
  AttentionBackward(const AttentionProblem& problem, const AttentionGradients& tensors)
      : p_(problem),
        t_(tensors),
        chunk_(std::clamp(round_up(problem.keys, kPanel<T>), kPanel<T>, kBackwardKeys)),
        size_(round_up(problem.size, kPanel<T>)),
        value_size_(round_up(problem.value_size, kPanel<T>)),
        keys_buffer_(3 * S * chunk_ * size_),
        values_buffer_(3 * S * chunk_ * value_size_),
        query_buffer_(S * kBackwardQueries * size_),
        gy_buffer_(2 * S * kBackwardQueries * value_size_),
        scores_buffer_(2 * S * kBackwardQueries * chunk_),
        add_buffer_(kBackwardQueries * chunk_),
        factors_buffer_(kBackwardQueries * chunk_),
        cover_(kBackwardQueries / kRows * chunk_ / kPanel<T>),
        gquery_buffer_(tensors.splits == 1 ? gquery_numbers(problem) : 0) {}

  static int64_t items(const AttentionProblem& p, const AttentionGradients& t) {
    return p.batch * p.key_heads * t.splits;
  }

  // Numbers in the sums of one item's gradient of the queries.
  static int64_t gquery_numbers(const AttentionProblem& p) {
    return p.heads / p.key_heads * blocks_per_head(p) * S * kBackwardQueries *
           round_up(p.size, kPanel<T>);
  }

  void run(int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t pair = item / t_.splits, split = item % t_.splits;
      const int64_t batch = pair / p_.key_heads, key_head = pair % p_.key_heads;
      T* sums = t_.splits == 1 ? static_cast<T*>(gquery_buffer_)
                               : static_cast<T*>(t_.partial) + item * gquery_numbers(p_);
      std::memset(sums, 0, sizeof(T) * static_cast<size_t>(gquery_numbers(p_)));
      const int64_t chunks = (p_.keys + chunk_ - 1) / chunk_;
      for (int64_t c = split * chunks / t_.splits; c < (split + 1) * chunks / t_.splits; ++c)
        chunk(batch, key_head, c * chunk_, std::min(chunk_, p_.keys - c * chunk_), sums);
      if (t_.splits == 1) write_queries(batch, key_head, sums);
    }
  }

  // Adds up the splits of key heads [begin, end) and writes the queries' gradients.
  void reduce(int64_t begin, int64_t end) {
    const int64_t numbers = gquery_numbers(p_);
    for (int64_t pair = begin; pair < end; ++pair) {
      T* sums = static_cast<T*>(t_.partial) + pair * t_.splits * numbers;
      for (int64_t split = 1; split < t_.splits; ++split) {
        const T* other = sums + split * numbers;
#pragma omp simd
        for (int64_t n = 0; n < numbers; ++n) sums[n] += other[n];
      }
      write_queries(pair / p_.key_heads, pair % p_.key_heads, sums);
    }
  }

 private:
  static constexpr int S = 1 + q + P;

  struct Chunk {
    int64_t first, keys, padded;
    Panels<T> key, key_columns, value, value_columns, gkey, gvalue;
  };
  struct Block {
    int64_t batch, head, first, rows;
    Panels<T> query, gy, scores, gradients, gquery;
    RowConstants<T, S> row[kBackwardQueries];
  };

  static int64_t blocks_per_head(const AttentionProblem& p) {
    return (p.queries + kBackwardQueries - 1) / kBackwardQueries;
  }

  Panels<T> queries_of(T* sums, int64_t block) const {
    return make_panels<T>(sums + block * S * kBackwardQueries * size_, kBackwardQueries, size_);
  }

  void chunk(int64_t batch, int64_t key_head, int64_t first, int64_t keys, T* sums) {
    const Chunk c = pack_chunk(batch, key_head, first, keys);
    const int64_t group = p_.heads / p_.key_heads, per_head = blocks_per_head(p_);
    for (int64_t n = 0; n < group * per_head; ++n) {
      block_.batch = batch;
      block_.head = key_head * group + n / per_head;
      block_.first = n % per_head * kBackwardQueries;
      block_.rows = std::min(kBackwardQueries, p_.queries - block_.first);
      block_.gquery = queries_of(sums, n);
      if (first_key(p_, block_.first) < first + keys &&
          end_key(p_, block_.first + block_.rows - 1) > first)
        attend(block_, c);
    }
    unpack_rows(c.gkey, S, keys, p_.size, T(1), t_.gkey, p_.storage, batch, key_head, first);
    unpack_rows(c.gvalue, S, keys, p_.value_size, T(1), t_.gvalue, p_.storage, batch, key_head,
                first);
  }

  Chunk pack_chunk(int64_t batch, int64_t head, int64_t first, int64_t keys) {
    const auto matrix = [&](T* buffer, int64_t n, int64_t size, bool columns) {
      T* at = buffer + n * S * chunk_ * size;
      return columns ? make_panels<T>(at, size, chunk_) : make_panels<T>(at, chunk_, size);
    };
    const Chunk c = {first,
                     keys,
                     round_up(keys, kPanel<T>),
                     matrix(keys_buffer_, 0, size_, false),
                     matrix(keys_buffer_, 1, size_, true),
                     matrix(values_buffer_, 0, value_size_, false),
                     matrix(values_buffer_, 1, value_size_, true),
                     matrix(keys_buffer_, 2, size_, false),
                     matrix(values_buffer_, 2, value_size_, false)};
    pack_rows(p_.key, p_.storage, S, batch, head, first, keys, c.padded, p_.size, T(1), c.key);
    transpose_panels(c.key, S, c.padded, size_, c.key_columns);
    pack_rows(p_.value, p_.storage, S, batch, head, first, keys, c.padded, p_.value_size, T(1),
              c.value);
    transpose_panels(c.value, S, c.padded, value_size_, c.value_columns);
    std::memset(c.gkey.data, 0, sizeof(T) * static_cast<size_t>(S * chunk_ * size_));
    std::memset(c.gvalue.data, 0, sizeof(T) * static_cast<size_t>(S * chunk_ * value_size_));
    return c;
  }

  void attend(Block& block, const Chunk& c) {
    TileMask<T> mask = {make_panels<T>(add_buffer_, kBackwardQueries, chunk_), cover_,
                        (block.rows + kRows - 1) / kRows, c.padded / kPanel<T>};
    cover_tile(p_, block.batch, block.head, block.first, block.rows, c.first, mask);
    block.scores = make_panels<T>(scores_buffer_, kBackwardQueries, chunk_);
    block.gradients =
        make_panels<T>(scores_buffer_ + S * kBackwardQueries * chunk_, kBackwardQueries, chunk_);
    pack_block(block);
    recompute(block, c, mask);
    score_gradients(block, c, mask);
    add_to_queries(block, c, mask);
    add_to_keys(block, c, mask);
  }

  void pack_block(Block& block) {
    const int64_t padded = round_up(block.rows, kRows);
    block.query = make_panels<T>(query_buffer_, kBackwardQueries, size_);
    block.gy = make_panels<T>(gy_buffer_, kBackwardQueries, value_size_);
    const Panels<T> y = make_panels<T>(gy_buffer_ + S * kBackwardQueries * value_size_,
                                       kBackwardQueries, value_size_);
    pack_rows(p_.query, p_.storage, S, block.batch, block.head, block.first, block.rows, padded,
              p_.size, static_cast<T>(p_.scale), block.query);
    pack_rows(t_.gy, p_.storage, S, block.batch, block.head, block.first, block.rows, padded,
              p_.value_size, T(1), block.gy);
    pack_rows(t_.y, p_.storage, S, block.batch, block.head, block.first, block.rows, padded,
              p_.value_size, T(1), y);
    for (int64_t r = 0; r < padded; ++r) {
      statistics(block, r);
      delta(block, y, r);
    }
  }

  // The saved jet of log sum e^s of a row. A row that sees nothing gets +inf, so that its weights
  // come out as 0.
  void statistics(Block& block, int64_t r) const {
    T* l = block.row[r].lse;
    if (r >= block.rows) {
      for (int s = 0; s < S; ++s) l[s] = s == 0 ? kInfinity<T> : T(0);
      return;
    }
    const int64_t stream = p_.batch * p_.heads * p_.queries;
    const T* from = static_cast<const T*>(t_.stats) +
                    (block.batch * p_.heads + block.head) * p_.queries + block.first + r;
    for (int s = 0; s < S; ++s) l[s] = from[s * stream];
    if (l[0] == -kInfinity<T>) l[0] = kInfinity<T>;
  }

  void delta(Block& block, Panels<T> y, int64_t r) const {
    using V = typename TileVector<T>::type;
    V sums[S] = {};
    for (int64_t c = 0; c < value_size_ / kPanel<T>; ++c) {
      for (int v = 0; v < TileVector<T>::per_panel; ++v) {
        V value[S], gradient[S];
        load_streams<S>(y, c, r, v, value);
        load_streams<S>(block.gy, c, r, v, gradient);
        product_jet_backward_add<q, P>(value, gradient, sums);
      }
    }
    for (int s = 0; s < S; ++s) block.row[r].delta[s] = sum_lanes<T>(sums[s]);
  }

  // Scores, and the gradients of the weights before dropout.
  void recompute(const Block& block, const Chunk& c, const TileMask<T>& mask) {
    for (int64_t p = 0; p < mask.panels; ++p) {
      for (int64_t g = 0; g < mask.groups; ++g) {
        if (mask.at(g, p) == Cover::hidden) continue;
        for (int s = 0; s < S; ++s) {
          multiply_by_rows<false>(block.query, g * kRows, c.key_columns, p, terms_.product[s], 0,
                                  p_.size, block.scores.at(s, p, g * kRows));
          multiply_by_rows<false>(block.gy, g * kRows, c.value_columns, p, terms_.gradient[s], 0,
                                  p_.value_size, block.gradients.at(s, p, g * kRows));
        }
      }
    }
  }

  // Scores to weights, and their gradients to those of the scores.
  void score_gradients(const Block& block, const Chunk& c, const TileMask<T>& mask) {
    const Panels<T> factors = make_panels<T>(factors_buffer_, kBackwardQueries, chunk_);
    if (p_.dropout_p > 0)
      dropout_factors(p_, block.batch, block.head, block.first, mask.groups * kRows, c.first,
                      mask.panels, factors);
    for (int64_t g = 0; g < mask.groups; ++g) {
      ScoreRow<T> row = {block.scores, 0, 0, 0, &mask};
      mask.panels_seen(g, row.begin, row.end);
      for (row.row = g * kRows; row.row < (g + 1) * kRows; ++row.row)
        gradient_row<q, P>(row, block.gradients, block.row[row.row], static_cast<T>(p_.softcap),
                           p_.dropout_p > 0 ? &factors : nullptr);
    }
  }

  void add_to_queries(const Block& block, const Chunk& c, const TileMask<T>& mask) {
    for (int64_t g = 0; g < mask.groups; ++g) {
      int64_t begin, end;
      mask.panels_seen(g, begin, end);
      for (int64_t p = 0; p < size_ / kPanel<T>; ++p) {
        for (int s = 0; s < S; ++s)
          multiply_by_rows<true>(block.gradients, g * kRows, c.key, p, terms_.gradient[s],
                                 begin * kPanel<T>, end * kPanel<T>,
                                 block.gquery.at(s, p, g * kRows));
      }
    }
  }

  void add_to_keys(const Block& block, const Chunk& c, const TileMask<T>& mask) {
    for (int64_t column = 0; column < c.padded; column += kRows) {
      mask.for_each_run_seeing(column / kPanel<T>, [&](int64_t first, int64_t last) {
        const int64_t begin = first * kRows, end = std::min(last * kRows, block.rows);
        for (int64_t p = 0; p < size_ / kPanel<T>; ++p) {
          for (int s = 0; s < S; ++s)
            multiply_by_columns<true>(block.gradients, column, block.query, p, terms_.gradient[s],
                                      begin, end, c.gkey.at(s, p, column));
        }
        for (int64_t p = 0; p < value_size_ / kPanel<T>; ++p) {
          for (int s = 0; s < S; ++s)
            multiply_by_columns<true>(block.scores, column, block.gy, p, weight_terms_[s], begin,
                                      end, c.gvalue.at(s, p, column));
        }
      });
    }
  }

  void write_queries(int64_t batch, int64_t key_head, T* sums) {
    const int64_t group = p_.heads / p_.key_heads, per_head = blocks_per_head(p_);
    for (int64_t n = 0; n < group * per_head; ++n) {
      const int64_t first = n % per_head * kBackwardQueries;
      unpack_rows(queries_of(sums, n), S, std::min(kBackwardQueries, p_.queries - first), p_.size,
                  static_cast<T>(p_.scale), t_.gquery, p_.storage, batch,
                  key_head * group + n / per_head, first);
    }
  }

  // gradient, with the factors the other way round: weights are the left factor, gy the right one.
  static std::array<Terms, S> swapped(const LeibnizTerms<q, P>& terms) {
    std::array<Terms, S> out = {};
    for (int s = 0; s < S; ++s) {
      out[s].count = terms.gradient[s].count;
      for (int t = 0; t < out[s].count; ++t)
        out[s].term[t] = {terms.gradient[s].term[t].b, terms.gradient[s].term[t].a};
    }
    return out;
  }

  const AttentionProblem& p_;
  const AttentionGradients& t_;
  const LeibnizTerms<q, P> terms_;
  const std::array<Terms, S> weight_terms_ = swapped(terms_);
  const int64_t chunk_, size_, value_size_;
  AlignedBuffer<T> keys_buffer_, values_buffer_, query_buffer_, gy_buffer_, scores_buffer_,
      add_buffer_, factors_buffer_;
  AlignedBuffer<Cover> cover_;
  AlignedBuffer<T> gquery_buffer_;
  Block block_;
};

}  // namespace JACHESS_ISA
}  // namespace jachess
