// Matrix products of a warp on the tensor cores: C[16 x 8] += A[16 x depth] B[depth x 8], operands
// in shared memory, C in registers. One set of primitives for every storage type:
//
//     bf16, fp16   mma.m16n8k16, operands by ldmatrix, sums in fp32
//     fp32         mma.m16n8k8 in tf32, three passes over operands split in two (error ~2^-21)
//     fp64         two mma.m8n8k4 (the NTK's products alone)
//
// Register layouts are those of the PTX manual ("Matrix fragments for mma"): with g = lane / 4 and
// t = lane % 4, a lane holds of C the elements (g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1).
// Each PTX instruction stands behind one small function, with another for the CPU shim, in
// which the lanes of a warp exchange their fragments as the hardware does.
#pragma once

#include "launch.h"

namespace jachess {

constexpr int kMmaRows = 16;
constexpr int kMmaColumns = 8;

__device__ inline int lane_index() { return static_cast<int>(threadIdx.x) % kWarp; }

// Keeps what is computed from n from being computed before, and held in registers until here.
__device__ inline void recompute(int& n) {
#if defined(__CUDACC__)
  asm volatile("" : "+r"(n));
#endif
}

// ---- asynchronous copies from global to shared memory ------------------------------------------

// Starts a copy of 16 bytes, both addresses aligned to 16; of zeros where nothing is to be read.
__device__ inline void copy_async_16(void* shared, const void* global, bool read = true) {
#if defined(__CUDACC__)
  const auto to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global),
               "r"(read ? 16 : 0)
               : "memory");
#else
  shim::copy_async(shared, read ? global : nullptr, 16);
#endif
}

// Starts a copy of four bytes.
__device__ inline void copy_async_4(void* shared, const void* global) {
#if defined(__CUDACC__)
  const auto to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(global) : "memory");
#else
  shim::copy_async(shared, global, 4);
#endif
}

// Closes a group of copies: those this thread has started since the last call.
__device__ inline void copy_async_commit() {
#if defined(__CUDACC__)
  asm volatile("cp.async.commit_group;" ::: "memory");
#else
  shim::copy_async_commit();
#endif
}

// Waits until at most `pending` of this thread's groups are under way. Other threads' copies need a
// __syncthreads after it.
template <int pending>
__device__ inline void copy_async_wait() {
#if defined(__CUDACC__)
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
#else
  shim::copy_async_wait(pending);
#endif
}

// ---- ldmatrix ---------------------------------------------------------------------------------

// Four 8 x 8 matrices of 16-bit elements: lane l names row l % 8 of matrix l / 8 by `row_of(l)`; a
// lane receives elements 2t, 2t+1 of row g of each matrix (of its transpose, if transposed).
template <bool transposed, typename Address>
__device__ inline void load_matrices(const Address& row_of, uint32_t (&out)[4]) {
#if defined(__CUDACC__)
  const auto from = static_cast<unsigned>(__cvta_generic_to_shared(row_of(lane_index())));
  if constexpr (transposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(from)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(from)
                 : "memory");
  }
#else
  const int g = lane_index() / 4, t = lane_index() % 4;
  for (int m = 0; m < 4; ++m) {
    if (reinterpret_cast<uintptr_t>(row_of(8 * m + lane_index() % 8)) % 16 != 0)
      shim::fail("ldmatrix: a row is not aligned to 16 bytes");
    const auto at = [&](int row, int k) { return row_of(8 * m + row)[k].bits; };
    const uint32_t low = transposed ? at(2 * t, g) : at(g, 2 * t);
    const uint32_t high = transposed ? at(2 * t + 1, g) : at(g, 2 * t + 1);
    out[m] = low | high << 16;
  }
#endif
}

// ---- mma --------------------------------------------------------------------------------------

#if !defined(__CUDACC__)
namespace shim {

// C += A B on fragments that the lanes hold in pieces: element(A fragment, row, k) of the lane that
// has it, likewise element(B fragment, k, column).
template <int depth, typename A, typename B, typename C, typename ElementA, typename ElementB>
void multiply_fragments(C (&c)[4], const A& a, const B& b, const ElementA& element_a,
                        const ElementB& element_b) {
  struct Operands {
    A a;
    B b;
  };
  const Operands* all = exchange(Operands{a, b});
  const int g = lane_index() / 4, t = lane_index() % 4;
  for (int e = 0; e < 4; ++e) {
    const int row = g + 8 * (e / 2), column = 2 * t + e % 2;
    for (int k = 0; k < depth; ++k) {
      C x, y;
      element_a([&](int lane) { return all[lane].a; }, row, k, x);
      element_b([&](int lane) { return all[lane].b; }, k, column, y);
      c[e] += x * y;
    }
  }
  finish_exchange();
}

}  // namespace shim
#endif

