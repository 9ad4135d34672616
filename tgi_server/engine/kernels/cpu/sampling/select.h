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

// Returns the sum of `SIZE` weights, whole numbers of at most 2^40. Doubles hold it exactly.
template <int64_t SIZE>
int64_t whole_sum(const float* weights) {
  static_assert(SIZE % (2 * WIDTH) == 0 && SIZE <= 1 << 13);
  F64 sums[4] = {};
  for (int64_t i = 0; i < SIZE; i += 2 * WIDTH)
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) sums[v] += load_f64(weights + i + v * WIDTH / 2);
  const F64 all = sums[0] + sums[1] + sums[2] + sums[3];
  double sum = 0;
  for (int lane = 0; lane < WIDTH / 2; ++lane) sum += all[lane];
  return static_cast<int64_t>(sum);
}

// Stores the lanes where the mask is set side by side, and anything behind them: WIDTH numbers at most. Returns how
// many lanes these are.
inline int compress(float* to, F32 x, I32 mask) {
#if defined(__AVX512BW__)
  const __mmask16 lanes = _mm512_movepi32_mask(reinterpret_cast<const __m512i&>(mask));
  _mm512_storeu_ps(to, _mm512_maskz_compress_ps(lanes, reinterpret_cast<const __m512&>(x)));
  return __builtin_popcount(lanes);
#else
  int stored = 0;
  if (any(mask))
    for (int lane = 0; lane < WIDTH; ++lane)
      if (mask[lane]) to[stored++] = x[lane];
  return stored;
#endif
}

// A value, the weight of all larger ones, and the weight and the number of those that are equal to it.
struct Threshold {
  float value;
  int64_t above, at, ties;
};

// Finds where weights reach a target. Of many values, a sample says between which two that probably is; if it is, only
// these are searched. A histogram of equally wide bins says in which bin it is; what lies in that bin is searched in
// the same way, until few values are left.
class Selector {
 public:
  // Returns the largest value such that the weights of all values from it on reach the target. values, weights: [size],
  // a multiple of WIDTH; no NaN; weights are whole numbers; null: all weigh 1. all: the weight of all values above
  // minus infinity; target: between 1 and that. least: values that weigh less may be left out of account, since the
  // others reach the target. bounds: of the values that weigh anything, where they are known.
  Threshold operator()(const float* values, const float* weights, int64_t size, int64_t target, int64_t all,
                       float least = 0, std::optional<std::pair<float, float>> bounds = {}) {
    int64_t above = 0;
    for (int round = 0;; ++round) {
      const auto [low, high] = bounds ? *bounds : range(values, weights, size);
      bounds.reset();
      if (low == high) return equal(values, weights, size, high, above);
      const float scale = BINS / (high - low);
      if (size <= FEW || !(scale < std::numeric_limits<float>::infinity()) || scale == 0)
        return sorted(values, weights, size, above, target);
      Candidates& next = candidates_[round % 2];
      if (round > 0 || size < MANY || !narrow(values, weights, size, high, scale, target, all, least, above, next)) {
        count(values, weights, size, high, scale, round == 0 ? least : 0);
        int bin = 0;
        for (; bin < BINS - 1 && above + bins_[bin] < target; ++bin) above += bins_[bin];
        next.collect(values, weights, size, low, high, scale, bin);
      }
      values = next.values.data(), weights = next.weights.data(), size = next.size;
    }
  }

 private:
  static constexpr int BINS = 1024, FEW = 64, AT_ONCE = 256, SAMPLE = 2048, MANY = 4 * SAMPLE;
  static constexpr double LIKENESS = 0.25,
                          MARGIN = 0.02;  // by which a sample's weight, and a share of it, may be wrong
  static constexpr float LEAST = -std::numeric_limits<float>::infinity();

  static I32 bin_of(F32 values, float high, float scale) {
    return __builtin_convertvector(vmin(vmax((high - values) * scale, F32{}), F32{} + (BINS - 1.0f)), I32);
  }

  // Values and weights, [size], a multiple of WIDTH.
  struct Candidates {
    std::vector<float> values, weights;
    int64_t size = 0;

