// jachess::softmax_jet and its backward on the CPU: the softmax rule (docs/how_it_works.md), row by
// row.
//
// With c_i = s_i − Σ p s_i and m, v the means of s_ij and of c_i c_j under p:
//     p_i = p c_i,   p_ij = p (s_ij − m_ij + c_i c_j − v_ij).
// A row of every stream stays in L1/L2 over the few sweeps. The backward recomputes p from the
// scores, so only the input is saved. A row whose scores are all −inf (a query that sees no key)
// gives zeros where `masked` is set, as in torch's attention, else NaN, as in torch's softmax.
#include <algorithm>
#include <limits>

#include "../softmax_arguments.h"
#include "streams.h"
#include "tensors.h"

namespace jachess {
namespace {

// Means under p over a row: of the tangents, of the second-order scores, and of the products of
// centred tangents.
template <int q, int P, typename T>
struct RowMeans {
  T first[q];
  T second[P + 1];  // P, never an empty array
  T product[P + 1];
};

template <typename T>
JACHESS_HD T row_maximum(const T* s, int64_t n) {
  T top = -std::numeric_limits<T>::infinity();
#pragma omp simd reduction(max : top)
  for (int64_t i = 0; i < n; ++i) top = s[i] > top ? s[i] : top;
  return top;
}

// p = softmax(s); false for a row that is −inf throughout.
template <typename T>
JACHESS_HD bool row_probabilities(const T* s, int64_t n, bool masked, T* p) {
  const T top = row_maximum(s, n);
  if (top == -std::numeric_limits<T>::infinity()) {
    // NaN compares false with everything, so such a row lands here too; it must stay visible.
    T probe = masked ? T(0) : std::numeric_limits<T>::quiet_NaN();
    for (int64_t i = 0; i < n; ++i) probe += s[i] != s[i] ? s[i] : T(0);
    for (int64_t i = 0; i < n; ++i) p[i] = probe;
    return probe != probe;
  }
  T sum = T(0);
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) {
    const T e = exp_nonpositive(s[i] - top);
    p[i] = e;
    sum += e;
  }
  const T inverse = T(1) / sum;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) p[i] *= inverse;
  return true;
}

template <int q, int P, typename T>
JACHESS_HD void row_means(const T* s, int64_t stride, const T* p, int64_t n,
                          RowMeans<q, P, T>& means) {
  for (int k = 0; k < q + P; ++k) {
    const T* tangent = s + (1 + k) * stride;
    T sum = T(0);
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; ++i) sum += p[i] * tangent[i];
    (k < q ? means.first[k] : means.second[k - q]) = sum;
  }
  if constexpr (P > 0) {
    for (int a = 0; a < q; ++a) {
      for (int b = a + 1; b < q; ++b) {
        const T *sa = s + (1 + a) * stride, *sb = s + (1 + b) * stride;
        const T ma = means.first[a], mb = means.first[b];
        T sum = T(0);
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < n; ++i) sum += p[i] * (sa[i] - ma) * (sb[i] - mb);
        means.product[pair_stream<q>(a, b) - 1 - q] = sum;
      }
    }
  }
}

template <int q, int P, typename T>
JACHESS_CLONES void forward_row(const T* s, int64_t stride, int64_t n, bool masked, T* y,
                                int64_t y_stride) {
  if (!row_probabilities(s, n, masked, y)) {
    for (int k = 1; k < 1 + q + P; ++k) std::fill_n(y + k * y_stride, n, T(0));
    return;
  }
  RowMeans<q, P, T> means;
  row_means<q, P>(s, stride, y, n, means);
  for (int a = 0; a < q; ++a) {
    const T *from = s + (1 + a) * stride, mean = means.first[a];
    T* to = y + (1 + a) * y_stride;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) to[i] = y[i] * (from[i] - mean);
  }
  if constexpr (P > 0) {
    for (int a = 0; a < q; ++a) {
      for (int b = a + 1; b < q; ++b) {
        const int ab = pair_stream<q>(a, b);
        const T *sa = s + (1 + a) * stride, *sb = s + (1 + b) * stride, *sab = s + ab * stride;
        const T ma = means.first[a], mb = means.first[b];
        const T shift = means.second[ab - 1 - q] + means.product[ab - 1 - q];
        T* to = y + ab * y_stride;
#pragma omp simd
        for (int64_t i = 0; i < n; ++i)
          to[i] = y[i] * (sab[i] - shift + (sa[i] - ma) * (sb[i] - mb));
      }
    }
  }
}

