// Runs one launcher of csrc/cuda under the CPU shim on buffers from a file: the test's other half
// is python_tests/ops/test_cuda_shim.py.
//
//   run_kernel INPUT OUTPUT op=... storage=... q=... pairs=... rows=... channels=... kind=...
//
// INPUT holds, one after the other: [gy] x, and for the norms [residual or gsum] weight [bias], in
// the backward [mean] rstd; the operators add_* are the norms' residual forms. For the gated
// activation [gy] g u, or both side by side in one tensor (gated_halves_*). For sample_directions
// seed, offset and the tokens' numbers, kind being the distribution; for
// jet_mean_squares [mask] [index: how many, and which] x [gradients], kind saying which are there.
// For the norms kind is the parameters' storage type, affine=0 leaves the parameters and their
// gradients out, and layer_norm_partials writes norm_partials; for the softmax, kind is whether a
// row of −inf gives zeros.
#include <algorithm>

#include "../cuda/launchers.h"
#include "options.h"

namespace {

using namespace jachess;
using namespace jachess::shim;

// Arguments of jet_mean_squares beside x. parts: 1 with a mask, 2 with an index.
struct TokenInput {
  Buffer mask, index;
  int64_t chosen;
};

TokenInput read_tokens(int parts, int64_t tokens, int64_t channels) {
  TokenInput given = {{}, {}, channels};
  if (parts & 1) given.mask = read(tokens);
  if (parts & 2) {
    std::memcpy(&given.chosen, read(8).data(), 8);
    given.index = read(given.chosen * 8);
  }
  return given;
}

const Queue queue = {nullptr, 0};

Buffer make(int64_t bytes) { return Buffer(static_cast<size_t>(bytes)); }

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

// activation_jet, gated_activation_jet, gated_halves_jet and their backwards.
void activate(const std::string& op, ActivationShape shape, Activation kind, int64_t element) {
  const int64_t n = shape.jet.n, all = (1 + shape.jet.q + shape.jet.pairs) * n * element;
  const bool backward = ends_with(op, "_backward"), halves = op.rfind("gated_halves", 0) == 0;
  const bool gated = op.rfind("gated_", 0) == 0;
  const Buffer gy = read(backward ? all : 0), g = read(halves ? 2 * all : all);
  const Buffer apart = read(gated && !halves ? all : 0);
  const char* u = halves ? g.data() + shape.length * element : gated ? apart.data() : nullptr;
  const int64_t times = halves ? 2 : 1;
  shape.g = shape.u = {times * n, times * shape.length};
  if (!halves) {  // dense: one row
    shape.rows = 1;
    shape.length = n;
  }
  Buffer y = make(all), gu = make(backward && gated ? all : 0);
  activation_jet_cuda(
      shape, kind,
      {backward ? gy.data() : nullptr, g.data(), u, y.data(), gu.empty() ? nullptr : gu.data()},
      queue);
  write(y);
  write(gu);
}

// layer_norm_jet, rms_norm_jet, their residual forms add_*, and the backwards.
void normalise(const std::string& op, NormShape shape, Storage parameters, int64_t element,
               int64_t wide) {
  const int64_t streams = 1 + shape.jet.q + shape.jet.pairs, all = streams * shape.jet.n * element;
  const int64_t statistics = streams * shape.rows * wide;
  const int64_t entries = shape.channels / shape.positions, channels = entries * wide;
  const bool layer = shape.centred, add = op.rfind("add_", 0) == 0;
  const bool affine = integer("affine") != 0;
  const int64_t parameter = affine ? shape.classes * entries * element_bytes(parameters) : 0;
  const auto pointer = [](Buffer& buffer) { return buffer.empty() ? nullptr : buffer.data(); };
  if (!ends_with(op, "_backward")) {
    Buffer x = read(all), residual = read(add ? all : 0), weight = read(parameter);
    Buffer bias = read(layer ? parameter : 0);
    Buffer y = make(all), sum = make(add ? all : 0);
    Buffer mean = make(layer ? statistics : 0), rstd = make(statistics);
    norm_jet_cuda(shape,
                  {x.data(),
                   pointer(residual),
                   {pointer(weight), parameters},
                   {pointer(bias), parameters},
                   y.data(),
                   pointer(sum),
                   pointer(mean),
                   rstd.data()},
                  1e-5, queue);
    for (const Buffer* result : {&y, &sum, &mean, &rstd}) write(*result);
    return;
  }
  Buffer gy = read(all), gsum = read(add ? all : 0), x = read(all), weight = read(parameter);
  Buffer mean = read(layer ? statistics : 0), rstd = read(statistics);
  Buffer partial = make(norm_partials(shape) * wide);
  Buffer gx = make(all), gweight = make(shape.classes * channels);
  Buffer gbias = make(layer ? shape.classes * channels : 0);
  norm_jet_backward_cuda(shape,
                         {gy.data(),
                          pointer(gsum),
                          x.data(),
                          {pointer(weight), parameters},
                          pointer(mean),
                          rstd.data(),
                          gx.data(),
                          affine ? partial.data() : nullptr,
                          gweight.data(),
                          pointer(gbias)},
                         queue);
  for (const Buffer* result : {&gx, &gweight, &gbias}) write(*result);
}

}  // namespace

