// Quantized weights of 4, 6 or 8 bits: codes, the LUTs and shifts that decode them, and a scale for each group of
// inputs.
//
// Codes of 4 and 8 bits are packed in the tiles of gemm.h, 8 or 4 to a word: even k in the low 16 bits, odd k in the
// high ones, so that vpmaddwd and vdpbf16ps take neighbours. SixBits describes the three words of 16 codes of 6 bits.
// The words of group g go from starts[g] to starts[g + 1]. A weight is number(code) * scale + offset. group_gemm.h has
// the loops around the products; wna16.h and wna8.h have the products with inputs of 16 and 8 bits.

#pragma once

#include <algorithm>
#include <cstdint>

#include "gemm/gemm.h"
#include "gemm/loop.h"
#include "simd/simd.h"

namespace oatmill {

// The place of a code in a word of `depth`, and the code at a place.
constexpr int place_in_word(int code, int depth) { return code % 2 * (depth / 2) + code / 2; }
constexpr int code_in_word(int place, int depth) { return place % (depth / 2) * 2 + place / (depth / 2); }

// The three words of 16 codes of 6 bits: the lower four bits of 8 each, and the upper two of all. Bytes of them are
// codes in the order of 8-bit words: step s of four has its lower bits in low[s / 2], and the upper ones in high.
struct SixBits {
  U32 low[2], high;

  // Returns four codes of each output, in the order of a word of 8 bits.
  [[gnu::always_inline]] U32 bytes(int step) const {
    return (low[step / 2] >> (4 * (step % 2)) & 0x0f0f0f0f) | ((high >> (2 * step) & 0x03030303) << 4);
  }
};

// Kinds of quantized weights: DEPTH codes make a word, or PLANES of them; numbers(words, part, to) decodes codes of
// each word, TOGETHER at once, namely those of the inputs step(part, 0), step(part, 1), ...

// Any 16 numbers, by LUT.
#if defined(__AVX512BW__)
struct Codebook : OneAtATime {
  static constexpr int64_t DEPTH = 8;
  explicit Codebook(const float* codebook) : numbers_(load_as<F32>(codebook)) {}
  float number(int code) const { return numbers_[code]; }
  void numbers(U32 words, int step, F32* to) const {
    const U32 places = words >> (4 * place_in_word(step, DEPTH));  // of which the instruction reads four bits
    *to = reinterpret_cast<F32>(
        _mm512_permutexvar_ps(reinterpret_cast<__m512i>(places), reinterpret_cast<__m512>(numbers_)));
  }

 private:
  F32 numbers_;
};
#elif defined(__AVX2__)
// A LUT for each byte of a float, for 32 codes at once.
struct Codebook {
  static constexpr int64_t DEPTH = 8;
  static constexpr int TOGETHER = 4;
  static constexpr int step(int part, int i) { return code_in_word(2 * i + part, DEPTH); }

  explicit Codebook(const float* codebook) {
    alignas(32) uint8_t tables[4][32];
    for (int i = 0; i < 32; ++i)
      for (int byte = 0; byte < 4; ++byte) tables[byte][i] = load_as<uint32_t>(codebook + i % 16) >> (8 * byte);
    for (int byte = 0; byte < 4; ++byte) tables_[byte] = load_as<__m256i>(tables[byte]);
  }

  void numbers(U32 words, int part, F32* to) const {
    // a byte of each of four words after the other
    const __m256i by_step = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15,  //
                                             0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m256i places = _mm256_shuffle_epi8(reinterpret_cast<__m256i>((words >> (4 * part)) & 0x0f0f0f0f), by_step);
    const __m256i first = _mm256_shuffle_epi8(tables_[0], places), second = _mm256_shuffle_epi8(tables_[1], places);
    const __m256i third = _mm256_shuffle_epi8(tables_[2], places), fourth = _mm256_shuffle_epi8(tables_[3], places);
    const __m256i low = _mm256_unpacklo_epi8(first, second), low_ends = _mm256_unpacklo_epi8(third, fourth);
    const __m256i high = _mm256_unpackhi_epi8(first, second), high_ends = _mm256_unpackhi_epi8(third, fourth);
    to[0] = reinterpret_cast<F32>(_mm256_unpacklo_epi16(low, low_ends));
    to[1] = reinterpret_cast<F32>(_mm256_unpackhi_epi16(low, low_ends));
    to[2] = reinterpret_cast<F32>(_mm256_unpacklo_epi16(high, high_ends));
    to[3] = reinterpret_cast<F32>(_mm256_unpackhi_epi16(high, high_ends));
  }

