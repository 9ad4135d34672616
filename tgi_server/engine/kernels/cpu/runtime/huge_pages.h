// Huge pages for weights. A step reads all weights: with pages of 4 KiB it would miss the TLB again and again.

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

constexpr int64_t HUGE_PAGE = 2 << 20, LINE = 64;  // bytes, of a page and of a cache's line

// An arena of huge pages for tensors side by side: alone, most would fill no huge page, or leave much of their last
// one. A page is returned to the system with the last tensor that has a part of it.
class HugePageArena {
 public:
  explicit HugePageArena(int64_t pages) : tensors_(pages), mapped_((pages + 1) * HUGE_PAGE) {
    start_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(start_ != MAP_FAILED, "there is no memory for ", mapped_, " bytes of weights: ", std::strerror(errno));
    first_ = static_cast<char*>(start_) + (HUGE_PAGE - reinterpret_cast<uintptr_t>(start_) % HUGE_PAGE);
#ifdef MADV_HUGEPAGE
    madvise(first_, pages * HUGE_PAGE, MADV_HUGEPAGE);  // where the system refuses, small pages do
#endif
  }
  HugePageArena(const HugePageArena&) = delete;
  ~HugePageArena() { munmap(start_, mapped_); }

  // Returns zeros for a tensor, or null where they do not fit.
  char* take(int64_t bytes) {
    const std::lock_guard lock(mutex_);
    if (used_ + bytes > static_cast<int64_t>(tensors_.size()) * HUGE_PAGE) return nullptr;
    char* from = first_ + used_;
    count(from, bytes, 1);
    used_ = (used_ + bytes + LINE - 1) / LINE * LINE;
    return from;
  }

  void release(const char* from, int64_t bytes) {
    const std::lock_guard lock(mutex_);
    count(from, bytes, -1);
  }

 private:
  void count(const char* from, int64_t bytes, int change) {
    for (int64_t page = (from - first_) / HUGE_PAGE; page <= (from + bytes - 1 - first_) / HUGE_PAGE; ++page)
      if ((tensors_[page] += change) == 0) madvise(first_ + page * HUGE_PAGE, HUGE_PAGE, MADV_DONTNEED);
  }

  std::mutex mutex_;
  std::vector<int> tensors_;  // of each page
  int64_t used_ = 0;
  size_t mapped_;
  void* start_;
  char* first_;
};

// Returns zeros in huge pages.
inline at::Tensor zeros_in_huge_pages(at::IntArrayRef sizes, const at::TensorOptions& options) {
  constexpr int64_t SMALL = 64 << 10, PAGES = 32;
  static std::mutex mutex;
  static std::weak_ptr<HugePageArena> latest;
  int64_t bytes = static_cast<int64_t>(options.dtype().itemsize());
  for (const int64_t size : sizes) bytes *= size;
  if (bytes < SMALL) return at::zeros(sizes, options);
  const std::lock_guard lock(mutex);
  std::shared_ptr<HugePageArena> arena = latest.lock();
  char* from = arena ? arena->take(bytes) : nullptr;
  if (!from) {
    latest = arena = std::make_shared<HugePageArena>(std::max(bytes / HUGE_PAGE + 1, PAGES));
    from = arena->take(bytes);
  }
  const auto release = [arena, bytes](void* data) { arena->release(static_cast<char*>(data), bytes); };
  return at::from_blob(from, sizes, release, options);
}

}  // namespace oatmill
