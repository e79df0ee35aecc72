// Runs .cu kernels on the CPU, unchanged, for tests on machines without a GPU.
//
// Each CUDA thread of a block is a fiber; blocks run one after another. A fiber runs until it
// reaches __syncthreads, a shuffle or a vote and goes on when all it must wait for have arrived; it
// aborts where a thread has left that others wait for. Running the fibers forwards and backwards
// gives different results where a barrier is missing. Compiled with -fsanitize=address,undefined it
// finds accesses out of bounds; with -fsanitize=thread, accesses that no barrier orders, since each
// fiber is then a thread of the sanitizer's. Asynchronous copies are made when they are waited for,
// no sooner. Not covered: races between blocks, PTX itself (plain functions run), warps in lock
// step.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __launch_bounds__(...)
#define __grid_constant__

struct ShimIndex {
  unsigned x = 0, y = 0, z = 0;
};
inline ShimIndex threadIdx, blockIdx, blockDim, gridDim;

namespace jachess::shim {

enum class State { ready, at_block_barrier, at_pair_barrier, at_warp_barrier, done };

struct Copy {
  void* to;
  const void* from;
  size_t bytes;
};

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  State state = State::ready;
  std::vector<std::vector<Copy>> copies;  // groups not yet waited for; the last one is open
  void* sanitizer = nullptr;              // the thread sanitizer's fiber
};

inline constexpr size_t kStackBytes = 256 * 1024;
inline constexpr unsigned kLanes = 32;
inline constexpr size_t kExchangeBytes = 64;  // a lane's share of an exchange
inline std::vector<Fiber> fibers;
inline std::vector<char> exchanged;
inline std::unique_ptr<char[]> dynamic_shared;
inline ucontext_t scheduler;
inline unsigned current = 0;
inline bool backwards = false;
inline std::function<void()> body;
// A block's limit of shared memory: that of sm_90 unless a test sets another.
inline size_t shared_limit = 227 * 1024;
inline int processors = 1;             // of the device
inline std::vector<int64_t> launched;  // the blocks of each launch

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "cuda shim: %s (block %u, thread %u)\n", what, blockIdx.x, current);
  std::abort();
}

// ---- annotations for the thread sanitizer
// --------------------------------------------------------- Switching fibers orders nothing; only
// barriers do. The scheduler's own variables are not watched.

#if defined(__SANITIZE_THREAD__)
inline void* scheduler_fiber = nullptr;
inline char block_order, pair_order[16], warp_order[32];
inline void unwatched(bool begin) {
  if (begin) {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  } else {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
}
inline void* order_of(State state) {
  if (state == State::at_pair_barrier) return &pair_order[current / (2 * kLanes)];
  return state == State::at_warp_barrier ? &warp_order[current / kLanes] : &block_order;
}
inline void publish(State state) { __tsan_release(order_of(state)); }
inline void observe(State state) { __tsan_acquire(order_of(state)); }
inline void start_fiber(Fiber& fiber) { fiber.sanitizer = __tsan_create_fiber(0); }
inline void end_fiber(Fiber& fiber) { __tsan_destroy_fiber(fiber.sanitizer); }
inline void announce(Fiber& fiber) {
  __tsan_switch_to_fiber(fiber.sanitizer, __tsan_switch_to_fiber_no_sync);
}
inline void announce_scheduler() {
  __tsan_switch_to_fiber(scheduler_fiber, __tsan_switch_to_fiber_no_sync);
}
inline void note_scheduler() {
  if (scheduler_fiber == nullptr) scheduler_fiber = __tsan_get_current_fiber();
}
#else
inline void unwatched(bool) {}
inline void publish(State) {}
inline void observe(State) {}
inline void start_fiber(Fiber&) {}
inline void end_fiber(Fiber&) {}
inline void announce(Fiber&) {}
inline void announce_scheduler() {}
inline void note_scheduler() {}
#endif

// ---- fibers and barriers -----------------------------------------------------------------------

inline void leave(State state) {
  publish(state);
  unwatched(true);
  Fiber& self = fibers[current];
  self.state = state;
  unwatched(false);  // before the switch: a fiber that is done does not come back
  announce_scheduler();
  swapcontext(&self.context, &scheduler);
}

inline void enter() {
  body();
  leave(State::done);
}

inline void wait(State state) {
  leave(state);
  observe(state);
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
    announce(fibers[t]);
    swapcontext(&scheduler, &fibers[t].context);
  }
}

inline void run_to_the_end(unsigned threads) {
  while (true) {
    run_ready_fibers();
    bool released = false, finished = true;
    for (unsigned begin = 0; begin < threads; begin += kLanes)
      released |= release(begin, begin + kLanes, State::at_warp_barrier);
    for (unsigned begin = 0; begin + 2 * kLanes <= threads; begin += 2 * kLanes)
      released |= release(begin, begin + 2 * kLanes, State::at_pair_barrier);
    if (!released) released = release(0, threads, State::at_block_barrier);
    for (const Fiber& fiber : fibers) finished &= fiber.state == State::done;
    if (finished) return;
    if (!released) fail("threads wait at different barriers");
  }
}

inline void run_block(unsigned threads) {
  if (threads % kLanes != 0) fail("the block is not made of whole warps");
  fibers.resize(threads);
  exchanged.assign(threads * kExchangeBytes, 0);
  note_scheduler();
  for (Fiber& fiber : fibers) {
    fiber.state = State::ready;
    fiber.copies.assign(1, {});
    fiber.stack.resize(kStackBytes);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, enter, 0);
    start_fiber(fiber);
  }
  unwatched(true);
  run_to_the_end(threads);
  unwatched(false);
  observe(State::done);
  for (Fiber& fiber : fibers) {
    if (fiber.copies.size() > 1 || !fiber.copies[0].empty()) {
      for (const auto& group : fiber.copies)
        if (!group.empty()) fail("a thread left with copies it has not waited for");
    }
    end_fiber(fiber);
  }
}

