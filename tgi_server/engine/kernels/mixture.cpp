// The experts of a mixture, one after the other, each with the tokens that chose it.

#include "mixture.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "dtypes.h"
#include "lanes.h"
#include "linear.h"
#include "ops.h"
#include "parallel.h"

namespace oatmill {

namespace {

// sums[tokens[i]] += shares[i] * (rows[i] + bias), of rows of as many numbers. No token is there twice.
void add_shares(float* sums, const at::Tensor& rows, const std::optional<at::Tensor>& bias, const at::Tensor& tokens,
                const std::vector<float>& shares) {
  const int64_t size = rows.size(1);
  const std::vector<float> zeros(bias ? 0 : size);
  const float* added = bias ? bias->const_data_ptr<float>() : zeros.data();
  const int64_t* token = tokens.const_data_ptr<int64_t>();
  by_dtype(rows, [&]<typename T>(T*) {
    const T* from = rows.const_data_ptr<T>();
    for_rows(rows.size(0), size, [&](int64_t r, int64_t last) {
      for (; r < last; ++r) {
        float* to = sums + token[r] * size;
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES)
          store(to + i, load(to + i) + shares[r] * (load(from + r * size + i) + load(added + i)));
        for (; i < size; ++i) to[i] += shares[r] * (static_cast<float>(from[r * size + i]) + added[i]);
      }
    });
  });
}

// gpt-oss's gate. up: [rows, 2 * size], each number of the gate before the one that it multiplies. bias: [2 * size].
// Returns [rows, size].
at::Tensor clamped_gate(const at::Tensor& up, const float* bias, float alpha, float limit) {
  const int64_t size = up.size(1) / 2;
  at::Tensor output = at::empty({up.size(0), size}, up.options());
  by_dtype(up, [&]<typename T>(T*) {
    const T* from = up.const_data_ptr<T>();
    T* to = output.mutable_data_ptr<T>();
    for_rows(up.size(0), 2 * size, [&](int64_t r, int64_t last) {
      for (; r < last; ++r)
        for (int64_t i = 0; i < size; i += LANES) {
          const int64_t count = std::min<int64_t>(LANES, size - i);
          float gates[LANES] = {}, others[LANES] = {};
          for (int64_t j = 0; j < count; ++j) {
            const int64_t place = 2 * (i + j);
            gates[j] = std::min(static_cast<float>(from[2 * r * size + place]) + bias[place], limit);
            others[j] = std::clamp(static_cast<float>(from[2 * r * size + place + 1]) + bias[place + 1], -limit, limit);
          }
          const Lanes gate = load(gates);
          T results[LANES];
          store(results, (load(others) + 1.0f) * (gate / (exponential(-alpha * gate) + 1.0f)));
          std::copy_n(results, count, to + r * size + i);
        }
    });
  });
  return output;
}

template <typename From, typename To>
void convert(const From* from, To* to, int64_t numbers) {
  for_rows(numbers, 1, [&](int64_t i, int64_t last) {
    for (; i + LANES <= last; i += LANES) store(to + i, load(from + i));
    for (; i < last; ++i) to[i] = static_cast<To>(static_cast<float>(from[i]));
  });
}

// The `chosen` largest of a token's outputs of the router, with their shares. scratch: room for all shares.
template <typename T>
void choose(const T* logits, std::vector<float>& scratch, int64_t chosen, bool normalised, Choice* choices) {
  std::copy_n(logits, scratch.size(), scratch.begin());
  const float largest = *std::max_element(scratch.begin(), scratch.end());
  float total = 0;
  for (float& share : scratch) total += share = std::exp(share - largest);
  if (!(total > 0)) std::fill(scratch.begin(), scratch.end(), 0.0f);  // NaN: some experts, with shares that are NaN, too
  if (normalised) total = 0;
  for (int64_t c = 0; c < chosen; ++c) {
    const auto best = std::max_element(scratch.begin(), scratch.end());
    choices[c] = {best - scratch.begin(), *best};
    if (normalised) total += *best;
    *best = -1;
  }
  for (int64_t c = 0; c < chosen; ++c) choices[c].share /= total;
}

}  // namespace

