// The derivatives of an activation whose kind is known at run time only.
#pragma once

#include "launch.h"

namespace jachess {

// The kind is the same for all threads: a branch on it costs nothing beside the memory traffic,
// and saves one instance of every kernel per kind.
template <typename A>
__device__ inline Derivatives<A> derivatives(Activation kind, A x) {
  switch (kind) {
#define JACHESS_CASE(name) \
  case Activation::name:   \
    return ActivationOf<Activation::name, A>::at(x);
    JACHESS_FOR_EACH_ACTIVATION(JACHESS_CASE)
#undef JACHESS_CASE
  }
  return {};
}

}  // namespace jachess
