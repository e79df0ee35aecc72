// Uninitialised scratch memory of a kernel, aligned to a cache line.
#pragma once

#include <cstdint>
#include <new>

namespace jachess {

template <typename T>
class AlignedBuffer {
 public:
  explicit AlignedBuffer(int64_t n)
      : data_(static_cast<T*>(
            ::operator new(static_cast<size_t>(n) * sizeof(T) + 64, std::align_val_t{64}))) {}
  ~AlignedBuffer() { ::operator delete(data_, std::align_val_t{64}); }
  AlignedBuffer(const AlignedBuffer&) = delete;
  AlignedBuffer& operator=(const AlignedBuffer&) = delete;
  operator T*() const { return data_; }

 private:
  T* data_;
};

}  // namespace jachess
