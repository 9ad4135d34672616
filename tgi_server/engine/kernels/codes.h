// Kernels for weights of 4 or 8 bits whose sums are in float: codes, what makes numbers of them, and a scale for each
// group of inputs.
//
// Codes stand in the tiles of linear.h, 8 or 4 to a word, low bits first. The inputs of a group follow each other; its
// words are those from starts[g] to starts[g + 1]. A weight is number(code) * scale + offset. For few rows numbers are
// made of codes in registers, as often as rows are multiplied by them; for many rows a part of a tile becomes floats,
// or bfloat16, once, and goes through the kernels for those.

#pragma once

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "linear.h"
#include "products.h"
#include "registers.h"

namespace oatmill {

// Kinds of codes: DEPTH of them make a word; numbers(words, part, to) makes what codes of each word stand for, TOGETHER at
// once, namely those at the steps step(part, 0), step(part, 1), ...

struct OneByOne {
  static constexpr int TOGETHER = 1;
  static constexpr int step(int part, int) { return part; }
};

// Whole numbers from -8 to 7.
struct Nibbles : OneByOne {
  static constexpr int64_t DEPTH = 8;
  explicit Nibbles(const float*) {}
  void numbers(Words words, int step, Floats* to) const {
    const Whole lifted = reinterpret_cast<const Whole&>(words) << (28 - 4 * step);
    *to = __builtin_convertvector(lifted >> 28, Floats);
  }
};

// Any 16 numbers.
#if defined(__AVX512F__)
struct Book : OneByOne {
  static constexpr int64_t DEPTH = 8;
  explicit Book(const float* codebook) : numbers_(load_as<Floats>(codebook)) {}
  void numbers(Words words, int step, Floats* to) const {
    const Words places = words >> (4 * step);  // of which the instruction reads four bits
    *to = reinterpret_cast<Floats>(
        _mm512_permutexvar_ps(reinterpret_cast<__m512i>(places), reinterpret_cast<__m512>(numbers_)));
  }

 private:
  Floats numbers_;
};
#elif defined(__AVX2__)
// The bytes of floats are looked up one by one, those of 32 codes at once.
struct Book {
  static constexpr int64_t DEPTH = 8;
  static constexpr int TOGETHER = 4;
  static constexpr int step(int part, int i) { return 2 * i + part; }

  explicit Book(const float* codebook) {
    alignas(32) uint8_t tables[4][32];
    for (int i = 0; i < 32; ++i)
      for (int byte = 0; byte < 4; ++byte) tables[byte][i] = load_as<uint32_t>(codebook + i % 16) >> (8 * byte);
    for (int byte = 0; byte < 4; ++byte) tables_[byte] = load_as<__m256i>(tables[byte]);
  }

  void numbers(Words words, int part, Floats* to) const {
    // a byte of each of four words after the other
    const __m256i by_step = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15,  //
                                             0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m256i places = _mm256_shuffle_epi8(
        reinterpret_cast<__m256i>((words >> (4 * part)) & 0x0f0f0f0f), by_step);
    const __m256i first = _mm256_shuffle_epi8(tables_[0], places), second = _mm256_shuffle_epi8(tables_[1], places);
    const __m256i third = _mm256_shuffle_epi8(tables_[2], places), fourth = _mm256_shuffle_epi8(tables_[3], places);
    const __m256i low = _mm256_unpacklo_epi8(first, second), low_ends = _mm256_unpacklo_epi8(third, fourth);
    const __m256i high = _mm256_unpackhi_epi8(first, second), high_ends = _mm256_unpackhi_epi8(third, fourth);
    to[0] = reinterpret_cast<Floats>(_mm256_unpacklo_epi16(low, low_ends));
    to[1] = reinterpret_cast<Floats>(_mm256_unpackhi_epi16(low, low_ends));
    to[2] = reinterpret_cast<Floats>(_mm256_unpacklo_epi16(high, high_ends));
    to[3] = reinterpret_cast<Floats>(_mm256_unpackhi_epi16(high, high_ends));
  }

