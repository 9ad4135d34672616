// The experts of a mixture, each with the tokens that chose it.

#include "gemm/moe.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <utility>

#include "simd/dtypes.h"
#include "simd/simd16.h"
#include "gemm/gemm.h"
#include "ops/ops.h"
#include "runtime/thread_pool.h"

namespace oatmill {

namespace {

// sums[i] += share * (row[i] + bias[i]). bias: or null.
template <typename T>
void add_share(float* sums, const T* row, const float* bias, float share, int64_t size) {
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) {
    const F32x16 output = bias ? load(row + i) + load(bias + i) : load(row + i);
    store(sums + i, load(sums + i) + share * output);
  }
  for (; i < size; ++i) sums[i] += share * (static_cast<float>(row[i]) + (bias ? bias[i] : 0.0f));
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
          const F32x16 gate = load(gates);
          T results[LANES];
          store(results, (load(others) + 1.0f) * (gate / (exponential(-alpha * gate) + 1.0f)));
          std::copy_n(results, count, to + r * size + i);
        }
    });
  });
  return output;
}

// row *= share, with the share rounded to the dtype first.
template <typename T>
void multiply_row(T* row, float share, int64_t size) {
  const float factor = static_cast<float>(static_cast<T>(share));
  for (int64_t i = 0; i < size; ++i) row[i] = static_cast<T>(static_cast<float>(row[i]) * factor);
}

template <typename From, typename To>
void convert(const From* from, To* to, int64_t numbers) {
  int64_t i = 0;
  for (; i + LANES <= numbers; i += LANES) store(to + i, load(from + i));
  for (; i < numbers; ++i) to[i] = static_cast<To>(static_cast<float>(from[i]));
}

// Leaves the ranks of the best groups of experts as they are; the others become minus infinity.
void keep_groups(const Routing& routing, std::vector<float>& ranks) {
  const int64_t size = static_cast<int64_t>(ranks.size()) / routing.groups;
  std::vector<float> goodness(routing.groups), highest(routing.group_scores);
  for (int64_t g = 0; g < routing.groups; ++g) {
    const auto group = ranks.begin() + g * size;
    std::partial_sort_copy(group, group + size, highest.begin(), highest.end(), std::greater<>());
    goodness[g] = std::accumulate(highest.begin(), highest.end(), 0.0f);
  }
  std::vector<int64_t> order(routing.groups);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return goodness[a] > goodness[b]; });
  for (auto g = order.begin() + routing.chosen_groups; g != order.end(); ++g)
    std::fill_n(ranks.begin() + *g * size, size, -INFINITY);
}

// The experts of a token, with their shares, by the router's outputs. scores, ranks: room for a number of each expert.
template <typename T>
void choose(const T* logits, const Routing& routing, std::vector<float>& scores, std::vector<float>& ranks,
            Choice* choices) {
  std::copy_n(logits, scores.size(), scores.begin());
  const float largest = *std::max_element(scores.begin(), scores.end());
  float total = 0;
  for (float& score : scores) total += score = routing.sigmoid ? 1 / (1 + std::exp(-score)) : std::exp(score - largest);
  if (!(total > 0)) std::fill(scores.begin(), scores.end(), 0.0f);  // NaN: some experts, with shares that are NaN, too
  else if (routing.sigmoid) total = 1;
  ranks = scores;
  if (routing.bias)
    for (size_t i = 0; i < ranks.size(); ++i) ranks[i] += routing.bias->const_data_ptr<float>()[i];
  if (routing.groups > 1) keep_groups(routing, ranks);
  if (routing.normalised) total = 0;
  for (int64_t c = 0; c < routing.chosen; ++c) {
    const auto best = std::max_element(ranks.begin(), ranks.end());
    const int64_t expert = best - ranks.begin();
    choices[c] = {expert, scores[expert]};
    if (routing.normalised) total += scores[expert];
    *best = -INFINITY;
  }
  for (int64_t c = 0; c < routing.chosen; ++c) {
    choices[c].share /= total;
    if (routing.factor != 1) choices[c].share *= static_cast<float>(routing.factor);
    if (routing.factors) choices[c].share *= routing.factors->const_data_ptr<float>()[choices[c].expert];
  }
}

}  // namespace

