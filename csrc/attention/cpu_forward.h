// Forward of attention on the CPU, for JACHESS_ISA: blocks of queries against chunks of keys.
//
// A chunk's weights are normalised within the chunk, and its result is a pair of jets: log sum e^s,
// and y. Two chunks are merged as if each were one key with that score and that value, which is the
// same softmax rule again; every sum is thereby centred, however far the scores lie from 0.
#pragma once

#include "../cpu/pack_panels.h"
#include "cpu_softmax.h"

namespace jachess {
namespace JACHESS_ISA {

constexpr int64_t kForwardQueries = 32;  // a block
constexpr int64_t kForwardKeys = 128;    // a chunk
constexpr int64_t kSpan = 8;             // blocks that share the packing of a chunk

template <int q, int P, typename T>
class AttentionForward {
 public:
  AttentionForward(const AttentionProblem& problem, const JetHeads& y, void* stats)
      : p_(problem),
        y_(y),
        stats_(static_cast<T*>(stats)),
        chunk_(std::clamp(round_up(problem.keys, kPanel<T>), kPanel<T>, kForwardKeys)),
        size_(round_up(problem.size, kPanel<T>)),
        value_size_(round_up(problem.value_size, kPanel<T>)),
        rows_buffer_(S * chunk_ * size_),
        keys_buffer_(S * chunk_ * size_),
        values_buffer_(S * chunk_ * value_size_),
        query_buffer_(S * kForwardQueries * size_),
        scores_buffer_(S * kForwardQueries * chunk_),
        add_buffer_(kForwardQueries * chunk_),
        factors_buffer_(kForwardQueries * chunk_),
        chunk_buffer_(S * kForwardQueries * value_size_),
        total_buffer_(kSpan * S * kForwardQueries * value_size_),
        cover_(kForwardQueries / kRows * chunk_ / kPanel<T>) {}

  // Blocks are numbered by batch, key head, query head of its group, and place.
  static int64_t blocks(const AttentionProblem& p) {
    return p.batch * p.heads * ((p.queries + kForwardQueries - 1) / kForwardQueries);
  }

  void run(int64_t begin, int64_t end) {
    const int64_t per_head = (p_.queries + kForwardQueries - 1) / kForwardQueries;
    const int64_t per_pair = p_.heads / p_.key_heads * per_head;
    while (begin < end) {
      const int64_t pair = begin / per_pair;
      const int64_t stop = std::min({end, (pair + 1) * per_pair, begin + kSpan});
      span(pair, begin - pair * per_pair, stop - begin, per_head);
      begin = stop;
    }
  }

 private:
  static constexpr int S = 1 + q + P;

  // A block: its queries, and what has been gathered over the chunks so far.
  struct Block {
    int64_t head, first, rows;
    bool started;
    T lse[kForwardQueries][S];
    Panels<T> y;
  };

  void span(int64_t pair, int64_t first, int64_t count, int64_t per_head) {
    const int64_t batch = pair / p_.key_heads, key_head = pair % p_.key_heads;
    for (int64_t n = 0; n < count; ++n) {
      Block& block = blocks_[n];
      block.head = key_head * (p_.heads / p_.key_heads) + (first + n) / per_head;
      block.first = (first + n) % per_head * kForwardQueries;
      block.rows = std::min(kForwardQueries, p_.queries - block.first);
      block.started = false;
      block.y = make_panels<T>(total_buffer_ + n * S * kForwardQueries * value_size_,
                               kForwardQueries, value_size_);
    }
    for (int64_t key = 0; key < p_.keys; key += chunk_) {
      const int64_t keys = std::min(chunk_, p_.keys - key);
      if (pair != packed_pair_ || key != packed_key_) pack_chunk(batch, key_head, key, keys, pair);
      for (int64_t n = 0; n < count; ++n) attend(batch, blocks_[n], key, keys);
    }
    for (int64_t n = 0; n < count; ++n) write(batch, blocks_[n]);
  }

