// From the tensors and numbers of jachess::attention_jet to an AttentionProblem, checked; shared by
// the CPU and CUDA sides.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "../tensor_kinds.h"
#include "problem.h"

namespace jachess {

// The operator's arguments behind the tensors, in the order of the schema.
struct AttentionSettings {
  int64_t q;
  double scale;
  bool causal;
  int64_t window_left, window_right;
  double softcap, dropout_p;
  int64_t summed;
};

// The kernels read any strides but the last: rows of head size must be dense.
inline Tensor with_dense_rows(const Tensor& x) {
  return x.size(4) <= 1 || x.stride(4) == 1 ? x : torch::stable::contiguous(x);
}

inline JetHeads jet_heads(const Tensor& x) {
  return {const_cast<void*>(x.const_data_ptr()), x.stride(0), x.stride(1), x.stride(2),
          x.stride(3)};
}

inline void check_attention_tensors(const char* op, const Tensor& query, const Tensor& key,
                                    const Tensor& value, int64_t q, int64_t summed, bool sums) {
  const auto check_one = [&](const char* name, const Tensor& x) {
    check_streams(op, name, x, q, summed, sums);
    check(x.dim() == 5, op, name, " has shape ", shape_of(x),
          "; expected [S, B, H, T, D], streams in front, then batch, heads, tokens and head size:"
          " add or merge dimensions.");
    check(x.scalar_type() == query.scalar_type() && x.device() == query.device(), op, name,
          " has another dtype or device than query: convert it with .to(query).");
  };
  check_one("query", query);
  check_one("key", key);
  check_one("value", value);
  check(
      key.size(0) == query.size(0) && key.size(1) == query.size(1) && key.size(4) == query.size(4),
      op, "key has shape ", shape_of(key),
      "; expected [S, B, Hk, Tk, D] with the S, B and D of query, which is ", shape_of(query), ".");
  bool same = true;
  for (int64_t d = 0; d < 4; ++d) same = same && value.size(d) == key.size(d);
  check(same, op, "value has shape ", shape_of(value),
        "; expected [S, B, Hk, Tk, Dv] with all but Dv as in key, which is ", shape_of(key), ".");
  const int64_t heads = query.size(2), key_heads = key.size(2);
  check(key_heads > 0 ? heads % key_heads == 0 : heads == 0, op, "query has ", heads,
        " heads and key ", key_heads,
        "; expected a multiple, so that each key head serves equally many query heads.");
}

inline MaskKind mask_kind(const char* op, ScalarType dtype) {
  if (dtype == ScalarType::Bool) return MaskKind::boolean;
  check(is_supported_dtype(dtype), op, "mask has dtype ", dtype_name(dtype),
        "; expected bool (True takes part) or ", kSupportedDtypes,
        " (added to the scores): convert it with .to().");
  const MaskKind kinds[] = {MaskKind::f64, MaskKind::f32, MaskKind::bf16, MaskKind::f16};
  return kinds[static_cast<int>(storage_of(dtype))];
}

// The mask's strides after broadcasting it to [B, H, T, Tk].
inline AttentionMask attention_mask(const char* op, const std::optional<Tensor>& mask,
                                    const Tensor& query, int64_t keys) {
  if (!mask.has_value()) return {nullptr, MaskKind::none, 0, 0, 0, 0};
  const int64_t full[] = {query.size(1), query.size(2), query.size(3), keys};
  int64_t strides[] = {0, 0, 0, 0};
  bool fits = mask->dim() <= 4;
  for (int64_t d = 0; fits && d < mask->dim(); ++d) {
    const int64_t at = d + 4 - mask->dim();
    fits = mask->size(d) == 1 || mask->size(d) == full[at];
    strides[at] = mask->size(d) == 1 ? 0 : mask->stride(d);
  }
  check(fits, op, "mask has shape ", shape_of(*mask),
        ", which does not broadcast to [B, H, T, Tk], here [", full[0], ", ", full[1], ", ",
        full[2], ", ", full[3], "]: reshape or expand it.");
  check(mask->device() == query.device(), op,
        "mask is not on the device of query: move it there with .to(query.device).");
  return {mask->const_data_ptr(),
          mask_kind(op, mask->scalar_type()),
          strides[0],
          strides[1],
          strides[2],
          strides[3]};
}

inline void check_attention_settings(const char* op, const AttentionSettings& s) {
  check(s.window_left >= -1 && s.window_right >= -1, op, "the window is (", s.window_left, ", ",
        s.window_right,
        "); expected how many keys to the left and to the right take part, -1 for no limit.");
  check(std::isfinite(s.softcap) && s.softcap >= 0, op, "softcap is ", s.softcap,
        "; expected a positive bound, or 0 for none.");
  check(s.dropout_p >= 0 && s.dropout_p < 1, op, "dropout_p is ", s.dropout_p,
        "; expected a probability below 1, or 0 for no dropout.");
}

// For query, key and value that passed check_attention_tensors and then with_dense_rows.
inline AttentionProblem attention_problem(const char* op, const Tensor& query, const Tensor& key,
                                          const Tensor& value, const std::optional<Tensor>& mask,
                                          const std::optional<Tensor>& dropout_seed,
                                          const AttentionSettings& s) {
  check_attention_settings(op, s);
  // No limit beyond the last key differs from none, and sums of indices must not overflow.
  const int64_t widest = query.size(3) + key.size(3);
  const int64_t window_right = std::min(s.window_right, widest);
  AttentionProblem p = {};
  p.storage = storage_of(query.scalar_type());
  p.q = static_cast<int>(s.q);
  p.pairs = static_cast<int>(query.size(0) - 1 - s.q);
  p.summed = s.summed;
  p.any = s.summed > 0 || s.q > kMaxDirections;
  check(!p.any || (s.softcap == 0 && s.dropout_p == 0), op, "q is ", s.q, " and summed is ",
        s.summed, "; with a soft cap or dropout the kernels take at most ", kMaxDirections,
        " directions and no sum of squares: call jachess_ext.ops, which goes on without them.");
  p.batch = query.size(1);
  p.heads = query.size(2);
  p.key_heads = key.size(2);
  p.queries = query.size(3);
  p.keys = key.size(3);
  p.size = query.size(4);
  p.value_size = value.size(4);
  p.query = jet_heads(query);
  p.key = jet_heads(key);
  p.value = jet_heads(value);
  p.mask = attention_mask(op, mask, query, p.keys);
  p.scale = s.scale;
  p.softcap = s.softcap;
  p.left = std::min(s.window_left, widest);
  p.right = s.causal ? 0 : window_right;
  p.dropout_p = s.dropout_p;
  if (s.dropout_p > 0) {
    check(dropout_seed.has_value(), op, "dropout_p is ", s.dropout_p,
          ", but there is no dropout_seed: give one int64.");
    p.dropout_seed = number_on_device(op, "dropout_seed", *dropout_seed, query);
  }
  return p;
}

// Query, key and value with dense rows, and the problem that points into them.
struct AttentionInputs {
  Tensor query, key, value;
  AttentionProblem problem;
};

inline AttentionInputs prepare_attention(const char* op, const Tensor& query, const Tensor& key,
                                         const Tensor& value, const std::optional<Tensor>& mask,
                                         const std::optional<Tensor>& dropout_seed,
                                         const AttentionSettings& settings, bool sums) {
  check_attention_tensors(op, query, key, value, settings.q, settings.summed, sums);
  const Tensor q = with_dense_rows(query), k = with_dense_rows(key), v = with_dense_rows(value);
  return {q, k, v, attention_problem(op, q, k, v, mask, dropout_seed, settings)};
}

// gy, y and stats of the backward: as the forward returned them.
inline void check_backward_tensors(const char* op, const AttentionProblem& p, const Tensor& query,
                                   const Tensor& gy, const Tensor& y, const Tensor& stats) {
  const int64_t shape[] = {query.size(0), p.batch, p.heads, p.queries, p.value_size};
  const auto fits = [&](const Tensor& t, int64_t dims, ScalarType dtype) {
    bool same = t.dim() == dims && t.scalar_type() == dtype && t.device() == query.device();
    for (int64_t d = 0; same && d < dims; ++d) same = t.size(d) == shape[d];
    return same;
  };
  check(fits(gy, 5, query.scalar_type()) && fits(y, 5, query.scalar_type()), op, "gy is ",
        shape_of(gy), " and y is ", shape_of(y), " for query ", shape_of(query),
        "; expected what attention_jet returned, and a gradient of its shape and dtype.");
  check(fits(stats, 4, wide_dtype(query.scalar_type())), op, "stats is ", shape_of(stats),
        " for query ", shape_of(query), "; expected what attention_jet returned for it.");
}

// In x's dtype. Not a view: a custom operator's result that is one could not be written to in
// place.
template <size_t dims>
Tensor new_strided(const Tensor& x, const int64_t (&shape)[dims], const int64_t (&strides)[dims]) {
  int32_t dtype = 0, device = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(x.get(), &device));
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(dims, shape, strides, dtype, device,
                                                  static_cast<int32_t>(x.get_device()), &handle));
  return Tensor(handle);
}

