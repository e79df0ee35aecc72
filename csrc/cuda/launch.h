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

#if defined(__CUDACC__)
// What a block of this device may have of shared memory, in bytes; 0 where it cannot be asked.
inline size_t shared_memory_limit(int device) {
  int bytes = 0;
  cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  return static_cast<size_t>(bytes);
}

// The shared memory a kernel was started with.
__device__ inline char* dynamic_shared_memory() {
  extern __shared__ __align__(16) char memory[];
  return memory;
}

// Starts a kernel; 0 or a cudaError_t. This library holds a CUDA runtime of its own (static), which
// must be told the device beside torch's. More than 48 kB of shared memory must be asked for first.
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

// Sums each of `count` values over groups of `lanes` neighbouring lanes; each gets its group's
// sums.
template <int count, int lanes = kWarp, typename T>
__device__ inline void warp_sum(T* values) {
  JACHESS_UNROLL
  for (int c = 0; c < count; ++c) {
    JACHESS_UNROLL
    for (int offset = lanes / 2; offset > 0; offset /= 2)
      values[c] += __shfl_xor_sync(0xFFFFFFFFu, values[c], offset);
  }
}

// The largest value of such a group, NaN left out.
template <int lanes = kWarp, typename T>
__device__ inline T warp_max(T value) {
  JACHESS_UNROLL
  for (int offset = lanes / 2; offset > 0; offset /= 2) {
    const T other = __shfl_xor_sync(0xFFFFFFFFu, value, offset);
    value = other > value ? other : value;
  }
  return value;
}

// Sums each of `count` values over the block; every thread gets the sums, in a fixed order, so that
// the result is the same run to run. Threads must be a multiple of 32, at most 1024.
template <int count, typename T>
__device__ inline void block_sum(T* values) {
  __shared__ T partial[count * kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  warp_sum<count>(values);
  __syncthreads();  // the previous sum's partials may still be read
  if (lane == 0) {
    JACHESS_UNROLL
    for (int c = 0; c < count; ++c) partial[c * kWarp + warp] = values[c];
  }
  __syncthreads();
  JACHESS_UNROLL
  for (int c = 0; c < count; ++c) {
    T sum = partial[c * kWarp];
    for (int w = 1; w < warps; ++w) sum += partial[c * kWarp + w];
    values[c] = sum;
  }
}

// The largest value of the block, NaN left out; threads as block_sum.
template <typename T>
__device__ inline T block_max(T value) {
  __shared__ T partial[kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  value = warp_max(value);
  __syncthreads();  // the previous maximum's partials may still be read
  if (lane == 0) partial[warp] = value;
  __syncthreads();
  T top = partial[0];
  for (int w = 1; w < warps; ++w) top = partial[w] > top ? partial[w] : top;
  return top;
}

}  // namespace jachess
