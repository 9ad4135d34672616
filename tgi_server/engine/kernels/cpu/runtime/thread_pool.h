// The thread pool, with dynamic scheduling.

#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <type_traits>

namespace oatmill {

inline int64_t ceil_div(int64_t size, int64_t part) { return (size + part - 1) / part; }

// Threads of our thread pool, in which loops run; 0: they run in OpenMP's, in as many as torch has. Where kernels
// alternate with operators of torch that have several threads, two pools would compete for the cores.
inline std::atomic<int> own_threads{0};

inline int loop_threads() {
  const int own = own_threads.load(std::memory_order_relaxed);
  return own > 0 ? own : at::get_num_threads();
}

// The elements of a cheap loop, such as a conversion, that are worth a thread. OpenMP's take longer to start and to
// end.
inline int64_t worth_a_thread() { return own_threads.load(std::memory_order_relaxed) > 0 ? 1 << 12 : 1 << 14; }

// A loop's work on an item. next: the item that this thread will do next, as far as that is known.
using ItemWork = void (*)(const void* context, int64_t item, int64_t next);

// Calls work(context, item, next) for every item below `items` on this thread and threads - 1 others, see
// thread_pool.cpp.
void run_items(int64_t items, int threads, ItemWork work, const void* context);

// Calls work(item), or work(item, next), for every item below `items`, on `loop_threads()` threads. Each takes
// another item when it is done with one. next: as of ItemWork.
template <typename Work>
void parallel_for(int64_t items, const Work& work) {
  const int threads = loop_threads();
  const ItemWork call = [](const void* context, int64_t item, int64_t next) {
    if constexpr (std::is_invocable_v<const Work&, int64_t, int64_t>) (*static_cast<const Work*>(context))(item, next);
    else (*static_cast<const Work*>(context))(item);
  };
  if (threads <= 1 || items <= 1) {
    for (int64_t item = 0; item < items; ++item) call(&work, item, std::min(item + 1, items - 1));
    return;
  }
  if (own_threads.load(std::memory_order_relaxed) > 0) return run_items(items, threads, call, &work);
  std::atomic<int64_t> next{0};
  // There may be more threads than items: OpenMP ends threads that a smaller team leaves out, and has to start them
  // anew.
#pragma omp parallel num_threads(threads)
  for (int64_t item = next++; item < items; item = next++) call(&work, item, std::min(item + threads, items - 1));
}

// Calls work(begin, end) for parts of a range, of `grain` numbers at least.
template <typename Work>
void for_range(int64_t size, int64_t grain, const Work& work) {
  const int64_t part = std::max(grain, ceil_div(size, loop_threads()));
  parallel_for(ceil_div(size, part), [&](int64_t i) { work(i * part, std::min(size, (i + 1) * part)); });
}

}  // namespace oatmill