    // Takes the values of a bin.
    void collect(const float* from, const float* weight, int64_t count, float low, float high, float scale, int bin) {
      take(from, weight, count, [&](F32 v, F32) { return (bin_of(v, high, scale) == bin) & (v >= low); });
    }

    template <typename Wanted>
    void take(const float* from, const float* weight, int64_t count, const Wanted& wanted) {
      if (static_cast<int64_t>(values.size()) < count + WIDTH)
        values.resize(count + WIDTH), weights.resize(count + WIDTH);
      size = 0;
      for (int64_t i = 0; i < count; i += WIDTH) {
        const F32 v = load_f32(from + i), w = weight ? load_f32(weight + i) : F32{} + 1.0f;
        const I32 hit = wanted(v, w);
        compress(&weights[size], w, hit);
        size += compress(&values[size], v, hit);
      }
      for (; size % WIDTH != 0; ++size) values[size] = LEAST, weights[size] = 0;
    }

    int64_t sum() const {
      int64_t all = 0;
      for (int64_t i = 0; i < size; ++i) all += static_cast<int64_t>(weights[i]);
      return all;
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

  // Takes the values among which the target probably is reached. Returns false if it is not, or if a sample cannot say.
  // above: becomes the weight of all larger values.
  bool narrow(const float* values, const float* weights, int64_t size, float high, float scale, int64_t target,
              int64_t all, float least, int64_t& above, Candidates& next) {
    const auto found =
        probable(values, weights, size, high, scale, static_cast<double>(target), static_cast<double>(all), least);
    if (!found) return false;
    const auto [from, to] = *found;
    int64_t larger = 0;
    alignas(64) float part[AT_ONCE];
    int64_t held = 0;
    next.take(values, weights, size, [&, from = from, to = to](F32 v, F32 w) {
      store(part + held, select(v >= to, w, F32{}));
      if ((held += WIDTH) == AT_ONCE) larger += whole_sum<AT_ONCE>(part), held = 0;
      return (v >= from) & (v < to) & (w >= least) & (v > LEAST);
    });
    std::fill(part + held, part + AT_ONCE, 0.0f);
    larger += whole_sum<AT_ONCE>(part);
    if (larger >= target || larger + next.sum() < target) return false;
    above = larger;
    return true;
  }

  // Returns two values between which a sample reaches the target: from the first on, below the second. None if the
  // sample is not like the whole, for example because a few tokens have nearly all the weight.
  std::optional<std::pair<float, float>> probable(const float* values, const float* weights, int64_t size, float high,
                                                  float scale, double target, double all, float least) {
    constexpr float MOST = std::numeric_limits<float>::infinity();
    alignas(64) float value[SAMPLE], weight[SAMPLE];
    const int64_t step = size / SAMPLE * WIDTH;
    I32 heavy = {};
    for (int64_t i = 0; i < SAMPLE; i += WIDTH) {
      const F32 w = weights ? load_f32(weights + i / WIDTH * step) : F32{} + 1.0f;
      store(value + i, load_f32(values + i / WIDTH * step));
      store(weight + i, w);
      heavy -= w >= least;
    }
    if (least > 0 && sum(heavy) < SAMPLE / 4) return std::pair{LEAST, MOST};
    count(value, weight, SAMPLE, high, scale, 0);
    double sampled = 0, running = 0;
    for (const int64_t bin : bins_) sampled += static_cast<double>(bin);
    const double factor = sampled / all, likeness = factor * static_cast<double>(size) / SAMPLE;
    if (likeness < 1 - LIKENESS || likeness > 1 + LIKENESS) return {};
    int first = 0, last = 0;
    for (; first < BINS && running + bins_[first] < target * factor - MARGIN * sampled; ++first)
      running += bins_[first];
    for (last = first; last < BINS && running < target * factor + MARGIN * sampled; ++last) running += bins_[last];
    return std::pair{last == BINS ? LEAST : high - last / scale, first == 0 ? MOST : high - first / scale};
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
