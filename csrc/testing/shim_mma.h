// The instructions of cuda/mma.h under the shim: the lanes of a warp exchange their fragments as
// the hardware does. With g = lane / 4 and t = lane % 4, as in the PTX manual.
#pragma once

#include "../dtypes.h"
#include "cuda_shim.h"

namespace jachess {
namespace shim {

inline int lane() { return static_cast<int>(threadIdx.x) % 32; }

// Four 8 x 8 matrices of 16-bit elements, row r of matrix m at row_of(8 m + r).
template <bool transposed, typename Address>
void load_matrices(const Address& row_of, uint32_t (&out)[4]) {
  const int g = lane() / 4, t = lane() % 4;
  for (int m = 0; m < 4; ++m) {
    if (reinterpret_cast<uintptr_t>(row_of(8 * m + lane() % 8)) % 16 != 0)
      fail("ldmatrix: a row is not aligned to 16 bytes");
    const auto at = [&](int row, int k) { return row_of(8 * m + row)[k].bits; };
    const uint32_t low = transposed ? at(2 * t, g) : at(g, 2 * t);
    const uint32_t high = transposed ? at(2 * t + 1, g) : at(g, 2 * t + 1);
    out[m] = low | high << 16;
  }
}

// Element `which` of a register of T.
template <typename T>
float element(uint32_t word, int which) {
  if constexpr (sizeof(T) == 2) {
    float value;
    convert(T{static_cast<uint16_t>(word >> (16 * which))}, value);
    return value;
  } else {
    return bits_to_float(word);
  }
}

// C [16 x 8] += A [16 x depth] B [depth x 8]: a register holds neighbours in k, a lane's registers
// are rows g and g + 8 of A, column g of B, then the same of the other half of k.
template <typename T>
void multiply_fragments(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  constexpr int per = sizeof(T) == 2 ? 2 : 1, part = 4 * per;
  struct Operands {
    uint32_t a[4], b[2];
  };
  const Operands own = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
  const Operands* all = exchange(own);
  for (int e = 0; e < 4; ++e) {
    const int row = lane() / 4 + 8 * (e / 2), column = lane() % 4 * 2 + e % 2;
    for (int k = 0; k < part * 2; ++k) {
      const int of_part = k % part / per;
      c[e] += element<T>(all[row % 8 * 4 + of_part].a[row / 8 + 2 * (k / part)], k % per) *
              element<T>(all[column * 4 + of_part].b[k / part], k % per);
    }
  }
  finish_exchange();
}

}  // namespace shim
}  // namespace jachess
