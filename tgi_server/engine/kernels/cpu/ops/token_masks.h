// Which tokens a grammar allows in a row of scores.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "simd/simd.h"

namespace oatmill {

constexpr float LOWEST = -std::numeric_limits<float>::infinity();
constexpr int64_t BITS = 32;  // tokens of a word of a mask

// A row without a mask.
struct Everything {
  static F32 filtered(F32 scores, int64_t) { return scores; }
  static bool allows(int64_t) { return true; }
};

// Bit i % BITS of word i / BITS says whether token i is allowed.
struct Mask {
  const int32_t* words;

  // The scores of tokens from `first` on, a multiple of WIDTH, with the lowest in place of those that are forbidden.
  F32 filtered(F32 scores, int64_t first) const {
    static constexpr int32_t PLACES[] = {1 << 0, 1 << 1, 1 << 2,  1 << 3,  1 << 4,  1 << 5,  1 << 6,  1 << 7,
                                         1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};
    const I32 bits = I32{} + (words[first / BITS] >> (first % BITS));
    return select((bits & load_as<I32>(PLACES)) == 0, F32{} + LOWEST, scores);
  }
  bool allows(int64_t token) const { return words[token / BITS] >> (token % BITS) & 1; }
};

// Which mask each of `rows` rows has, or null.
inline std::vector<const int32_t*> masks_by_row(int64_t rows, const std::optional<at::Tensor>& masks,
                                                at::IntArrayRef masked_rows) {
  TORCH_CHECK(!masks || (masks->is_contiguous() && masks->size(0) == static_cast<int64_t>(masked_rows.size())));
  std::vector<const int32_t*> by_row(rows);
  for (size_t m = 0; m < masked_rows.size(); ++m)
    by_row.at(masked_rows[m]) = masks->const_data_ptr<int32_t>() + m * masks->size(1);
  return by_row;
}

}  // namespace oatmill
