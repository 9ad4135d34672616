// The feed-forward part of a layer that is a mixture of experts (Shazeer et al. 2017): each token goes through a few.

#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gemm/linear.h"
#include "ops/ops.h"

namespace oatmill {

// An expert of a token, and what its output is multiplied by.
struct Choice {
  int64_t expert;
  float share;
};

// up_bias, down_bias: [outputs] float32, or none.
struct Expert {
  LinearPtr up, down;
  std::optional<at::Tensor> up_bias, down_bias;
};

// An expert is an activation between two projections. Where it is gated, half of the outputs of the first one are a
// gate, and the others are multiplied by that. The gate's half comes first; or, if alpha is not 0, the gate is that of
// gpt-oss: x * sigmoid(alpha * x) of numbers up to `limit`, and its outputs stand before each of the others, which are
// kept between -limit and limit, and 1 is added to them.
struct Experts : torch::CustomClassHolder {
  Experts(const std::string& activation, bool gated, double alpha, double limit)
      : activation_(activation_named(activation)), gated_(gated), alpha_(static_cast<float>(alpha)),
        limit_(static_cast<float>(limit)) {}

  // Adds the next expert.
  void add(LinearPtr up, LinearPtr down, std::optional<at::Tensor> up_bias, std::optional<at::Tensor> down_bias);

  // chosen, shares: the experts of each token, [tokens, experts of a token], int64 and a float dtype; no token has one
  // twice. The others as below.
  at::Tensor forward(const at::Tensor& x, const at::Tensor& chosen, const at::Tensor& shares) const;

  // x: [tokens, hidden_size], contiguous. choices: [tokens, of each]. residual: as x, or none. Returns it and the
  // outputs of each token's experts, times their shares, [tokens, hidden_size]; sums are in float32. share_inputs:
  // shares multiply what goes into experts instead.
  at::Tensor sum(const at::Tensor& x, const std::vector<Choice>& choices, const std::optional<at::Tensor>& residual,
                 bool share_inputs = false) const;

  int64_t count() const { return static_cast<int64_t>(experts_.size()); }

 private:
  // An expert and the tokens that chose it, [rows]; what goes into its layers, and what comes out of them.
  struct Work {
    const Expert* expert;
    std::vector<int64_t> tokens;
    std::vector<float> shares;
    at::Tensor rows, up, output;
  };

  // Computes the outputs of all works. A thread takes an expert at a time, or where there are few of them a share of
  // the outputs of one of its layers: threads meet a few times, and not for every layer of every expert.
  void compute(const at::Tensor& x, std::vector<Work>& works, bool share_inputs) const;

  at::Tensor activated(const at::Tensor& up, const std::optional<at::Tensor>& bias) const;

  Activation activation_;
  bool gated_;
  float alpha_, limit_;
  std::vector<Expert> experts_;
};

using ExpertsPtr = c10::intrusive_ptr<Experts>;

// How a token chooses experts by the outputs of a router. Their scores are a softmax over all, or the sigmoid of each.
struct Routing : torch::CustomClassHolder {
  int64_t chosen = 1;  // experts of a token: those with the highest scores
  bool sigmoid = false;
  std::optional<at::Tensor> bias;         // [experts] float32, added to scores in the choice alone; or none
  int64_t groups = 1, chosen_groups = 1;  // a token has experts of so many groups of neighbours alone
  int64_t group_scores = 1;               // a group is as good as so many of its highest scores together
  bool normalised = false;                // shares add up to 1, and are otherwise the scores
  double factor = 1;                      // of shares
  bool wide = false;                      // the router computes in float32, whatever the model does
  std::optional<at::Tensor> factors;      // of the shares of each expert, [experts] float32; or none
  bool share_inputs = false;              // shares multiply what goes into experts
};

using RoutingPtr = c10::intrusive_ptr<Routing>;

// router: has an output for each expert.
struct Mixture : torch::CustomClassHolder {
  Mixture(LinearPtr router, ExpertsPtr experts, RoutingPtr routing);

  // x, residual: as in Experts::sum. of_router: what the router reads, as x. adapters: as Linear::adapted takes them.
  at::Tensor operator()(const at::Tensor& x, const at::Tensor& of_router, const std::optional<at::Tensor>& residual,
                        const std::optional<at::Tensor>& adapters) const;

 private:
  LinearPtr router_;
  ExpertsPtr experts_;
  RoutingPtr routing_;
};

using MixturePtr = c10::intrusive_ptr<Mixture>;

}  // namespace oatmill
