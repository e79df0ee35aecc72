// Matrix products of a warp on the tensor cores: C[16 x 8] += A[16 x depth] B[depth x 8], operands
// in shared memory, C in registers. One set of primitives for every storage type:
//
//     bf16, fp16   mma.m16n8k16, operands by ldmatrix, sums in fp32
//     fp32         mma.m16n8k8 in tf32, three passes over operands split in two (error ~2^-21)
//
// Register layouts are those of the PTX manual ("Matrix fragments for mma"): with g = lane / 4 and
// t = lane % 4, a lane holds of C the elements (g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1).
// Each PTX instruction stands behind one small function, with another for the CPU shim
// (csrc/testing/shim_mma.h).
#pragma once

#include "launch.h"
#if !defined(__CUDACC__)
#include "shim_mma.h"
#endif

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
__device__ inline void recompute(float& n) {
#if defined(__CUDACC__)
  asm volatile("" : "+f"(n));
#endif
}

// Waits for the other warp of a pair: warps 2n and 2n + 1 are pair n, of at most 15.
__device__ inline void sync_pair(int pair) {
#if defined(__CUDACC__)
  asm volatile("bar.sync %0, 64;" ::"r"(pair + 1) : "memory");  // barrier 0 is the block's
#else
  (void)pair;
  shim::wait(shim::State::at_pair_barrier);
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
  shim::load_matrices<transposed>(row_of, out);
#endif
}

// ---- mma --------------------------------------------------------------------------------------

// c += a b, the instruction's registers; of elements T under the shim.
#if defined(__CUDACC__)
#define JACHESS_MMA(T, instruction, c, a, b)                            \
  asm volatile("mma.sync.aligned." instruction                          \
               " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])         \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
#else
#define JACHESS_MMA(T, instruction, c, a, b) shim::multiply_fragments<T>(c, a, b)
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
};

template <>
struct Mma<BFloat16> : Mma16<BFloat16> {
  static __device__ inline void multiply_add(float (&c)[4], const A& a, const B& b) {
    JACHESS_MMA(BFloat16, "m16n8k16.row.col.f32.bf16.bf16.f32", c, a.r, b.r);
  }
};

template <>
struct Mma<Half> : Mma16<Half> {
  static __device__ inline void multiply_add(float (&c)[4], const A& a, const B& b) {
    JACHESS_MMA(Half, "m16n8k16.row.col.f32.f16.f16.f32", c, a.r, b.r);
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

  // Small terms first; small * small is below fp32's last bit. Tensor cores round what they add
  // towards zero, so that the errors of a long sum all point one way (on an H100, 1e-5 after 4,096
  // terms): only eight terms are summed there, and the rest where sums are rounded to the nearest.
  static __device__ inline void multiply_add(float (&c)[4], const A& a, const B& b) {
    float eight[4] = {};
    JACHESS_MMA(float, "m16n8k8.row.col.f32.tf32.tf32.f32", eight, a.small, b.big);
    JACHESS_MMA(float, "m16n8k8.row.col.f32.tf32.tf32.f32", eight, a.big, b.small);
    JACHESS_MMA(float, "m16n8k8.row.col.f32.tf32.tf32.f32", eight, a.big, b.big);
    JACHESS_UNROLL
    for (int i = 0; i < 4; ++i) c[i] += eight[i];
  }
};

// Calls f with a null pointer of the storage type; kNoTileFits for float64, which has no products
// here.
template <typename F>
int dispatch_products(Storage storage, const F& f) {
  if (storage == Storage::f32) return f(static_cast<float*>(nullptr));
  if (storage == Storage::bf16) return f(static_cast<BFloat16*>(nullptr));
  return storage == Storage::f16 ? f(static_cast<Half*>(nullptr)) : kNoTileFits;
}

}  // namespace jachess
