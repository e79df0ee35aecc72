// Attention of jets with any number of directions and at most one stream of second order, the sum
// of squares of some of them; forward and backward on the CPU, for JACHESS_ISA.
//
// A block of queries meets all keys of its head at once, and directions are visited one after
// another: tiles of scores are few, however many the directions. With c_i = s_i - sum p s_i, and
// t = s_s + sum c_i^2 over the summed directions:
//     p_i = p c_i,   p_s = p (t - sum p t).
#pragma once

#include "../cpu/pack_panels.h"
#include "cpu_softmax.h"

namespace jachess {
namespace JACHESS_ISA {

constexpr int64_t kSumQueries = 32;   // a block, at most
constexpr int64_t kSumScores = 8192;  // of a tile, about: three of them stay in L2

template <typename T>
class AttentionSum {
 public:
  // `gradients`: null in the forward.
  AttentionSum(const AttentionProblem& problem, const AttentionGradients* gradients)
      : p_(problem),
        t_(gradients),
        last_(1 + problem.q),
        streams_(last_ + problem.pairs),
        summed_(problem.pairs > 0 ? problem.summed : 0),
        keys_(round_up(std::max<int64_t>(problem.keys, 1), kPanel<T>)),
        size_(round_up(problem.size, kPanel<T>)),
        value_size_(round_up(problem.value_size, kPanel<T>)),
        rows_(std::clamp(kSumScores / keys_ / kRows * kRows, kRows, kSumQueries)),
        key_rows_(streams_, keys_, size_),
        key_columns_(streams_, size_, keys_),
        value_rows_(streams_, keys_, value_size_),
        value_columns_(gradients ? streams_ : 0, value_size_, keys_),
        query_(streams_, rows_, size_),
        y_(streams_ + 1, rows_, value_size_),
        gquery_(gradients ? streams_ : 0, rows_, size_),
        gkey_(gradients ? streams_ : 0, keys_, size_),
        gvalue_(gradients ? streams_ : 0, keys_, value_size_),
        tiles_(gradients ? kTiles : kForwardTiles, rows_, keys_),
        add_(1, rows_, keys_),
        cover_(rows_ / kRows * keys_ / kPanel<T>),
        log_sum_(rows_ * streams_) {}

  static int64_t items(const AttentionProblem& p) { return p.batch * p.key_heads; }

  void forward(const JetHeads& y, void* stats, int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      pack_keys(item);
      for_each_block(item, [&] {
        forward_block();
        unpack_rows(y_.panels, streams_, count_, p_.value_size, T(1), y, p_.storage, batch_, head_,
                    first_);
        for_each_log_sum(static_cast<T*>(stats), [](T& saved, T& lse) { saved = lse; });
      });
    }
  }

  void backward(int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      pack_keys(item);
      transpose_panels(value_rows_.panels, streams_, keys_, value_size_, value_columns_.panels);
      gkey_.clear();
      gvalue_.clear();
      for_each_block(item, [&] {
        for_each_log_sum(static_cast<T*>(const_cast<void*>(t_->stats)),
                         [](T& saved, T& lse) { lse = saved; });
        backward_block();
        unpack_rows(gquery_.panels, streams_, count_, p_.size, static_cast<T>(p_.scale), t_->gquery,
                    p_.storage, batch_, head_, first_);
      });
      const int64_t key_head = item % p_.key_heads;
      unpack_rows(gkey_.panels, streams_, p_.keys, p_.size, T(1), t_->gkey, p_.storage, batch_,
                  key_head, 0);
      unpack_rows(gvalue_.panels, streams_, p_.keys, p_.value_size, T(1), t_->gvalue, p_.storage,
                  batch_, key_head, 0);
    }
  }

 private:
  using V = typename TileVector<T>::type;

