// LoRA deltas of a linear layer (Hu et al. 2021), each for the rows of its requests.

#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

namespace oatmill {

// Some neighbouring outputs of a layer, and what an adapter adds to them: b^T times some of its ranks, with zeros up to
// an even number of them.
struct LoraPart {
  int64_t first, outputs, first_rank, ranks;
  at::Tensor b;  // packed, see lora.cpp
};

// One adapter's delta of a layer: y = dora_scale * base(x) + b (a x) + bias_delta. The parts follow each other and are
// all outputs.
struct LoraDelta {
  at::Tensor a;  // of all parts, packed
  int64_t inputs, ranks;
  std::vector<LoraPart> parts;
  std::optional<at::Tensor> dora_scale, bias_delta;  // [outputs] float32
};

class Adapters;

// The rows of a pass, grouped by the adapter that changes them in one layer; without those that none changes.
class LoraRows {
 public:
  struct Group {
    const LoraDelta* delta;
    std::vector<int64_t> rows;
  };

  // numbers: [rows] int32, of the adapter of each row; 0, or one that does not change this layer: none.
  LoraRows(const Adapters& adapters, const at::Tensor& numbers);

  bool any() const { return !groups_.empty(); }
  // Returns of each row true if an adapter changes it.
  const bool* adapted() const { return adapted_.get(); }
  const std::vector<Group>& groups() const { return groups_; }

 private:
  std::unique_ptr<bool[]> adapted_;
  std::vector<Group> groups_;
};

class Adapters : public torch::CustomClassHolder {
 public:
  explicit Adapters(int64_t outputs) : outputs_(outputs) {}

  // a: [ranks, inputs]. b: of each part [ranks, outputs], with the first of its outputs; it takes as many of the ranks
  // as it needs, in turn. Replaces the change that the adapter with that number had.
  void put(int64_t number, const at::Tensor& a, std::vector<at::Tensor> b, std::vector<int64_t> firsts,
           std::optional<at::Tensor> dora_scale, std::optional<at::Tensor> bias_delta);

  void drop(int64_t number) { deltas_.erase(number); }

  bool empty() const { return deltas_.empty(); }

  // Returns an adapter's delta, or null.
  const LoraDelta* find(int64_t number) const {
    const auto found = deltas_.find(number);
    return found == deltas_.end() ? nullptr : &found->second;
  }

  // x: [..., inputs]. y: the base layer's outputs for it, [..., outputs], which are returned with the deltas of some
  // rows. After its delta comes a row's residual; that of the other rows is in y.
  at::Tensor apply(const at::Tensor& x, at::Tensor y, const LoraRows& rows,
                   const std::optional<at::Tensor>& residual) const;

 private:
  int64_t outputs_;
  std::unordered_map<int64_t, LoraDelta> deltas_;
};

using AdaptersPtr = c10::intrusive_ptr<Adapters>;

}  // namespace oatmill