  void pack_chunk(int64_t batch, int64_t head, int64_t key, int64_t keys, int64_t pair) {
    const int64_t padded = round_up(keys, kPanel<T>);
    const Panels<T> rows = make_panels<T>(rows_buffer_, chunk_, size_);
    pack_rows(p_.key, p_.storage, S, batch, head, key, keys, padded, p_.size, T(1), rows);
    keys_ = make_panels<T>(keys_buffer_, size_, chunk_);
    transpose_panels(rows, S, padded, size_, keys_);
    values_ = make_panels<T>(values_buffer_, chunk_, value_size_);
    pack_rows(p_.value, p_.storage, S, batch, head, key, keys, padded, p_.value_size, T(1),
              values_);
    packed_pair_ = pair;
    packed_key_ = key;
  }

  // One block of queries against the packed chunk.
  void attend(int64_t batch, Block& block, int64_t key, int64_t keys) {
    if (first_key(p_, block.first) >= key + keys ||
        end_key(p_, block.first + block.rows - 1) <= key)
      return;
    TileMask<T> mask = {make_panels<T>(add_buffer_, kForwardQueries, chunk_), cover_,
                        (block.rows + kRows - 1) / kRows, (keys + kPanel<T> - 1) / kPanel<T>};
    cover_tile(p_, batch, block.head, block.first, block.rows, key, mask);
    const Panels<T> z = make_panels<T>(scores_buffer_, kForwardQueries, chunk_);
    score(batch, block, mask, z);
    T lse[kForwardQueries][S], lag[kForwardQueries][P + 1];
    softmax_weights(batch, block, key, mask, z, lse, lag);
    const Panels<T> chunk_y =
        block.started ? make_panels<T>(chunk_buffer_, kForwardQueries, value_size_) : block.y;
    average(mask, z, lag, chunk_y);
    if (block.started) {
      for (int64_t r = 0; r < block.rows; ++r) merge(block.y, chunk_y, r, lse[r], block.lse[r]);
    } else {
      std::memcpy(block.lse, lse, sizeof(lse));
      block.started = true;
    }
  }

  void score(int64_t batch, const Block& block, const TileMask<T>& mask, Panels<T> z) {
    const Panels<T> query = make_panels<T>(query_buffer_, kForwardQueries, size_);
    pack_rows(p_.query, p_.storage, S, batch, block.head, block.first, block.rows,
              round_up(block.rows, kRows), p_.size, static_cast<T>(p_.scale), query);
    for (int64_t c = 0; c < mask.panels; ++c) {
      for (int64_t g = 0; g < mask.groups; ++g) {
        if (mask.at(g, c) == Cover::hidden) continue;
        for (int s = 0; s < S; ++s)
          multiply_by_rows<false>(query, g * kRows, keys_, c, terms_.product[s], 0, p_.size,
                                  z.at(s, c, g * kRows));
      }
    }
  }

  void softmax_weights(int64_t batch, const Block& block, int64_t key, const TileMask<T>& mask,
                       Panels<T> z, T (*lse)[S], T (*lag)[P + 1]) {
    const Panels<T> factors = make_panels<T>(factors_buffer_, kForwardQueries, chunk_);
    if (p_.dropout_p > 0)
      dropout_factors(p_, batch, block.head, block.first, mask.groups * kRows, key, mask.panels,
                      factors);
    for (int64_t g = 0; g < mask.groups; ++g) {
      ScoreRow<T> row = {z, 0, 0, 0, &mask};
      mask.panels_seen(g, row.begin, row.end);
      for (row.row = g * kRows; row.row < (g + 1) * kRows; ++row.row) {
        softmax_row<q, P>(row, static_cast<T>(p_.softcap), lse[row.row], lag[row.row]);
        if (p_.dropout_p > 0) scale_row<S>(row, factors);
      }
    }
  }

  // y = weights · values, with the term that the weights of second order lack.
  void average(const TileMask<T>& mask, Panels<T> z, const T (*lag)[P + 1], Panels<T> y) {
    for (int64_t g = 0; g < mask.groups; ++g) {
      int64_t begin, end;
      mask.panels_seen(g, begin, end);
      for (int64_t c = 0; c < value_size_ / kPanel<T>; ++c) {
        for (int s = 0; s < S; ++s)
          multiply_by_rows<false>(z, g * kRows, values_, c, terms_.product[s], begin * kPanel<T>,
                                  end * kPanel<T>, y.at(s, c, g * kRows));
        for (int k = 0; k < P; ++k) {
          for (int64_t r = g * kRows; r < (g + 1) * kRows; ++r) {
            for (int v = 0; v < TileVector<T>::per_panel; ++v)
              vector_at(y.at(1 + q + k, c, r), v) -= lag[r][k] * vector_at(y.at(0, c, r), v);
          }
        }
      }
    }
  }