void Experts::add(LinearPtr up, LinearPtr down, std::optional<at::Tensor> up_bias,
                  std::optional<at::Tensor> down_bias) {
  const auto fits = [](const std::optional<at::Tensor>& bias, const LinearPtr& linear) {
    return !bias || (bias->scalar_type() == at::kFloat && bias->is_contiguous() && bias->numel() == linear->outputs);
  };
  TORCH_CHECK(fits(up_bias, up) && fits(down_bias, down), "a bias is a float32 number for each output");
  TORCH_CHECK(up->outputs == (gated_ ? 2 : 1) * down->inputs,
              "an expert's gate and what it multiplies are of the size of its inner layer");
  TORCH_CHECK(alpha_ != 0 || !up_bias, "experts with this activation have no bias before it");
  experts_.push_back({std::move(up), std::move(down), std::move(up_bias), std::move(down_bias)});
}

at::Tensor Experts::activated(const at::Tensor& up, const std::optional<at::Tensor>& bias) const {
  if (alpha_ == 0) return activate(up, activation_, gated_);
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

void Experts::compute(const at::Tensor& x, std::vector<Work>& works, bool share_inputs) const {
  constexpr int64_t ENOUGH = 4;  // items of a thread
  const auto count = static_cast<int64_t>(works.size());
  const int64_t shares = count == 0 ? 1 : ceil_div(ENOUGH * loop_threads(), count);
  const auto begin = [&](Work& work) {
    const auto rows = static_cast<int64_t>(work.tokens.size());
    const bool as_they_are = x.size(0) == 1 && !share_inputs;
    work.rows = as_they_are ? x : rows_of(x, at::from_blob(work.tokens.data(), {rows}, at::kLong));
    if (share_inputs)
      by_dtype(x, [&]<typename T>(T*) {
        T* row = work.rows.mutable_data_ptr<T>();
        for (float& share : work.shares) multiply_row(row, std::exchange(share, 1.0f), x.size(1)), row += x.size(1);
      });
    work.up = at::empty({rows, work.expert->up->outputs}, x.options());
    work.output = at::empty(work.rows.sizes(), x.options());
  };
  const auto gate = [&](Work& work) { work.rows = activated(work.up, work.expert->up_bias); };
  const auto multiply = [&](const Linear& linear, const at::Tensor& rows, int64_t share, at::Tensor& output) {
    const int64_t tiles = ceil_div(linear.outputs, COLUMNS), first = tiles * share / shares;
    std::vector<int64_t> own(tiles * (share + 1) / shares - first);
    std::iota(own.begin(), own.end(), first);
    linear.write_tiles(rows, own, output);
  };
  const auto up = [&](Work& work, int64_t share) { multiply(*work.expert->up, work.rows, share, work.up); };
  const auto down = [&](Work& work, int64_t share) { multiply(*work.expert->down, work.rows, share, work.output); };
  if (shares == 1) {
    parallel_for(count, [&](int64_t w) {
      begin(works[w]);
      up(works[w], 0);
      gate(works[w]);
      down(works[w], 0);
    });
    return;
  }
  parallel_for(count, [&](int64_t w) { begin(works[w]); });
  parallel_for(count * shares, [&](int64_t item) { up(works[item / shares], item % shares); });
  parallel_for(count, [&](int64_t w) { gate(works[w]); });
  parallel_for(count * shares, [&](int64_t item) { down(works[item / shares], item % shares); });
}

at::Tensor Experts::sum(const at::Tensor& x, const std::vector<Choice>& choices,
                        const std::optional<at::Tensor>& residual, bool share_inputs) const {
  const int64_t tokens = x.size(0), size = x.size(1);
  const int64_t of_each = tokens == 0 ? 0 : static_cast<int64_t>(choices.size()) / tokens;
  std::vector<Work> works(experts_.size());
  for (size_t i = 0; i < choices.size(); ++i) {
    const int64_t expert = choices[i].expert;
    TORCH_CHECK_INDEX(0 <= expert && expert < count(), "there is no expert ", expert, " of ", count());
    works[expert].expert = &experts_[expert];
    works[expert].tokens.push_back(static_cast<int64_t>(i) / of_each);
    works[expert].shares.push_back(choices[i].share);
  }
  std::erase_if(works, [](const Work& work) { return work.tokens.empty(); });
  compute(x, works, share_inputs);
  // The row of a token in the work of each of its experts, in their order.
  std::vector<std::pair<const Work*, int64_t>> rows(choices.size());
  std::vector<int64_t> found(tokens);
  for (const Work& work : works)
    for (size_t row = 0; row < work.tokens.size(); ++row) {
      const int64_t token = work.tokens[row];
      rows[token * of_each + found[token]++] = {&work, row};
    }
  at::Tensor output = at::empty(x.sizes(), x.options());
  by_dtype(output, [&]<typename T>(T*) {
    const T* added = residual ? residual->const_data_ptr<T>() : nullptr;
    T* to = output.mutable_data_ptr<T>();
    for_rows(tokens, size * (of_each + 1), [&](int64_t token, int64_t last) {
      std::vector<float> sums(size);
      for (; token < last; ++token) {
        if (added) convert(added + token * size, sums.data(), size);
        else std::fill(sums.begin(), sums.end(), 0.0f);
        for (int64_t i = token * of_each; i < (token + 1) * of_each; ++i) {
          const auto [work, row] = rows[i];
          const std::optional<at::Tensor>& bias = work->expert->down_bias;
          add_share(sums.data(), work->output.const_data_ptr<T>() + row * size,
                    bias ? bias->const_data_ptr<float>() : nullptr, work->shares[row], size);
        }
        convert(sums.data(), to + token * size, size);
      }
    });
  });
  return output;
}

Mixture::Mixture(LinearPtr router, ExpertsPtr experts, RoutingPtr routing)
    : router_(std::move(router)), experts_(std::move(experts)), routing_(std::move(routing)) {
  const int64_t count = router_->outputs, groups = routing_->groups;
  TORCH_CHECK(experts_->count() == count, "a router of ", count, " for ", experts_->count(), " experts");
  TORCH_CHECK(0 < groups && count % groups == 0 && 0 < routing_->chosen_groups && routing_->chosen_groups <= groups &&
                  routing_->group_scores <= count / groups,
              count, " experts are not in ", groups, " groups");
  const int64_t most = routing_->chosen_groups * (count / groups);
  TORCH_CHECK(0 < routing_->chosen && routing_->chosen <= most, "a token cannot have ", routing_->chosen, " of ", most,
              " experts");
  TORCH_CHECK(!routing_->bias || (routing_->sigmoid && routing_->bias->scalar_type() == at::kFloat &&
                                  routing_->bias->is_contiguous() && routing_->bias->numel() == count),
              "a bias is a float32 number for each expert, whose score is a sigmoid");
  TORCH_CHECK(
      !routing_->factors || (routing_->factors->scalar_type() == at::kFloat && routing_->factors->numel() == count),
      "factors are a float32 number for each expert");
}

at::Tensor Mixture::operator()(const at::Tensor& x, const at::Tensor& of_router,
                               const std::optional<at::Tensor>& residual,
                               const std::optional<at::Tensor>& adapters) const {
  const at::Tensor logits = router_->adapted(routing_->wide ? of_router.to(at::kFloat) : of_router, adapters);
  const int64_t tokens = x.size(0), experts = experts_->count(), chosen = routing_->chosen;
  std::vector<Choice> choices(tokens * chosen);
  by_dtype(logits, [&]<typename T>(T*) {
    const T* from = logits.const_data_ptr<T>();
    for_rows(tokens, experts * chosen, [&](int64_t t, int64_t last) {
      std::vector<float> scores(experts), ranks(experts);
      for (; t < last; ++t) choose(from + t * experts, *routing_, scores, ranks, choices.data() + t * chosen);
    });
  });
  return experts_->sum(x, choices, residual, routing_->share_inputs);
}

}  // namespace oatmill
