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

namespace oatmill {

constexpr int64_t LARGE_PAGE = 2 << 20;

// Memory of weights that lie side by side: alone, most would fill no large page, or leave much of their last one. It goes
// back to the system with the last of them, and the large pages inside a single one with that.
struct Stretch {
  char *start, *next, *end;
  size_t mapped;

  explicit Stretch(int64_t bytes) : mapped(bytes + LARGE_PAGE) {
    void* place = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(place != MAP_FAILED, "there is no memory for ", bytes, " bytes of weights: ", std::strerror(errno));
    start = static_cast<char*>(place);
    next = start + (LARGE_PAGE - reinterpret_cast<uintptr_t>(start) % LARGE_PAGE);
    end = next + bytes;
#ifdef MADV_HUGEPAGE
    madvise(next, bytes, MADV_HUGEPAGE);  // where the system refuses, small pages do
#endif
  }
  Stretch(const Stretch&) = delete;
  ~Stretch() { munmap(start, mapped); }
};

inline void give_back(char* from, int64_t bytes) {
  char* first = from + (LARGE_PAGE - reinterpret_cast<uintptr_t>(from) % LARGE_PAGE) % LARGE_PAGE;
  const int64_t inside = (from + bytes - first) / LARGE_PAGE * LARGE_PAGE;
  if (inside > 0) madvise(first, inside, MADV_DONTNEED);
}

// Returns zeros that lie in large pages.
inline at::Tensor zeros_in_large_pages(at::IntArrayRef sizes, const at::TensorOptions& options) {
  constexpr int64_t SMALL = 64 << 10, STRETCH = 64 << 20, LINE = 64;
  static std::mutex mutex;
  static std::weak_ptr<Stretch> newest;
  int64_t bytes = static_cast<int64_t>(options.dtype().itemsize());
  for (const int64_t size : sizes) bytes *= size;
  if (bytes < SMALL) return at::zeros(sizes, options);
  const std::lock_guard lock(mutex);
  std::shared_ptr<Stretch> stretch = newest.lock();
  if (!stretch || stretch->end - stretch->next < bytes) {
    stretch = std::make_shared<Stretch>(std::max(bytes + LARGE_PAGE, STRETCH) / LARGE_PAGE * LARGE_PAGE);
    newest = stretch;
  }
  char* from = stretch->next;
  stretch->next += (bytes + LINE - 1) / LINE * LINE;
  return at::from_blob(from, sizes, [stretch, bytes](void* data) { give_back(static_cast<char*>(data), bytes); }, options);
}

}  // namespace oatmill
