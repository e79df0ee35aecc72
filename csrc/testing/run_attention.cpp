// Runs the attention launchers of csrc/cuda under the CPU shim on buffers from a file: the test's
// other half is python_tests/ops/test_cuda_shim_attention.py.
//
//   run_attention INPUT OUTPUT NAME=VALUE...
//
// A tensor's value is its number of elements and its strides, as N,STREAM,BATCH,HEAD,ROW (of the
// mask: N,KIND,BATCH,HEAD,QUERY,KEY); INPUT holds the elements one tensor after the other. Without
// `gy` the forward runs and writes y and stats; with it the backward, which also reads both and
// writes the three gradients or, with `chunk` (FIRST_HEAD,HEADS,FIRST_ROW,ROWS,KEYS,LINE), weights
// and scores' gradients of a chunk, whose rows lie LINE elements apart, all bytes 0x7F before. With
// `plans` no kernel runs, and a line for each launch is written: its warps, stages and bytes of
// shared memory.
#include "../cuda/launchers.h"
#include "options.h"

namespace {

using namespace jachess;
using namespace jachess::shim;

struct Heads {
  Buffer buffer;
  JetHeads view;
};

Heads read_heads(const std::string& name, int64_t element) {
  const std::vector<int64_t> v = integers(name);
  Heads heads = {read(v[0] * element), {}};
  heads.view = {heads.buffer.data(), v[1], v[2], v[3], v[4]};
  return heads;
}

// [S, batch, heads, rows, size], laid out as [S, batch, rows, heads, size].
struct Result {
  Buffer buffer;
  JetHeads view;
  Result(const AttentionProblem& problem, int64_t heads, int64_t rows, int64_t size)
      : buffer(static_cast<size_t>((1 + problem.q + problem.pairs) * problem.batch * heads * rows *
                                   size * element_bytes(problem.storage))) {
    const int64_t row = heads * size;
    view = {buffer.data(), problem.batch * rows * row, rows * row, size, row};
  }
};

AttentionProblem read_problem() {
  AttentionProblem problem = {};
  problem.storage = static_cast<Storage>(integer("storage"));
  problem.q = integer("q");
  problem.pairs = integer("pairs");
  problem.batch = integer("batch");
  problem.heads = integer("heads");
  problem.key_heads = integer("key_heads");
  problem.queries = integer("queries");
  problem.keys = integer("keys");
  problem.size = integer("size");
  problem.value_size = integer("value_size");
  problem.scale = number("scale");
  problem.softcap = number("softcap");
  problem.dropout_p = number("dropout_p");
  static const int64_t seed = std::atoll(options.at("dropout_seed").c_str());
  problem.dropout_seed = &seed;
  problem.left = integer("left");
  problem.right = integer("right");
  return problem;
}

}  // namespace

int main(int count, char** argument) {
  parse_options(count, argument);
  AttentionProblem problem = read_problem();
  const Queue queue = {nullptr, 0};
  if (options.count("plans"))
    planned = [](int warps, int stages, size_t bytes) {
      output << warps << ' ' << stages << ' ' << bytes << '\n';
    };
  const int64_t element = element_bytes(problem.storage);
  Heads query = read_heads("query", element), key = read_heads("key", element),
        value = read_heads("value", element);
  problem.query = query.view;
  problem.key = key.view;
  problem.value = value.view;
  Buffer mask;
  if (options.count("mask")) {
    const std::vector<int64_t> v = integers("mask");
    const MaskKind kind = static_cast<MaskKind>(v[1]);
    const int64_t bytes = kind == MaskKind::boolean
                              ? 1
                              : element_bytes(static_cast<Storage>(v[1] - int(MaskKind::f64)));
    mask = read(v[0] * bytes);
    problem.mask = {mask.data(), kind, v[2], v[3], v[4], v[5]};
  }
  Buffer stats(static_cast<size_t>((1 + problem.q + problem.pairs) * problem.batch * problem.heads *
                                   problem.queries * (problem.storage == Storage::f64 ? 8 : 4)));
  if (!options.count("gy")) {
    Result y(problem, problem.heads, problem.queries, problem.value_size);
    const int error = attention_jet_cuda(problem, y.view, stats.data(), queue);
    if (planned) return exit_status(error);
    write(y.buffer);
    write(stats);
    return exit_status(error);
  }
  Heads gy = read_heads("gy", element), y = read_heads("y", element);
  stats = read(static_cast<int64_t>(stats.size()));
  Buffer delta(stats.size());
  int error = attention_jet_delta_cuda(problem, gy.view, y.view, delta.data(), queue);
  if (options.count("chunk")) {
    const std::vector<int64_t> c = integers("chunk");
    const int64_t stream = c[1] * c[3] * c[5];
    const size_t bytes = static_cast<size_t>((1 + problem.q + problem.pairs) * stream * element);
    Buffer weights(bytes, 0x7F), grads = weights;
    const ScoreChunk chunk = {c[0],   c[1], c[2],           c[3],        c[4],
                              stream, c[5], weights.data(), grads.data()};
    if (error == 0)
      error = attention_jet_scores_cuda(problem, gy.view, stats.data(), delta.data(), chunk, queue);
    if (planned) return exit_status(error);
    write(weights);
    write(grads);
    return exit_status(error);
  }
  Result gquery(problem, problem.heads, problem.queries, problem.size),
      gkey(problem, problem.key_heads, problem.keys, problem.size),
      gvalue(problem, problem.key_heads, problem.keys, problem.value_size);
  if (error == 0)
    error = attention_jet_backward_cuda(problem, gy.view, stats.data(), delta.data(), gquery.view,
                                        gkey.view, gvalue.view, queue);
  if (planned) return exit_status(error);
  write(gquery.buffer);
  write(gkey.buffer);
  write(gvalue.buffer);
  return exit_status(error);
}