// [S, B, heads, tokens, size], laid out as [S, B, tokens, heads, size], in x's dtype.
inline Tensor new_by_token(const Tensor& x, int64_t heads, int64_t tokens, int64_t size) {
  const int64_t shape[] = {x.size(0), x.size(1), heads, tokens, size};
  const int64_t row = heads * size, batch = tokens * row;
  const int64_t strides[] = {x.size(1) * batch, batch, size, row, 1};
  return new_strided(x, shape, strides);
}

// [S, B, H, T] in the accumulation dtype: the jet of log L, L = sum e^s the softmax's denominator;
// -inf and 0 for a query that sees nothing. Not L_ij / L_0, whose size (sum p s_i)^2 costs digits
// where the tangents of the scores share an offset.
inline Tensor new_attention_statistics(const Tensor& query) {
  return new_wide(query, shape_of_rows(query));
}

// The operators of one device, around what both share:
//     Device::Guard                      for the time of a call, of query's device
//     Device::sums                       as of check_streams
//     Device::forward(op, inputs, y, stats)
//     Device::backward(op, inputs, gy, y, stats, gquery, gkey, gvalue)
// which fill the results; gy and y have dense rows, stats is contiguous.
template <typename Device>
struct AttentionOperators {
  static std::tuple<Tensor, Tensor> attention_jet(
      const Tensor& query, const Tensor& key, const Tensor& value,
      const std::optional<Tensor>& mask, const std::optional<Tensor>& dropout_seed, int64_t q,
      double scale, bool causal, int64_t window_left, int64_t window_right, double softcap,
      double dropout_p, int64_t summed) {
    const char* op = "attention_jet";
    const AttentionInputs inputs = prepare_attention(
        op, query, key, value, mask, dropout_seed,
        {q, scale, causal, window_left, window_right, softcap, dropout_p, summed}, Device::sums);
    const typename Device::Guard guard(query.get_device());
    const AttentionProblem& p = inputs.problem;
    const Tensor y = new_by_token(query, p.heads, p.queries, p.value_size);
    const Tensor stats = new_attention_statistics(query);
    Device::forward(op, inputs, y, stats);
    return {y, stats};
  }