 private:
  __m256i tables_[4];
};
#else
struct Book : OneByOne {
  static constexpr int64_t DEPTH = 8;
  explicit Book(const float* codebook) : numbers_(codebook) {}
  void numbers(Words words, int step, Floats* to) const {
    for (int i = 0; i < WIDTH; ++i) (*to)[i] = numbers_[words[i] >> (4 * step) & 15];
  }

 private:
  const float* numbers_;
};
#endif

// Whole numbers from -128 to 127.
struct Bytes : OneByOne {
  static constexpr int64_t DEPTH = 4;
  explicit Bytes(const float*) {}
  void numbers(Words words, int step, Floats* to) const {
    const Whole lifted = reinterpret_cast<const Whole&>(words) << (24 - 8 * step);
    *to = __builtin_convertvector(lifted >> 24, Floats);
  }
};

// Floats of 8 bits, with 4 bits of exponent and 3 of mantissa; none of them is a NaN.
struct SmallFloats : OneByOne {
  static constexpr int64_t DEPTH = 4;
  explicit SmallFloats(const float*) {}
  void numbers(Words words, int step, Floats* to) const {
    const Whole lifted = reinterpret_cast<const Whole&>(words) << (24 - 8 * step);
    const Whole bits = lifted >> 4 & static_cast<int32_t>(0x87f00000);  // sign, and a float's bits
    *to = reinterpret_cast<const Floats&>(bits) * 0x1p120f;  // whose exponent is lower by 127 - 7
  }
};

// What makes weights of numbers, of each group and output: a scale, and maybe an offset, or a zero times that scale.
// All are [tiles, groups, COLUMNS]. dtype: of the scales, float, half or bfloat16.
struct Scales {
  at::ScalarType dtype;
  const void* scales;
  const float* offsets;  // or null
  const int8_t* zeros;   // or null

  bool shifted() const { return offsets || zeros; }

  Floats scale(int64_t place) const {
    switch (dtype) {
      case at::kHalf:
        return widened(static_cast<const c10::Half*>(scales) + place);
      case at::kBFloat16:
        return widened(static_cast<const c10::BFloat16*>(scales) + place);
      default:
        return widened(static_cast<const float*>(scales) + place);
    }
  }

  // scale: of the same place.
  Floats offset(int64_t place, Floats scale) const {
    using Bytes = int8_t __attribute__((vector_size(WIDTH)));
    if (offsets) return load_as<Floats>(offsets + place);
    return -__builtin_convertvector(__builtin_convertvector(load_as<Bytes>(zeros + place), Whole), Floats) * scale;
  }
};

// A product with codes. weights: their words. sums: [rows, groups], of the inputs of each group, where weights are shifted.
// input_scales: of rows that were rounded.
struct CodedProduct : Product {
  Scales scales;
  const int32_t* starts;
  int64_t groups;
  const float* codebook;
  const float* sums;
  const float* input_scales;

  const char* words(int64_t tile) const { return weights + tile * depth * TILE_WORD; }
};

// See linear.h: run_product calls this for products with codes.
template <typename Kernel>
void multiply_rows(const CodedProduct& product, int64_t first_row, int64_t rows, int64_t tile, int64_t next_tile,
                   char* totals) {
  Kernel::multiply(product, first_row, rows, tile, next_tile, totals);
}

constexpr int64_t CODES_AHEAD = 48;  // words that are asked for before they are needed

// Asks for the words of a tile's columns that will be needed after word k.
template <int V>
void want_words(const char* words, const char* next, int64_t k, int64_t depth, int64_t column) {
  const int64_t later = k + CODES_AHEAD;
  const char* wanted = (later < depth ? words + later * TILE_WORD : next + (later - depth) * TILE_WORD) + column * WORD;
#pragma GCC unroll 6
  for (int v = 0; v < V; v += 16 / WIDTH) __builtin_prefetch(wanted + v * WIDTH * WORD, 0, 2);
}

// Few rows: numbers are made in registers. Every row is added up in the same order, whatever rows are beside it.
template <typename Kind>
struct CodeProducts {
  static constexpr int ROWS = WIDTH == 16 ? 6 : 4;

