// The product of a few rows with the weights of an LM head of which only the largest of each row is wanted.
//
// With a copy of the weights in 8 bits, half as many bytes are read from memory. It gives each logit to within a bound,
// by the inequality of Cauchy and Schwarz:
//
//     |x w - x' w'|  <=  |x| |w - w'| + |x - x'| |w'|
//
// where x' and w' are what x and w are rounded to. So it shows in which tiles of outputs the largest can be, and only
// these are computed with the weights themselves, by the instructions that would compute all of them. A row may have a
// mask; then it is the largest of those that the mask allows.

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <vector>

#include "bf16.h"
#include "int8.h"
#include "linear.h"
#include "token_masks.h"

namespace oatmill {

namespace {

using T = c10::BFloat16;

// With more rows, 8-bit products take as long as those that they save.
constexpr int64_t MAX_ROWS = 8;
constexpr float SUM_ERROR = 1.2e-7f;   // of adding a product to a sum in float, relative to both
constexpr float TINY = 1e-15f;         // squares of such numbers may be lost
constexpr float OUTPUT_ERROR = 0.01f;  // apart by less, relative to themselves, two sums may be one bfloat16

// How many rows can be screened; 0: this CPU lacks the instructions.
int64_t screened_rows() { return MULTIPLIES_PAIRS && MULTIPLIES_BYTES ? MAX_ROWS : 0; }

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)

constexpr int64_t PAIR_BYTES = sizeof(T) * PAIR<T>;
static_assert(PAIR_BYTES == WORD);

// The weights in 8 bits: packed as by int8_pack, and for each output the scale, OFFSET times the sum of its bytes, the
// length of what was lost by rounding, as a vector, and the length of what was kept. Padded to a tile.
struct Screen {
  const char* packed;  // [tiles, depth, COLUMNS] words
  int64_t depth;
  const float* scales;
  const int32_t* corrections;
  const float* lost;
  const float* kept;
};

// A row in two parts, each in bytes: high * high_scale + low * low_scale. length: of the row as a vector; lost: of what
// is missing.
struct SplitRow {
  float high_scale, low_scale, length, lost;
};

inline Lanes magnitude(Lanes x) { return larger(x, -x); }

inline void store_bytes(uint8_t* to, Ints numbers) {
  const Bytes bytes = __builtin_convertvector(numbers + OFFSET, Bytes);
  std::memcpy(to, &bytes, sizeof(bytes));
}

// high, low: [size], which is a multiple of LANES.
SplitRow split_row(const T* from, int64_t size, uint8_t* high, uint8_t* low) {
  Lanes peaks = {}, squares = {}, lost = {};
  for (int64_t k = 0; k < size; k += LANES) {
    const Lanes values = load(from + k);
    peaks = larger(magnitude(values), peaks);
    squares += values * values;
  }
  const float high_scale = largest(peaks) / 127.0f, low_scale = high_scale / 254.0f;
  const float factor = high_scale > 0.0f ? 1.0f / high_scale : 0.0f;
  for (int64_t k = 0; k < size; k += LANES) {
    const Lanes values = load(from + k);
    const Ints coarse = nearest(values * factor);
    const Lanes rest = values - __builtin_convertvector(coarse, Lanes) * high_scale;
    const Ints fine = nearest(smaller(larger(rest * factor * 254.0f, Lanes{} - 127.0f), Lanes{} + 127.0f));
    const Lanes missing = rest - __builtin_convertvector(fine, Lanes) * low_scale;
    lost += missing * missing;
    store_bytes(high + k, coarse);
    store_bytes(low + k, fine);
  }
  const float length = high_scale > TINY ? std::sqrt(sum(squares)) : -LOWEST;
  return {high_scale, low_scale, length, std::sqrt(sum(lost))};
}

// Between what the largest logit of a tile is.
struct Bounds {
  float lower, upper;
};

inline Lanes converted(const int32_t* sums, const int32_t* corrections) {
  Ints sum, correction;
  std::memcpy(&sum, sums, sizeof(sum));
  std::memcpy(&correction, corrections, sizeof(correction));
  return __builtin_convertvector(sum - correction, Lanes);
}

// high, low: [COLUMNS], the sums of a row's two parts; first: of the tile's outputs, of which those before `end` are
// looked at where the filter allows them. What is not a number is unbounded.
template <typename Filter>
Bounds bounds_of_tile(const Screen& screen, const SplitRow& row, const int32_t* high, const int32_t* low,
                      int64_t first, int64_t end, const Filter& filter) {
  constexpr Ints PLACES = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const float rounding = static_cast<float>(screen.depth * WORD) * SUM_ERROR * row.length;
  Lanes lowers = Lanes{} + LOWEST, uppers = lowers;
  for (int64_t n = first; n < std::min(first + COLUMNS, end); n += LANES) {
    const Ints exists = PLACES + static_cast<int32_t>(n) < Ints{} + static_cast<int32_t>(end);
    const Lanes sums = converted(high + n - first, screen.corrections + n) * row.high_scale +
                       converted(low + n - first, screen.corrections + n) * row.low_scale;
    const Lanes logits = sums * load(screen.scales + n), lost = load(screen.lost + n), kept = load(screen.kept + n);
    const Lanes bound = lost * row.length + kept * row.lost + (lost + kept) * rounding;
    const Lanes upper = logits + bound;
    lowers = larger(filter.filtered(exists ? logits - bound : Lanes{} + LOWEST, n), lowers);
    uppers = larger(filter.filtered(exists ? (upper == upper ? upper : Lanes{} - LOWEST) : Lanes{} + LOWEST, n), uppers);
  }
  return {largest(lowers), largest(uppers)};
}

#endif

}  // namespace

