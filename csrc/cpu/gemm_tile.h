// Register-blocked products of small matrices in panels, for the instruction set JACHESS_ISA.
//
// A matrix in panels is cut into panels of 64 bytes' worth of columns (kPanel); a panel holds its
// rows one after another, so that every row is one cache line and every address in a micro-kernel
// is a constant away from a pointer. A stack of matrices has one such block per stream. A
// micro-kernel adds up a whole sum of products of streams, sum A_a B_b over `terms`, for 8 rows and
// one panel of columns in registers: the sum is one product with a longer inner dimension.
#pragma once

// For what does not depend on the number of streams: compiled once, not into each of its callers.
#define JACHESS_ONCE __attribute__((noinline, noclone))

namespace jachess {
namespace JACHESS_ISA {

template <typename T>
constexpr int64_t kPanel = 64 / static_cast<int64_t>(sizeof(T));
constexpr int64_t kRows = 8;  // of a micro-kernel

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Registers of the instruction set: 8 rows fill 8 of 32 with 64 bytes; where there are 16 smaller
// ones, fewer rows at a time leave room for the factors.
template <typename T>
struct TileVector {
  typedef T type __attribute__((vector_size(JACHESS_VECTOR_BYTES), may_alias));
  static constexpr int lanes = JACHESS_VECTOR_BYTES / static_cast<int>(sizeof(T));
  static constexpr int per_panel = 64 / JACHESS_VECTOR_BYTES;
  static constexpr int rows_at_once = JACHESS_VECTOR_BYTES / 8;
};

template <typename T>
JACHESS_HD typename TileVector<T>::type& vector_at(T* panel_row, int v) {
  return *reinterpret_cast<typename TileVector<T>::type*>(panel_row + v * TileVector<T>::lanes);
}

// A stack of matrices in panels: where a stream, a panel and a row begin.
template <typename T>
struct Panels {
  T* data;
  int64_t stream, panel;
  JACHESS_HD T* at(int64_t s, int64_t p, int64_t row = 0) const {
    return data + s * stream + p * panel + row * kPanel<T>;
  }
};

template <typename T>
Panels<T> make_panels(T* data, int64_t rows, int64_t columns) {
  const int64_t panel = rows * kPanel<T>;
  return {data, round_up(columns, kPanel<T>) / kPanel<T> * panel, panel};
}

// The sum that makes up one stream of a product of jets: streams of the two factors.
struct Term {
  int a, b;
};
struct Terms {
  Term term[kMaxStreams];
  int count;
};

// acc[r] += sum over k < n of a(r, k) b[k], with a(r, k) at a[r * kPanel + k], or, by columns, at
// a[k * kPanel + r].
template <bool by_columns, int rows, typename T, typename V>
JACHESS_HD void accumulate(T* a, T* b, int64_t n, V (&acc)[rows][TileVector<T>::per_panel]) {
  constexpr int vectors = TileVector<T>::per_panel;
  for (int64_t k = 0; k < n; ++k) {
    V row[vectors];
    JACHESS_UNROLL
    for (int v = 0; v < vectors; ++v) row[v] = vector_at(b + k * kPanel<T>, v);
    JACHESS_UNROLL
    for (int r = 0; r < rows; ++r) {
      const T factor = by_columns ? a[k * kPanel<T> + r] : a[r * kPanel<T> + k];
      JACHESS_UNROLL
      for (int v = 0; v < vectors; ++v) acc[r][v] += factor * row[v];
    }
  }
}

template <bool add, int rows, typename T, typename V>
JACHESS_HD void write_tile(V (&acc)[rows][TileVector<T>::per_panel], T* out) {
  JACHESS_UNROLL
  for (int r = 0; r < rows; ++r) {
    JACHESS_UNROLL
    for (int v = 0; v < TileVector<T>::per_panel; ++v) {
      V& to = vector_at(out + r * kPanel<T>, v);
      to = add ? to + acc[r][v] : acc[r][v];
    }
  }
}

// Rows row .. row + 7 and one panel of sum A_a B_b, with the inner index in [begin, end), a range
// that begins with a panel of A; written to, or added to, out [8, kPanel].
template <bool add, typename T>
JACHESS_ONCE void multiply_by_rows(Panels<T> a, int64_t row, Panels<T> b, int64_t panel,
                                   const Terms& terms, int64_t begin, int64_t end, T* out) {
  using V = typename TileVector<T>::type;
  constexpr int rows = TileVector<T>::rows_at_once;
  for (int64_t r = 0; r < kRows; r += rows) {
    V acc[rows][TileVector<T>::per_panel] = {};
    for (int t = 0; t < terms.count; ++t) {
      for (int64_t k = begin; k < end; k += kPanel<T>) {
        accumulate<false>(a.at(terms.term[t].a, k / kPanel<T>, row + r),
                          b.at(terms.term[t].b, panel, k),
                          end - k < kPanel<T> ? end - k : kPanel<T>, acc);
      }
    }
    write_tile<add>(acc, out + r * kPanel<T>);
  }
}

// The same for sum A_a^T B_b: columns column .. column + 7 of A, the inner index is its row.
template <bool add, typename T>
JACHESS_ONCE void multiply_by_columns(Panels<T> a, int64_t column, Panels<T> b, int64_t panel,
                                      const Terms& terms, int64_t begin, int64_t end, T* out) {
  using V = typename TileVector<T>::type;
  constexpr int rows = TileVector<T>::rows_at_once;
  const int64_t p = column / kPanel<T>, within = column % kPanel<T>;
  for (int64_t r = 0; r < kRows; r += rows) {
    V acc[rows][TileVector<T>::per_panel] = {};
    for (int t = 0; t < terms.count; ++t) {
      accumulate<true>(a.at(terms.term[t].a, p, begin) + within + r,
                       b.at(terms.term[t].b, panel, begin), end - begin, acc);
    }
    write_tile<add>(acc, out + r * kPanel<T>);
  }
}

// ---- which streams meet in a product of jets (Leibniz), and in its gradients ------------------

template <int q, int P>
struct LeibnizTerms {
  Terms product[1 + q + P];   // (stream of a, stream of b)
  Terms gradient[1 + q + P];  // for a stream of one factor: (stream of the product, of the other)

  LeibnizTerms() : product{}, gradient{} {
    add(0, 0, 0);
    for (int s = 1; s < 1 + q + P; ++s) {
      add(s, s, 0);
      add(s, 0, s);
    }
    if constexpr (P > 0) {
      for (int i = 0; i < q; ++i) {
        for (int j = i + 1; j < q; ++j) {
          add(pair_stream<q>(i, j), 1 + i, 1 + j);
          add(pair_stream<q>(i, j), 1 + j, 1 + i);
        }
      }
    }
  }

 private:
  // The relation is symmetric in the factors, so one list of gradients serves both.
  void add(int of, int a, int b) {
    Terms& p = product[of];
    p.term[p.count++] = {a, b};
    Terms& g = gradient[a];
    g.term[g.count++] = {of, b};
  }
};

}  // namespace JACHESS_ISA
}  // namespace jachess
