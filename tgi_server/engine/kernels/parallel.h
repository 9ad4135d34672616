// Work for several threads.

#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace oatmill {

// How many parts of that size there are, the last one being what is left.
inline int64_t parts(int64_t size, int64_t part) { return (size + part - 1) / part; }

// Calls work(item) for every item below `items`, on all of torch's threads. Each takes the next item when it is done
// with one: where other processes want the cores too, nobody waits for more than the item that a held-up thread has.
// There may be more threads than items: OpenMP ends threads that a smaller team leaves out, and has to start them anew.
template <typename Work>
void for_each_item(int64_t items, const Work& work) {
  const int threads = at::get_num_threads();
  if (threads <= 1 || items <= 1) {
    for (int64_t item = 0; item < items; ++item) work(item);
    return;
  }
  std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(threads)
  for (int64_t item = next++; item < items; item = next++) work(item);
}

}  // namespace oatmill