// ---- exchanges within a warp -------------------------------------------------------------------

// Every lane gives a value and sees those of all lanes until it calls finish_exchange.
template <typename T>
const T* exchange(const T& mine) {
  static_assert(sizeof(T) <= kExchangeBytes);
  const unsigned first = current / kLanes * kLanes, lane = current % kLanes;
  char* all = exchanged.data() + first * kExchangeBytes;
  std::memcpy(all + lane * sizeof(T), &mine, sizeof(T));
  wait(State::at_warp_barrier);
  return reinterpret_cast<const T*>(all);
}
inline void finish_exchange() { wait(State::at_warp_barrier); }

inline void whole_warp(unsigned mask) {
  if (mask != 0xFFFFFFFFu) fail("the mask leaves lanes out");
}

// ---- asynchronous copies -----------------------------------------------------------------------

inline void copy_async(void* to, const void* from, size_t bytes) {
  if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % bytes != 0)
    fail("an asynchronous copy is not aligned");
  fibers[current].copies.back().push_back({to, from, bytes});
}
inline void copy_async_commit() { fibers[current].copies.emplace_back(); }
inline void copy_async_wait(size_t pending) {
  auto& groups = fibers[current].copies;
  while (groups.size() - 1 > pending) {
    for (const Copy& copy : groups.front()) {
      if (copy.from == nullptr)
        std::memset(copy.to, 0, copy.bytes);
      else
        std::memcpy(copy.to, copy.from, copy.bytes);
    }
    groups.erase(groups.begin());
  }
}

}  // namespace jachess::shim

inline void __syncthreads() { jachess::shim::wait(jachess::shim::State::at_block_barrier); }
inline void __syncwarp() { jachess::shim::wait(jachess::shim::State::at_warp_barrier); }

// Whether any thread of the block brings something other than 0.
inline int __syncthreads_or(int value) {
  static int any;
  __syncthreads();
  if (threadIdx.x == 0) any = 0;
  __syncthreads();
  if (value != 0) __atomic_store_n(&any, 1, __ATOMIC_RELAXED);
  __syncthreads();
  const int result = __atomic_load_n(&any, __ATOMIC_RELAXED);
  __syncthreads();
  return result;
}

inline int atomicCAS(int* at, int expected, int value) {
  __atomic_compare_exchange_n(at, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;  // what was there
}
inline int atomicExch(int* at, int value) {
  return __atomic_exchange_n(at, value, __ATOMIC_RELAXED);
}

inline int __any_sync(unsigned mask, int value) {
  jachess::shim::whole_warp(mask);
  const int* all = jachess::shim::exchange(value);
  int any = 0;
  for (unsigned lane = 0; lane < jachess::shim::kLanes; ++lane) any |= all[lane] != 0;
  jachess::shim::finish_exchange();
  return any;
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int offset) {
  jachess::shim::whole_warp(mask);
  const T* all = jachess::shim::exchange(value);
  const T other = all[threadIdx.x % jachess::shim::kLanes ^ static_cast<unsigned>(offset)];
  jachess::shim::finish_exchange();
  return other;
}

namespace jachess {

inline size_t shared_memory_limit(int /*device*/) { return shim::shared_limit; }

inline int multiprocessors(int /*device*/) { return shim::processors; }

inline char* dynamic_shared_memory() { return shim::dynamic_shared.get(); }

namespace shim {

// Is told the warps, stages and shared bytes of each launch in place of running it, where set.
inline std::function<void(int, int, size_t)> planned;

// Streamed tiles that attention's kernels have in shared memory at a time; 0 of other kernels.
template <typename... Arguments>
int stages_of(const Arguments&...) {
  return 0;
}
template <typename Arguments, typename... More>
auto stages_of(const Arguments& arguments, const More&...) -> decltype(arguments.smem.stages) {
  return arguments.smem.stages;
}

}  // namespace shim

template <typename Kernel, typename Q, typename... Arguments>
int launch_with_shared(Kernel kernel, int64_t blocks, int threads, size_t shared_bytes,
                       const Q& /*queue*/, Arguments... arguments) {
  if (blocks < 1) shim::fail("a launch of no blocks, which CUDA refuses");
  if (shared_bytes > shim::shared_limit) shim::fail("more shared memory than a block may have");
  if (shim::planned) {
    shim::planned(threads / 32, shim::stages_of(arguments...), shared_bytes);
    return 0;
  }
  shim::launched.push_back(blocks);
  gridDim.x = static_cast<unsigned>(blocks);
  blockDim.x = static_cast<unsigned>(threads);
  shim::body = [&] { kernel(arguments...); };
  for (int64_t b = 0; b < blocks; ++b) {
    blockIdx.x = static_cast<unsigned>(b);
    shim::dynamic_shared.reset(new char[shared_bytes]);
    std::memset(shim::dynamic_shared.get(), 0xFF, shared_bytes);  // NaN where nothing was written
    shim::run_block(static_cast<unsigned>(threads));
  }
  return 0;
}

template <typename Kernel, typename Q, typename... Arguments>
int launch(Kernel kernel, int64_t blocks, int threads, const Q& queue, Arguments... arguments) {
  return launch_with_shared(kernel, blocks, threads, 0, queue, arguments...);
}

}  // namespace jachess