  // Registers of outputs that are computed together, as many as leave room for words and numbers beside the sums.
  static constexpr int vectors(int rows) {
    if (WIDTH == 16) return 3;
    if (REGISTERS == 32) return rows <= 2 ? 6 : 4;
    if (Kind::TOGETHER > 1) return rows == 1 ? 3 : rows == 2 ? 2 : 1;
    return rows == 1 ? 6 : rows == 2 ? 3 : 2;
  }

  template <typename T>
  static Input prepare(const T* from, int64_t rows, int64_t inputs, int64_t depth, const int32_t*, int64_t) {
    return converted_rows<float>(from, rows, inputs, rows, depth * Kind::DEPTH);
  }

  static void multiply(const CodedProduct& product, int64_t first_row, int64_t rows, int64_t tile, int64_t next_tile,
                       char* totals) {
    for_each_block(rows, ROWS, [&](int64_t first, int64_t count) {
      BLOCKS[count - 1](product, first_row + first, tile, next_tile, reinterpret_cast<float*>(totals) + first * COLUMNS);
    });
  }

 private:
  using Block = void (*)(const CodedProduct&, int64_t, int64_t, int64_t, float*);

  template <int R>
  static void multiply_block(const CodedProduct& product, int64_t row, int64_t tile, int64_t next_tile, float* totals) {
    constexpr int V = vectors(R);
    for (int column = 0; column < COLUMNS; column += V * WIDTH)
      multiply_columns<R, V>(product, row, tile, next_tile, column, totals + column);
  }

  // Loops over registers must be unrolled before the compiler decides what is kept in registers, hence the pragmas.
  template <int R, int V>
  static void multiply_columns(const CodedProduct& product, int64_t row, int64_t tile, int64_t next_tile, int column,
                               float* totals) {
    const Kind kind(product.codebook);
    const char* input = product.input + row * product.row_bytes;
    const char *words = product.words(tile), *next = product.words(next_tile);
    for (int64_t g = 0; g < product.groups; ++g) {
      Floats sums[R][V] = {};
      for (int64_t k = product.starts[g]; k < product.starts[g + 1]; ++k) {
        want_words<V>(words, next, k, product.depth, column);
        Words read[V];
#pragma GCC unroll 6
        for (int v = 0; v < V; ++v) read[v] = load_as<Words>(words + k * TILE_WORD + (column + v * WIDTH) * WORD);
#pragma GCC unroll 8
        for (int part = 0; part < Kind::DEPTH / Kind::TOGETHER; ++part) {
          Floats numbers[V][Kind::TOGETHER];
#pragma GCC unroll 6
          for (int v = 0; v < V; ++v) kind.numbers(read[v], part, numbers[v]);
#pragma GCC unroll 4
          for (int i = 0; i < Kind::TOGETHER; ++i) {
            const char* place = input + (k * Kind::DEPTH + Kind::step(part, i)) * sizeof(float);
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r) {
              const Floats x = Floats{} + load_as<float>(place + r * product.row_bytes);
#pragma GCC unroll 6
              for (int v = 0; v < V; ++v) sums[r][v] = multiply_add(x, numbers[v][i], sums[r][v]);
            }
          }
        }
      }
      const int64_t scaled = (tile * product.groups + g) * COLUMNS + column;
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 6
        for (int v = 0; v < V; ++v) {
          float* total = totals + r * COLUMNS + v * WIDTH;
          const Floats before = g == 0 ? Floats{} : load_as<Floats>(total);
          const Floats scale = product.scales.scale(scaled + v * WIDTH);
          Floats sum = multiply_add(sums[r][v], scale, before);
          if (product.scales.shifted()) {
            const Floats inputs = Floats{} + product.sums[(row + r) * product.groups + g];
            sum = multiply_add(inputs, product.scales.offset(scaled + v * WIDTH, scale), sum);
          }
          store_as(total, sum);
        }
    }
  }

