// The feed-forward part of a layer that is a mixture of experts (Shazeer et al. 2017): each token goes through a few.

#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "linear_layer.h"

namespace oatmill {

// An expert of a token, and what its output is multiplied by.
struct Choice {
  int64_t expert;
  float share;
};

struct Experts : torch::CustomClassHolder {
  // Adds the next expert. up: the gate's outputs, and behind them those that are multiplied by it.
  void add(LinearPtr up, LinearPtr down) { experts_.emplace_back(std::move(up), std::move(down)); }

  // chosen, shares: the experts of each token, [tokens, experts of a token], int64 and a float dtype; no token has one
  // twice. The others as below.
  at::Tensor forward(const at::Tensor& x, const at::Tensor& chosen, const at::Tensor& shares) const;

  // x: [tokens, hidden_size], contiguous. choices: [tokens, of each]. residual: as x, or none. Returns it and the outputs
  // of each token's experts, times their shares, [tokens, hidden_size]; sums are in float32.
  at::Tensor sum(const at::Tensor& x, const std::vector<Choice>& choices, const std::optional<at::Tensor>& residual) const;

  int64_t count() const { return static_cast<int64_t>(experts_.size()); }

 private:
  std::vector<std::pair<LinearPtr, LinearPtr>> experts_;
};

using ExpertsPtr = c10::intrusive_ptr<Experts>;

// router: has an output for each expert. chosen: how many a token has, those of the largest outputs. normalised: their
// shares add up to 1, and are otherwise what the softmax over all experts gives them.
struct Mixture : torch::CustomClassHolder {
  Mixture(LinearPtr router, ExpertsPtr experts, int64_t chosen, bool normalised);

  // x, residual: as in Experts::sum.
  at::Tensor operator()(const at::Tensor& x, const at::Tensor& residual) const;

 private:
  LinearPtr router_;
  ExpertsPtr experts_;
  int64_t chosen_;
  bool normalised_;
};

using MixturePtr = c10::intrusive_ptr<Mixture>;

}  // namespace oatmill
