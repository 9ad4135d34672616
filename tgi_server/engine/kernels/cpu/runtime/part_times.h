// How long the parts of passes take, for benchmarks. Nothing is measured until somebody asks for it.

#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <unordered_map>

namespace oatmill {

struct PartTime {
  int64_t calls = 0;
  double seconds = 0;
};

// By name, since the measurement began; null: nothing is measured. Only the thread that runs a pass adds to it.
inline std::unordered_map<std::string, PartTime>* part_times = nullptr;

// Measures from its construction to its end.
class TimedPart {
 public:
  explicit TimedPart(const char* name) : name_(part_times ? name : nullptr) {
    if (name_) start_ = std::chrono::steady_clock::now();
  }
  ~TimedPart() {
    if (!name_ || !part_times) return;
    PartTime& part = (*part_times)[name_];
    ++part.calls;
    part.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }
  TimedPart(const TimedPart&) = delete;
  TimedPart& operator=(const TimedPart&) = delete;

 private:
  const char* name_;
  std::chrono::steady_clock::time_point start_;
};

// Returns what work returns.
template <typename Work>
auto timed(const char* name, const Work& work) {
  const TimedPart part(name);
  return work();
}

}  // namespace oatmill
