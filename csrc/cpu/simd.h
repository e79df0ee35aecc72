// Function clones per instruction set and SIMD vectors for the CPU kernels. No torch header.
#pragma once

#include <cstdint>
#include <cstring>

#include "../dispatch.h"
#include "../dtypes.h"
#include "../jet_math.h"

// One binary for every x86-64 machine: the loader picks the best clone of each kernel.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(JACHESS_NO_CLONES)
#define JACHESS_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#define JACHESS_HAS_CLONES 1
#else
#define JACHESS_HAS_CLONES 0
#define JACHESS_CLONES
#endif

namespace jachess {

// 32 bytes: one register of x86-64-v3, and what GCC prefers on v4.
template <typename T, int bytes = 32>
struct VectorOf {
  typedef T type __attribute__((vector_size(bytes)));
  typedef T unaligned __attribute__((vector_size(bytes), aligned(alignof(T)), may_alias));
};

// load/store for a whole vector (V = VectorOf<T, ...>::type) or one element (V = T).
template <typename V, typename T>
JACHESS_HD void load(V& out, const T* p) {
  if constexpr (sizeof(V) == sizeof(T)) {
    out = *p;
  } else {
    out = *reinterpret_cast<const typename VectorOf<T, sizeof(V)>::unaligned*>(p);
  }
}

template <typename V, typename T>
JACHESS_HD void store(T* p, const V& value) {
  if constexpr (sizeof(V) == sizeof(T)) {
    *p = value;
  } else {
    *reinterpret_cast<typename VectorOf<T, sizeof(V)>::unaligned*>(p) = value;
  }
}

// A window on a jet: stream s of element i is at p[s * stride + i].
template <typename T>
struct Window {
  T* p;
  int64_t stride;
};

template <int S, typename V, typename T>
JACHESS_HD void load_jet(V* out, Window<const T> from, int64_t i) {
  JACHESS_UNROLL
  for (int s = 0; s < S; ++s) load(out[s], from.p + s * from.stride + i);
}

template <int S, typename V, typename T>
JACHESS_HD void store_jet(Window<T> to, const V* values, int64_t i) {
  JACHESS_UNROLL
  for (int s = 0; s < S; ++s) store(to.p + s * to.stride + i, values[s]);
}

// Sum of a vector accumulator and of the scalar one that took the row's tail.
template <typename V, typename T>
JACHESS_HD T total(const V& lanes, T tail) {
  for (unsigned l = 0; l < sizeof(V) / sizeof(T); ++l) tail += lanes[l];
  return tail;
}

template <typename From, typename To>
JACHESS_CLONES void convert_array(const From* from, To* to, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) convert(from[i], to[i]);
}

}  // namespace jachess
