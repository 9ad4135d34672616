// Weights of 4 or 8 bits: codes, what makes numbers of them, and a scale for each group of inputs.
//
// Codes stand in the tiles of linear.h, 8 or 4 to a word: those of even inputs in its lower half, the others in the upper one,
// so that neighbours, which some instructions multiply together, stand half a word apart. The inputs of a group follow
// each other; its words are those from starts[g] to starts[g + 1]. A weight is number(code) * scale + offset. For few rows
// numbers are made of codes in registers, as often as rows are multiplied by them (grouped.h, digits.h, byte_digits.h); for
// many rows a part of a tile becomes floats, or bfloat16, once, and goes through the kernels for those (expanded.h).

#pragma once

#include <cstdint>

#include "gemm/gemm.h"
#include "simd/simd.h"

namespace oatmill {

// Where a code stands in a word of so many, and which code stands there.
constexpr int place_in_word(int code, int depth) { return code % 2 * (depth / 2) + code / 2; }
constexpr int code_in_word(int place, int depth) { return place % (depth / 2) * 2 + place / (depth / 2); }

// Kinds of codes: DEPTH of them make a word; numbers(words, part, to) makes what codes of each word stand for, TOGETHER at
// once, namely those of the inputs step(part, 0), step(part, 1), ...

struct OneByOne {
  static constexpr int TOGETHER = 1;
  static constexpr int step(int part, int) { return part; }
};

// Any 16 numbers.
#if defined(__AVX512BW__)
struct Book : OneByOne {
  static constexpr int64_t DEPTH = 8;
  explicit Book(const float* codebook) : numbers_(load_as<Floats>(codebook)) {}
  float number(int code) const { return numbers_[code]; }
  void numbers(Words words, int step, Floats* to) const {
    const Words places = words >> (4 * place_in_word(step, DEPTH));  // of which the instruction reads four bits
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
  static constexpr int step(int part, int i) { return code_in_word(2 * i + part, DEPTH); }

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
#elif defined(__aarch64__)
// The same, 16 codes at once.
struct Book {
  static constexpr int64_t DEPTH = 8;
  static constexpr int TOGETHER = 4;
  static constexpr int step(int part, int i) { return code_in_word(2 * i + part, DEPTH); }

  explicit Book(const float* codebook) {
    const uint8x16x4_t bytes = vld4q_u8(reinterpret_cast<const uint8_t*>(codebook));
    for (int byte = 0; byte < 4; ++byte) tables_[byte] = bytes.val[byte];
  }

  void numbers(Words words, int part, Floats* to) const {
    constexpr uint8x16_t BY_STEP = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    const uint8x16_t places =
        vqtbl1q_u8(reinterpret_cast<uint8x16_t>((words >> (4 * part)) & 0x0f0f0f0f), BY_STEP);
    uint16x8_t pairs[2][2];  // of the first and the last two bytes, of the first and the last eight codes
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const uint8x16_t even = vqtbl1q_u8(tables_[2 * i], places), odd = vqtbl1q_u8(tables_[2 * i + 1], places);
      pairs[i][0] = vreinterpretq_u16_u8(vzip1q_u8(even, odd));
      pairs[i][1] = vreinterpretq_u16_u8(vzip2q_u8(even, odd));
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      to[2 * i] = reinterpret_cast<Floats>(vzip1q_u16(pairs[0][i], pairs[1][i]));
      to[2 * i + 1] = reinterpret_cast<Floats>(vzip2q_u16(pairs[0][i], pairs[1][i]));
    }
  }

 private:
  uint8x16_t tables_[4];
};
#else
struct Book : OneByOne {
  static constexpr int64_t DEPTH = 8;
  explicit Book(const float* codebook) : numbers_(codebook) {}
  void numbers(Words words, int step, Floats* to) const {
    for (int i = 0; i < WIDTH; ++i) (*to)[i] = numbers_[words[i] >> (4 * place_in_word(step, DEPTH)) & 15];
  }

 private:
  const float* numbers_;
};
#endif

// Of each word a signed number of so many bits.
template <int BITS>
Floats signed_numbers(Words words, int step) {
  const Whole lifted = reinterpret_cast<const Whole&>(words) << (32 - BITS * (place_in_word(step, 32 / BITS) + 1));
  return __builtin_convertvector(lifted >> (32 - BITS), Floats);
}

// Whole numbers from -8 to 7, stored ADDED higher.
#if defined(__AVX512BW__)
struct Nibbles : Book {
  static constexpr int ADDED = 8;
  explicit Nibbles(const float*) : Book(NUMBERS) {}