 private:
  __m256i tables_[4];
};
#elif defined(__aarch64__)
// The same, 16 codes at once.
struct Codebook {
  static constexpr int64_t DEPTH = 8;
  static constexpr int TOGETHER = 4;
  static constexpr int step(int part, int i) { return code_in_word(2 * i + part, DEPTH); }

  explicit Codebook(const float* codebook) {
    const uint8x16x4_t bytes = vld4q_u8(reinterpret_cast<const uint8_t*>(codebook));
    for (int byte = 0; byte < 4; ++byte) tables_[byte] = bytes.val[byte];
  }

  void numbers(U32 words, int part, F32* to) const {
    constexpr uint8x16_t BY_STEP = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    const uint8x16_t places = vqtbl1q_u8(reinterpret_cast<uint8x16_t>((words >> (4 * part)) & 0x0f0f0f0f), BY_STEP);
    uint16x8_t pairs[2][2];  // of the first and the last two bytes, of the first and the last eight codes
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const uint8x16_t even = vqtbl1q_u8(tables_[2 * i], places), odd = vqtbl1q_u8(tables_[2 * i + 1], places);
      pairs[i][0] = vreinterpretq_u16_u8(vzip1q_u8(even, odd));
      pairs[i][1] = vreinterpretq_u16_u8(vzip2q_u8(even, odd));
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      to[2 * i] = reinterpret_cast<F32>(vzip1q_u16(pairs[0][i], pairs[1][i]));
      to[2 * i + 1] = reinterpret_cast<F32>(vzip2q_u16(pairs[0][i], pairs[1][i]));
    }
  }

 private:
  uint8x16_t tables_[4];
};
#else
struct Codebook : OneAtATime {
  static constexpr int64_t DEPTH = 8;
  explicit Codebook(const float* codebook) : numbers_(codebook) {}
  void numbers(U32 words, int step, F32* to) const {
    for (int i = 0; i < WIDTH; ++i) (*to)[i] = numbers_[words[i] >> (4 * place_in_word(step, DEPTH)) & 15];
  }

 private:
  const float* numbers_;
};
#endif

// Of each word a signed number of so many bits.
template <int BITS>
F32 signed_numbers(U32 words, int step) {
  const I32 lifted = reinterpret_cast<const I32&>(words) << (32 - BITS * (place_in_word(step, 32 / BITS) + 1));
  return __builtin_convertvector(lifted >> (32 - BITS), F32);
}

// Integers from -8 to 7, stored plus ZERO_POINT.
#if defined(__AVX512BW__)
struct Int4 : Codebook {
  static constexpr int ZERO_POINT = 8;
  explicit Int4(const float*) : Codebook(NUMBERS) {}

 private:
  static constexpr float NUMBERS[] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
};
#else
struct Int4 : OneAtATime {
  static constexpr int64_t DEPTH = 8;
  static constexpr int ZERO_POINT = 8;
  explicit Int4(const float*) {}
  void numbers(U32 words, int step, F32* to) const {
    *to = signed_numbers<4>(words ^ 0x88888888, step);  // which makes them -8 to 7
  }
};
#endif

// Integers from -128 to 127.
struct Int8 : OneAtATime {
  static constexpr int64_t DEPTH = 4;
  static constexpr int ZERO_POINT = 0;
  explicit Int8(const float*) {}
  void numbers(U32 words, int step, F32* to) const { *to = signed_numbers<8>(words, step); }
};

// Integers from -32 to 31, stored plus ZERO_POINT.
struct Int6 : OneAtATime {
  static constexpr int64_t DEPTH = 16;
  static constexpr int PLANES = 3, ZERO_POINT = 32;
  explicit Int6(const float*) {}
  void numbers(const SixBits& words, int step, F32* to) const {
    const U32 codes = words.bytes(step / 4) >> (8 * place_in_word(step % 4, 4)) & 0xff;
    *to = __builtin_convertvector(reinterpret_cast<const I32&>(codes) - ZERO_POINT, F32);
  }
};

// Returns the words of an output that hold DEPTH codes.
template <typename Kind>
constexpr int planes_of() {
  if constexpr (requires { Kind::PLANES; }) return Kind::PLANES;
  return 1;
}

