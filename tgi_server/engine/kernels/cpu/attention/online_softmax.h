// The softmax of attention, online as of Milakov and Gimelshein (2018): scores come a part at a time, and what has been
// summed so far decays when a score is much higher than all before it.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "attention/attention.h"
#include "simd/simd16.h"
#include "simd/simd.h"

namespace oatmill {

constexpr float MASKED = -std::numeric_limits<float>::infinity();
constexpr float SLACK = 8;  // weights are e^SLACK at most: what they are divided by in the end changes only then

// Softmax of some rows so far.
template <int ROWS>
struct Softmax {
  alignas(64) float acc[ROWS * WIDTH];  // of weights, added up in the end
  float references[ROWS];               // weights are e to the score minus this
  float decays[ROWS];                   // of what was summed before the last part

  void begin(const Variant& variant, const AttentionItem& item) {
    std::fill_n(acc, item.rows() * WIDTH, 0.0f);
    std::fill_n(references, item.rows(), MASKED);
    for (int r = 0; variant.sinks && r < item.rows(); ++r) {
      acc[r * WIDTH] = 1;
      references[r] = variant.sinks[item.head(r)];
    }
  }

  float total(int row) const { return sum(load_as<F32>(acc + row * WIDTH)); }
};

inline float rounded(float x) { return static_cast<float>(c10::BFloat16(x)); }

// To a few units in the last place of 1.
inline F32 hyperbolic_tangent(F32 x) { return 1.0f - 2.0f / (exponential(x + x) + 1.0f); }

// Scales a row's scores against tokens from `start` on, with softcap and alibi.
inline void adjust_scores(const Variant& variant, int head, int64_t position, int64_t start, int columns,
                          float* scores) {
  for (int c = 0; c < columns; ++c) scores[c] *= variant.score_scaling;
  if (variant.softcap != 0)
    for (int j = 0; j < columns; j += WIDTH)
      store_as(scores + j, variant.softcap * hyperbolic_tangent(load_as<F32>(scores + j) / variant.softcap));
  if (variant.alibi_slopes) {
    const float slope = variant.alibi_slopes[head];
    if (variant.rounded_alibi)
      for (int j = 0; j < columns; ++j)
        scores[j] += variant.scaling * rounded(slope * rounded(static_cast<float>(start + j)));
    else
      for (int j = 0; j < columns; ++j) scores[j] += slope * static_cast<float>(start - position + j);
  }
}

// 2^x for x up to 127, to a relative error of 3e-6; below -126 it is 0.
inline F32 power_of_two(F32 x) {
#if defined(__AVX512BW__)
  const __m512 exponent = reinterpret_cast<const __m512&>(x), whole = _mm512_roundscale_ps(exponent, 0);
  const F32 rest = x - reinterpret_cast<const F32&>(whole);
  F32 series = fma(rest, F32{} + 9.58285066e-3f, F32{} + 5.59064282e-2f);
  series = fma(series, rest, F32{} + 2.40240987e-1f);
  series = fma(series, rest, F32{} + 6.93124193e-1f);
  series = fma(series, rest, F32{} + 1.0f);
  const __mmask16 above = _mm512_cmp_ps_mask(exponent, _mm512_set1_ps(-126), _CMP_GT_OQ);
  return reinterpret_cast<F32>(_mm512_maskz_scalef_ps(above, reinterpret_cast<const __m512&>(series), whole));
#else
  return exponential(x * 0.693147181f);
#endif
}

// How weights are computed of scores: e^x is `of(UNIT * x)`.
struct NaturalPower {
  static constexpr float UNIT = 1;
  static F32 of(F32 x) { return exponential(x); }
};
struct PowerOfTwo {
  static constexpr float UNIT = 1.44269504f;
  static F32 of(F32 x) { return power_of_two(x); }
};

// Turns the scores of the query at a position, which looks at the tokens before `end`, against tokens from `start` on
// into softmax weights, and says how much the sums so far decay. columns: of scores, a multiple of LANES, of which
// `tokens` are those of tokens. write(column, weights): called for each register of weights.
template <typename Power, int ROWS, typename Write>
inline void weigh_row(const Variant& variant, int head, int64_t position, int64_t end, int64_t start, int columns,
                      int tokens, int row, Softmax<ROWS>& softmax, float* scores, const Write& write) {
  float scaling = variant.score_scaling;
  const int64_t last = std::clamp<int64_t>(end - start, 0, tokens);
  const int64_t first = std::clamp<int64_t>(variant.first_token(position) - start, 0, columns);
  if (!variant.plain()) {
    adjust_scores(variant, head, position, start, columns, scores);
    scaling = 1;
  }
  std::fill(scores, scores + first, MASKED);
  std::fill(scores + last, scores + columns, MASKED);
  F32 highest = load_as<F32>(scores);
  for (int c = WIDTH; c < columns; c += WIDTH) highest = vmax(highest, load_as<F32>(scores + c));
  highest *= scaling;
  F32 total = load_as<F32>(softmax.acc + row * WIDTH);
  float& reference = softmax.references[row];
  softmax.decays[row] = 1;
  if (any_greater(highest, reference + SLACK)) {
    const float peak = reduce_max(highest);
    softmax.decays[row] = std::exp(reference - peak);
    reference = peak;
    total *= softmax.decays[row];
  } else if (reference == MASKED) {
    for (int c = 0; c < columns; c += WIDTH) write(c, F32{});
    return;
  }
  const F32 scale = F32{} + scaling * Power::UNIT, offset = F32{} - reference * Power::UNIT;
  for (int c = 0; c < columns; c += WIDTH) {
    const F32 weight = Power::of(fma(load_as<F32>(scores + c), scale, offset));
    write(c, weight);
    total += weight;
  }
  store_as(softmax.acc + row * WIDTH, total);
}

// Weights as what values are multiplied by: bfloat16 numbers, or the floats that they are.
template <typename Operand>
const Operand* as_operands(const float* weights, int64_t first, int64_t count, Operand* to) {
  if constexpr (std::is_same_v<Operand, float>) {
    return weights;
  } else {
    for (int64_t i = first; i < first + count; i += LANES) store(to + i, load(weights + i));
    return to;
  }
}

}  // namespace oatmill