void Experts::add(LinearPtr up, LinearPtr down, std::optional<at::Tensor> up_bias, std::optional<at::Tensor> down_bias) {
  const auto fits = [](const std::optional<at::Tensor>& bias, const LinearPtr& linear) {
    return !bias || (bias->scalar_type() == at::kFloat && bias->is_contiguous() && bias->numel() == linear->outputs);
  };
  TORCH_CHECK(fits(up_bias, up) && fits(down_bias, down), "a bias is a float32 number for each output");
  TORCH_CHECK(up->outputs == 2 * down->inputs, "an expert's gate and what it multiplies are of the size of its inner layer");
  TORCH_CHECK(alpha_ != 0 || !up_bias, "experts with a SiLU gate have no bias before it");
  experts_.push_back({std::move(up), std::move(down), std::move(up_bias), std::move(down_bias)});
}

at::Tensor Experts::gated(const at::Tensor& up, const std::optional<at::Tensor>& bias) const {
  if (alpha_ == 0) return silu_mul(up);
  const std::vector<float> zeros(bias ? 0 : up.size(1));
  return clamped_gate(up, bias ? bias->const_data_ptr<float>() : zeros.data(), alpha_, limit_);
}

at::Tensor Experts::forward(const at::Tensor& x, const at::Tensor& chosen, const at::Tensor& shares) const {
  TORCH_CHECK(chosen.is_contiguous() && shares.is_contiguous() && chosen.sizes() == shares.sizes());
  const int64_t* expert = chosen.const_data_ptr<int64_t>();
  std::vector<Choice> choices(chosen.numel());
  by_dtype(shares, [&]<typename T>(T*) {
    const T* share = shares.const_data_ptr<T>();
    for (size_t i = 0; i < choices.size(); ++i) choices[i] = {expert[i], static_cast<float>(share[i])};
  });
  return sum(x.contiguous(), choices, {});
}

at::Tensor Experts::sum(const at::Tensor& x, const std::vector<Choice>& choices,
                        const std::optional<at::Tensor>& residual) const {
  const int64_t of_each = x.size(0) == 0 ? 0 : static_cast<int64_t>(choices.size()) / x.size(0);
  std::vector<std::vector<int64_t>> places(experts_.size());
  for (size_t i = 0; i < choices.size(); ++i) {
    const int64_t expert = choices[i].expert;
    TORCH_CHECK_INDEX(0 <= expert && expert < count(), "there is no expert ", expert, " of ", count());
    places[expert].push_back(static_cast<int64_t>(i));
  }
  at::Tensor sums = at::empty(x.sizes(), x.options().dtype(at::kFloat)), output = at::empty(x.sizes(), x.options());
  float* total = sums.mutable_data_ptr<float>();
  by_dtype(output, [&]<typename T>(T*) {
    if (residual) convert(residual->const_data_ptr<T>(), total, sums.numel());
    else std::memset(total, 0, sums.nbytes());
  });
  for (size_t e = 0; e < experts_.size(); ++e) {
    if (places[e].empty()) continue;
    const auto& [up, down, up_bias, down_bias] = experts_[e];
    const at::Tensor tokens = at::empty({static_cast<int64_t>(places[e].size())}, at::kLong);
    std::vector<float> shares;
    for (const int64_t place : places[e]) {
      tokens.mutable_data_ptr<int64_t>()[shares.size()] = place / of_each;
      shares.push_back(choices[place].share);
    }
    add_shares(total, (*down)(gated((*up)(rows_of(x, tokens)), up_bias)), down_bias, tokens, shares);
  }
  by_dtype(output, [&]<typename T>(T*) { convert(total, output.mutable_data_ptr<T>(), output.numel()); });
  return output;
}

Mixture::Mixture(LinearPtr router, ExpertsPtr experts, int64_t chosen, bool normalised)
    : router_(std::move(router)), experts_(std::move(experts)), chosen_(chosen), normalised_(normalised) {
  TORCH_CHECK(experts_->count() == router_->outputs, "a router of ", router_->outputs, " for ", experts_->count(), " experts");
  TORCH_CHECK(0 < chosen_ && chosen_ <= router_->outputs, "a token cannot have ", chosen_, " of ", router_->outputs, " experts");
}

at::Tensor Mixture::operator()(const at::Tensor& x, const at::Tensor& residual) const {
  const at::Tensor logits = (*router_)(x);
  const int64_t tokens = x.size(0), experts = experts_->count();
  std::vector<Choice> choices(tokens * chosen_);
  by_dtype(logits, [&]<typename T>(T*) {
    const T* from = logits.const_data_ptr<T>();
    for_rows(tokens, experts * chosen_, [&](int64_t t, int64_t last) {
      std::vector<float> scratch(experts);
      for (; t < last; ++t) choose(from + t * experts, scratch, chosen_, normalised_, choices.data() + t * chosen_);
    });
  });
  return experts_->sum(x, choices, residual);
}

}  // namespace oatmill