  static std::tuple<Tensor, Tensor, Tensor> attention_jet_backward(
      const Tensor& gy, const Tensor& query, const Tensor& key, const Tensor& value,
      const std::optional<Tensor>& mask, const std::optional<Tensor>& dropout_seed, const Tensor& y,
      const Tensor& stats, int64_t q, double scale, bool causal, int64_t window_left,
      int64_t window_right, double softcap, double dropout_p, int64_t summed) {
    const char* op = "attention_jet_backward";
    const AttentionInputs inputs = prepare_attention(
        op, query, key, value, mask, dropout_seed,
        {q, scale, causal, window_left, window_right, softcap, dropout_p, summed}, Device::sums);
    const typename Device::Guard guard(query.get_device());
    const AttentionProblem& p = inputs.problem;
    check_backward_tensors(op, p, query, gy, y, stats);
    const Tensor gquery = new_by_token(query, p.heads, p.queries, p.size);
    const Tensor gkey = new_by_token(key, p.key_heads, p.keys, p.size);
    const Tensor gvalue = new_by_token(value, p.key_heads, p.keys, p.value_size);
    Device::backward(op, inputs, with_dense_rows(gy), with_dense_rows(y),
                     torch::stable::contiguous(stats), gquery, gkey, gvalue);
    return {gquery, gkey, gvalue};
  }

  static void add_to(torch::stable::detail::StableLibrary& m) {
    m.impl("attention_jet", TORCH_BOX(&attention_jet));
    m.impl("attention_jet_backward", TORCH_BOX(&attention_jet_backward));
  }
};

}  // namespace jachess
