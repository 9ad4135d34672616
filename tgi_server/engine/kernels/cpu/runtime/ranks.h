// The ranks of a model, and how they bring together what each of them has computed: on one machine through memory that
// they share, in microseconds, and on several through a process group of torch.

#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <string>
#include <vector>

namespace oatmill {

// In shared memory every rank has two places in the memory, which it uses in turn, and a counter of the tensors that it
// has put down. It puts its tensor down, counts, waits until the others have counted as far, and reads theirs. A place
// is written again two calls later; by then every other rank has begun the call between, so has read what was there.
class Ranks : public torch::CustomClassHolder {
 public:
  // memory: bytes, 0 at first, the same for all: a counter of each rank, LINE_BYTES apart, and PLACES places of each,
  // of place_bytes. processes: the ids of all ranks' processes. timeout: seconds to wait for the others in a call.
  Ranks(at::Tensor memory, int64_t rank, std::vector<int64_t> processes, int64_t place_bytes, double timeout);

  // group: the name of a process group of torch.
  Ranks(std::string group, int64_t rank, int64_t world_size);

  // Sums a contiguous tensor of floats over all ranks, in place. The result has the same bits everywhere.
  void all_reduce(at::Tensor x);

  // Joins every rank's tensor, all of one shape, along the last axis.
  at::Tensor all_gather(const at::Tensor& x);

  int64_t rank() const { return rank_; }

 private:
  // Puts bytes down, and waits for those of the others. Returns the first rank's place; the next ones follow it.
  const char* exchange(const char* from, int64_t bytes);
  void wait() const;
  bool arrived() const;
  void check_others() const;

  at::Tensor memory_;  // or none
  std::string group_;
  int64_t rank_, world_size_;
  std::vector<int64_t> processes_;
  int64_t place_bytes_ = 0;
  double timeout_ = 0;
  int64_t calls_ = 0;
};

using RanksPtr = c10::intrusive_ptr<Ranks>;

}  // namespace oatmill