// input: [..., inputs] bfloat16, at most MAX_ROWS rows; packed: of bf16_pack; screened: of int8_pack, of the weights
// divided by scales; scales, lost, kept: float32, corrections: int32, [outputs, padded to a tile], as in Screen; masks,
// masked_rows: as in argmax. Returns [..., outputs] bfloat16: the largest of each row, of those that its mask allows, and
// some others, are what bf16_linear gives; the rest are minus infinity.
at::Tensor screened_linear(const at::Tensor& input, const at::Tensor& packed, int64_t outputs,
                           const at::Tensor& screened, const at::Tensor& scales, const at::Tensor& corrections,
                           const at::Tensor& lost, const at::Tensor& kept, const std::optional<at::Tensor>& masks,
                           at::IntArrayRef masked_rows) {
  TORCH_CHECK(screened_rows(), "screening needs a CPU with AVX-512 BF16 and VNNI");
  const at::Tensor x = input.contiguous();
  const int64_t size = x.size(-1), rows = x.numel() / size, depth = packed.size(1);
  TORCH_CHECK(rows <= MAX_ROWS, "at most ", MAX_ROWS, " rows can be screened");
  TORCH_CHECK(size == 2 * depth && size % LANES == 0, "the input has ", size, " features, the weights ", 2 * depth);
  auto shape = x.sizes().vec();
  shape.back() = outputs;
  at::Tensor output = at::full(shape, LOWEST, x.options());
#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
  const Screen screen{static_cast<const char*>(screened.const_data_ptr()), screened.size(1),
                      scales.const_data_ptr<float>(), corrections.const_data_ptr<int32_t>(),
                      lost.const_data_ptr<float>(), kept.const_data_ptr<float>()};
  std::vector<uint8_t> bytes(2 * rows * size);
  std::vector<SplitRow> split(rows);
  for (int64_t r = 0; r < rows; ++r)
    split[r] = split_row(x.const_data_ptr<T>() + r * size, size, &bytes[2 * r * size], &bytes[(2 * r + 1) * size]);

  const auto mask_of = masks_by_row(rows, masks, masked_rows);
  const int64_t allowed = masks ? std::min(outputs, masks->size(1) * BITS) : 0;  // no token behind these
  const int64_t tiles = parts(outputs, COLUMNS);
  std::vector<Bounds> bounds(tiles * rows);
  const Product rough{reinterpret_cast<const char*>(bytes.data()), screen.packed, 2 * rows, screen.depth, outputs};
  for_each_item(tiles, [&](int64_t tile) {
    alignas(64) int32_t sums[2 * MAX_ROWS * COLUMNS];
    const int64_t next_tile = std::min(tile + at::get_num_threads(), tiles - 1);
    multiply_rows<AddBytes>(rough, 0, 2 * rows, tile, next_tile, reinterpret_cast<char*>(sums));
    for (int64_t r = 0; r < rows; ++r) {
      const int32_t *high = sums + 2 * r * COLUMNS, *low = high + COLUMNS;
      const int64_t first = tile * COLUMNS;
      bounds[tile * rows + r] =
          mask_of[r] ? bounds_of_tile(screen, split[r], high, low, first, allowed, Mask{mask_of[r]})
                     : bounds_of_tile(screen, split[r], high, low, first, outputs, Everything{});
    }
  });

  std::vector<float> needed(rows, LOWEST);
  for (int64_t tile = 0; tile < tiles; ++tile)
    for (int64_t r = 0; r < rows; ++r) needed[r] = std::max(needed[r], bounds[tile * rows + r].lower);
  for (float& least : needed) least -= OUTPUT_ERROR * std::abs(least);
  std::vector<int64_t> chosen;
  for (int64_t tile = 0; tile < tiles; ++tile)
    for (int64_t r = 0; r < rows; ++r)
      if (!(bounds[tile * rows + r].upper < needed[r])) {
        chosen.push_back(tile);
        break;
      }

  const Product exact{static_cast<const char*>(x.const_data_ptr()), static_cast<const char*>(packed.const_data_ptr()),
                      rows, depth, outputs};
  const Finish<T> finish{nullptr, false, nullptr, output.mutable_data_ptr<T>()};
  for_each_item(static_cast<int64_t>(chosen.size()), [&](int64_t item) {
    alignas(64) char totals[MAX_ROWS * COLUMNS * WORD];
    multiply_rows<AddPairs>(exact, 0, rows, chosen[item], chosen[std::min<size_t>(item + 1, chosen.size() - 1)], totals);
    for (int64_t row = 0; row < rows; ++row)
      finish_row(exact, finish, totals + row * COLUMNS * WORD, row, chosen[item] * COLUMNS,
                 [](const char* sums, int64_t, int64_t) { return load(reinterpret_cast<const float*>(sums)); });
  });
#endif
  return output;
}

}  // namespace oatmill

TORCH_LIBRARY_FRAGMENT(oatmill, library) {
  library.def("screened_rows() -> int", &oatmill::screened_rows);
  library.def(
      "screened_linear(Tensor input, Tensor packed, int outputs, Tensor screened, Tensor scales, Tensor corrections, "
      "Tensor lost, Tensor kept, Tensor? masks=None, int[] masked_rows=[]) -> Tensor");
}

TORCH_LIBRARY_IMPL(oatmill, CPU, library) { library.impl("screened_linear", &oatmill::screened_linear); }