  // Tiles of a block: weights, those of a direction (its scores before), sum c_i^2, half of what
  // products of tangents add to s_s; and in the backward the gradients of scores s_i and s_s, the
  // latter twice over, h = gradient of p_s, centred, and the gradient of p (then of s_0).
  enum Tile {
    kWeight,
    kTangent,
    kSquares,
    kCrossed,
    kGradient,
    kSecond,
    kTwice,
    kCentred,
    kPrimal
  };
  static constexpr int kForwardTiles = kGradient, kTiles = kPrimal + 1;

  // A stack of matrices in panels, and its memory.
  struct Stack {
    AlignedBuffer<T> buffer;
    Panels<T> panels;
    int64_t numbers;
    Stack(int64_t streams, int64_t rows, int64_t columns)
        : buffer(streams * rows * round_up(columns, kPanel<T>)),
          panels(make_panels<T>(buffer, rows, columns)),
          numbers(streams * panels.stream) {}
    void clear() { std::memset(panels.data, 0, sizeof(T) * static_cast<size_t>(numbers)); }
    void clear(int64_t s) {
      std::memset(panels.at(s, 0), 0, sizeof(T) * static_cast<size_t>(panels.stream));
    }
  };

  static Terms terms(int a, int b) { return {{{a, b}}, 1}; }
  static Terms terms(int a, int b, int c, int d) { return {{{a, b}, {c, d}}, 2}; }

  // ---- blocks ----------------------------------------------------------------------------------

  void pack_keys(int64_t item) {
    batch_ = item / p_.key_heads;
    const int64_t head = item % p_.key_heads;
    pack_rows(p_.key, p_.storage, streams_, batch_, head, 0, p_.keys, keys_, p_.size, T(1),
              key_rows_.panels);
    transpose_panels(key_rows_.panels, streams_, keys_, size_, key_columns_.panels);
    pack_rows(p_.value, p_.storage, streams_, batch_, head, 0, p_.keys, keys_, p_.value_size, T(1),
              value_rows_.panels);
  }

  // Calls f for every block of queries of a key head, packed; what is summed up in tiles is 0.
  template <typename F>
  void for_each_block(int64_t item, const F& f) {
    const int64_t group = p_.heads / p_.key_heads;
    mask_ = {add_.panels, cover_, 0, keys_ / kPanel<T>};
    for (int64_t n = 0; n < group; ++n) {
      head_ = item % p_.key_heads * group + n;
      for (first_ = 0; first_ < p_.queries; first_ += rows_) {
        count_ = std::min(rows_, p_.queries - first_);
        mask_.groups = (count_ + kRows - 1) / kRows;
        cover_tile(p_, batch_, head_, first_, count_, 0, mask_);
        pack_rows(p_.query, p_.storage, streams_, batch_, head_, first_, count_,
                  mask_.groups * kRows, p_.size, static_cast<T>(p_.scale), query_.panels);
        tiles_.clear(kSquares);
        tiles_.clear(kCrossed);
        f();
      }
    }
  }

  // Calls f(g, begin, end) for every group of rows and the panels of keys that it sees.
  template <typename F>
  void for_each_group(const F& f) {
    for (int64_t g = 0; g < mask_.groups; ++g) {
      int64_t begin, end;
      mask_.panels_seen(g, begin, end);
      f(g, begin, end);
    }
  }

  // Calls f(at) for a row's panels, a vector at a time: at(tile) is that vector of a tile.
  template <typename F>
  void for_each_vector(int64_t row, int64_t begin, int64_t end, const F& f) {
    for (int64_t c = begin; c < end; ++c) {
      for (int v = 0; v < TileVector<T>::per_panel; ++v)
        f([&](int tile) -> V& { return vector_at(tiles_.panels.at(tile, c, row), v); });
    }
  }

  template <typename F>
  void for_each_log_sum(T* stats, const F& f) {
    const int64_t stream = p_.batch * p_.heads * p_.queries;
    T* at = stats + (batch_ * p_.heads + head_) * p_.queries + first_;
    for (int s = 0; s < streams_; ++s) {
      for (int64_t r = 0; r < count_; ++r) f(at[s * stream + r], log_sum(s, r));
    }
  }

