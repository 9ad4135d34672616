// The threads that share the items of a kernel.
//
// They are not OpenMP's: its threads all meet at the end of every loop. Where other processes want the cores, too, each
// meeting waits for a thread that is not running, though it has nothing to do, and a step has some hundred loops. Here
// whoever calls waits for the items, and not for the threads: one that comes late finds none left.

#include "runtime/thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <system_error>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "runtime/part_times.h"

namespace oatmill {

namespace {

using Clock = std::chrono::steady_clock;

// A thread looks for the next loop for so long, which is more than lies between those of a step, and then sleeps: the
// router wants the core, or a loop of torch's own. A spin takes from 3 to 50 nanoseconds, by the kind of CPU.
constexpr std::chrono::microseconds LOOKING{50};
constexpr int SPINS_BEFORE_CLOCK = 1 << 6, SPINS_BEFORE_YIELD = 1 << 10;

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb");  // on many of these CPUs `yield` does nothing
#endif
}

// Threads that wait for loops, and the loop that runs. left: its number in the upper half, and how many of its items
// nobody has taken yet. An item is taken by lowering it; since that fails when the loop is another one by then, what is
// known of a loop is only written while no item is left, and read before one is taken, or while one that was taken is
// not counted as done.
class Threads {
 public:
  void run(int64_t items, int threads, ItemWork work, const void* context) {
    start(threads - 1);
    work_.store(work, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    items_.store(items, std::memory_order_relaxed);
    helpers_.store(threads - 1, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    const uint64_t loop = (left_.load(std::memory_order_relaxed) >> 32) + 1;
    left_.store(loop << 32 | static_cast<uint64_t>(items), std::memory_order_seq_cst);
    left_.notify_all();
    work_off();
    const TimedPart waiting("waiting for threads");
    for (int spins = 0; done_.load(std::memory_order_acquire) < items; ++spins)
      if (spins % SPINS_BEFORE_YIELD == SPINS_BEFORE_YIELD - 1) sched_yield();
      else relax();
  }

 private:
  // Where the system has no more threads, those that there are do all items.
  void start(int helpers) {
    try {
      for (; started_ < helpers; ++started_) std::thread([this, number = started_] { serve(number); }).detach();
    } catch (const std::system_error&) {
    }
  }

  // Does items of the loop that runs until none is left. The next one is taken before an item is done, so that what it
  // needs can be asked for in time, as long as there is one for every other thread as well.
  void work_off() {
    int64_t done = 0;
    for (int64_t item = take(1); item >= 0; ++done) {
      const int64_t threads = helpers_.load(std::memory_order_relaxed) + 1,
                    last = items_.load(std::memory_order_relaxed) - 1;
      const int64_t next = take(threads + 1);
      work_.load(std::memory_order_relaxed)(context_.load(std::memory_order_relaxed), item,
                                            next >= 0 ? next : std::min(item + threads, last));
      item = next >= 0 ? next : take(1);
    }
    done_.fetch_add(done, std::memory_order_release);  // the loop is this one: it has not ended without these
  }

  // Takes an item of the loop that runs, if there are so many that nobody has taken. Returns -1 if not.
  int64_t take(int64_t least) {
    uint64_t left = left_.load(std::memory_order_acquire);
    for (;;) {
      const int64_t open = static_cast<int64_t>(left & 0xffffffff);
      if (open < least) return -1;
      const int64_t item = items_.load(std::memory_order_relaxed) - open;
      if (left_.compare_exchange_weak(left, left - 1, std::memory_order_acq_rel, std::memory_order_acquire))
        return item;
    }
  }

  void serve(int number) {
    Clock::time_point since = Clock::now();
    for (unsigned spins = 1;; ++spins) {
      const uint64_t left = left_.load(std::memory_order_acquire);
      if ((left & 0xffffffff) != 0 && number < helpers_.load(std::memory_order_relaxed)) {
        work_off();
        since = Clock::now();
      } else if (spins % SPINS_BEFORE_CLOCK != 0 || Clock::now() - since < LOOKING) {
        relax();
      } else {
        left_.wait(left);
        since = Clock::now();
      }
    }
  }

  alignas(64) std::atomic<uint64_t> left_{0};
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<ItemWork> work_{nullptr};
  std::atomic<const void*> context_{nullptr};
  std::atomic<int64_t> items_{0};
  std::atomic<int> helpers_{0};
  int started_ = 0;
};

std::atomic<Threads*> threads_of_process{nullptr};
std::atomic<bool> taken{false};

}  // namespace

// Where the threads are taken, by another thread's loop or by one around this, the items are done here.
void run_items(int64_t items, int threads, ItemWork work, const void* context) {
  if (taken.exchange(true, std::memory_order_acquire)) {
    for (int64_t item = 0; item < items; ++item) work(context, item, std::min(item + 1, items - 1));
    return;
  }
  if (threads_of_process == nullptr) {
    static const int registered = pthread_atfork(nullptr, nullptr, [] {  // a child has none of its parent's threads
      threads_of_process = nullptr;
      taken = false;
    });
    static_cast<void>(registered);
    threads_of_process = new Threads;  // for as long as the process lives
  }
  threads_of_process.load()->run(items, threads, work, context);
  taken.store(false, std::memory_order_release);
}

}  // namespace oatmill

TORCH_LIBRARY_FRAGMENT(oatmill, library) {
  // From now on loops run in so many threads of our own; 0: in OpenMP's. Returns the number before.
  library.def("set_own_threads(int threads) -> int",
              [](int64_t threads) -> int64_t { return oatmill::own_threads.exchange(static_cast<int>(threads)); });
}
