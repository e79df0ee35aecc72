// Evaluates a double function of csrc/scalar_math.h: the test's other half is
// python_tests/ops/test_scalar_math.py.
//
//   run_scalar_math FUNCTION INPUT OUTPUT
//
// INPUT holds doubles, and OUTPUT gets as many, evaluated in the loop that the kernels have.
#include "../jet_math.h"

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
  if (function == "exp") {
    evaluate(values, [](double x) JACHESS_INLINE { return exp_of(x); });
  } else if (function == "expm1_nonpositive") {
    evaluate(values, [](double x) JACHESS_INLINE { return expm1_nonpositive(x); });
  } else if (function == "log1p") {
    evaluate(values, [](double x) JACHESS_INLINE { return log1p_unit(x); });
  } else if (function == "gauss") {
    evaluate(values, [](double x) JACHESS_INLINE { return normal_at(x).gauss; });
  } else if (function == "normal_tail") {
    evaluate(values, [](double x) JACHESS_INLINE { return normal_at(x).tail; });
  } else if (function == "sin") {
    evaluate(values, [](double x) JACHESS_INLINE { return sin_cos(x).sin; });
  } else if (function == "cos") {
    evaluate(values, [](double x) JACHESS_INLINE { return sin_cos(x).cos; });
  } else if (function == "tanh") {
    evaluate(values, [](double x) JACHESS_INLINE {
      return ActivationOf<Activation::tanh, double>::at(x).f0;
    });
  } else {
    std::cerr << "no function " << function << "\n";
    return 2;
  }
  std::ofstream(argument[3], std::ios::binary).write(reinterpret_cast<char*>(values.data()), bytes);
  return 0;
}
