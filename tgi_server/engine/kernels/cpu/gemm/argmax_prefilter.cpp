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
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "simd/dtypes.h"
#include "gemm/gemm.h"
#include "gemm/linear.h"
#include "gemm/microkernel.h"
#include "gemm/amx.h"
#include "ops/token_masks.h"

namespace oatmill {

namespace {

// Of the products in 8 bits, by a kernel: the bytes of a number of a row, and in how many rows of whole numbers a row
// stands there, which are sums of ever finer parts.
template <typename Kernel>
constexpr int64_t NUMBER = Kernel::INPUT_WORD / Int8Weights::DEPTH;
template <typename Kernel>
constexpr int64_t PARTS = NUMBER<Kernel> == 1 ? 2 : 1;

constexpr int64_t MOST_ROWS = 16;
constexpr int64_t FILLED_AT_ONCE = 1 << 15;  // outputs
constexpr int64_t MOST_PARTS = 2 * MOST_ROWS;
static_assert(MOST_PARTS % SIDE == 0);

constexpr float SUM_ERROR = 1.2e-7f;   // of adding a product to a sum in float, relative to both
constexpr float TINY = 1e-15f;         // squares of such numbers may be lost
constexpr float OUTPUT_ERROR = 0.01f;  // apart by less, relative to themselves, two sums may be one bfloat16

// The weights in 8 bits: packed as by linear_pack, and for each output the scale, UNSIGNED_OFFSET times the sum of its
// bytes, the length of what was lost by rounding, as a vector, and the length of what was kept. Padded to a tile.
struct Screen {
  const char* packed;  // [tiles, depth, COLUMNS] words
  int64_t depth;
  const float* scales;
  const int32_t* corrections;
  const float* lost;
  const float* kept;
};

// A row as the sum of one or two rows of whole numbers, times a scale each. length: of the row as a vector; lost: of what
// is missing.
struct SplitRow {
  float scales[2], length, lost;
};

inline Lanes magnitude(Lanes x) { return larger(x, -x); }

// The largest whole number that a part of a row may have, so that no sum of `size` products exceeds 32 bits.
template <typename Kernel>
float largest_number(int64_t size) {
  constexpr int64_t WEIGHT = 127, SUM = std::numeric_limits<int32_t>::max();
  constexpr int64_t MOST = NUMBER<Kernel> == 1 ? 127 : 32767;
  return static_cast<float>(std::min(MOST, SUM / (WEIGHT * size)));
}

template <typename Kernel>
void keep(char* to, Ints numbers) {
  if constexpr (NUMBER<Kernel> == 1)
    keep_bytes<Kernel::OFFSET>(reinterpret_cast<uint8_t*>(to), reinterpret_cast<const int32_t*>(&numbers));
  else
    ShortProducts::keep(reinterpret_cast<int16_t*>(to), reinterpret_cast<const int32_t*>(&numbers));
}

// to: PARTS rows of [size] numbers, size being a multiple of LANES.
template <typename Kernel, typename T>
SplitRow split_row(const T* from, int64_t size, char* to) {
  Lanes peaks = {}, squares = {}, lost = {};
  for (int64_t k = 0; k < size; k += LANES) {
    const Lanes values = load(from + k);
    peaks = larger(magnitude(values), peaks);
    squares += values * values;
  }
  const float most = largest_number<Kernel>(size), first = largest(peaks) / most;
  SplitRow row;
  for (int64_t p = 0; p < PARTS<Kernel>; ++p) row.scales[p] = p == 0 ? first : row.scales[p - 1] / (2 * most);
  for (int64_t k = 0; k < size; k += LANES) {
    Lanes rest = load(from + k);
    for (int64_t p = 0; p < PARTS<Kernel>; ++p) {
      const float factor = row.scales[p] > 0.0f ? 1.0f / row.scales[p] : 0.0f;
      const Ints numbers = nearest(smaller(larger(rest * factor, Lanes{} - most), Lanes{} + most));
      rest -= __builtin_convertvector(numbers, Lanes) * row.scales[p];
      keep<Kernel>(to + (p * size + k) * NUMBER<Kernel>, numbers);
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

template <typename Kernel>
Lanes converted(const int32_t* sums, const int32_t* corrections) {
  Ints sum = load_as<Ints>(sums);
  if (Kernel::OFFSET != 0) sum -= load_as<Ints>(corrections);
  return __builtin_convertvector(sum, Lanes);
}

// sums: [PARTS, COLUMNS], of a row's parts; first: of the tile's outputs, of which those before `end` are looked at
// where the filter allows them. What is not a number is unbounded.
template <typename Kernel, typename Filter>
Bounds bounds_of_tile(const Screen& screen, const SplitRow& row, const int32_t* sums, int64_t first, int64_t end,
                      const Filter& filter) {
  constexpr Ints PLACES = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const float rounding = static_cast<float>(screen.depth * WORD) * SUM_ERROR * row.length;
  Lanes lowers = Lanes{} + LOWEST, uppers = lowers;
  for (int64_t n = first; n < std::min(first + COLUMNS, end); n += LANES) {
    const Ints exists = below(PLACES + static_cast<int32_t>(n), static_cast<int32_t>(end));
    Lanes whole = {};
    for (int64_t p = 0; p < PARTS<Kernel>; ++p)
      whole += converted<Kernel>(sums + p * COLUMNS + n - first, screen.corrections + n) * row.scales[p];
    const Lanes logits = whole * load(screen.scales + n), lost = load(screen.lost + n), kept = load(screen.kept + n);
    const Lanes bound = lost * row.length + kept * row.lost + (lost + kept) * rounding;
    const Lanes none = Lanes{} + LOWEST, upper = logits + bound, limited = chosen(defined(upper), upper, -none);
    const auto filtered = [&](Lanes scores) {
      return by_registers<Lanes>([&](int i) { return filter.filtered(register_of<Floats>(scores, i), n + i * WIDTH); });
    };
    lowers = larger(filtered(chosen(exists, logits - bound, none)), lowers);
    uppers = larger(filtered(chosen(exists, limited, none)), uppers);
  }
  return {largest(lowers), largest(uppers)};
}

// The tiles of which an output may be the largest of a row. bounds: [tiles, rows]
std::vector<int64_t> promising(const std::vector<Bounds>& bounds, int64_t tiles, int64_t rows) {
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

// The tiles of outputs among which is the largest output of each row, of those that its mask allows. x: [rows, inputs]
template <typename Kernel>
std::vector<int64_t> candidates(const at::Tensor& x, int64_t outputs, const Screen& screen,
                                const std::optional<at::Tensor>& masks, at::IntArrayRef masked_rows) {
  constexpr int64_t EACH = PARTS<Kernel>;
  const int64_t rows = x.size(0), size = x.size(1), row_bytes = size * NUMBER<Kernel>;
  std::vector<char> numbers(oatmill::parts(rows * EACH, SIDE) * SIDE * row_bytes);  // matrices have SIDE rows
  std::vector<SplitRow> split(rows);
  by_dtype(x, [&]<typename T>(T*) {
    const T* from = x.const_data_ptr<T>();
    for (int64_t r = 0; r < rows; ++r)
      split[r] = split_row<Kernel>(from + r * size, size, &numbers[r * EACH * row_bytes]);
  });

  const auto mask_of = masks_by_row(rows, masks, masked_rows);
  const int64_t allowed = masks ? std::min(outputs, masks->size(1) * BITS) : 0;  // no token behind these
  const int64_t tiles = parts(outputs, COLUMNS);
  std::vector<Bounds> bounds(tiles * rows);
  const Product rough{numbers.data(), row_bytes, screen.packed, EACH * rows, screen.depth, outputs};
  for_each_item(tiles, [&](int64_t tile) {
    alignas(64) int32_t sums[MOST_PARTS * COLUMNS];
    const int64_t next_tile = std::min(tile + at::get_num_threads(), tiles - 1), first = tile * COLUMNS;
    multiply_rows<Kernel>(rough, 0, EACH * rows, tile, next_tile, reinterpret_cast<char*>(sums));
    for (int64_t r = 0; r < rows; ++r) {
      const int32_t* own = sums + EACH * r * COLUMNS;
      bounds[tile * rows + r] =
          mask_of[r] ? bounds_of_tile<Kernel>(screen, split[r], own, first, allowed, Mask{mask_of[r]})
                     : bounds_of_tile<Kernel>(screen, split[r], own, first, outputs, Everything{});
    }
  });
  return promising(bounds, tiles, rows);
}

// A way to find candidates: a kernel. It pays for `fewest` to `most` rows: with more, products in 8 bits take as long as
// those that they save, and with fewer the next one is as fast.
struct Screening {
  const char* name;
  bool (*available)();  // on this CPU
  int64_t depth;        // words, of which a weight must have a multiple
  int64_t fewest, most;
  std::vector<int64_t> (*candidates)(const at::Tensor& x, int64_t outputs, const Screen& screen,
                                     const std::optional<at::Tensor>& masks, at::IntArrayRef masked_rows);
};

bool always() { return true; }

template <typename Matrices>
constexpr Screening by_matrices(const char* name, bool (*available)()) {
  return {name, available, SIDE, 5, MOST_ROWS, candidates<TileProducts<Matrices>>};
}

// The last stands in for AMX in tests; it is slow.
constexpr std::array SCREENINGS{
#if OATMILL_AMX
    by_matrices<AmxMatrices<Int8Weights>>("amx", amx_permitted),
#endif
#if OATMILL_INT8
    Screening{ByteProducts::NAME, always, 1, 1, 8, candidates<Products<ByteProducts>>},
#else
    Screening{"int16", always, 1, 1, WIDTH == 8 ? MOST_ROWS : 8, candidates<Products<ShortProducts>>},
#endif
    by_matrices<PlainMatrices<Int8Weights>>("amx_emulated", always)};

bool serves(const Screening& screening, const at::Tensor& packed) {
  return screening.available() && packed.size(1) % screening.depth == 0;
}

// Returns the names of the kernels that can screen by these weights on this CPU, the emulated one last.
std::vector<std::string> screening_kernels(const at::Tensor& packed) {
  std::vector<std::string> names;
  for (const Screening& screening : SCREENINGS)
    if (serves(screening, packed)) names.emplace_back(screening.name);
  return names;
}

// Returns for how many rows screening by these weights pays.
int64_t screened_rows(const at::Tensor& packed) {
  return std::find_if(SCREENINGS.begin(), SCREENINGS.end(), [&](const Screening& s) { return serves(s, packed); })->most;
}

const Screening& screening_for(int64_t rows, const at::Tensor& packed, const std::optional<std::string>& name) {
  const auto found = std::find_if(SCREENINGS.begin(), SCREENINGS.end(), [&](const Screening& screening) {
    return serves(screening, packed) && (name ? screening.name == *name : screening.fewest <= rows);
  });
  TORCH_CHECK(found != SCREENINGS.end(), "there is no kernel `", name.value_or(""), "` for screening here");
  return *found;
}

}  // namespace

// input: [..., inputs], at most MOST_ROWS rows; screened: of linear_pack, of the layer's weights divided by scales, as
// int8; scales, lost, kept: float32, corrections: int32, [outputs, padded to a tile], as in Screen; masks, masked_rows: as
// in argmax; kernel: of screening_kernels; none: the best. Returns [..., outputs]: the largest of each row, of those that
// its mask allows, and some others, are what the layer gives; the rest are minus infinity.
at::Tensor Linear::screened(const at::Tensor& input, const at::Tensor& screened, const at::Tensor& scales,
                            const at::Tensor& corrections, const at::Tensor& lost, const at::Tensor& kept,
                            const std::optional<at::Tensor>& masks, std::vector<int64_t> masked_rows,
                            std::optional<std::string> kernel) const {
  const at::Tensor x = input.contiguous();
  const int64_t size = x.size(-1), rows = x.numel() / size;
  TORCH_CHECK(rows <= MOST_ROWS, "at most ", MOST_ROWS, " rows can be screened");
  TORCH_CHECK(size == inputs && size % LANES == 0 && !bias, "this layer cannot be screened");
  auto shape = x.sizes().vec();
  shape.back() = outputs;
  at::Tensor output = at::empty(shape, x.options());
  by_dtype(output, [&]<typename T>(T*) {
    T* to = output.mutable_data_ptr<T>();
    for_range(output.numel(), FILLED_AT_ONCE, [&](int64_t begin, int64_t end) { std::fill(to + begin, to + end, T(LOWEST)); });
  });
  if (rows == 0) return output;  // the pass is a part of a prompt, and no more
  const Screen screen{static_cast<const char*>(screened.const_data_ptr()), screened.size(1),
                      scales.const_data_ptr<float>(), corrections.const_data_ptr<int32_t>(),
                      lost.const_data_ptr<float>(), kept.const_data_ptr<float>()};
  const Screening& screening = screening_for(rows, screened, kernel);
  write_tiles(x, screening.candidates(x.view({rows, size}), outputs, screen, masks, masked_rows), output);
  return output;
}

}  // namespace oatmill

TORCH_LIBRARY_FRAGMENT(oatmill, library) {
  library.def("screening_kernels(Tensor packed) -> str[]");
  library.def("screened_rows(Tensor packed) -> int");
}

TORCH_LIBRARY_IMPL(oatmill, CPU, library) {
  library.impl("screening_kernels", &oatmill::screening_kernels);
  library.impl("screened_rows", &oatmill::screened_rows);
}
