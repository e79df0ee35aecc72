// Rows of tensors in memory to matrices in panels (gemm_tile.h), and back; for JACHESS_ISA.
#pragma once

#include "gemm_tile.h"

namespace jachess {
namespace JACHESS_ISA {

// Calls f with a null pointer of the storage type; T is its accumulation type.
template <typename T, typename F>
void dispatch_storage(Storage storage, const F& f) {
  if constexpr (std::is_same_v<T, double>) {
    f(static_cast<double*>(nullptr));
  } else {
    if (storage == Storage::f32) return f(static_cast<float*>(nullptr));
    if (storage == Storage::bf16) return f(static_cast<BFloat16*>(nullptr));
    f(static_cast<Half*>(nullptr));
  }
}

// n rows of `size` numbers, `token` apart -> one stream of panels, times scale, zeros up to
// `padded` rows and to the end of the last panel.
template <typename T, typename Stored>
void pack_stream(const Stored* from, int64_t token, int64_t n, int64_t padded, int64_t size,
                 T scale, T* to, int64_t panel) {
  for (int64_t r = 0; r < padded; ++r) {
    const Stored* row = from + r * token;
    for (int64_t c = 0; c < size; c += kPanel<T>) {
      T* out = to + c / kPanel<T> * panel + r * kPanel<T>;
      const int64_t count = r < n ? (size - c < kPanel<T> ? size - c : kPanel<T>) : 0;
      if (count == kPanel<T>) {
#pragma omp simd
        for (int64_t l = 0; l < kPanel<T>; ++l) {
          T value;
          convert(row[c + l], value);
          out[l] = value * scale;
        }
      } else {
        for (int64_t l = 0; l < kPanel<T>; ++l) {
          T value = T(0);
          if (l < count) convert(row[c + l], value);
          out[l] = value * scale;
        }
      }
    }
  }
}

// Tokens [begin, begin + n) of one head, every stream.
template <typename T>
JACHESS_ONCE void pack_rows(const JetHeads& from, Storage storage, int streams, int64_t batch,
                            int64_t head, int64_t begin, int64_t n, int64_t padded, int64_t size,
                            T scale, Panels<T> to) {
  dispatch_storage<T>(storage, [&](auto* typed) {
    using Stored = std::remove_pointer_t<decltype(typed)>;
    const Stored* data = static_cast<const Stored*>(from.data) + batch * from.batch +
                         head * from.head + begin * from.token;
    for (int s = 0; s < streams; ++s)
      pack_stream(data + s * from.stream, from.token, n, padded, size, scale, to.at(s, 0),
                  to.panel);
  });
}

// The way back: n rows of every stream, times scale.
template <typename T>
JACHESS_ONCE void unpack_rows(Panels<T> from, int streams, int64_t n, int64_t size, T scale,
                              const JetHeads& to, Storage storage, int64_t batch, int64_t head,
                              int64_t begin) {
  dispatch_storage<T>(storage, [&](auto* typed) {
    using Stored = std::remove_pointer_t<decltype(typed)>;
    Stored* data =
        static_cast<Stored*>(to.data) + batch * to.batch + head * to.head + begin * to.token;
    for (int s = 0; s < streams; ++s) {
      for (int64_t r = 0; r < n; ++r) {
        Stored* row = data + s * to.stream + r * to.token;
        for (int64_t c = 0; c < size; c += kPanel<T>) {
          const T* in = from.at(s, c / kPanel<T>, r);
          const int64_t count = size - c < kPanel<T> ? size - c : kPanel<T>;
#pragma omp simd
          for (int64_t l = 0; l < count; ++l) convert(in[l] * scale, row[c + l]);
        }
      }
    }
  });
}

// ---- transposition --------------------------------------------------------------------------

template <typename T>
struct ZipOf;  // 32-byte vectors and the shuffles that interleave two of them
template <>
struct ZipOf<float> {
  typedef float V __attribute__((vector_size(32), may_alias));
  typedef int32_t M __attribute__((vector_size(32)));
  static constexpr int lanes = 8;
  static JACHESS_HD V low(V a, V b) { return __builtin_shuffle(a, b, M{0, 8, 1, 9, 2, 10, 3, 11}); }
  static JACHESS_HD V high(V a, V b) {
    return __builtin_shuffle(a, b, M{4, 12, 5, 13, 6, 14, 7, 15});
  }
};
template <>
struct ZipOf<double> {
  typedef double V __attribute__((vector_size(32), may_alias));
  typedef int64_t M __attribute__((vector_size(32)));
  static constexpr int lanes = 4;
  static JACHESS_HD V low(V a, V b) { return __builtin_shuffle(a, b, M{0, 4, 1, 5}); }
  static JACHESS_HD V high(V a, V b) { return __builtin_shuffle(a, b, M{2, 6, 3, 7}); }
};

// A square of 32-byte rows, `stride` apart: log2(lanes) perfect shuffles of its rows transpose it.
template <typename T>
JACHESS_HD void transpose_square(const T* from, int64_t stride, T* to) {
  using Zip = ZipOf<T>;
  using V = typename Zip::V;
  constexpr int n = Zip::lanes;
  V rows[n], next[n];
  JACHESS_UNROLL
  for (int r = 0; r < n; ++r) rows[r] = *reinterpret_cast<const V*>(from + r * stride);
  JACHESS_UNROLL
  for (int step = 1; step < n; step *= 2) {
    JACHESS_UNROLL
    for (int r = 0; r < n / 2; ++r) {
      next[2 * r] = Zip::low(rows[r], rows[r + n / 2]);
      next[2 * r + 1] = Zip::high(rows[r], rows[r + n / 2]);
    }
    JACHESS_UNROLL
    for (int r = 0; r < n; ++r) rows[r] = next[r];
  }
  JACHESS_UNROLL
  for (int r = 0; r < n; ++r) *reinterpret_cast<V*>(to + r * kPanel<T>) = rows[r];
}

// Panels of `rows` x `columns`, both multiples of kPanel, to panels of the transposed matrices.
template <typename T>
JACHESS_ONCE void transpose_panels(Panels<T> from, int streams, int64_t rows, int64_t columns,
                                   Panels<T> to) {
  constexpr int half = ZipOf<T>::lanes;
  for (int s = 0; s < streams; ++s) {
    for (int64_t r = 0; r < rows; r += kPanel<T>) {
      for (int64_t c = 0; c < columns; c += kPanel<T>) {
        T *in = from.at(s, c / kPanel<T>, r), *out = to.at(s, r / kPanel<T>, c);
        for (int i = 0; i < 2; ++i) {
          for (int j = 0; j < 2; ++j)
            transpose_square(in + half * (i * kPanel<T> + j), kPanel<T>,
                             out + half * (j * kPanel<T> + i));
        }
      }
    }
  }
}

}  // namespace JACHESS_ISA
}  // namespace jachess
