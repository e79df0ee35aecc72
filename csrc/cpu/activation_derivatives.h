// The derivatives of an activation on a block of elements: one instance per kind, whatever the
// number of streams that they are then multiplied into.
#pragma once

#include <cstdint>

#include "../jet_math.h"

namespace jachess {

// Writes f, f', f'', f''' of x[0..n); the short form leaves f''' out (and may be given null there).
template <typename T>
using DerivativeLoop = void (*)(const T* x, T* f0, T* f1, T* f2, T* f3, int64_t n);

// The loop for a kind, with f''' or without; T is float or double.
template <typename T>
DerivativeLoop<T> derivative_loop(Activation kind, bool with_third);

}  // namespace jachess
