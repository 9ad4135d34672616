// Work for several threads.

#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>

namespace oatmill {

// How many parts of that size there are, the last one being what is left.
inline int64_t parts(int64_t size, int64_t part) { return (size + part - 1) / part; }

// Calls work(context, item) for every item below `items` on this thread and threads - 1 others, see parallel.cpp.
void run_items(int64_t items, int threads, void (*work)(const void* context, int64_t item), const void* context);

// Calls work(item) for every item below `items`, on as many threads as torch has. Each takes the next item when it is
// done with one.
template <typename Work>
void for_each_item(int64_t items, const Work& work) {
  const int threads = at::get_num_threads();
  if (threads <= 1 || items <= 1) {
    for (int64_t item = 0; item < items; ++item) work(item);
    return;
  }
  run_items(items, threads, [](const void* context, int64_t item) { (*static_cast<const Work*>(context))(item); }, &work);
}

// Calls work(begin, end) for parts of a range, of `grain` numbers at least.
template <typename Work>
void for_range(int64_t size, int64_t grain, const Work& work) {
  const int64_t part = std::max(grain, parts(size, at::get_num_threads()));
  for_each_item(parts(size, part), [&](int64_t i) { work(i * part, std::min(size, (i + 1) * part)); });
}

}  // namespace oatmill
