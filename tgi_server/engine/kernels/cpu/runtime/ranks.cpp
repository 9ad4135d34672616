#include "runtime/ranks.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <string>
#include <utility>

#include "simd/dtypes.h"
#include "simd/simd16.h"
#include "gemm/gemm.h"
#include "runtime/thread_pool.h"

namespace oatmill {

namespace {

constexpr int64_t PLACES = 2;
// Counters of different ranks stand so far apart that a write of one does not slow down readers of the others.
constexpr int64_t LINE_BYTES = 64;
constexpr int SPINS = 2000;  // looks at the counters before another thread that needs this core gets it
constexpr int LOOKS = 1000;  // further ones, after which a rank checks that its peers are alive

bool has_ended(int64_t process) {
  if (kill(static_cast<pid_t>(process), 0) != 0 && errno == ESRCH) return true;
  std::ifstream file("/proc/" + std::to_string(process) + "/stat");
  std::string line;
  if (!std::getline(file, line)) return false;
  const size_t name_end = line.rfind(')');  // the state follows it: Z is a zombie
  return name_end != std::string::npos && name_end + 2 < line.size() && line[name_end + 2] == 'Z';
}

std::atomic_ref<int64_t> counter(const at::Tensor& memory, size_t rank) {
  char* bytes = static_cast<char*>(memory.data_ptr());
  return std::atomic_ref<int64_t>(*reinterpret_cast<int64_t*>(bytes + rank * LINE_BYTES));
}

// Calls an operator on a process group, and waits for its result.
at::Tensor collective(const char* name, torch::jit::Stack arguments) {
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  try {
    dispatcher.findSchemaOrThrow(name, "").callBoxed(arguments);
    dispatcher.findSchemaOrThrow("_c10d_functional::wait_tensor", "").callBoxed(arguments);
  } catch (const std::exception& error) {
    TORCH_CHECK(false, "peer lost: ", error.what());
  }
  return arguments.front().toTensor();
}

}  // namespace

Ranks::Ranks(at::Tensor memory, int64_t rank, std::vector<int64_t> processes, int64_t place_bytes, double timeout)
    : memory_(std::move(memory)), rank_(rank), world_size_(static_cast<int64_t>(processes.size())),
      processes_(std::move(processes)), place_bytes_(place_bytes), timeout_(timeout) {
  TORCH_CHECK(memory_.scalar_type() == at::kByte && memory_.is_contiguous());
  TORCH_CHECK(memory_.numel() >= world_size_ * (LINE_BYTES + PLACES * place_bytes_),
              "the ranks need more shared memory");
}

Ranks::Ranks(std::string group, int64_t rank, int64_t world_size)
    : group_(std::move(group)), rank_(rank), world_size_(world_size) {}

void Ranks::all_reduce(at::Tensor x) {
  TORCH_CHECK(x.is_contiguous());
  if (!memory_.defined()) {
    collective("_c10d_functional::all_reduce_", {x, "sum", group_});
    return;
  }
  const int64_t world_size = world_size_;
  by_dtype(x, [&]<typename T>(T*) {
    T* to = x.mutable_data_ptr<T>();
    const int64_t most = place_bytes_ / static_cast<int64_t>(sizeof(T)), all = x.numel();
    for (int64_t first = 0; first < all; first += most) {
      const int64_t count = std::min(most, all - first);
      const char* places = exchange(reinterpret_cast<const char*>(to + first), count * static_cast<int64_t>(sizeof(T)));
      const auto of = [&](int64_t rank) { return reinterpret_cast<const T*>(places + rank * place_bytes_); };
      for_rows(count, world_size, [&](int64_t begin, int64_t last) {
        for (int64_t i = begin; i < last; ++i) {  // rounded after every rank's, as sums of tensors are
          T sum = of(0)[i];
          for (int64_t rank = 1; rank < world_size; ++rank)
            sum = static_cast<T>(static_cast<float>(sum) + static_cast<float>(of(rank)[i]));
          to[first + i] = sum;
        }
      });
    }
  });
}

at::Tensor Ranks::all_gather(const at::Tensor& x) {
  const at::Tensor own = x.contiguous();
  const int64_t world_size = world_size_;
  auto shape = own.sizes().vec();
  if (!memory_.defined()) {  // which joins them along the first axis
    const at::Tensor parts = collective("_c10d_functional::all_gather_into_tensor", {own, world_size, group_});
    shape.back() *= world_size;
    return parts.view({world_size, -1, own.size(-1)}).transpose(0, 1).reshape(shape);
  }
  shape.back() *= world_size;
  at::Tensor joined = at::empty(shape, own.options());
  const int64_t row_bytes = own.size(-1) * own.element_size(), all = own.numel() * own.element_size();
  const char* from = static_cast<const char*>(own.const_data_ptr());
  char* to = static_cast<char*>(joined.mutable_data_ptr());
  for (int64_t first = 0; first < all; first += place_bytes_) {
    const int64_t last = std::min(first + place_bytes_, all);
    const char* places = exchange(from + first, last - first);
    for (int64_t rank = 0; rank < world_size; ++rank)
      for (int64_t i = first, count; i < last; i += count) {  // what there is of a row
        count = std::min(last - i, row_bytes - i % row_bytes);
        std::memcpy(to + (i / row_bytes * world_size + rank) * row_bytes + i % row_bytes,
                    places + rank * place_bytes_ + i - first, count);
      }
  }
  return joined;
}

const char* Ranks::exchange(const char* from, int64_t bytes) {
  char* places =
      static_cast<char*>(memory_.data_ptr()) + world_size_ * LINE_BYTES + calls_ % PLACES * world_size_ * place_bytes_;
  std::memcpy(places + rank_ * place_bytes_, from, bytes);
  counter(memory_, rank_).store(++calls_, std::memory_order_release);
  wait();
  return places;
}

bool Ranks::arrived() const {
  for (size_t rank = 0; rank < processes_.size(); ++rank)
    if (counter(memory_, rank).load(std::memory_order_acquire) < calls_) return false;
  return true;
}

void Ranks::wait() const {
  for (int i = 0; i < SPINS; ++i) {
    if (arrived()) return;
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_);
  while (true) {
    for (int i = 0; i < LOOKS; ++i) {
      if (arrived()) return;
      sched_yield();
    }
    check_others();
    if (std::chrono::steady_clock::now() < deadline) continue;
    for (size_t rank = 0; rank < processes_.size(); ++rank)
      TORCH_CHECK(counter(memory_, rank).load() >= calls_, "peer lost: shard ", rank,
                  " has not come to the same point within ", timeout_, " s");
  }
}

void Ranks::check_others() const {
  for (size_t rank = 0; rank < processes_.size(); ++rank)
    TORCH_CHECK(!has_ended(processes_[rank]), "peer lost: shard ", rank, " has ended");
}

}  // namespace oatmill