// With h_ij = ȳ_ij − Σ p ȳ_ij, e_i = ȳ_i + Σ_j h_ij c_j, C_i = Σ p e_i and
// A = ȳ_0 + Σ_i (ȳ_i − C_i) c_i + Σ_ij h_ij (s_ij − m_ij + c_i c_j − v_ij):
//     s̄_ij = p h_ij,   s̄_i = p (e_i − C_i),   s̄_0 = p (A − Σ p A).
template <int q, int P, typename T>
JACHESS_CLONES void backward_row(const T* g, int64_t g_stride, const T* s, int64_t stride,
                                 int64_t n, bool masked, T* p, T* out, int64_t out_stride) {
  if (!row_probabilities(s, n, masked, p)) {
    for (int k = 0; k < 1 + q + P; ++k) std::fill_n(out + k * out_stride, n, T(0));
    return;
  }
  RowMeans<q, P, T> means;
  row_means<q, P>(s, stride, p, n, means);
  for (int k = 0; k < 1 + q; ++k) std::copy_n(g + k * g_stride, n, out + k * out_stride);
  if constexpr (P > 0) {
    for (int a = 0; a < q; ++a) {
      for (int b = a + 1; b < q; ++b) {
        const int ab = pair_stream<q>(a, b);
        const T *sa = s + (1 + a) * stride, *sb = s + (1 + b) * stride, *sab = s + ab * stride;
        const T* gab = g + ab * g_stride;
        const T ma = means.first[a], mb = means.first[b];
        const T shift = means.second[ab - 1 - q] + means.product[ab - 1 - q];
        T *oa = out + (1 + a) * out_stride, *ob = out + (1 + b) * out_stride;
        T* oab = out + ab * out_stride;
        T mean = T(0);
#pragma omp simd reduction(+ : mean)
        for (int64_t i = 0; i < n; ++i) mean += p[i] * gab[i];
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) {
          const T h = gab[i] - mean, ca = sa[i] - ma, cb = sb[i] - mb;
          oa[i] += h * cb;
          ob[i] += h * ca;
          out[i] += h * (sab[i] - shift + ca * cb);
          oab[i] = p[i] * h;
        }
      }
    }
  }
  for (int a = 0; a < q; ++a) {
    const T *sa = s + (1 + a) * stride, *ga = g + (1 + a) * g_stride, ma = means.first[a];
    T *oa = out + (1 + a) * out_stride, mean = T(0);
#pragma omp simd reduction(+ : mean)
    for (int64_t i = 0; i < n; ++i) mean += p[i] * oa[i];
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      out[i] += (ga[i] - mean) * (sa[i] - ma);
      oa[i] = p[i] * (oa[i] - mean);
    }
  }
  T mean = T(0);
#pragma omp simd reduction(+ : mean)
  for (int64_t i = 0; i < n; ++i) mean += p[i] * out[i];
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i] = p[i] * (out[i] - mean);
}

// ---- any number of directions, and the sum of the squares of some ------------------------------

// Σ p a over a row.
template <typename T>
JACHESS_HD T mean_under(const T* __restrict p, const T* __restrict a, int64_t n) {
  T sum = T(0);
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += p[i] * a[i];
  return sum;
}

