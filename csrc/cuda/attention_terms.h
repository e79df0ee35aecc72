// Which products of streams make up each stream of a jet's bilinear operation: tables made on the
// host, read by the attention kernels, so that one kernel serves every number of streams.
#pragma once

#include <cstdint>

#include "../jet_math.h"

namespace jachess {

// Stream s of the result is the sum over t < count[s] of row[s][t] times column[s][t]. `order`
// lists the streams from the most terms to the fewest, for sharing them out evenly.
struct TermTable {
  int8_t count[kMaxStreams];
  int8_t order[kMaxStreams];
  int8_t row[kMaxStreams][kMaxStreams];
  int8_t column[kMaxStreams][kMaxStreams];

  void add(int stream, int of_row, int of_column) {
    row[stream][count[stream]] = static_cast<int8_t>(of_row);
    column[stream][count[stream]] = static_cast<int8_t>(of_column);
    ++count[stream];
  }

  void sort(int streams) {
    int placed = 0;
    for (int terms = kMaxStreams; terms > 0; --terms) {
      for (int s = 0; s < streams; ++s) {
        if (count[s] == terms) order[placed++] = static_cast<int8_t>(s);
      }
    }
  }

  // Rows and columns change places.
  TermTable swapped() const {
    TermTable other = *this;
    for (int s = 0; s < kMaxStreams; ++s) {
      for (int t = 0; t < count[s]; ++t) {
        other.row[s][t] = column[s][t];
        other.column[s][t] = row[s][t];
      }
    }
    return other;
  }
};

// Stream of the pair i < j at run time (pair_stream<q> at compile time).
inline int pair_stream_of(int q, int i, int j) {
  return 1 + q + i * (q - 1) - i * (i - 1) / 2 + (j - i - 1);
}

// Calls f(s, a, b) for every term a_a b_b of stream s of the product a b (Leibniz).
template <typename F>
void for_each_leibniz_term(int q, int pairs, const F& f) {
  f(0, 0, 0);
  for (int i = 1; i <= q; ++i) {
    f(i, i, 0);
    f(i, 0, i);
  }
  if (pairs == 0) return;
  for (int i = 0; i < q; ++i) {
    for (int j = i + 1; j < q; ++j) {
      const int ij = pair_stream_of(q, i, j);
      f(ij, ij, 0);
      f(ij, 1 + i, 1 + j);
      f(ij, 1 + j, 1 + i);
      f(ij, 0, ij);
    }
  }
}

// y = a b: row streams are a's, column streams b's.
inline TermTable product_terms(int q, int pairs) {
  TermTable table = {};
  for_each_leibniz_term(q, pairs, [&](int s, int a, int b) { table.add(s, a, b); });
  table.sort(1 + q + pairs);
  return table;
}

// The gradient in a of y = a b: row streams are gy's, column streams b's.
inline TermTable gradient_terms(int q, int pairs) {
  TermTable table = {};
  for_each_leibniz_term(q, pairs, [&](int s, int a, int b) { table.add(a, s, b); });
  table.sort(1 + q + pairs);
  return table;
}

// Kernels are compiled for few numbers of streams; a jet with fewer is given zeros. Entry s of the
// compiled order is this jet's stream, or −1.
struct StreamMap {
  int8_t at[kMaxStreams];
};

inline StreamMap stream_map(int compiled_q, int q, int pairs) {
  StreamMap map;
  for (int8_t& s : map.at) s = -1;
  for (int i = 0; i <= q; ++i) map.at[i] = static_cast<int8_t>(i);
  for (int i = 0; pairs > 0 && i < q; ++i) {
    for (int j = i + 1; j < q; ++j)
      map.at[pair_stream_of(compiled_q, i, j)] = static_cast<int8_t>(pair_stream_of(q, i, j));
  }
  return map;
}

}  // namespace jachess
