#include "activation_derivatives.h"

#include "simd.h"

namespace jachess {
namespace {

template <Activation kind, bool with_third, typename T>
JACHESS_CLONES void derivatives(const T* __restrict x, T* __restrict f0, T* __restrict f1,
                                T* __restrict f2, T* __restrict f3, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const Derivatives<T> d = ActivationOf<kind, T>::at(x[i]);
    f0[i] = d.f0;
    f1[i] = d.f1;
    f2[i] = d.f2;
    if constexpr (with_third) f3[i] = d.f3;
  }
  if constexpr (kind == Activation::sin || kind == Activation::cos) {
    T largest = T(0);  // NaN leaves it alone
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < n; ++i) largest = magnitude(x[i]) > largest ? magnitude(x[i]) : largest;
    if (largest <= T(kSinCosBound)) return;
    for (int64_t i = 0; i < n; ++i) {
      if (!(magnitude(x[i]) > T(kSinCosBound))) continue;
      const Derivatives<T> d = ActivationOf<kind, T>::of({std::sin(x[i]), std::cos(x[i])});
      f0[i] = d.f0;
      f1[i] = d.f1;
      f2[i] = d.f2;
      if constexpr (with_third) f3[i] = d.f3;
    }
  }
}

}  // namespace

template <typename T>
DerivativeLoop<T> derivative_loop(Activation kind, bool with_third) {
  switch (kind) {
#define JACHESS_CASE(name)                                     \
  case Activation::name:                                       \
    return with_third ? derivatives<Activation::name, true, T> \
                      : derivatives<Activation::name, false, T>;
    JACHESS_FOR_EACH_ACTIVATION(JACHESS_CASE)
#undef JACHESS_CASE
  }
  return nullptr;
}

template DerivativeLoop<float> derivative_loop(Activation, bool);
template DerivativeLoop<double> derivative_loop(Activation, bool);

}  // namespace jachess
