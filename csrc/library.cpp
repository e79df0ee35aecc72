// Schemas of every operator in the namespace `jachess`. Kernels register themselves beside their
// code (cpu/, cuda/); fake kernels and autograd are registered in Python (jachess_ext/ops).
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(jachess, m) {
  m.def("activation_jet(Tensor x, str kind, int q, int summed=0) -> Tensor");
  m.def("activation_jet_backward(Tensor gy, Tensor x, str kind, int q, int summed=0) -> Tensor");
  m.def("gated_activation_jet(Tensor g, Tensor u, str kind, int q, int summed=0) -> Tensor");
  m.def(
      "gated_activation_jet_backward(Tensor gy, Tensor g, Tensor u, str kind, int q, int summed=0)"
      " -> (Tensor gg, Tensor gu)");
  m.def(
      "layer_norm_jet(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, int q,"
      " int summed=0)"
      " -> (Tensor y, Tensor sum, Tensor mean, Tensor rstd)");
  m.def(
      "layer_norm_jet_backward(Tensor gy, Tensor? gsum, Tensor x, Tensor? weight, float eps, int q,"
      " Tensor mean, Tensor rstd, bool need_weight, int summed=0) -> (Tensor gx, Tensor gweight, "
      "Tensor gbias)");
  m.def(
      "rms_norm_jet(Tensor x, Tensor? residual, Tensor? weight, float eps, int q, int summed=0)"
      " -> (Tensor y, Tensor sum, Tensor rstd)");
  m.def(
      "rms_norm_jet_backward(Tensor gy, Tensor? gsum, Tensor x, Tensor? weight, float eps, int q,"
      " Tensor rstd, bool need_weight, int summed=0) -> (Tensor gx, Tensor gweight)");
  m.def(
      "attention_jet(Tensor query, Tensor key, Tensor value, Tensor? mask,"
      " Tensor? dropout_seed, int q, float scale, bool causal, int window_left, int window_right,"
      " float softcap, float dropout_p, int summed=0) -> (Tensor y, Tensor stats)");
  m.def(
      "attention_jet_backward(Tensor gy, Tensor query, Tensor key, Tensor value, Tensor? mask,"
      " Tensor? dropout_seed, Tensor y, Tensor stats, int q, float scale, bool causal,"
      " int window_left, int window_right, float softcap, float dropout_p, int summed=0)"
      " -> (Tensor gquery, Tensor gkey, Tensor gvalue)");
  m.def("attention_jet_delta(Tensor gy, Tensor y, int q) -> Tensor");
  m.def(
      "attention_jet_scores(Tensor gy, Tensor query, Tensor key, Tensor value, Tensor? mask,"
      " Tensor? dropout_seed, Tensor stats, Tensor delta, int q, float scale, bool causal,"
      " int window_left, int window_right, float softcap, float dropout_p, int summed,"
      " int first_head, int heads, int first_row, int rows, int keys) -> (Tensor p, Tensor gs)");
  m.def(
      "jet_mean_squares(Tensor x, Tensor? mask, Tensor? index, int q)"
      " -> (Tensor first, Tensor second)");
  m.def(
      "jet_mean_squares_backward(Tensor gfirst, Tensor gsecond, Tensor x, Tensor? mask,"
      " Tensor? index, int q) -> Tensor");
  m.def(
      "ntk_gram(Tensor inputs, Tensor[] cotangents, Tensor? other_inputs,"
      " Tensor[] other_cotangents) -> Tensor");
  m.def(
      "sample_directions(Tensor token, int q, int d, Tensor seed, Tensor offset, str distribution,"
      " ScalarType dtype) -> Tensor");
  m.def("softmax_jet(Tensor x, int q, bool masked, int summed=0) -> Tensor");
  m.def("softmax_jet_backward(Tensor gy, Tensor x, int q, bool masked, int summed=0) -> Tensor");
}
