// Runs .cu kernels on the CPU, unchanged, for tests on machines without a GPU.
//
// Each CUDA thread of a block is a fiber; blocks run one after another. A fiber runs until it
// reaches __syncthreads or a shuffle and goes on when all it must wait for have arrived; it aborts
// where a thread has left that others wait for. Running the fibers forwards and backwards gives
// different results where a barrier is missing. Compiled with -fsanitize=address,undefined it finds
// accesses out of bounds. Not covered: races between blocks, inline PTX, warps in lock step.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __launch_bounds__(threads)

struct ShimIndex {
  unsigned x = 0, y = 0, z = 0;
};
inline ShimIndex threadIdx, blockIdx, blockDim, gridDim;

namespace jachess::shim {

enum class State { ready, at_block_barrier, at_warp_barrier, done };

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  State state = State::ready;
};

inline constexpr size_t kStackBytes = 256 * 1024;
inline constexpr unsigned kLanes = 32;
inline std::vector<Fiber> fibers;
inline std::vector<uint64_t> shuffled;
inline ucontext_t scheduler;
inline unsigned current = 0;
inline bool backwards = false;
inline std::function<void()> body;

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "cuda shim: %s (block %u, thread %u)\n", what, blockIdx.x, current);
  std::abort();
}

inline void enter() {
  body();
  fibers[current].state = State::done;
  swapcontext(&fibers[current].context, &scheduler);
}

inline void wait(State state) {
  fibers[current].state = state;
  swapcontext(&fibers[current].context, &scheduler);
}

// Releases the threads [begin, end) if all have arrived at the barrier `state`.
inline bool release(unsigned begin, unsigned end, State state) {
  bool waiting = false;
  for (unsigned t = begin; t < end; ++t) waiting |= fibers[t].state == state;
  if (!waiting) return false;
  for (unsigned t = begin; t < end; ++t) {
    if (fibers[t].state == State::done) fail("a thread left before a barrier others wait at");
    if (fibers[t].state != state) return false;
  }
  for (unsigned t = begin; t < end; ++t) fibers[t].state = State::ready;
  return true;
}

inline void run_ready_fibers() {
  const unsigned count = static_cast<unsigned>(fibers.size());
  for (unsigned i = 0; i < count; ++i) {
    const unsigned t = backwards ? count - 1 - i : i;
    if (fibers[t].state != State::ready) continue;
    current = t;
    threadIdx.x = t;
    swapcontext(&scheduler, &fibers[t].context);
  }
}

inline void run_block(unsigned threads) {
  if (threads % kLanes != 0) fail("the block is not made of whole warps");
  fibers.resize(threads);
  shuffled.assign(threads, 0);
  for (Fiber& fiber : fibers) {
    fiber.state = State::ready;
    fiber.stack.resize(kStackBytes);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, enter, 0);
  }
  while (true) {
    run_ready_fibers();
    bool released = false, finished = true;
    for (unsigned begin = 0; begin < threads; begin += kLanes)
      released |= release(begin, begin + kLanes, State::at_warp_barrier);
    if (!released) released = release(0, threads, State::at_block_barrier);
    for (const Fiber& fiber : fibers) finished &= fiber.state == State::done;
    if (finished) return;
    if (!released) fail("threads wait at different barriers");
  }
}

}  // namespace jachess::shim

inline void __syncthreads() { jachess::shim::wait(jachess::shim::State::at_block_barrier); }

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int offset) {
  using namespace jachess::shim;
  if (mask != 0xFFFFFFFFu) fail("the shuffle's mask leaves lanes out");
  const unsigned self = current;
  std::memcpy(&shuffled[self], &value, sizeof(T));
  wait(State::at_warp_barrier);
  T other;
  std::memcpy(&other, &shuffled[self ^ static_cast<unsigned>(offset)], sizeof(T));
  wait(State::at_warp_barrier);
  return other;
}

namespace jachess {

template <typename Kernel, typename Q, typename... Arguments>
int launch(Kernel kernel, int64_t blocks, int threads, const Q& /*queue*/, Arguments... arguments) {
  gridDim.x = static_cast<unsigned>(blocks);
  blockDim.x = static_cast<unsigned>(threads);
  shim::body = [&] { kernel(arguments...); };
  for (int64_t b = 0; b < blocks; ++b) {
    blockIdx.x = static_cast<unsigned>(b);
    shim::run_block(static_cast<unsigned>(threads));
  }
  return 0;
}

}  // namespace jachess