template <typename T>
struct Mma;

// Two elements in a register, the first in the lower half.
template <typename T>
__device__ inline uint32_t pair_of(float low, float high) {
  T a, b;
  convert(low, a);
  convert(high, b);
  return a.bits | static_cast<uint32_t>(b.bits) << 16;
}
#if defined(__CUDACC__)
template <>
__device__ inline uint32_t pair_of<BFloat16>(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
template <>
__device__ inline uint32_t pair_of<Half>(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
#endif

// The 16-bit types.
template <typename T>
struct Mma16 {
  static constexpr int kDepth = 16;
  struct A {
    uint32_t r[4];  // rows g, g+8, g, g+8; k = 2t, 2t+1, in the last two + 8
  };
  struct B {
    uint32_t r[2];  // column g; k = 2t, 2t+1, in the second + 8
  };

  // A[row][k] = tile[row * ld + k].
  static __device__ inline void load_a(const T* tile, int ld, A& a) {
    load_matrices<false>([&](int l) { return tile + (l % 16) * ld + (l / 16) * 8; }, a.r);
  }
  // Two B side by side, 16 columns: B[k][column] = tile[column * ld + k].
  static __device__ inline void load_b_by_column(const T* tile, int ld, B (&b)[2]) {
    uint32_t r[4];
    load_matrices<false>(
        [&](int l) { return tile + (l % 8 + (l / 16) * 8) * ld + (l / 8 % 2) * 8; }, r);
    b[0] = {{r[0], r[1]}};
    b[1] = {{r[2], r[3]}};
  }
  // The results of a product as the operand A of the next: its columns become k. One A takes
  // kDepth / 8 of the 16 x 8 blocks.
  static __device__ inline void from_sums(const float (*c)[4], A& a) {
    JACHESS_UNROLL
    for (int i = 0; i < 4; ++i)
      a.r[i] = pair_of<T>(c[i / 2][2 * (i % 2)], c[i / 2][2 * (i % 2) + 1]);
  }
  // Two B for it, side by side: B[k][column] = tile[k * ld + column].
  static __device__ inline void load_b_by_row(const T* tile, int ld, B (&b)[2]) {
    uint32_t r[4];
    load_matrices<true>([&](int l) { return tile + (l % 16) * ld + (l / 16) * 8; }, r);
    b[0] = {{r[0], r[1]}};
    b[1] = {{r[2], r[3]}};
  }

#if !defined(__CUDACC__)
  static void in_lanes(float (&c)[4], const A& a, const B& b) {
    const auto half = [](uint32_t word, int which, float& out) {
      convert(T{static_cast<uint16_t>(word >> (16 * which))}, out);
    };
    shim::multiply_fragments<kDepth>(
        c, a, b,
        [&](const auto& of, int row, int k, float& out) {
          half(of((row % 8) * 4 + k % 8 / 2).r[row / 8 + 2 * (k / 8)], k % 2, out);
        },
        [&](const auto& of, int k, int column, float& out) {
          half(of(column * 4 + k % 8 / 2).r[k / 8], k % 2, out);
        });
  }
#endif
};

template <>
struct Mma<BFloat16> : Mma16<BFloat16> {
  static __device__ inline void multiply_add(float (&c)[4], const A& a, const B& b) {
#if defined(__CUDACC__)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b.r[0]), "r"(b.r[1]));
#else
    in_lanes(c, a, b);
#endif
  }
};

template <>
struct Mma<Half> : Mma16<Half> {
  static __device__ inline void multiply_add(float (&c)[4], const A& a, const B& b) {
#if defined(__CUDACC__)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b.r[0]), "r"(b.r[1]));
#else
    in_lanes(c, a, b);
#endif
  }
};

// x rounded to tf32 (10 bits of mantissa, ties away from zero), as bits.
__device__ inline uint32_t round_to_tf32(float x) {
#if defined(__CUDACC__)
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return bits;
#else
  const uint32_t bits = float_to_bits(x);
  return (bits & 0x7F800000u) == 0x7F800000u ? bits : (bits + 0x1000u) & 0xFFFFE000u;
#endif
}

template <>
struct Mma<float> {
  static constexpr int kDepth = 8;
  template <int count>
  struct Split {  // x = big + small, both in tf32
    uint32_t big[count], small[count];
    __device__ inline void set(int i, float x) {
      big[i] = round_to_tf32(x);
      small[i] = round_to_tf32(x - bits_to_float(big[i]));
    }
  };
  using A = Split<4>;  // rows g, g+8, g, g+8; k = t, in the last two + 4
  using B = Split<2>;  // column g; k = t, in the second + 4

  static __device__ inline void load_a(const float* tile, int ld, A& a) {
    const int g = lane_index() / 4, t = lane_index() % 4;
    JACHESS_UNROLL
    for (int i = 0; i < 4; ++i) a.set(i, tile[(g + 8 * (i % 2)) * ld + t + 4 * (i / 2)]);
  }
  static __device__ inline void load_b_by_column(const float* tile, int ld, B (&b)[2]) {
    const int g = lane_index() / 4, t = lane_index() % 4;
    JACHESS_UNROLL
    for (int i = 0; i < 4; ++i) b[i / 2].set(i % 2, tile[(g + 8 * (i / 2)) * ld + t + 4 * (i % 2)]);
  }
  // In the results a lane holds columns 2t and 2t + 1, in A it has k = t and t + 4: k is taken in
  // that order, here and in load_b_by_row.
  static __device__ inline void from_sums(const float (*c)[4], A& a) {
    JACHESS_UNROLL
    for (int i = 0; i < 4; ++i) a.set(i, c[0][2 * (i % 2) + i / 2]);
  }
  static __device__ inline void load_b_by_row(const float* tile, int ld, B (&b)[2]) {
    const int g = lane_index() / 4, t = lane_index() % 4;
    JACHESS_UNROLL
    for (int i = 0; i < 4; ++i) b[i / 2].set(i % 2, tile[(2 * t + i % 2) * ld + g + 8 * (i / 2)]);
  }

  static __device__ inline void pass(float (&c)[4], const uint32_t (&a)[4],
                                     const uint32_t (&b)[2]) {
#if defined(__CUDACC__)
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    struct WordsA {
      uint32_t r[4];
    };
    struct WordsB {
      uint32_t r[2];
    };
    shim::multiply_fragments<kDepth>(
        c, WordsA{{a[0], a[1], a[2], a[3]}}, WordsB{{b[0], b[1]}},
        [](const auto& of, int row, int k, float& out) {
          out = bits_to_float(of((row % 8) * 4 + k % 4).r[row / 8 + 2 * (k / 4)]);
        },
        [](const auto& of, int k, int column, float& out) {
          out = bits_to_float(of(column * 4 + k % 4).r[k / 4]);
        });
#endif
  }
  // Small terms first; small * small is below fp32's last bit.
  static __device__ inline void multiply_add(float (&c)[4], const A& a, const B& b) {
    pass(c, a.small, b.big);
    pass(c, a.big, b.small);
    pass(c, a.big, b.big);
  }
};

template <>
struct Mma<double> {
  static constexpr int kDepth = 4;
  struct A {
    double r[2];  // rows g, g+8; k = t
  };
  struct B {
    double r;  // k = t, column g
  };

  static __device__ inline void load_a(const double* tile, int ld, A& a) {
    const int g = lane_index() / 4, t = lane_index() % 4;
    a.r[0] = tile[g * ld + t];
    a.r[1] = tile[(g + 8) * ld + t];
  }
  static __device__ inline void load_b_by_column(const double* tile, int ld, B (&b)[2]) {
    const int g = lane_index() / 4, t = lane_index() % 4;
    b[0].r = tile[g * ld + t];
    b[1].r = tile[(g + 8) * ld + t];
  }
  static __device__ inline void multiply_add(double (&c)[4], const A& a, const B& b) {
#if defined(__CUDACC__)
    JACHESS_UNROLL
    for (int half = 0; half < 2; ++half) {
      asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};"
                   : "+d"(c[2 * half]), "+d"(c[2 * half + 1])
                   : "d"(a.r[half]), "d"(b.r));
    }
#else
    shim::multiply_fragments<kDepth>(
        c, a, b,
        [](const auto& of, int row, int k, double& out) { out = of((row % 8) * 4 + k).r[row / 8]; },
        [](const auto& of, int k, int column, double& out) { out = of(column * 4 + k).r; });
#endif
  }
};

}  // namespace jachess
