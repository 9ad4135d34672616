// Weighted selection without sorting: where weights, added up from the largest value down, reach a target.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "simd/simd.h"

namespace oatmill {

constexpr int64_t round_up(int64_t size, int64_t part) { return (size + part - 1) / part * part; }

// A value, the weight of all larger ones, and the weight and the number of those that are equal to it.
struct Threshold {
  float value;
  int64_t above, at, ties;
};

// A histogram of equally wide bins says in which bin the target is reached; what lies in that bin is looked into in the
// same way, until few values are left.
class Selector {
 public:
  // Returns the largest value such that the weights of all values from it on reach the target. values, weights: [size],
  // a multiple of WIDTH; no NaN; weights are whole numbers; null: all weigh 1. target: between 1 and the weight of all
  // values above minus infinity. least: values that weigh less may be left out of account, since the others reach the
  // target. bounds: of the values that weigh anything, where they are known.
  Threshold operator()(const float* values, const float* weights, int64_t size, int64_t target, float least = 0,
                       std::optional<std::pair<float, float>> bounds = {}) {
    int64_t above = 0;
    for (int round = 0;; ++round) {
      const auto [low, high] = bounds ? *bounds : range(values, weights, size);
      bounds.reset();
      if (low == high) return equal(values, weights, size, high, above);
      const float scale = BINS / (high - low);
      if (size <= FEW || !(scale < std::numeric_limits<float>::infinity()) || scale == 0)
        return sorted(values, weights, size, above, target);
      count(values, weights, size, high, scale, round == 0 ? least : 0);
      int bin = 0;
      for (; bin < BINS - 1 && above + bins_[bin] < target; ++bin) above += bins_[bin];
      Candidates& next = candidates_[round % 2];
      next.collect(values, weights, size, low, high, scale, bin);
      values = next.values.data(), weights = next.weights.data(), size = static_cast<int64_t>(next.values.size());
    }
  }

 private:
  static constexpr int BINS = 1024, FEW = 64, AT_ONCE = 256;
  static constexpr float LEAST = -std::numeric_limits<float>::infinity();

  static I32 bin_of(F32 values, float high, float scale) {
    return __builtin_convertvector(vmin(vmax((high - values) * scale, F32{}), F32{} + (BINS - 1.0f)), I32);
  }

  struct Candidates {
    std::vector<float> values, weights;

    // Takes the values of a bin, and fills up the last vector.
    void collect(const float* from, const float* weight, int64_t size, float low, float high, float scale, int bin) {
      values.clear(), weights.clear();
      for (int64_t i = 0; i < size; i += WIDTH) {
        const F32 v = load_f32(from + i);
        const I32 hit = (bin_of(v, high, scale) == bin) & (v >= low);
        if (!any(hit)) continue;
        for (int lane = 0; lane < WIDTH; ++lane)
          if (hit[lane]) values.push_back(v[lane]), weights.push_back(weight ? weight[i + lane] : 1);
      }
      const int64_t whole = round_up(static_cast<int64_t>(values.size()), WIDTH);
      values.resize(whole, LEAST), weights.resize(whole, 0);
    }
  };

  // The lowest and the highest value that has a weight, but for minus infinity.
  static std::pair<float, float> range(const float* values, const float* weights, int64_t size) {
    F32 low = F32{} - LEAST, high = F32{} + LEAST;
    for (int64_t i = 0; i < size; i += WIDTH) {
      const F32 v = load_f32(values + i);
      I32 counts = v > LEAST;
      if (weights) counts &= load_f32(weights + i) > 0;
      low = vmin(low, select(counts, v, F32{} - LEAST));
      high = vmax(high, select(counts, v, F32{} + LEAST));
    }
    return {-reduce_max(-low), reduce_max(high)};
  }

  void count(const float* values, const float* weights, int64_t size, float high, float scale, float least) {
    bins_.fill(0);
    int32_t bin[AT_ONCE];
    int64_t weight[AT_ONCE];
    std::fill_n(weight, AT_ONCE, 1);
    int64_t held = 0;
    const auto add = [&] {
      for (int64_t i = 0; i < held; ++i) bins_[bin[i]] += weight[i];
      held = 0;
    };
    for (int64_t i = 0; i < size; i += WIDTH) {
      if (weights) {
        if (least > 0 && !any(load_f32(weights + i) >= least)) continue;
        for (int lane = 0; lane < WIDTH; ++lane) weight[held + lane] = static_cast<int64_t>(weights[i + lane]);
      }
      store_as(bin + held, bin_of(load_f32(values + i), high, scale));
      if ((held += WIDTH) == AT_ONCE) add();
    }
    add();
  }

  static Threshold equal(const float* values, const float* weights, int64_t size, float value, int64_t above) {
    Threshold found{value, above, 0, 0};
    for (int64_t i = 0; i < size; ++i)
      if (values[i] == value) found.at += weights ? static_cast<int64_t>(weights[i]) : 1, ++found.ties;
    return found;
  }

  static Threshold sorted(const float* values, const float* weights, int64_t size, int64_t above, int64_t target) {
    std::vector<std::pair<float, float>> order;
    for (int64_t i = 0; i < size; ++i)
      if (values[i] > LEAST) order.emplace_back(values[i], weights ? weights[i] : 1);
    std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    Threshold found{LEAST, above, 0, 0};
    for (const auto& [value, weight] : order) {
      if (value != found.value) {
        if (found.above + found.at >= target) break;
        found = {value, found.above + found.at, 0, 0};
      }
      found.at += static_cast<int64_t>(weight), ++found.ties;
    }
    return found;
  }

  std::array<int64_t, BINS> bins_;
  std::array<Candidates, 2> candidates_;
};

}  // namespace oatmill
