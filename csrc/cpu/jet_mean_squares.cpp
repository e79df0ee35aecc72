// jachess::jet_mean_squares and its backward on the CPU, token by token. Memory is read once and
// written once; every sum belongs to one row, so results do not depend on the number of threads.
#include <algorithm>
#include <vector>

#include "../jet_mean_squares_arguments.h"
#include "streams.h"
#include "tensors.h"

namespace jachess {
namespace {

// Which tokens count: all, or those whose byte is not zero.
struct Mask {
  const uint8_t* bytes;
  bool operator()(int64_t token) const { return bytes == nullptr || bytes[token] != 0; }
};

// Points into the mask, which must outlive it.
Mask mask_of(const std::optional<Tensor>& dense) {
  return {dense.has_value() ? static_cast<const uint8_t*>(dense->const_data_ptr()) : nullptr};
}

// The dimensions wanted, checked; empty for all of them.
std::vector<int64_t> chosen_dimensions(const char* op, const std::optional<Tensor>& dense,
                                       int64_t channels) {
  if (!dense.has_value()) return {};
  const int64_t* values = input<int64_t>(*dense);
  std::vector<int64_t> chosen(values, values + dense->numel());
  std::vector<bool> seen(static_cast<size_t>(channels), false);
  for (const int64_t j : chosen) {
    check(j >= 0 && j < channels, op, "index holds ", j, "; expected 0 to ", channels - 1,
          ", numbers of x's last dimension.");
    check(!seen[static_cast<size_t>(j)], op, "index holds ", j,
          " twice; expected distinct dimensions: drop the repeated ones.");
    seen[static_cast<size_t>(j)] = true;
  }
  return chosen;
}

template <typename A>
JACHESS_CLONES A sum_of_squares(const A* x, int64_t n) {
  using V = typename VectorOf<A>::type;
  constexpr int64_t width = sizeof(V) / sizeof(A);
  V sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * width <= n; i += 4 * width) {
    JACHESS_UNROLL
    for (int k = 0; k < 4; ++k) {
      V v;
      load(v, x + i + k * width);
      sums[k] += v * v;
    }
  }
  A tail = 0;
  for (; i < n; ++i) tail += x[i] * x[i];
  return total(V((sums[0] + sums[1]) + (sums[2] + sums[3])), tail);
}

template <typename A>
JACHESS_CLONES void add_squares(const A* x, A factor, int64_t n, A* sums) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) sums[i] += factor * x[i] * x[i];
}

template <typename A, typename T>
JACHESS_CLONES void scale_row(const T* x, A factor, int64_t n, T* y) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    A value;
    convert(x[i], value);
    convert(A(factor * value), y[i]);
  }
}

template <typename A, typename T>
JACHESS_CLONES void multiply_rows(const T* x, const A* g, A factor, int64_t n, T* y) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    A value;
    convert(x[i], value);
    convert(A(factor * g[i] * value), y[i]);
  }
}

template <typename T>
struct MeanSquares {
  using Stored = T;
  using A = accumulate_t<T>;
  const T* x;
  TokenRows rows;
  Mask mask;
  std::vector<int64_t> chosen;  // empty: all dimensions
  bool all;
  int64_t count;  // of dimensions whose second-order mean square is wanted

  const T* row(int64_t stream, int64_t token) const {
    return x + (stream * rows.tokens + token) * rows.channels;
  }

  void forward(A* first, A* second, int64_t begin, int64_t end) const {
    const int64_t n = rows.channels;
    std::vector<A> scratch = scratch_of<T>(n);
    const auto widened = [&](const T* from) {
      return read_streams(from, 0, 1, n, scratch.data(), n).p;
    };
    for (int64_t t = begin; t < end; ++t) {
      A* to = second + t * count;
      first[t] = A(0);
      std::fill_n(to, count, A(0));
      if (!mask(t)) continue;
      for (int64_t i = 1; i <= rows.directions; ++i)
        first[t] += sum_of_squares(widened(row(i, t)), n);
      first[t] /= static_cast<A>(rows.directions);
      if (rows.pairs == 0) continue;
      const A mean = A(1) / static_cast<A>(rows.pairs);
      for (int64_t s = 1 + rows.directions; s < rows.streams; ++s) {
        if (all) {
          add_squares(widened(row(s, t)), mean, n, to);
        } else {
          add_chosen(row(s, t), mean, to);
        }
      }
    }
  }

