// The most likely token of each row, of all or of those that a grammar allows.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "simd/dtypes.h"
#include "runtime/thread_pool.h"
#include "simd/simd.h"
#include "ops/token_masks.h"

namespace oatmill {

namespace {

constexpr int64_t PART = 1024;  // scores
constexpr int KEPT = 4;         // registers of what has been found so far, so that they need not wait for each other

template <typename T, typename Filter>
float peak_of(const T* scores, int64_t begin, int64_t end, const Filter& filter) {
  F32 peaks[KEPT];
  std::fill_n(peaks, KEPT, F32{} + LOWEST);
  int64_t i = begin;
  for (; i + KEPT * WIDTH <= end; i += KEPT * WIDTH)
#pragma GCC unroll 4
    for (int v = 0; v < KEPT; ++v)
      peaks[v] = vmax(filter.filtered(load_f32(scores + i + v * WIDTH), i + v * WIDTH), peaks[v]);
  float peak = reduce_max(vmax(vmax(peaks[0], peaks[1]), vmax(peaks[2], peaks[3])));
  for (; i < end; ++i)
    if (filter.allows(i)) peak = std::max(peak, static_cast<float>(scores[i]));
  return peak;
}

// Part by part, so that only the part with the largest score is searched for its place.
template <typename T, typename Filter>
int64_t largest_place(const T* scores, int64_t size, const Filter& filter) {
  int64_t best = 0;
  float peak = LOWEST;
  for (int64_t start = 0; start < size; start += PART) {
    const float found = peak_of(scores, start, std::min(start + PART, size), filter);
    if (found > peak) {
      peak = found;
      best = start;
    }
  }
  for (int64_t i = best; i < std::min(best + PART, size); ++i)
    if (filter.allows(i) && static_cast<float>(scores[i]) == peak) return i;
  return 0;
}

}  // namespace

// scores: [rows, size]; masks: [masked, words] int32; masked_rows: which row each mask is of. Returns the place of each
// row's largest among those that its mask allows, the first of equals: [rows] int64; 0 where none is. NaN is never it.
// Places behind a mask's last word are not allowed.
at::Tensor argmax(const at::Tensor& scores, const std::optional<at::Tensor>& masks, at::IntArrayRef masked_rows) {
  const at::Tensor x = scores.contiguous();
  const int64_t rows = x.size(0), size = x.size(1), words = masks ? masks->size(1) : 0;
  const auto mask_of = masks_by_row(rows, masks, masked_rows);
  at::Tensor output = at::empty({rows}, x.options().dtype(at::kLong));
  int64_t* to = output.mutable_data_ptr<int64_t>();
  by_dtype(x, [&]<typename T>(T*) {
    const T* from = x.const_data_ptr<T>();
    for_range(rows, 1, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r)
        to[r] = mask_of[r] ? largest_place(from + r * size, std::min(size, words * BITS), Mask{mask_of[r]})
                           : largest_place(from + r * size, size, Everything{});
    });
  });
  return output;
}

}  // namespace oatmill

TORCH_LIBRARY_FRAGMENT(oatmill, library) {
  library.def("argmax(Tensor scores, Tensor? masks=None, int[] masked_rows=[]) -> Tensor");
}

TORCH_LIBRARY_IMPL(oatmill, CPU, library) { library.impl("argmax", &oatmill::argmax); }
