// Memory for weights, in pages as large as the system has. A step reads all weights, and a core remembers where only so
// many pages are: with small ones it looks that up again and again.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>

namespace oatmill {

// Zeros straight from the system, of which parts are handed out one behind the other.
class Pages {
 public:
  // Has room for so many bytes at least.
  explicit Pages(int64_t bytes) : size_(std::max(LEAST, bytes) + LARGE) {
    start_ = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(start_ != MAP_FAILED, "there is no memory for ", size_, " bytes of weights: ", std::strerror(errno));
    end_ = static_cast<char*>(start_) + size_;
    next_ = static_cast<char*>(start_) + (LARGE - reinterpret_cast<uintptr_t>(start_) % LARGE);
#ifdef MADV_HUGEPAGE
    madvise(next_, end_ - next_, MADV_HUGEPAGE);  // where the system refuses, small pages do
#endif
  }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  ~Pages() { munmap(start_, size_); }

  int64_t left() const { return end_ - next_; }
  void* take(int64_t bytes) { return std::exchange(next_, next_ + bytes); }

 private:
  static constexpr int64_t LARGE = 2 << 20, LEAST = 16 * LARGE;

  int64_t size_;
  void* start_;
  char *next_, *end_;
};

// Returns zeros. Tensors share pages, which are given back with the last of them.
inline at::Tensor zeros_in_large_pages(at::IntArrayRef sizes, const at::TensorOptions& options) {
  constexpr int64_t LINE = 64;
  static std::mutex mutex;
  static std::shared_ptr<Pages> pages;
  int64_t bytes = static_cast<int64_t>(options.dtype().itemsize());
  for (const int64_t size : sizes) bytes *= size;
  bytes = (bytes + LINE - 1) / LINE * LINE;
  const std::lock_guard lock(mutex);
  if (!pages || pages.use_count() == 1 || pages->left() < bytes) pages = std::make_shared<Pages>(bytes);
  return at::from_blob(pages->take(bytes), sizes, [kept = pages](void*) {}, options);
}

}  // namespace oatmill