// y_s = p (s_s + Σ c_i² − Σ p (s_s + Σ c_i²)); `bent` [n] gets s_s + Σ c_i².
template <typename T>
JACHESS_CLONES void forward_sum(const JetStreams& jet, const T* s, int64_t stride, int64_t n,
                                bool masked, T* y, int64_t y_stride, T* bent) {
  const int64_t last = 1 + jet.q;
  if (!row_probabilities(s, n, masked, y)) {
    for (int64_t k = 1; k < last + jet.pairs; ++k) std::fill_n(y + k * y_stride, n, T(0));
    return;
  }
  if (jet.pairs > 0) std::copy_n(s + last * stride, n, bent);
  for (int64_t a = 1; a < last; ++a) {
    const T *from = s + a * stride, mean = mean_under(y, from, n);
    T* to = y + a * y_stride;
    if (a <= jet.summed) {
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) {
        const T c = from[i] - mean;
        to[i] = y[i] * c;
        bent[i] += c * c;
      }
    } else {
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) to[i] = y[i] * (from[i] - mean);
    }
  }
  if (jet.pairs == 0) return;
  const T mean = mean_under(y, bent, n);
  T* to = y + last * y_stride;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) to[i] = y[i] * (bent[i] - mean);
}

// The gradients of backward_row, of which h_ij is h, the same for every term:
//     e_i = ȳ_i + 2 h c_i,   A = ȳ_0 + Σ_i (ȳ_i − C_i) c_i + h (s_s + Σ c_i² − Σ p (s_s + Σ c_i²))
template <typename T>
JACHESS_CLONES void backward_sum(const JetStreams& jet, const T* g, int64_t g_stride, const T* s,
                                 int64_t stride, int64_t n, bool masked, T* p, T* out,
                                 int64_t out_stride, T* bent) {
  const int64_t last = 1 + jet.q;
  if (!row_probabilities(s, n, masked, p)) {
    for (int64_t k = 0; k < last + jet.pairs; ++k) std::fill_n(out + k * out_stride, n, T(0));
    return;
  }
  const T* gs = g + last * g_stride;
  const T h_mean = jet.pairs > 0 ? mean_under(p, gs, n) : T(0);
  if (jet.pairs > 0) std::copy_n(s + last * stride, n, bent);
  std::copy_n(g, n, out);
  for (int64_t a = 1; a < last; ++a) {
    const T *sa = s + a * stride, *ga = g + a * g_stride, m = mean_under(p, sa, n);
    T* oa = out + a * out_stride;
    if (a <= jet.summed) {
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) {
        const T c = sa[i] - m;
        bent[i] += c * c;
        oa[i] = ga[i] + T(2) * (gs[i] - h_mean) * c;
      }
    } else {
      std::copy_n(ga, n, oa);
    }
    const T mean = mean_under(p, oa, n);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      out[i] += (ga[i] - mean) * (sa[i] - m);
      oa[i] = p[i] * (oa[i] - mean);
    }
  }
  if (jet.pairs > 0) {
    const T mean = mean_under(p, bent, n);
    T* os = out + last * out_stride;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      const T h = gs[i] - h_mean;
      out[i] += h * (bent[i] - mean);
      os[i] = p[i] * h;
    }
  }
  const T mean = mean_under(p, out, n);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i] = p[i] * (out[i] - mean);
}

// gy is null in the forward.
template <typename T>
void sum_rows(const SoftmaxInputs& in, const T* gy, const T* x, T* to, int64_t begin, int64_t end) {
  using A = accumulate_t<T>;
  const JetStreams& jet = in.streams;
  const int64_t S = 1 + jet.q + jet.pairs, n = in.rows.n, stride = in.rows.rows * n;
  std::vector<A> from = scratch_of<T>(S * n), out = scratch_of<T>(S * n),
                 grad = scratch_of<T>(gy == nullptr ? 0 : S * n);
  std::vector<A> p(static_cast<size_t>(n)), bent(static_cast<size_t>(n));
  for (int64_t at = begin * n; at < end * n; at += n) {
    const Window<const A> row = read_streams(x + at, stride, S, n, from.data(), n);
    const Window<A> result = output_streams(to + at, stride, out.data(), n);
    if (gy == nullptr) {
      forward_sum<A>(jet, row.p, row.stride, n, in.masked, result.p, result.stride, bent.data());
    } else {
      const Window<const A> g = read_streams(gy + at, stride, S, n, grad.data(), n);
      backward_sum<A>(jet, g.p, g.stride, row.p, row.stride, n, in.masked, p.data(), result.p,
                      result.stride, bent.data());
    }
    write_streams(result, to + at, stride, S, n);
  }
}

