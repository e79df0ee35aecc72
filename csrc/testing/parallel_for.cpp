// torch's parallel loop for the operators built with -fsanitize=thread, which takes the place of
// libtorch's when it is linked into their library: OpenMP's barriers lie in a library the sanitizer
// does not watch, those of std::thread it knows. The range is always split, however small.
#include <torch/csrc/stable/c/shim.h>

#include <algorithm>
#include <thread>
#include <vector>

AOTITorchError torch_parallel_for(int64_t begin, int64_t end, int64_t /*grain_size*/,
                                  ParallelFunc func, void* ctx) {
  constexpr int64_t kThreads = 4;
  const int64_t chunk = std::max<int64_t>(1, (end - begin + kThreads - 1) / kThreads);
  std::vector<std::thread> threads;
  for (int64_t at = begin; at < end; at += chunk)
    threads.emplace_back(func, at, std::min(at + chunk, end), ctx);
  for (std::thread& thread : threads) thread.join();
  return AOTI_TORCH_SUCCESS;
}
