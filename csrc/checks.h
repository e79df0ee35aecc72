// Argument checks shared by the CPU and CUDA sides of every operator: what was wrong, what was
// expected, and the fix, in one sentence. They throw std::runtime_error (RuntimeError in Python).
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

#include "jet_math.h"

namespace jachess {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename... Parts>
void check(bool condition, const char* op, const Parts&... parts) {
  if (condition) return;
  std::ostringstream message;
  message << "jachess::" << op << ": ";
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

constexpr const char* kSupportedDtypes = "float64, float32, bfloat16 or float16";

// The name in Python of a dtype that a user may pass.
inline const char* dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Double:
      return "float64";
    case ScalarType::Float:
      return "float32";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Bool:
      return "bool";
    case ScalarType::ComplexFloat:
      return "complex64";
    case ScalarType::ComplexDouble:
      return "complex128";
    default:
      return torch::headeronly::toString(dtype);
  }
}

inline std::string shape_of(const Tensor& t) {
  std::ostringstream text;
  text << '[';
  for (int64_t d = 0; d < t.dim(); ++d) text << (d ? ", " : "") << t.size(d);
  text << ']';
  return text.str();
}

inline bool is_supported_dtype(ScalarType dtype) {
  return dtype == ScalarType::Double || dtype == ScalarType::Float ||
         dtype == ScalarType::BFloat16 || dtype == ScalarType::Half;
}

// The number of second-order streams, after checking that x is a jet of q directions.
inline int check_jet(const char* op, const char* name, const Tensor& x, int64_t q) {
  check(q >= 1 && q <= kMaxDirections, op, "q is ", q,
        "; expected 1 to 4 directions: split the directions over several jets.");
  check(is_supported_dtype(x.scalar_type()), op, name, " has dtype ", dtype_name(x.scalar_type()),
        "; expected ", kSupportedDtypes, ": convert it with .to().");
  check(x.dim() >= 1, op, name,
        " has no dimension; expected streams in front, [S, ...]: stack them with torch.stack.");
  const int64_t streams = x.size(0), pairs = pair_count(static_cast<int>(q));
  check(streams == 1 + q || streams == 1 + q + pairs, op, name, " has shape ", shape_of(x), ", so ",
        streams, " streams in front; q = ", q, " expects ", 1 + q, " (first order) or ",
        1 + q + pairs, " (second order): stack the streams as [S, ...].");
  return static_cast<int>(streams - 1 - q);
}

// Which streams a stack holds. With `any`, a number of directions that is known at run time alone,
// and one stream of second order at most: Σ D²f[u_i, u_i] over the first `summed` of them.
struct JetStreams {
  int64_t q;
  int pairs;  // streams of second order
  int64_t summed;
  bool any;
};

// The streams of x, after checking that it has them. `sums`: whether the device's kernel takes sums
// of squares and any number of directions.
inline JetStreams check_streams(const char* op, const char* name, const Tensor& x, int64_t q,
                                int64_t summed, bool sums) {
  const bool any = summed > 0 || (q > kMaxDirections && x.dim() >= 1 && x.size(0) == 1 + q);
  if (!any || !sums) {
    check(summed == 0, op, "summed is ", summed,
          ", but this device has no kernel for sums of squares: call jachess_ext.ops, which takes "
          "the reference.");
    return {q, check_jet(op, name, x, q), 0, false};
  }
  check(summed >= 0 && summed <= q, op, "summed is ", summed, "; expected 0 to q = ", q,
        " directions.");
  check(is_supported_dtype(x.scalar_type()), op, name, " has dtype ", dtype_name(x.scalar_type()),
        "; expected ", kSupportedDtypes, ": convert it with .to().");
  const int seconds = summed > 0 ? 1 : 0;
  check(x.dim() >= 1 && x.size(0) == 1 + q + seconds, op, name, " has shape ", shape_of(x),
        "; q = ", q, " directions and their sum expect ", 1 + q + seconds,
        " streams in front: stack the streams as [S, ...].");
  return {q, seconds, summed, true};
}

// `like`: the name of x in the message.
inline void check_same(const char* op, const char* name, const Tensor& t, const Tensor& x,
                       const char* like = "x") {
  bool same = t.dim() == x.dim() && t.scalar_type() == x.scalar_type();
  for (int64_t d = 0; same && d < x.dim(); ++d) same = t.size(d) == x.size(d);
  check(same, op, name, " is ", dtype_name(t.scalar_type()), shape_of(t), "; expected what ", like,
        " is, ", dtype_name(x.scalar_type()), shape_of(x), ": give both the same shape and dtype.");
  check(t.device() == x.device(), op, name, " is not on the device of ", like,
        ": move it there with .to(", like, ".device).");
}

// A per-channel parameter (weight, bias) of any supported dtype, on x's device: [n] or, for rows
// `apart`, [rows, n] with the rows of x's last dimension but one.
inline void check_channels(const char* op, const char* name, const std::optional<Tensor>& t,
                           const Tensor& x, bool apart, int64_t n) {
  if (!t.has_value()) return;
  const int64_t rows = apart ? x.size(x.dim() - 2) : 0;
  const bool fits = t->dim() == (apart ? 2 : 1) && t->size(t->dim() - 1) == n;
  const std::string expected = (apart ? std::to_string(rows) + ", " : "") + std::to_string(n);
  check(fits && (!apart || t->size(0) == rows), op, name, " has shape ", shape_of(*t),
        "; expected [", expected, "], the last dimension", apart ? "s" : "", " of x, which is ",
        shape_of(x), ".");
  check(is_supported_dtype(t->scalar_type()), op, name, " has dtype ", dtype_name(t->scalar_type()),
        "; expected ", kSupportedDtypes, ": convert it with .to().");
  check(t->device() == x.device(), op, name,
        " is not on the device of x: move it there with .to(x.device).");
}

}  // namespace jachess