// ---- rows over threads -------------------------------------------------------------------------

template <int q, int P, typename T>
void forward_rows(const T* x, T* y, RowShape shape, bool masked, int64_t begin, int64_t end) {
  using A = accumulate_t<T>;
  constexpr int S = 1 + q + P;
  const int64_t n = shape.n, stride = shape.rows * n;
  std::vector<A> in = scratch_of<T>(S * n), out = scratch_of<T>(S * n);
  for (int64_t at = begin * n; at < end * n; at += n) {
    const Window<const A> row = read_streams(x + at, stride, S, n, in.data(), n);
    const Window<A> to = output_streams(y + at, stride, out.data(), n);
    forward_row<q, P, A>(row.p, row.stride, n, masked, to.p, to.stride);
    write_streams(to, y + at, stride, S, n);
  }
}

template <int q, int P, typename T>
void backward_rows(const T* gy, const T* x, T* gx, RowShape shape, bool masked, int64_t begin,
                   int64_t end) {
  using A = accumulate_t<T>;
  constexpr int S = 1 + q + P;
  const int64_t n = shape.n, stride = shape.rows * n;
  std::vector<A> in = scratch_of<T>(S * n), grad = scratch_of<T>(S * n);
  std::vector<A> out = scratch_of<T>(S * n), p(static_cast<size_t>(n));
  for (int64_t at = begin * n; at < end * n; at += n) {
    const Window<const A> row = read_streams(x + at, stride, S, n, in.data(), n);
    const Window<const A> g = read_streams(gy + at, stride, S, n, grad.data(), n);
    const Window<A> to = output_streams(gx + at, stride, out.data(), n);
    backward_row<q, P, A>(g.p, g.stride, row.p, row.stride, n, masked, p.data(), to.p, to.stride);
    write_streams(to, gx + at, stride, S, n);
  }
}

int64_t row_grain(RowShape shape, int64_t streams) {
  return std::max<int64_t>(1, 8192 / (shape.n * streams));
}

struct Cpu {
  using Guard = NoGuard;
  static constexpr bool sums = true;

  static void softmax(const char* /*op*/, const SoftmaxInputs& in, const Tensor& result) {
    dispatch_dtype(in.x.scalar_type(), [&](auto* typed) {
      using T = std::remove_pointer_t<decltype(typed)>;
      const T *x = input<T>(in.x), *gy = in.gy.has_value() ? input<T>(*in.gy) : nullptr;
      T* to = data<T>(result);
      const int64_t grain = row_grain(in.rows, in.x.size(0));
      if (in.streams.any) {
        return torch::stable::parallel_for(0, in.rows.rows, grain, [&](int64_t begin, int64_t end) {
          sum_rows<T>(in, gy, x, to, begin, end);
        });
      }
      dispatch_streams(in.streams.q, in.streams.pairs, [&](auto q_, auto P_) {
        constexpr int q = decltype(q_)::value, P = decltype(P_)::value;
        const auto run = [&](int64_t begin, int64_t end) {
          if (gy == nullptr) {
            forward_rows<q, P>(x, to, in.rows, in.masked, begin, end);
          } else {
            backward_rows<q, P>(gy, x, to, in.rows, in.masked, begin, end);
          }
        };
        torch::stable::parallel_for(0, in.rows.rows, grain, run);
      });
    });
  }
};

}  // namespace
}  // namespace jachess

STABLE_TORCH_LIBRARY_IMPL(jachess, CPU, m) { jachess::SoftmaxOperators<jachess::Cpu>::add_to(m); }
