// An int8 pre-filter: an LM head for a few rows of which only the largest logits are needed, one or some.
//
// A copy of the weights in 8 bits reads half as many bytes from memory. It gives each logit with an error bound, by the
// inequality of Cauchy and Schwarz:
//
//     |x w - x' w'|  <=  |x| |w - w'| + |x - x'| |w'|
//
// where x' and w' are x and w in 8 bits. So it shows which of the outputs can be the k largest, and only these are
// computed with the weights themselves, by the kernel that would compute all of them. The tiles of outputs have a lower
// bound each, of their largest one: k outputs reach the k-th largest of these. A row may have a mask; then it is about
// the outputs that the mask allows.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <vector>

#include "simd/dtypes.h"
#include "gemm/gemm.h"
#include "gemm/linear.h"
#include "gemm/microkernel.h"
#include "gemm/amx.h"
#include "ops/token_masks.h"

namespace oatmill {

namespace {

// By kernel: the bytes of an input, and the number of integer rows into which a row is split, each finer than the one
// before.
template <typename Kernel>
constexpr int64_t NUMBER = Kernel::INPUT_WORD / Int8Weights::DEPTH;
template <typename Kernel>
constexpr int64_t PARTS = NUMBER<Kernel> == 1 ? 2 : 1;

constexpr int64_t MOST_ROWS = 16;
constexpr int64_t FILLED_AT_ONCE = 1 << 15;  // outputs
constexpr int64_t TILES_PER_LOGIT = 16;      // with fewer tiles for each that is needed, too many are candidates
constexpr int64_t MOST_PARTS = 2 * MOST_ROWS;
static_assert(MOST_PARTS % SIDE == 0);

constexpr float SUM_ERROR = 1.2e-7f;   // of a float addition, relative to both operands
constexpr float TINY = 1e-15f;         // squares of such numbers may be lost
constexpr float OUTPUT_ERROR = 0.01f;  // apart by less, relative to themselves, two sums may be one bfloat16

// The weights in 8 bits: packed as by linear_pack, and for each output the scale, INPUT_ZERO_POINT times the sum of its
// bytes, the norm of the rounding error, and the norm of the rounded weights. Padded to a tile.
struct PrefilterWeights {
  const char* packed;  // [tiles, depth, COLUMNS] words
  int64_t depth;
  const float* scales;
  const int32_t* compensation;
  const float* error_norm;
  const float* weight_norm;
};

// A row as the sum of one or two integer rows, times a scale each. length: its norm; error_norm: of what is missing.
struct SplitRow {
  float scales[2], length, error_norm;
};

inline F32x16 magnitude(F32x16 x) { return vmax(x, -x); }

// Returns the largest integer of a split row such that no accumulator of `size` products exceeds 32 bits.
template <typename Kernel>
float largest_number(int64_t size) {
  constexpr int64_t WEIGHT = 127, SUM = std::numeric_limits<int32_t>::max();
  constexpr int64_t MOST = NUMBER<Kernel> == 1 ? 127 : 32767;
  return static_cast<float>(std::min(MOST, SUM / (WEIGHT * size)));
}

template <typename Kernel>
void keep(char* to, I32x16 numbers) {
  if constexpr (NUMBER<Kernel> == 1)
    keep_bytes<Kernel::OFFSET>(reinterpret_cast<uint8_t*>(to), reinterpret_cast<const int32_t*>(&numbers));
  else Int16Dot::keep(reinterpret_cast<int16_t*>(to), reinterpret_cast<const int32_t*>(&numbers));
}

// to: PARTS rows of [size] numbers, size being a multiple of LANES.
template <typename Kernel, typename T>
SplitRow split_row(const T* from, int64_t size, char* to) {
  F32x16 peaks = {}, squares = {}, error_norm = {};
  for (int64_t k = 0; k < size; k += LANES) {
    const F32x16 values = load(from + k);
    peaks = vmax(magnitude(values), peaks);
    squares += values * values;
  }
  const float most = largest_number<Kernel>(size), first = reduce_max(peaks) / most;
  SplitRow row;
  for (int64_t p = 0; p < PARTS<Kernel>; ++p) row.scales[p] = p == 0 ? first : row.scales[p - 1] / (2 * most);
  for (int64_t k = 0; k < size; k += LANES) {
    F32x16 rest = load(from + k);
    for (int64_t p = 0; p < PARTS<Kernel>; ++p) {
      const float factor = row.scales[p] > 0.0f ? 1.0f / row.scales[p] : 0.0f;
      const I32x16 numbers = round_i32(vmin(vmax(rest * factor, F32x16{} - most), F32x16{} + most));
      rest -= __builtin_convertvector(numbers, F32x16) * row.scales[p];
      keep<Kernel>(to + (p * size + k) * NUMBER<Kernel>, numbers);
    }
    error_norm += rest * rest;
  }
  row.length = first > TINY ? std::sqrt(sum(squares)) : -LOWEST;
  row.error_norm = std::sqrt(sum(error_norm));
  return row;
}

template <typename Kernel>
F32x16 converted(const int32_t* sums, const int32_t* compensation) {
  I32x16 sum = load_as<I32x16>(sums);
  if (Kernel::OFFSET != 0) sum -= load_as<I32x16>(compensation);
  return __builtin_convertvector(sum, F32x16);
}

// sums: [PARTS, COLUMNS], of a row's parts; first: of the tile's outputs, of which those before `end` are looked at
// where the filter allows them. What is not a number is unbounded. Writes the upper bounds of the tile's outputs, minus
// infinity for others. Returns the lower bound of the largest.
template <typename Kernel, typename Filter>
float bounds_of_tile(const PrefilterWeights& weights, const SplitRow& row, const int32_t* sums, int64_t first,
                     int64_t end, const Filter& filter, float* uppers) {
  constexpr I32x16 PLACES = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const float rounding = static_cast<float>(weights.depth * WORD) * SUM_ERROR * row.length;
  F32x16 lowers = F32x16{} + LOWEST;
  for (int64_t n = first; n < first + COLUMNS; n += LANES) {
    if (n >= end) {  // where a mask may have no word
      store(uppers + n - first, F32x16{} + LOWEST);
      continue;
    }
    const I32x16 exists = below(PLACES + static_cast<int32_t>(n), static_cast<int32_t>(end));
    F32x16 whole = {};
    for (int64_t p = 0; p < PARTS<Kernel>; ++p)
      whole += converted<Kernel>(sums + p * COLUMNS + n - first, weights.compensation + n) * row.scales[p];
    const F32x16 logits = whole * load(weights.scales + n), error_norm = load(weights.error_norm + n),
                 weight_norm = load(weights.weight_norm + n);
    const F32x16 bound = error_norm * row.length + weight_norm * row.error_norm + (error_norm + weight_norm) * rounding;
    const F32x16 none = F32x16{} + LOWEST, upper = logits + bound, limited = select(defined(upper), upper, -none);
    const auto filtered = [&](F32x16 scores) {
      return by_registers<F32x16>([&](int i) { return filter.filtered(register_at<F32>(scores, i), n + i * WIDTH); });
    };
    lowers = vmax(filtered(select(exists, logits - bound, none)), lowers);
    store(uppers + n - first, filtered(select(exists, limited, none)));
  }
  return reduce_max(lowers);
}

// The bounds of all outputs of some rows.
struct Bounds {
  int64_t rows, tiles;
  std::vector<float> lowers;  // [rows, tiles], of a tile's largest output
  at::Tensor uppers;          // [rows, tiles, COLUMNS]

