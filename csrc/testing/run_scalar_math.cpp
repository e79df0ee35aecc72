// Evaluates a double function of csrc/scalar_math.h: the test's other half is
// python_tests/ops/test_scalar_math.py.
//
//   run_scalar_math FUNCTION INPUT OUTPUT
//
// INPUT holds doubles, and OUTPUT gets as many, evaluated in the loop that the kernels have.
#include "../scalar_math.h"

#include <fstream>
#include <iostream>
#include <string>
#include <vector>

namespace {

using namespace jachess;

template <typename F>
void evaluate(std::vector<double>& values, const F& f) {
  double* p = values.data();
  const int64_t n = static_cast<int64_t>(values.size());
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) p[i] = f(p[i]);
}

}  // namespace

int main(int, char** argument) {
  const std::string function = argument[1];
  std::ifstream input(argument[2], std::ios::binary | std::ios::ate);
  std::vector<double> values(static_cast<size_t>(input.tellg()) / sizeof(double));
  const auto bytes = static_cast<std::streamsize>(values.size() * sizeof(double));
  input.seekg(0).read(reinterpret_cast<char*>(values.data()), bytes);
  if (function == "exp_nonpositive") {
    evaluate(values, [](double x) JACHESS_INLINE { return exp_nonpositive(x); });
  } else {
    std::cerr << "no function " << function << "\n";
    return 2;
  }
  std::ofstream(argument[3], std::ios::binary).write(reinterpret_cast<char*>(values.data()), bytes);
  return 0;
}
