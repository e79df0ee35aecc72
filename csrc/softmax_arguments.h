// The arguments of jachess::softmax_jet and its backward, as the CPU and CUDA sides both see them.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "row_layout.h"

namespace jachess {

// Checked and dense; gy of the backward alone.
struct SoftmaxInputs {
  JetStreams streams;
  bool masked;
  RowShape rows;
  Tensor x;
  std::optional<Tensor> gy;
};

// The operators of one device:
//     Device::Guard                         for the time of a call, of x's device
//     Device::sums                          as of check_streams
//     Device::softmax(op, inputs, result)   fills y, or gx where there is a gy; x is not empty
template <typename Device>
struct SoftmaxOperators {
  static Tensor run(const char* op, const Tensor* gy, const Tensor& x, int64_t q, bool masked,
                    int64_t summed) {
    const JetStreams streams = check_streams(op, "x", x, q, summed, Device::sums);
    if (gy != nullptr) check_same(op, "gy", *gy, x);
    const RowShape rows = row_shape(op, x);
    const typename Device::Guard guard(x.get_device());
    SoftmaxInputs inputs = {streams, masked, rows, torch::stable::contiguous(x), std::nullopt};
    if (gy != nullptr) inputs.gy = torch::stable::contiguous(*gy);
    const Tensor result = torch::stable::empty_like(inputs.x);
    if (result.numel() != 0) Device::softmax(op, inputs, result);
    return result;
  }

  static Tensor softmax_jet(const Tensor& x, int64_t q, bool masked, int64_t summed) {
    return run("softmax_jet", nullptr, x, q, masked, summed);
  }
  static Tensor softmax_jet_backward(const Tensor& gy, const Tensor& x, int64_t q, bool masked,
                                     int64_t summed) {
    return run("softmax_jet_backward", &gy, x, q, masked, summed);
  }

  static void add_to(torch::stable::detail::StableLibrary& m) {
    m.impl("softmax_jet", TORCH_BOX(&softmax_jet));
    m.impl("softmax_jet_backward", TORCH_BOX(&softmax_jet_backward));
  }
};

}  // namespace jachess
