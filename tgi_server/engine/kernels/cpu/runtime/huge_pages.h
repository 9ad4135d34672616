// Memory for weights, in pages as large as the system has. A step reads all weights, and a core remembers where only so
// many pages are: with small ones it looks that up again and again.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

namespace oatmill {

constexpr int64_t LARGE_PAGE = 2 << 20, LINE = 64;  // bytes, of a page and of a cache's line

// Memory of weights that lie side by side: alone, most would fill no large page, or leave much of their last one. A page
// goes back to the system with the last of the tensors that have a part of it.
class Stretch {
 public:
  explicit Stretch(int64_t pages) : tensors_(pages), mapped_((pages + 1) * LARGE_PAGE) {
    start_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(start_ != MAP_FAILED, "there is no memory for ", mapped_, " bytes of weights: ", std::strerror(errno));
    first_ = static_cast<char*>(start_) + (LARGE_PAGE - reinterpret_cast<uintptr_t>(start_) % LARGE_PAGE);
#ifdef MADV_HUGEPAGE
    madvise(first_, pages * LARGE_PAGE, MADV_HUGEPAGE);  // where the system refuses, small pages do
#endif
  }
  Stretch(const Stretch&) = delete;
  ~Stretch() { munmap(start_, mapped_); }

  // Returns zeros for a tensor, or null where they do not fit.
  char* take(int64_t bytes) {
    const std::lock_guard lock(mutex_);
    if (used_ + bytes > static_cast<int64_t>(tensors_.size()) * LARGE_PAGE) return nullptr;
    char* from = first_ + used_;
    count(from, bytes, 1);
    used_ = (used_ + bytes + LINE - 1) / LINE * LINE;
    return from;
  }

  void give_back(const char* from, int64_t bytes) {
    const std::lock_guard lock(mutex_);
    count(from, bytes, -1);
  }

 private:
  void count(const char* from, int64_t bytes, int change) {
    for (int64_t page = (from - first_) / LARGE_PAGE; page <= (from + bytes - 1 - first_) / LARGE_PAGE; ++page)
      if ((tensors_[page] += change) == 0) madvise(first_ + page * LARGE_PAGE, LARGE_PAGE, MADV_DONTNEED);
  }

  std::mutex mutex_;
  std::vector<int> tensors_;  // of each page
  int64_t used_ = 0;
  size_t mapped_;
  void* start_;
  char* first_;
};

// Returns zeros that lie in large pages.
inline at::Tensor zeros_in_large_pages(at::IntArrayRef sizes, const at::TensorOptions& options) {
  constexpr int64_t SMALL = 64 << 10, PAGES = 32;
  static std::mutex mutex;
  static std::weak_ptr<Stretch> newest;
  int64_t bytes = static_cast<int64_t>(options.dtype().itemsize());
  for (const int64_t size : sizes) bytes *= size;
  if (bytes < SMALL) return at::zeros(sizes, options);
  const std::lock_guard lock(mutex);
  std::shared_ptr<Stretch> stretch = newest.lock();
  char* from = stretch ? stretch->take(bytes) : nullptr;
  if (!from) {
    newest = stretch = std::make_shared<Stretch>(std::max(bytes / LARGE_PAGE + 1, PAGES));
    from = stretch->take(bytes);
  }
  const auto give_back = [stretch, bytes](void* data) { stretch->give_back(static_cast<char*>(data), bytes); };
  return at::from_blob(from, sizes, give_back, options);
}

}  // namespace oatmill
