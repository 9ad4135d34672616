// Memory for weights, in pages as large as the system has. A step reads all weights, and a core remembers where only so
// many pages are: with small ones it looks that up again and again.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

namespace oatmill {

// Returns zeros that lie in large pages as far as they fill some. They go back to the system with the tensor.
inline at::Tensor zeros_in_large_pages(at::IntArrayRef sizes, const at::TensorOptions& options) {
  constexpr int64_t LARGE = 2 << 20;
  int64_t bytes = static_cast<int64_t>(options.dtype().itemsize());
  for (const int64_t size : sizes) bytes *= size;
  if (bytes < LARGE) return at::zeros(sizes, options);
  const size_t mapped = bytes + LARGE;
  void* start = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(start != MAP_FAILED, "there is no memory for ", bytes, " bytes of weights: ", std::strerror(errno));
  char* first = static_cast<char*>(start) + (LARGE - reinterpret_cast<uintptr_t>(start) % LARGE);
#ifdef MADV_HUGEPAGE
  madvise(first, bytes / LARGE * LARGE, MADV_HUGEPAGE);  // where the system refuses, small pages do
#endif
  return at::from_blob(first, sizes, [start, mapped](void*) { munmap(start, mapped); }, options);
}

}  // namespace oatmill
