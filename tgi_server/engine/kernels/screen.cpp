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

#include "dtypes.h"
#include "linear.h"
#include "linear_layer.h"
#include "products.h"
#include "token_masks.h"

namespace oatmill {

namespace {

// The products in 8 bits. A row stands in PARTS rows of whole numbers there, which are sums of ever finer parts.
#if defined(__AVX512VNNI__)
using Rough = Products<ByteProducts>;
constexpr int64_t PARTS = 2;
#else
using Rough = Products<ShortProducts>;
constexpr int64_t PARTS = 1;
#endif
constexpr int64_t ROUGH_NUMBER = Rough::INPUT_WORD / Int8Weights::DEPTH;  // bytes

// With more rows, 8-bit products take as long as those that they save.
constexpr int64_t MAX_ROWS = 8;
constexpr float SUM_ERROR = 1.2e-7f;   // of adding a product to a sum in float, relative to both
constexpr float TINY = 1e-15f;         // squares of such numbers may be lost
constexpr float OUTPUT_ERROR = 0.01f;  // apart by less, relative to themselves, two sums may be one bfloat16

int64_t screened_rows() { return MAX_ROWS; }

// The weights in 8 bits: packed as by linear_pack, and for each output the scale, UNSIGNED_OFFSET times the sum of its bytes, the
// length of what was lost by rounding, as a vector, and the length of what was kept. Padded to a tile.
struct Screen {
  const char* packed;  // [tiles, depth, COLUMNS] words
  int64_t depth;
  const float* scales;
  const int32_t* corrections;
  const float* lost;
  const float* kept;
};

// A row as the sum of PARTS rows of whole numbers, times a scale each. length: of the row as a vector; lost: of what is
// missing.
struct SplitRow {
  float scales[PARTS], length, lost;
};

inline Lanes magnitude(Lanes x) { return larger(x, -x); }

// The largest whole number that a part of a row may have, so that no sum of `size` products exceeds 32 bits.
inline float largest_number(int64_t size) {
  constexpr int64_t WEIGHT = 127, SUM = std::numeric_limits<int32_t>::max();
  constexpr int64_t NUMBER = ROUGH_NUMBER == 1 ? 127 : 32767;
  return static_cast<float>(std::min(NUMBER, SUM / (WEIGHT * size)));
}

inline void keep(char* to, Ints numbers) {
#if defined(__AVX512VNNI__)
  keep_unsigned(reinterpret_cast<uint8_t*>(to), numbers);
#else
  ShortProducts::keep(reinterpret_cast<int16_t*>(to), numbers);
#endif
}

// to: PARTS rows of [size] numbers, size being a multiple of LANES.
template <typename T>
SplitRow split_row(const T* from, int64_t size, char* to) {
  Lanes peaks = {}, squares = {}, lost = {};
  for (int64_t k = 0; k < size; k += LANES) {
    const Lanes values = load(from + k);
    peaks = larger(magnitude(values), peaks);
    squares += values * values;
  }
  const float most = largest_number(size), first = largest(peaks) / most;
  SplitRow row;
  for (int64_t p = 0; p < PARTS; ++p) row.scales[p] = p == 0 ? first : row.scales[p - 1] / (2 * most);
  for (int64_t k = 0; k < size; k += LANES) {
    Lanes rest = load(from + k);
    for (int64_t p = 0; p < PARTS; ++p) {
      const float factor = row.scales[p] > 0.0f ? 1.0f / row.scales[p] : 0.0f;
      const Ints numbers = nearest(smaller(larger(rest * factor, Lanes{} - most), Lanes{} + most));
      rest -= __builtin_convertvector(numbers, Lanes) * row.scales[p];
      keep(to + (p * size + k) * ROUGH_NUMBER, numbers);
    }
    lost += rest * rest;
  }
  row.length = first > TINY ? std::sqrt(sum(squares)) : -LOWEST;
  row.lost = std::sqrt(sum(lost));
  return row;
}

// Between what the largest logit of a tile is.
struct Bounds {
  float lower, upper;
};

inline Lanes converted(const int32_t* sums, const int32_t* corrections) {
  Ints sum = load_as<Ints>(sums);
  if (Rough::OFFSET != 0) sum -= load_as<Ints>(corrections);
  return __builtin_convertvector(sum, Lanes);
}

// sums: [PARTS, COLUMNS], of a row's parts; first: of the tile's outputs, of which those before `end` are looked at
// where the filter allows them. What is not a number is unbounded.
template <typename Filter>
Bounds bounds_of_tile(const Screen& screen, const SplitRow& row, const int32_t* sums, int64_t first, int64_t end,
                      const Filter& filter) {
  constexpr Ints PLACES = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const float rounding = static_cast<float>(screen.depth * WORD) * SUM_ERROR * row.length;
  Lanes lowers = Lanes{} + LOWEST, uppers = lowers;
  for (int64_t n = first; n < std::min(first + COLUMNS, end); n += LANES) {
    const Ints exists = PLACES + static_cast<int32_t>(n) < Ints{} + static_cast<int32_t>(end);
    Lanes whole = {};
    for (int64_t p = 0; p < PARTS; ++p)
      whole += converted(sums + p * COLUMNS + n - first, screen.corrections + n) * row.scales[p];
    const Lanes logits = whole * load(screen.scales + n), lost = load(screen.lost + n), kept = load(screen.kept + n);
    const Lanes bound = lost * row.length + kept * row.lost + (lost + kept) * rounding;
    const Lanes upper = logits + bound;
    lowers = larger(filter.filtered(exists ? logits - bound : Lanes{} + LOWEST, n), lowers);
    uppers = larger(filter.filtered(exists ? (upper == upper ? upper : Lanes{} - LOWEST) : Lanes{} + LOWEST, n), uppers);
  }
  return {largest(lowers), largest(uppers)};
}

// The tiles of outputs among which is the largest output of each row, of those that its mask allows.
template <typename T>
std::vector<int64_t> candidates(const T* x, int64_t rows, int64_t size, int64_t outputs, const Screen& screen,
                                const std::optional<at::Tensor>& masks, at::IntArrayRef masked_rows) {
  const int64_t row_bytes = size * ROUGH_NUMBER;
  std::vector<char> numbers(rows * PARTS * row_bytes);
  std::vector<SplitRow> split(rows);
  for (int64_t r = 0; r < rows; ++r) split[r] = split_row(x + r * size, size, &numbers[r * PARTS * row_bytes]);

  const auto mask_of = masks_by_row(rows, masks, masked_rows);
  const int64_t allowed = masks ? std::min(outputs, masks->size(1) * BITS) : 0;  // no token behind these
  const int64_t tiles = parts(outputs, COLUMNS);
  std::vector<Bounds> bounds(tiles * rows);
  const Product rough{numbers.data(), row_bytes, screen.packed, PARTS * rows, screen.depth, outputs};
  for_each_item(tiles, [&](int64_t tile) {
    alignas(64) int32_t sums[PARTS * MAX_ROWS * COLUMNS];
    const int64_t next_tile = std::min(tile + at::get_num_threads(), tiles - 1), first = tile * COLUMNS;
    multiply_rows<Rough>(rough, 0, PARTS * rows, tile, next_tile, reinterpret_cast<char*>(sums));
    for (int64_t r = 0; r < rows; ++r) {
      const int32_t* own = sums + PARTS * r * COLUMNS;
      bounds[tile * rows + r] = mask_of[r] ? bounds_of_tile(screen, split[r], own, first, allowed, Mask{mask_of[r]})
                                           : bounds_of_tile(screen, split[r], own, first, outputs, Everything{});
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
  return chosen;
}

}  // namespace

// input: [..., inputs], at most MAX_ROWS rows; screened: of linear_pack, of the layer's weights divided by scales, as
// int8; scales, lost, kept: float32, corrections: int32, [outputs, padded to a tile], as in Screen; masks, masked_rows: as
// in argmax. Returns [..., outputs]: the largest of each row, of those that its mask allows, and
// some others, are what the layer gives; the rest are minus infinity.
at::Tensor Linear::screened(const at::Tensor& input, const at::Tensor& screened, const at::Tensor& scales,
                            const at::Tensor& corrections, const at::Tensor& lost, const at::Tensor& kept,
                            const std::optional<at::Tensor>& masks, std::vector<int64_t> masked_rows) const {
  const at::Tensor x = input.contiguous();
  const int64_t size = x.size(-1), rows = x.numel() / size;
  TORCH_CHECK(rows <= MAX_ROWS, "at most ", MAX_ROWS, " rows can be screened");
  TORCH_CHECK(size == inputs && size % LANES == 0 && !bias, "this layer cannot be screened");
  auto shape = x.sizes().vec();
  shape.back() = outputs;
  at::Tensor output = at::full(shape, LOWEST, x.options());
  const Screen screen{static_cast<const char*>(screened.const_data_ptr()), screened.size(1),
                      scales.const_data_ptr<float>(), corrections.const_data_ptr<int32_t>(),
                      lost.const_data_ptr<float>(), kept.const_data_ptr<float>()};
  by_dtype(x, [&]<typename T>(T*) {
    const auto tiles = candidates(x.const_data_ptr<T>(), rows, size, outputs, screen, masks, masked_rows);
    write_tiles(x, tiles, output);
  });
  return output;
}

}  // namespace oatmill

TORCH_LIBRARY_FRAGMENT(oatmill, library) {
  library.def("screened_rows() -> int", &oatmill::screened_rows);
}