// Floats of 8 bits, with 4 bits of exponent and 3 of mantissa; none of them is a NaN.
struct Fp8Weights : OneAtATime {
  static constexpr int64_t DEPTH = 4;
  explicit Fp8Weights(const float*) {}
  void numbers(U32 words, int step, F32* to) const {
    const I32 lifted = reinterpret_cast<const I32&>(words) << (24 - 8 * place_in_word(step, DEPTH));
    const I32 bits = lifted >> 4 & static_cast<int32_t>(0x87f00000);  // sign, and a float's bits
    *to = reinterpret_cast<const F32&>(bits) * 0x1p120f;              // whose exponent is lower by 127 - 7
  }
};

// Scales of each group and output, and maybe offsets, or zero points that are multiplied by the scale.
// All are [tiles, groups, COLUMNS]. dtype: of the scales, float, half or bfloat16; offsets are floats.
// With factors, scales and offsets are half, of blocks of 2^groups_shift groups, and are multiplied by those.
struct Scales {
  at::ScalarType dtype;
  const void* scales;
  const void* offsets;                                         // or null
  const int8_t* zeros;                                         // or null
  const int8_t *factors = nullptr, *offset_factors = nullptr;  // or null
  int groups_shift = 0;
  float zero = 0;  // with factors, the zero point of all groups

  // Prefetches those of a tile's block, with the factors of its groups.
  void prefetch_block(int64_t place, int64_t groups_of_block) const {
    const auto lines = [](const void* from, int64_t first, int64_t bytes) {
      for (int64_t byte = 0; byte < bytes; byte += LINE)
        __builtin_prefetch(static_cast<const char*>(from) + first + byte, 0, 2);
    };
    constexpr int64_t SIZE = sizeof(c10::Half);
    lines(scales, place * SIZE, COLUMNS * SIZE);
    lines(factors, place * groups_of_block, COLUMNS * groups_of_block);
    if (!offsets) return;
    lines(offsets, place * SIZE, COLUMNS * SIZE);
    lines(offset_factors, place * groups_of_block, COLUMNS * groups_of_block);
  }

  // Prefetches those of a tile's group.
  void prefetch(int64_t place) const {
    if (factors) {
      __builtin_prefetch(factors + place, 0, 2);
      if (offset_factors) __builtin_prefetch(offset_factors + place, 0, 2);
      return;
    }
    const int64_t size = dtype == at::kFloat ? sizeof(float) : sizeof(c10::Half);
    for (int64_t byte = 0; byte < COLUMNS * size; byte += 64)
      __builtin_prefetch(static_cast<const char*>(scales) + place * size + byte, 0, 2);
    if (zeros) __builtin_prefetch(zeros + place, 0, 2);
  }

  // Reads the scales of V registers of outputs.
  template <int V>
  [[gnu::always_inline]] void read(int64_t place, F32 (&scaled)[V]) const {
    if (factors) return product(factors + place, static_cast<const c10::Half*>(scales) + block(place), scaled);
    switch (dtype) {
      case at::kHalf:
        return widen(static_cast<const c10::Half*>(scales) + place, scaled);
      case at::kBFloat16:
        return widen(static_cast<const c10::BFloat16*>(scales) + place, scaled);
      default:
        return widen(static_cast<const float*>(scales) + place, scaled);
    }
  }

  // Reads the offsets, with that of ZERO_POINT. scaled: the scales. ZEROS: those are part of the offsets.
  template <int ZERO_POINT, bool ZEROS, int V>
  [[gnu::always_inline]] void read_offsets(int64_t place, const F32 (&scaled)[V], F32 (&shifted)[V]) const {
    if (factors) {
      if (offsets) product(offset_factors + place, static_cast<const c10::Half*>(offsets) + block(place), shifted);
#pragma GCC unroll 12
      for (int v = 0; v < V; ++v)
        shifted[v] = (offsets ? shifted[v] : F32{}) - (static_cast<float>(ZERO_POINT) + zero) * scaled[v];
      return;
    }
    if (ZEROS && zeros) {
      widen(zeros + place, shifted);
#pragma GCC unroll 12
      for (int v = 0; v < V; ++v) shifted[v] = (-static_cast<float>(ZERO_POINT) - shifted[v]) * scaled[v];
      return;
    }
#pragma GCC unroll 12
    for (int v = 0; v < V; ++v) {
      shifted[v] = -static_cast<float>(ZERO_POINT) * scaled[v];
      if (offsets) shifted[v] += load_f32(static_cast<const float*>(offsets) + place + v * WIDTH);
    }
  }