 private:
  static constexpr float NUMBERS[] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
};
#else
struct Nibbles : OneByOne {
  static constexpr int64_t DEPTH = 8;
  static constexpr int ADDED = 8;
  explicit Nibbles(const float*) {}
  void numbers(Words words, int step, Floats* to) const {
    *to = signed_numbers<4>(words ^ 0x88888888, step);  // which makes them -8 to 7
  }
};
#endif

// Whole numbers from -128 to 127.
struct Bytes : OneByOne {
  static constexpr int64_t DEPTH = 4;
  static constexpr int ADDED = 0;
  explicit Bytes(const float*) {}
  void numbers(Words words, int step, Floats* to) const {
    *to = signed_numbers<8>(words, step);
  }
};

// Floats of 8 bits, with 4 bits of exponent and 3 of mantissa; none of them is a NaN.
struct SmallFloats : OneByOne {
  static constexpr int64_t DEPTH = 4;
  explicit SmallFloats(const float*) {}
  void numbers(Words words, int step, Floats* to) const {
    const Whole lifted = reinterpret_cast<const Whole&>(words) << (24 - 8 * place_in_word(step, DEPTH));
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

  // Asks for those of a tile's group.
  void want(int64_t place) const {
    const int64_t size = dtype == at::kFloat ? sizeof(float) : sizeof(c10::Half);
    for (int64_t byte = 0; byte < COLUMNS * size; byte += 64)
      __builtin_prefetch(static_cast<const char*>(scales) + place * size + byte, 0, 2);
    if (zeros) __builtin_prefetch(zeros + place, 0, 2);
  }

  // Reads the scales of V registers of outputs, and the offsets for numbers that are read ADDED higher than they are.
  // ZEROS: those are part of the offsets.
  template <int ADDED, bool ZEROS, int V>
  [[gnu::always_inline]] void read(int64_t place, Floats (&scaled)[V], Floats (&shifted)[V]) const {
    switch (dtype) {
      case at::kHalf:
        widen(static_cast<const c10::Half*>(scales) + place, scaled);
        break;
      case at::kBFloat16:
        widen(static_cast<const c10::BFloat16*>(scales) + place, scaled);
        break;
      default:
        widen(static_cast<const float*>(scales) + place, scaled);
    }
    if (ZEROS && zeros) {
      widen(zeros + place, shifted);
#pragma GCC unroll 6
      for (int v = 0; v < V; ++v) shifted[v] = (-static_cast<float>(ADDED) - shifted[v]) * scaled[v];
      return;
    }
#pragma GCC unroll 6
    for (int v = 0; v < V; ++v) {
      shifted[v] = -static_cast<float>(ADDED) * scaled[v];
      if (offsets) shifted[v] += widened(offsets + place + v * WIDTH);
    }
  }

  // The zeros of WIDTH outputs, each in every byte of its word.
  Words zero_bytes(int64_t place) const {
    if (!zeros) return Words{};
    const Whole numbers = nearest(widened(zeros + place));
    return (reinterpret_cast<const Words&>(numbers) & 0xff) * 0x01010101u;
  }

 private:
  template <typename T, int V>
  [[gnu::always_inline]] static void widen(const T* from, Floats (&to)[V]) {
#pragma GCC unroll 6
    for (int v = 0; v < V; ++v) to[v] = widened(from + v * WIDTH);
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

// Asks for words long before they are needed: for some of word k of a tile, those that stand in the same place of a
// later word. next: the words of the tile that comes next.
struct WantedWords {
  static constexpr int64_t AHEAD = 48;
  const char *words, *next;
  int64_t depth;

  // Returns word k of the WIDTH outputs from a column on.
  Words read(int64_t k, int column) const { return load_as<Words>(words + k * TILE_WORD + column * WORD); }

  // V: registers of words, from a column on. Inline: compilers leave out calls of a function that does nothing else.
  template <int V>
  [[gnu::always_inline]] void want(int64_t k, int column) const {
    const int64_t later = k + AHEAD;
    const char* place = (later < depth ? words + later * TILE_WORD : next + (later - depth) * TILE_WORD) + column * WORD;
#pragma GCC unroll 12
    for (int v = 0; v < V; v += 16 / WIDTH) __builtin_prefetch(place + v * WIDTH * WORD, 0, 2);
  }
};

// See linear.h: run_product calls this for products with codes.
template <typename Kernel>
void multiply_rows(const CodedProduct& product, int64_t first_row, int64_t rows, int64_t tile, int64_t next_tile,
                   char* totals) {
  Kernel::multiply(product, first_row, rows, tile, next_tile, totals);
}

}  // namespace oatmill
