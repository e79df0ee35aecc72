// From run-time stream counts and storage types to template arguments.
#pragma once

#include <cstdint>
#include <type_traits>

#include "dtypes.h"

namespace jachess {

template <int n>
using Int = std::integral_constant<int, n>;

// Calls f(Int<q>, Int<P>) for run-time q and P (q = 1 has no pair: P = 0).
template <typename F>
void dispatch_streams(int64_t q, int P, const F& f) {
  switch (q) {
    case 1:
      return f(Int<1>{}, Int<0>{});
    case 2:
      return P ? f(Int<2>{}, Int<1>{}) : f(Int<2>{}, Int<0>{});
    case 3:
      return P ? f(Int<3>{}, Int<3>{}) : f(Int<3>{}, Int<0>{});
    default:
      return P ? f(Int<4>{}, Int<6>{}) : f(Int<4>{}, Int<0>{});
  }
}

// Calls f with a null pointer of the storage type and returns what it does.
template <typename F>
auto dispatch_storage(Storage storage, const F& f) {
  switch (storage) {
    case Storage::f64:
      return f(static_cast<double*>(nullptr));
    case Storage::f32:
      return f(static_cast<float*>(nullptr));
    case Storage::bf16:
      return f(static_cast<BFloat16*>(nullptr));
    default:
      return f(static_cast<Half*>(nullptr));
  }
}

}  // namespace jachess