  static constexpr auto BLOCKS = []<int... R>(std::integer_sequence<int, R...>) {
    return std::array<Block, ROWS>{&multiply_block<R + 1>...};
  }(std::make_integer_sequence<int, ROWS>());
};

inline Words nearest_bf16(Floats value) {
  const Words bits = reinterpret_cast<const Words&>(value);
  return bits + 0x7fff + (bits >> 16 & 1);
}

// Many rows: Inner, a kernel for floats or bfloat16, multiplies them by a part of a tile after the other.
template <typename Kind, typename Inner>
struct ExpandedProducts {
  using Weights = typename Inner::Weights;
  static constexpr int64_t INPUTS = 96;  // of a part; a multiple of what every Inner takes at once

  template <typename T>
  static Input prepare(const T* from, int64_t rows, int64_t inputs, int64_t depth, const int32_t*, int64_t) {
    return Inner::prepare(from, rows, inputs, depth * Kind::DEPTH / Weights::DEPTH);
  }

  static void multiply(const CodedProduct& product, int64_t first_row, int64_t rows, int64_t tile, int64_t next_tile,
                       char* totals) {
    constexpr int64_t PART = INPUTS / Kind::DEPTH;
    alignas(64) static thread_local char part[INPUTS / Weights::DEPTH * TILE_WORD];
    int64_t group = 0;
    for (int64_t k = 0; k < product.depth; k += PART) {
      const int64_t depth = std::min(PART, product.depth - k);
      expand(product, tile, next_tile, k, depth, group, part);
      const char* input =
          product.input + first_row * product.row_bytes + k * Kind::DEPTH / Weights::DEPTH * Inner::INPUT_WORD;
      Inner::multiply(input, product.row_bytes, rows, part, part, depth * Kind::DEPTH / Weights::DEPTH, k == 0, totals);
    }
  }

 private:
  // Makes weights of `depth` words from word `first` on. group: of that word; on return, of the last one.
  static void expand(const CodedProduct& product, int64_t tile, int64_t next_tile, int64_t first, int64_t depth,
                     int64_t& group, char* part) {
    const Kind kind(product.codebook);
    const char *words = product.words(tile), *next = product.words(next_tile);
    for (int64_t k = first; k < first + depth; ++k) {
      while (k >= product.starts[group + 1]) ++group;
      want_words<COLUMNS / WIDTH>(words, next, k, product.depth, 0);
      const int64_t scaled = (tile * product.groups + group) * COLUMNS;
      char* to = part + (k - first) * Kind::DEPTH / Weights::DEPTH * TILE_WORD;
#pragma GCC unroll 12
      for (int column = 0; column < COLUMNS; column += WIDTH) {
        const Words read = load_as<Words>(words + k * TILE_WORD + column * WORD);
        const Floats scales = product.scales.scale(scaled + column);
        const Floats offsets = product.scales.shifted() ? product.scales.offset(scaled + column, scales) : Floats{};
        Floats weights[Kind::DEPTH];
#pragma GCC unroll 8
        for (int part = 0; part < Kind::DEPTH / Kind::TOGETHER; ++part) {
          Floats numbers[Kind::TOGETHER];
          kind.numbers(read, part, numbers);
#pragma GCC unroll 4
          for (int i = 0; i < Kind::TOGETHER; ++i)
            weights[Kind::step(part, i)] = multiply_add(numbers[i], scales, offsets);
        }
#pragma GCC unroll 8
        for (int step = 0; step < Kind::DEPTH; step += Weights::DEPTH) {
          char* place = to + step / Weights::DEPTH * TILE_WORD + column * WORD;
          if constexpr (std::is_same_v<Weights, FloatWeights>)
            store_as(place, weights[step]);
          else
            store_as(place, nearest_bf16(weights[step]) >> 16 | (nearest_bf16(weights[step + 1]) & 0xffff0000));
        }
      }
    }
  }
};

}  // namespace oatmill