  T& log_sum(int s, int64_t row) { return log_sum_[s * rows_ + row]; }

  // ---- products of a group of rows
  // ----------------------------------------------------------------

  // A row of queries or gradients times the transposed keys or values -> a tile.
  template <bool add>
  void score(const Stack& a, const Stack& b, int64_t size, const Terms& t, int tile, int64_t g,
             int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c)
      multiply_by_rows<add>(a.panels, g * kRows, b.panels, c, t, 0, size,
                            tiles_.panels.at(tile, c, g * kRows));
  }

  // Tiles times keys or values -> a stream of `out`.
  template <bool add>
  void average(const Stack& b, const Terms& t, Stack& out, int s, int64_t g, int64_t begin,
               int64_t end) {
    for (int64_t c = 0; c * kPanel<T> < out.panels.stream / rows_; ++c)
      multiply_by_rows<add>(tiles_.panels, g * kRows, b.panels, c, t, begin * kPanel<T>,
                            end * kPanel<T>, out.panels.at(s, c, g * kRows));
  }

  // Transposed tiles times queries or gradients, added to a stream of `out`.
  void gather(const Stack& b, const Terms& t, Stack& out, int s) {
    for (int64_t column = 0; column < keys_; column += kRows) {
      mask_.for_each_run_seeing(column / kPanel<T>, [&](int64_t begin, int64_t end) {
        for (int64_t c = 0; c * kPanel<T> < out.panels.stream / keys_; ++c)
          multiply_by_columns<true>(tiles_.panels, column, b.panels, c, t, begin * kRows,
                                    std::min(end * kRows, count_), out.panels.at(s, c, column));
      });
    }
  }

  // ---- forward ---------------------------------------------------------------------------------

  void softmax_weights(int64_t g, int64_t begin, int64_t end) {
    score<false>(query_, key_columns_, p_.size, terms(0, 0), kWeight, g, begin, end);
    for (int64_t r = g * kRows; r < (g + 1) * kRows; ++r) {
      T lag;
      softmax_row<0, 0>(ScoreRow<T>{tiles_.panels, r, begin, end, &mask_}, T(0), &log_sum(0, r),
                        &lag);
    }
  }

  // s_i into kTangent, and its products with itself to kCrossed.
  void score_tangent(int i, int64_t g, int64_t begin, int64_t end) {
    score<false>(query_, key_columns_, p_.size, terms(i, 0, 0, i), kTangent, g, begin, end);
    if (i <= summed_)
      score<true>(query_, key_columns_, p_.size, terms(i, i), kCrossed, g, begin, end);
  }

  void forward_block() {
    if (p_.pairs > 0) y_.clear(last_);
    for_each_group([&](int64_t g, int64_t begin, int64_t end) {
      softmax_weights(g, begin, end);
      average<false>(value_rows_, terms(kWeight, 0), y_, 0, g, begin, end);
    });
    for (int i = 1; i < last_; ++i) {
      for_each_group([&](int64_t g, int64_t begin, int64_t end) {
        score_tangent(i, g, begin, end);
        for (int64_t r = g * kRows; r < (g + 1) * kRows; ++r) {
          V sum = {};
          for_each_vector(r, begin, end,
                          [&](const auto& at) { sum += at(kWeight) * at(kTangent); });
          const T mean = log_sum(i, r) = sum_lanes<T>(sum);
          for_each_vector(r, begin, end, [&](const auto& at) {
            const V c = at(kTangent) - mean;
            if (i <= summed_) at(kSquares) += c * c;
            at(kTangent) = at(kWeight) * c;
          });
        }
        average<false>(value_rows_, terms(kTangent, 0, kWeight, i), y_, i, g, begin, end);
        if (i <= summed_) average<true>(value_rows_, terms(kTangent, i), y_, last_, g, begin, end);
      });
    }
    if (p_.pairs == 0) return;
    for (int64_t n = 0; n < y_.panels.stream; ++n) y_.panels.at(last_, 0)[n] *= T(2);
    for_each_group([&](int64_t g, int64_t begin, int64_t end) {
      score<false>(query_, key_columns_, p_.size, terms(last_, 0, 0, last_), kTangent, g, begin,
                   end);
      for (int64_t r = g * kRows; r < (g + 1) * kRows; ++r) {
        V sum = {};
        for_each_vector(r, begin, end, [&](const auto& at) {
          at(kTangent) += T(2) * at(kCrossed) + at(kSquares);
          sum += at(kWeight) * at(kTangent);
        });
        const T mean = log_sum(last_, r) = sum_lanes<T>(sum);
        for_each_vector(r, begin, end, [&](const auto& at) {
          at(kTangent) = at(kWeight) * (at(kTangent) - mean);
        });
      }
      average<true>(value_rows_, terms(kTangent, 0, kWeight, last_), y_, last_, g, begin, end);
    });
  }

  // ---- backward --------------------------------------------------------------------------------
  //
  // With g the gradients of the weights, h = g_s - sum p g_s, e_i = g_i + 2 h c_i (g_i where i is
  // not summed), C_i = sum p e_i and A = g_0 + sum (g_i - C_i) c_i + h (t - sum p t), those of the
  // scores are p (A - sum p A), p (e_i - C_i) and p h. y_ holds the gradient of y here, and behind
  // it twice that of y_s.

  void backward_block() {
    pack_rows(t_->gy, p_.storage, streams_, batch_, head_, first_, count_, mask_.groups * kRows,
              p_.value_size, T(1), y_.panels);
    if (p_.pairs > 0) {
      const T* from = y_.panels.at(last_, 0);
      for (int64_t n = 0; n < y_.panels.stream; ++n) y_.panels.at(streams_, 0)[n] = T(2) * from[n];
    }
    gquery_.clear(0);
    if (p_.pairs == 0) tiles_.clear(kCentred);  // which is h
    for_each_group([&](int64_t g, int64_t begin, int64_t end) {
      softmax_weights(g, begin, end);
      if (p_.pairs > 0) backward_second(g, begin, end);
      const Terms of_weight = p_.pairs > 0 ? terms(0, 0, last_, last_) : terms(0, 0);
      score<false>(y_, value_columns_, p_.value_size, of_weight, kPrimal, g, begin, end);
    });
    for (int i = 1; i < last_; ++i) backward_tangent(i);
    for_each_group([&](int64_t g, int64_t begin, int64_t end) { backward_primal(g, begin, end); });
    gather(query_, terms(kPrimal, 0), gkey_, 0);
    gather(y_, terms(kWeight, 0), gvalue_, 0);
    if (p_.pairs == 0) return;
    gather(query_, terms(kSecond, last_), gkey_, 0);
    gather(query_, terms(kSecond, 0), gkey_, last_);
    gather(y_, terms(kTangent, last_), gvalue_, 0);
    gather(y_, terms(kWeight, last_), gvalue_, last_);
  }

  void backward_second(int64_t g, int64_t begin, int64_t end) {
    score<false>(y_, value_columns_, p_.value_size, terms(last_, 0), kCentred, g, begin, end);
    for (int64_t r = g * kRows; r < (g + 1) * kRows; ++r) {
      V sum = {};
      for_each_vector(r, begin, end, [&](const auto& at) { sum += at(kWeight) * at(kCentred); });
      const T mean = sum_lanes<T>(sum);
      for_each_vector(r, begin, end, [&](const auto& at) {
        at(kCentred) -= mean;
        at(kSecond) = at(kWeight) * at(kCentred);
        at(kTwice) = T(2) * at(kSecond);
      });
    }
  }

  void backward_tangent(int i) {
    const bool squared = i <= summed_;
    const int twice = streams_;
    for_each_group([&](int64_t g, int64_t begin, int64_t end) {
      score_tangent(i, g, begin, end);
      score<false>(y_, value_columns_, p_.value_size, squared ? terms(i, 0, twice, i) : terms(i, 0),
                   kGradient, g, begin, end);
      score<true>(y_, value_columns_, p_.value_size, terms(i, i), kPrimal, g, begin, end);
      for (int64_t r = g * kRows; r < (g + 1) * kRows; ++r) {
        const T mean = log_sum(i, r);
        const T factor = squared ? T(2) : T(0);
        V sum = {};
        for_each_vector(r, begin, end, [&](const auto& at) {
          const V c = at(kTangent) - mean;
          sum += at(kWeight) * (at(kGradient) + factor * at(kCentred) * c);
        });
        const T mean_gradient = sum_lanes<T>(sum);
        for_each_vector(r, begin, end, [&](const auto& at) {
          const V c = at(kTangent) - mean, centred = at(kGradient) - mean_gradient;
          at(kPrimal) += centred * c;
          if (squared) at(kSquares) += c * c;
          at(kTangent) = at(kWeight) * c;
          at(kGradient) = at(kWeight) * (centred + factor * at(kCentred) * c);
        });
      }
      average<false>(key_rows_, squared ? terms(kGradient, 0, kTwice, i) : terms(kGradient, 0),
                     gquery_, i, g, begin, end);
      average<true>(key_rows_, terms(kGradient, i), gquery_, 0, g, begin, end);
    });
    gather(query_, squared ? terms(kGradient, 0, kTwice, i) : terms(kGradient, 0), gkey_, i);
    gather(query_, terms(kGradient, i), gkey_, 0);
    gather(y_, squared ? terms(kWeight, i, kTangent, twice) : terms(kWeight, i), gvalue_, i);
    gather(y_, terms(kTangent, i), gvalue_, 0);
  }

  // kPrimal becomes the gradient of s_0, and kTangent p_s.
  void backward_primal(int64_t g, int64_t begin, int64_t end) {
    if (p_.pairs > 0)
      score<false>(query_, key_columns_, p_.size, terms(last_, 0, 0, last_), kTangent, g, begin,
                   end);
    for (int64_t r = g * kRows; r < (g + 1) * kRows; ++r) {
      V sum = {};
      for_each_vector(r, begin, end, [&](const auto& at) {
        if (p_.pairs > 0) {
          const V centred_second =
              at(kTangent) + T(2) * at(kCrossed) + at(kSquares) - log_sum(last_, r);
          at(kPrimal) += at(kCentred) * centred_second;
          at(kTangent) = at(kWeight) * centred_second;
        }
        sum += at(kWeight) * at(kPrimal);
      });
      const T mean = sum_lanes<T>(sum);
      for_each_vector(r, begin, end,
                      [&](const auto& at) { at(kPrimal) = at(kWeight) * (at(kPrimal) - mean); });
    }
    average<true>(key_rows_, terms(kPrimal, 0), gquery_, 0, g, begin, end);
    if (p_.pairs == 0) return;
    average<true>(key_rows_, terms(kSecond, last_), gquery_, 0, g, begin, end);
    average<false>(key_rows_, terms(kSecond, 0), gquery_, last_, g, begin, end);
  }

  const AttentionProblem& p_;
  const AttentionGradients* const t_;
  const int last_, streams_;
  const int64_t summed_, keys_, size_, value_size_, rows_;
  Stack key_rows_, key_columns_, value_rows_, value_columns_, query_, y_, gquery_, gkey_, gvalue_,
      tiles_, add_;
  AlignedBuffer<Cover> cover_;
  AlignedBuffer<T> log_sum_;
  TileMask<T> mask_ = {};
  int64_t batch_ = 0, head_ = 0, first_ = 0, count_ = 0;
};

}  // namespace JACHESS_ISA
}  // namespace jachess