  void backward(const A* gfirst, const A* gsecond, T* gx, int64_t begin, int64_t end) const {
    const int64_t n = rows.channels;
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t s = 0; s < rows.streams; ++s) {
        T* to = gx + (s * rows.tokens + t) * n;
        if (s == 0 || !mask(t)) {
          std::fill_n(to, n, T{});
        } else if (s <= rows.directions) {
          scale_row(row(s, t), A(2) / static_cast<A>(rows.directions) * gfirst[t], n, to);
        } else if (all) {
          multiply_rows(row(s, t), gsecond + t * n, A(2) / static_cast<A>(rows.pairs), n, to);
        } else {
          gradient_of_chosen(row(s, t), gsecond + t * count, to);
        }
      }
    }
  }

 private:
  void add_chosen(const T* from, A mean, A* to) const {
    for (int64_t k = 0; k < count; ++k) {
      A value;
      convert(from[chosen[static_cast<size_t>(k)]], value);
      to[k] += mean * value * value;
    }
  }

  void gradient_of_chosen(const T* from, const A* g, T* to) const {
    std::fill_n(to, rows.channels, T{});
    for (int64_t k = 0; k < count; ++k) {
      const int64_t j = chosen[static_cast<size_t>(k)];
      A value;
      convert(from[j], value);
      convert(A(2) / static_cast<A>(rows.pairs) * g[k] * value, to[j]);
    }
  }
};

// ---- operators ----------------------------------------------------------------------------------

// Rows of n elements that make a task worth a thread.
int64_t grain_of(int64_t n) { return std::max<int64_t>(1, 32768 / std::max<int64_t>(1, n)); }

// Calls f(kernel) with the MeanSquares of the inputs' type.
template <typename F>
void with_kernel(const char* op, const MeanSquaresInputs& in, const F& f) {
  dispatch_dtype(in.x.scalar_type(), [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    f(MeanSquares<T>{input<T>(in.x), in.rows, mask_of(in.mask),
                     chosen_dimensions(op, in.index, in.rows.channels), !in.index.has_value(),
                     in.count});
  });
}

struct Cpu {
  using Guard = NoGuard;

  static void forward(const char* op, const MeanSquaresInputs& in, const Tensor& first,
                      const Tensor& second) {
    with_kernel(op, in, [&](const auto& kernel) {
      using A = typename std::decay_t<decltype(kernel)>::A;
      A *to_first = data<A>(first), *to_second = data<A>(second);
      torch::stable::parallel_for(
          0, in.rows.tokens, grain_of(in.rows.channels * in.rows.streams),
          [&](int64_t begin, int64_t end) { kernel.forward(to_first, to_second, begin, end); });
    });
  }

  static void backward(const char* op, const MeanSquaresInputs& in, const Tensor& gfirst,
                       const Tensor& gsecond, const Tensor& gx) {
    with_kernel(op, in, [&](const auto& kernel) {
      using Kernel = std::decay_t<decltype(kernel)>;
      using A = typename Kernel::A;
      const A *g1 = input<A>(gfirst), *g2 = input<A>(gsecond);
      auto* to = data<typename Kernel::Stored>(gx);
      torch::stable::parallel_for(
          0, in.rows.tokens, grain_of(in.rows.channels * in.rows.streams),
          [&](int64_t begin, int64_t end) { kernel.backward(g1, g2, to, begin, end); });
    });
  }
};

}  // namespace
}  // namespace jachess

STABLE_TORCH_LIBRARY_IMPL(jachess, CPU, m) {
  jachess::MeanSquaresOperators<jachess::Cpu>::add_to(m);
}
