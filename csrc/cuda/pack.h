// Groups of neighbouring elements that one load or store moves.
#pragma once

#include <cstdint>

namespace jachess {

template <typename T, int width>
struct alignas(sizeof(T) * width) Pack {
  T at[width];
};

// Whether rows of n elements that start at these addresses fall into groups of four, which holds
// where every row then starts aligned; doubles are moved one by one.
template <typename T>
bool can_pack(int64_t n, const void* a, const void* b, const void* c) {
  const auto address = reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) |
                       reinterpret_cast<uintptr_t>(c);
  return sizeof(T) <= 4 && n % 4 == 0 && address % (4 * sizeof(T)) == 0;
}

}  // namespace jachess