  // The zeros of WIDTH outputs, each in every byte of its word.
  U32 zero_bytes(int64_t place) const {
    if (!zeros) return U32{};
    const I32 numbers = round_i32(load_f32(zeros + place));
    return (reinterpret_cast<const U32&>(numbers) & 0xff) * 0x01010101u;
  }

 private:
  int64_t block(int64_t place) const { return (place / COLUMNS >> groups_shift) * COLUMNS + place % COLUMNS; }

  template <int V>
  [[gnu::always_inline]] static void product(const int8_t* factors, const c10::Half* blocks, F32 (&to)[V]) {
#pragma GCC unroll 12
    for (int v = 0; v < V; ++v) to[v] = load_f32(factors + v * WIDTH) * load_f32(blocks + v * WIDTH);
  }

  template <typename T, int V>
  [[gnu::always_inline]] static void widen(const T* from, F32 (&to)[V]) {
#pragma GCC unroll 12
    for (int v = 0; v < V; ++v) to[v] = load_f32(from + v * WIDTH);
  }
};

// Words of a group whose products one accumulator holds: those from first to last. index: among the parts of all
// groups.
struct Part {
  int64_t index, group, first, last;
};

// Calls work(part) for all words. MOST: the words of a part.
template <int64_t MOST, typename Work>
[[gnu::always_inline]] inline void for_each_part(const int32_t* starts, int64_t groups, const Work& work) {
  int64_t index = 0;
  for (int64_t g = 0; g < groups; ++g)
    for (int64_t first = starts[g]; first < starts[g + 1]; first += MOST)
      work(Part{index++, g, first, std::min<int64_t>(starts[g + 1], first + MOST)});
}

template <int64_t MOST>
int64_t count_parts(const int32_t* starts, int64_t groups) {
  int64_t count = 0;
  for (int64_t g = 0; g < groups; ++g) count += ceil_div(starts[g + 1] - starts[g], MOST);
  return count;
}

// A GEMM with quantized weights. weights: their words. sums: [rows, parts], of the inputs of each part, if weights have
// offsets. input_scales: of rows that were quantized. depth: in DEPTH inputs; tile_bytes: of the words of a tile.
struct QuantizedGemmArgs : GemmArgs {
  Scales scales;
  const int32_t* starts;
  int64_t groups, parts;
  const float* codebook;
  const float* sums;
  const float* input_scales;
  int64_t tile_bytes;

  const char* words(int64_t tile) const { return weights + tile * tile_bytes; }
};

// Of the row and part at a place of quantized rows: the scale, and the sum.
inline float input_scale(const QuantizedGemmArgs& product, int64_t place) { return product.input_scales[2 * place]; }
inline float rounded_sum(const QuantizedGemmArgs& product, int64_t place) {
  return product.input_scales[2 * place + 1];
}

// The words of a tile, prefetched AHEAD of their use. next: the words of the tile that comes next. PLANES: as of a
// kind.
template <int PLANES>
struct WeightStream {
  static constexpr int64_t AHEAD = 48 / PLANES, BYTES = PLANES * TILE_WORD;
  const char *words, *next;
  int64_t depth;

  // Returns word k of the WIDTH outputs from a column on, or what takes the place of one.
  auto read(int64_t k, int column) const {
    const char* from = words + k * BYTES + column * WORD;
    if constexpr (PLANES == 1) return load_as<U32>(from);
    else return SixBits{{load_as<U32>(from), load_as<U32>(from + TILE_WORD)}, load_as<U32>(from + 2 * TILE_WORD)};
  }

  // V: registers of words, from a column on. Inline: compilers leave out calls of a function that does nothing else.
  template <int V>
  [[gnu::always_inline]] void prefetch(int64_t k, int column) const {
    const int64_t later = k + AHEAD;
    const char* place = (later < depth ? words + later * BYTES : next + (later - depth) * BYTES) + column * WORD;
#pragma GCC unroll 3
    for (int plane = 0; plane < PLANES; ++plane)
#pragma GCC unroll 12
      for (int v = 0; v < V; v += 16 / WIDTH) __builtin_prefetch(place + plane * TILE_WORD + v * WIDTH * WORD, 0, 2);
  }
};

// See gemm.h: run_gemm calls this for quantized weights.
template <typename Kernel>
void multiply_tile(const QuantizedGemmArgs& product, int64_t first_row, int64_t rows, int64_t tile, int64_t next_tile,
                   char* acc) {
  Kernel::multiply(product, first_row, rows, tile, next_tile, acc);
}

}  // namespace oatmill