  Bounds(int64_t rows, int64_t tiles)
      : rows(rows), tiles(tiles), lowers(rows * tiles), uppers(at::empty({rows, tiles * COLUMNS}, at::kFloat)) {}

  // The outputs that may be among the `most` largest of a row, or equal to the last of these once they are rounded, in
  // order. There are at least `most` tiles. Changes the order of the lower bounds.
  std::vector<int64_t> candidates(int64_t most) {
    const int64_t outputs = tiles * COLUMNS;
    std::vector<char> chosen(outputs);
    for (int64_t r = 0; r < rows; ++r) {
      const auto own = lowers.begin() + r * tiles, last = own + (most - 1);
      std::nth_element(own, last, own + tiles, std::greater<>());
      const float needed = *last - OUTPUT_ERROR * std::abs(*last),
                  *upper = uppers.const_data_ptr<float>() + r * outputs;
      for (int64_t n = 0; n < outputs; ++n) chosen[n] |= (upper[n] >= needed) & (upper[n] > LOWEST);
    }
    std::vector<int64_t> found;
    for (int64_t n = 0; n < outputs; ++n)
      if (chosen[n]) found.push_back(n);
    return found;
  }
};

// The outputs among which are the `most` largest of each row, of those that its mask allows. x: [rows, inputs]
template <typename Kernel>
std::vector<int64_t> candidates(const at::Tensor& x, int64_t outputs, int64_t most, const PrefilterWeights& weights,
                                const std::optional<at::Tensor>& masks, at::IntArrayRef masked_rows) {
  constexpr int64_t EACH = PARTS<Kernel>;
  const int64_t rows = x.size(0), size = x.size(1), row_bytes = size * NUMBER<Kernel>;
  std::vector<char> numbers(oatmill::ceil_div(rows * EACH, SIDE) * SIDE * row_bytes);  // matrices have SIDE rows
  std::vector<SplitRow> split(rows);
  by_dtype(x, [&]<typename T>(T*) {
    const T* from = x.const_data_ptr<T>();
    for (int64_t r = 0; r < rows; ++r)
      split[r] = split_row<Kernel>(from + r * size, size, &numbers[r * EACH * row_bytes]);
  });

  const auto mask_of = masks_by_row(rows, masks, masked_rows);
  const int64_t allowed = masks ? std::min(outputs, masks->size(1) * BITS) : 0;  // no token behind these
  const int64_t tiles = ceil_div(outputs, COLUMNS);
  Bounds bounds(rows, tiles);
  float* uppers = bounds.uppers.mutable_data_ptr<float>();
  const GemmArgs rough{numbers.data(), row_bytes, weights.packed, EACH * rows, weights.depth, outputs};
  parallel_for(tiles, [&](int64_t tile) {
    alignas(64) int32_t sums[MOST_PARTS * COLUMNS];
    const int64_t next_tile = std::min(tile + loop_threads(), tiles - 1), first = tile * COLUMNS;
    multiply_tile<Kernel>(rough, 0, EACH * rows, tile, next_tile, reinterpret_cast<char*>(sums));
    for (int64_t r = 0; r < rows; ++r) {
      const int32_t* own = sums + EACH * r * COLUMNS;
      float* const upper = uppers + (r * tiles + tile) * COLUMNS;
      bounds.lowers[r * tiles + tile] =
          mask_of[r] ? bounds_of_tile<Kernel>(weights, split[r], own, first, allowed, Mask{mask_of[r]}, upper)
                     : bounds_of_tile<Kernel>(weights, split[r], own, first, outputs, Everything{}, upper);
    }
  });
  return bounds.candidates(most);
}

// A kernel that finds candidates. It pays for `fewest` to `most` rows: with more, products in 8 bits take as long as
// those that they save, and with fewer the next one is as fast.
struct PrefilterKernel {
  bool (*available)();  // on this CPU
  int64_t depth;        // words, of which a weight must have a multiple
  int64_t fewest, most;
  std::vector<int64_t> (*candidates)(const at::Tensor& x, int64_t outputs, int64_t most,
                                     const PrefilterWeights& weights, const std::optional<at::Tensor>& masks,
                                     at::IntArrayRef masked_rows);
};

bool always() { return true; }

template <typename Tiles>
constexpr PrefilterKernel by_matrices(bool (*available)()) {
  return {available, SIDE, 5, MOST_ROWS, candidates<AmxGemm<Tiles>>};
}

constexpr std::array PREFILTER_KERNELS{
#if defined(OATMILL_EMULATED_TILES)
    by_matrices<EmulatedTiles<Int8Weights>>(always),
#elif OATMILL_AMX
    by_matrices<AmxTiles<Int8Weights>>(amx_permitted),
#endif
#if OATMILL_INT8
    PrefilterKernel{always, 1, 1, 8, candidates<Gemm<Int8Dot>>},
#else
    PrefilterKernel{always, 1, 1, WIDTH == 8 ? MOST_ROWS : 8, candidates<Gemm<Int16Dot>>},
#endif
};

bool serves(const PrefilterKernel& prefilter, const at::Tensor& packed) {
  return prefilter.available() && packed.size(1) % prefilter.depth == 0;
}

// Returns the most rows for which a pre-filter with these weights pays.
int64_t prefilter_rows(const at::Tensor& packed) {
  return std::find_if(PREFILTER_KERNELS.begin(), PREFILTER_KERNELS.end(),
                      [&](const PrefilterKernel& s) { return serves(s, packed); })
      ->most;
}

const PrefilterKernel& prefilter_for(int64_t rows, const at::Tensor& packed) {
  return *std::find_if(PREFILTER_KERNELS.begin(), PREFILTER_KERNELS.end(), [&](const PrefilterKernel& prefilter) {
    return serves(prefilter, packed) && prefilter.fewest <= rows;
  });
}

}  // namespace

// input: [..., inputs], at most MOST_ROWS rows; prefilter: as of linear_pack, of the layer's weights divided by scales,
// as int8; scales, error_norm, weight_norm: float32, compensation: int32, [outputs, padded to a tile], as in
// PrefilterWeights; masks, masked_rows: as in argmax. Returns [..., outputs]: the `count` largest of each row and those
// that are equal to the last of them once they are rounded, of the tokens that its mask allows, and some others, are
// what the layer gives; the rest are minus infinity. weight: the layer's weights, [outputs, inputs], where the
// embedding has them, too: without it whole tiles are computed.
at::Tensor Linear::top_logits(const at::Tensor& input, int64_t count, const at::Tensor& prefilter,
                              const at::Tensor& scales, const at::Tensor& compensation, const at::Tensor& error_norm,
                              const at::Tensor& weight_norm, const std::optional<at::Tensor>& weight,
                              const std::optional<at::Tensor>& masks, std::vector<int64_t> masked_rows) const {
  const at::Tensor x = input.contiguous();
  const int64_t size = x.size(-1), rows = x.numel() / size;
  TORCH_CHECK(rows <= MOST_ROWS, "at most ", MOST_ROWS, " rows can be pre-filtered");
  TORCH_CHECK(size == inputs && size % LANES == 0 && !bias, "this layer cannot have a pre-filter");
  if (count > 1 && count * rows > ceil_div(outputs, COLUMNS) / TILES_PER_LOGIT) return (*this)(input);
  auto shape = x.sizes().vec();
  shape.back() = outputs;
  at::Tensor output = at::empty(shape, x.options());
  by_dtype(output, [&]<typename T>(T*) {
    T* to = output.mutable_data_ptr<T>();
    for_range(output.numel(), FILLED_AT_ONCE,
              [&](int64_t begin, int64_t end) { std::fill(to + begin, to + end, T(LOWEST)); });
  });
  if (rows == 0) return output;  // the pass is a part of a prompt, and no more
  const PrefilterWeights weights{static_cast<const char*>(prefilter.const_data_ptr()),
                                 prefilter.size(1),
                                 scales.const_data_ptr<float>(),
                                 compensation.const_data_ptr<int32_t>(),
                                 error_norm.const_data_ptr<float>(),
                                 weight_norm.const_data_ptr<float>()};
  const PrefilterKernel& kernel = prefilter_for(rows, prefilter);
  std::vector<int64_t> chosen = kernel.candidates(x.view({rows, size}), outputs, count, weights, masks, masked_rows);
  if (weight) {
    write_outputs(x, chosen, *weight, output);
  } else {
    for (int64_t& each : chosen) each /= COLUMNS;
    chosen.erase(std::unique(chosen.begin(), chosen.end()), chosen.end());
    write_tiles(x, chosen, output);
  }
  return output;
}

}  // namespace oatmill

TORCH_LIBRARY_FRAGMENT(oatmill, library) { library.def("prefilter_rows(Tensor packed) -> int"); }

TORCH_LIBRARY_IMPL(oatmill, CPU, library) { library.impl("prefilter_rows", &oatmill::prefilter_rows); }