  // total := the softmax of two keys with scores `lse`, `total_lse` and values `y`, `total`.
  void merge(Panels<T> total, Panels<T> y, int64_t r, const T* lse, T* total_lse) const {
    using V = typename TileVector<T>::type;
    T a[S], b[S];
    merge_weights(total_lse, lse, a, b);
    for (int64_t c = 0; c < value_size_ / kPanel<T>; ++c) {
      for (int v = 0; v < TileVector<T>::per_panel; ++v) {
        V a_value[S], b_value[S], first[S], second[S];
        load_streams<S>(total, c, r, v, a_value);
        load_streams<S>(y, c, r, v, b_value);
        product_jet<q, P>(a_value, a, first);
        product_jet<q, P>(b_value, b, second);
        JACHESS_UNROLL
        for (int s = 0; s < S; ++s) first[s] += second[s];
        store_streams<S>(total, c, r, v, first);
      }
    }
  }

  // The weights of two scores, as jets; the first becomes the jet of their log sum e^s.
  static void merge_weights(T* first, const T* second, T* a, T* b) {
    const bool none = first[0] == -kInfinity<T>, all = second[0] == -kInfinity<T>;
    if (none || all) {
      for (int s = 0; s < S; ++s) {
        a[s] = s == 0 && all ? T(1) : T(0);
        b[s] = s == 0 && !all ? T(1) : T(0);
        if (!all) first[s] = second[s];
      }
      return;
    }
    const T top = first[0] > second[0] ? first[0] : second[0];
    const T x = std::exp(first[0] - top), y = std::exp(second[0] - top);
    a[0] = x / (x + y);
    b[0] = y / (x + y);
    T l[S], za[S], zb[S];
    l[0] = top + std::log(x + y);
    for (int s = 1; s < S; ++s) l[s] = a[0] * first[s] + b[0] * second[s];
    const auto centre = [&] {
      for (int s = 1; s < S; ++s) {
        za[s] = first[s] - l[s];
        zb[s] = second[s] - l[s];
      }
      pointwise_jet<q, P>(a[0], a[0], za, a);
      pointwise_jet<q, P>(b[0], b[0], zb, b);
    };
    centre();
    // So far the weights of second order sum to what l_ij lacks.
    for (int s = 1 + q; s < S; ++s) l[s] += a[s] + b[s];
    centre();
    for (int s = 0; s < S; ++s) first[s] = l[s];
  }

  void write(int64_t batch, Block& block) {
    if (!block.started) {
      for (int s = 0; s < S; ++s) {
        for (int64_t c = 0; c < value_size_ / kPanel<T>; ++c)
          std::memset(block.y.at(s, c), 0, sizeof(T) * kForwardQueries * kPanel<T>);
      }
      for (auto& row : block.lse) {
        for (int s = 0; s < S; ++s) row[s] = s == 0 ? -kInfinity<T> : T(0);
      }
    }
    unpack_rows(block.y, S, block.rows, p_.value_size, T(1), y_, p_.storage, batch, block.head,
                block.first);
    const int64_t stream = p_.batch * p_.heads * p_.queries;
    T* out = stats_ + (batch * p_.heads + block.head) * p_.queries + block.first;
    for (int64_t r = 0; r < block.rows; ++r) {
      for (int s = 0; s < S; ++s) out[s * stream + r] = block.lse[r][s];
    }
  }

  const AttentionProblem& p_;
  const JetHeads y_;
  T* stats_;
  const LeibnizTerms<q, P> terms_;
  const int64_t chunk_, size_, value_size_;
  AlignedBuffer<T> rows_buffer_, keys_buffer_, values_buffer_, query_buffer_, scores_buffer_,
      add_buffer_, factors_buffer_, chunk_buffer_, total_buffer_;
  AlignedBuffer<Cover> cover_;
  Panels<T> keys_ = {}, values_ = {};
  int64_t packed_pair_ = -1, packed_key_ = -1;
  Block blocks_[kSpan];
};

}  // namespace JACHESS_ISA
}  // namespace jachess
