// How .cu files start kernels and reduce over a block. The shim (csrc/testing) replaces the CUDA
// runtime where there is no nvcc, so that the same .cu runs on the CPU in tests.
#pragma once

#if defined(__CUDACC__)
#include <cuda_runtime.h>
#else
#include "cuda_shim.h"
#endif

#include "../dispatch.h"
#include "../dtypes.h"
#include "../jet_math.h"
#include "launchers.h"

namespace jachess {

constexpr int kWarp = 32;

inline int64_t ceil_divide(int64_t n, int64_t d) { return (n + d - 1) / d; }

// Whether rows at `data` start, and end, at multiples of 16 bytes: strides and sizes in elements.
template <typename T, typename... Counts>
bool is_aligned(const void* data, Counts... counts) {
  return (reinterpret_cast<uintptr_t>(data) |
          ((static_cast<uintptr_t>(counts) | ...) * sizeof(T))) %
             16 ==
         0;
}

#if defined(__CUDACC__)
// What a block of this device may have of shared memory, in bytes; 0 where it cannot be asked.
inline size_t shared_memory_limit(int device) {
  int bytes = 0;
  cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  return static_cast<size_t>(bytes);
}

inline int multiprocessors(int device) {
  int count = 0;
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

// The shared memory a kernel was started with.
__device__ inline char* dynamic_shared_memory() {
  extern __shared__ __align__(16) char memory[];
  return memory;
}

// Starts a kernel; 0 or a cudaError_t. CUDA refuses a launch of no blocks. This library holds a
// CUDA runtime of its own (static), which must be told the device beside torch's. More than 48 kB
// of shared memory must be asked for first.
template <typename Kernel, typename... Arguments>
int launch_with_shared(Kernel kernel, int64_t blocks, int threads, size_t shared_bytes, Queue queue,
                       Arguments... arguments) {
  cudaError_t error = cudaSetDevice(queue.device);
  if (error == cudaSuccess && shared_bytes > 48 * 1024)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(shared_bytes));
  if (error != cudaSuccess) return static_cast<int>(error);
  kernel<<<static_cast<unsigned>(blocks), static_cast<unsigned>(threads), shared_bytes,
           static_cast<cudaStream_t>(queue.stream)>>>(arguments...);
  return static_cast<int>(cudaGetLastError());
}

template <typename Kernel, typename... Arguments>
int launch(Kernel kernel, int64_t blocks, int threads, Queue queue, Arguments... arguments) {
  return launch_with_shared(kernel, blocks, threads, 0, queue, arguments...);
}
#endif

struct Add {
  template <typename T>
  __device__ inline T operator()(T a, T b) const {
    return a + b;
  }
};
struct Larger {  // NaN left out
  template <typename T>
  __device__ inline T operator()(T a, T b) const {
    return b > a ? b : a;
  }
};

// Combines each of `count` values over groups of `lanes` neighbouring lanes; all get the result.
template <typename How, int count = 1, int lanes = kWarp, typename T>
__device__ inline void warp_reduce(T* values) {
  JACHESS_UNROLL
  for (int c = 0; c < count; ++c) {
    JACHESS_UNROLL
    for (int offset = lanes / 2; offset > 0; offset /= 2)
      values[c] = How()(values[c], __shfl_xor_sync(0xFFFFFFFFu, values[c], offset));
  }
}

// Combines each of `count` values over the block; every thread gets the result, in a fixed order,
// so that it is the same run to run. Threads must be a multiple of 32, at most 1024.
template <typename How, int count = 1, typename T>
__device__ inline void block_reduce(T* values) {
  __shared__ T partial[count * kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  warp_reduce<How, count>(values);
  __syncthreads();  // the previous partials may still be read
  if (lane == 0) {
    JACHESS_UNROLL
    for (int c = 0; c < count; ++c) partial[c * kWarp + warp] = values[c];
  }
  __syncthreads();
  JACHESS_UNROLL
  for (int c = 0; c < count; ++c) {
    values[c] = partial[c * kWarp];
    for (int w = 1; w < warps; ++w) values[c] = How()(values[c], partial[c * kWarp + w]);
  }
}

}  // namespace jachess