int main(int count, char** argument) {
  parse_options(count, argument);
  const std::string op = options.at("op");
  const Storage storage = static_cast<Storage>(integer("storage"));
  const int q = integer("q"), pairs = integer("pairs"), choice = integer("kind");
  const int64_t rows = integer("rows"), channels = integer("channels");
  const int64_t wide = storage == Storage::f64 ? 8 : 4, element = element_bytes(storage);
  const int64_t streams = 1 + q + pairs, n = rows * channels;
  const JetShape jet = {storage, q, pairs, n};
  const NormShape norm = {jet,
                          rows,
                          channels,
                          integer("classes"),
                          integer("positions"),
                          op.find("layer_norm") != std::string::npos};
  const SoftmaxShape softmax = {jet, rows, channels, choice != 0};
  Buffer result = make(streams * n * element);

  if (op.find("activation_jet") != std::string::npos || op.rfind("gated_", 0) == 0) {
    activate(op, {jet, rows, channels, {}, {}}, static_cast<Activation>(choice), element);
  } else if (op.find("norm_jet") != std::string::npos) {
    normalise(op, norm, static_cast<Storage>(choice), element, wide);
  } else if (op == "layer_norm_partials") {
    Buffer numbers = make(sizeof(int64_t));
    const int64_t partials = norm_partials(norm);
    std::memcpy(numbers.data(), &partials, sizeof(partials));
    write(numbers);
  } else if (op == "sample_directions") {
    int64_t stream[2];
    std::memcpy(stream, read(sizeof(stream)).data(), sizeof(stream));
    const Buffer token = read(rows * 8);
    Buffer directions = make(q * n * element);
    sample_directions_cuda({storage, choice == 0, q, rows, channels, &stream[0], &stream[1]},
                           token.data(), directions.data(), queue);
    write(directions);
  } else if (op == "softmax_jet" || op == "softmax_jet_backward") {
    const Buffer gy = read(ends_with(op, "_backward") ? streams * n * element : 0);
    const Buffer x = read(streams * n * element);
    softmax_jet_cuda(softmax, gy.empty() ? nullptr : gy.data(), x.data(), result.data(), queue);
    write(result);
  } else if (op.rfind("jet_", 0) == 0) {
    const TokenInput given = read_tokens(choice, rows, channels);
    const int64_t chosen = pairs == 0 ? 0 : given.chosen;
    const TokenShape tokens = {storage,  streams, q,       rows,
                               channels, chosen,  1.0 / q, 1.0 / std::max(pairs, 1)};
    const void* mask = choice & 1 ? given.mask.data() : nullptr;
    const void* index = choice & 2 ? given.index.data() : nullptr;
    Buffer position = make(channels * 4);
    Buffer first = make(rows * wide), second = make(rows * chosen * wide);
    const Buffer x = read(streams * n * element);
    TokenBuffers buffers = {x.data(), static_cast<const uint8_t*>(mask),
                            static_cast<const int64_t*>(index)};
    buffers.gx = result.data();
    if (index) buffers.position = reinterpret_cast<int32_t*>(position.data());
    if (op == "jet_mean_squares") {
      buffers.first = first.data();
      buffers.second = second.data();
      jet_mean_squares_cuda(tokens, buffers, queue);
      write(first);
      write(second);
    } else {
      first = read(static_cast<int64_t>(first.size()));
      second = read(static_cast<int64_t>(second.size()));
      buffers.first = first.data();
      buffers.second = second.data();
      jet_mean_squares_backward_cuda(tokens, buffers, queue);
      write(result);
    }
  } else {
    std::fprintf(stderr, "run_kernel: no operator is named %s\n", op.c_str());
    return 2;
  }
  return 0;
}
