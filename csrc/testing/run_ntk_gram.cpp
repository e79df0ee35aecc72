// Runs the launcher of csrc/cuda/ntk_gram.cu under the CPU shim on buffers from a file: the test's
// other half is python_tests/ops/test_cuda_shim_ntk_gram.py.
//
//   run_ntk_gram INPUT OUTPUT NAME=VALUE...
//
// A tensor's value is its number of elements, its strides and its last size, as
// N,OUTPUT,SAMPLE,POSITION,SIZE; there are inputs and cotangents0.., and other_ of each unless the
// problem is symmetric. The result [C, N, C, M] is written, and the blocks of the first
// launch.
#include "../cuda/launchers.h"
#include "options.h"

namespace {

using namespace jachess;
using namespace jachess::shim;

struct Side {
  std::vector<Buffer> buffers;
  std::vector<GramRows> views;

  Side(const std::string& prefix, int64_t layers, int64_t element) {
    add(prefix + "inputs", element);
    for (int64_t l = 0; l < layers; ++l) add(prefix + "cotangents" + std::to_string(l), element);
  }
  GramSide side(const std::string& prefix) const {
    return {integer(prefix + "samples"), integer(prefix + "positions"), views[0], views.data() + 1};
  }

 private:
  void add(const std::string& name, int64_t element) {
    const std::vector<int64_t> v = integers(name);
    buffers.push_back(read(v[0] * element));
    views.push_back({buffers.back().data(), v[1], v[2], v[3], v[4]});
  }
};

}  // namespace

int main(int count, char** argument) {
  parse_options(count, argument);
  processors = integer("processors");
  const Storage storage = static_cast<Storage>(integer("storage"));
  const int64_t layers = integer("layers"), element = element_bytes(storage);
  const bool symmetric = integer("symmetric") != 0;
  const Side left("", layers, element);
  const Side right = symmetric ? left : Side("other_", layers, element);
  const GramProblem problem = {storage,       integer("outputs"),
                               layers,        symmetric,
                               left.side(""), right.side(symmetric ? "" : "other_")};
  const int64_t elements =
      problem.outputs * problem.outputs * problem.left.samples * problem.right.samples;
  const GramScratch needed = ntk_gram_scratch(problem);
  // NaN where nothing was written
  Buffer scratch(static_cast<size_t>(needed.numbers * 4), static_cast<char>(0xFF));
  Buffer result(static_cast<size_t>(elements * 4), static_cast<char>(0xFF));
  const auto numbers = [](Buffer& buffer) { return reinterpret_cast<float*>(buffer.data()); };
  const int error = ntk_gram_cuda(problem, numbers(scratch), numbers(result), {nullptr, 0});
  write(result);
  if (error == 0) output.write(reinterpret_cast<const char*>(launched.data()), sizeof(int64_t));
  return exit_status(error);
}
