// Products of codes of 4 bits with inputs that are rounded to 8 bits, group by group of the weights. They are sums of
// whole numbers, which have several times as many products in an instruction as floats.
//
// A group of a row is `digits` * scale. Of the 8 inputs that stand for a word of weights, those of its lower halves of
// bytes come first, then those of the upper ones.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "codes.h"
#include "linear.h"
#include "products.h"
#include "registers.h"

namespace oatmill {

struct NibbleDigits;
class BookDigits;

#if defined(__AVX2__)

using Shorts = int16_t __attribute__((vector_size(WIDTH * 4)));

// Products of unsigned by signed bytes, those of two neighbours added up; 16 bits have to be enough for that.
inline Shorts multiply_bytes(Words a, Words b) {
#if defined(__AVX512BW__)
  return reinterpret_cast<Shorts>(_mm512_maddubs_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#else
  return reinterpret_cast<Shorts>(_mm256_maddubs_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#endif
}

// Of each byte of places, which is below 16, that byte of a table that stands in every 16 bytes.
inline Words looked_up(Words table, Words places) {
#if defined(__AVX512BW__)
  return reinterpret_cast<Words>(_mm512_shuffle_epi8(reinterpret_cast<__m512i>(table), reinterpret_cast<__m512i>(places)));
#else
  return reinterpret_cast<Words>(_mm256_shuffle_epi8(reinterpret_cast<__m256i>(table), reinterpret_cast<__m256i>(places)));
#endif
}

// Bytes of a, negative where those of b are, and zero where those of b are.
inline Words with_signs(Words a, Words b) {
#if defined(__AVX512BW__)
  const __m512i bytes = reinterpret_cast<__m512i>(a);
  return reinterpret_cast<Words>(
      _mm512_mask_sub_epi8(bytes, _mm512_movepi8_mask(reinterpret_cast<__m512i>(b)), _mm512_setzero_si512(), bytes));
#else
  return reinterpret_cast<Words>(_mm256_sign_epi8(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#endif
}

// Kinds of codes: read(words) gives their numbers as bytes, product(numbers, half, inputs) those of half of the words'
// times inputs. FIT: how many products 16 bits hold the sum of. ADDED: how much higher than they are numbers are read.
// UNIT: what numbers are multiplied by.

// Whole numbers from -8 to 7.
struct NibbleDigits {
  static constexpr int FIT = 8, ADDED = 8;
  struct Numbers {
    Words halves[2];
  };

  explicit NibbleDigits(const float*) {}
  float unit() const { return 1; }
  Numbers read(Words words) const {
    const Words lifted = words ^ 0x88888888;
    return {{lifted & 0x0f0f0f0f, (lifted >> 4) & 0x0f0f0f0f}};
  }
  static Shorts product(const Numbers& numbers, int half, Words inputs) {
    return multiply_bytes(numbers.halves[half], inputs);
  }
};

// Any 16 numbers, rounded to 8 bits.
class BookDigits {
 public:
  static constexpr int FIT = 1, ADDED = 0;
  struct Numbers {
    Words sizes[2], signed_[2];
  };

  explicit BookDigits(const float* codebook) {
    float peak = 0;
    for (int i = 0; i < 16; ++i) peak = std::max(peak, std::abs(codebook[i]));
    unit_ = peak > 0 ? peak / 127.0f : 1.0f;
    alignas(64) int8_t numbers[WIDTH * 4], sizes[WIDTH * 4];
    for (int i = 0; i < WIDTH * 4; ++i) {
      numbers[i] = static_cast<int8_t>(std::lround(codebook[i % 16] / unit_));
      sizes[i] = static_cast<int8_t>(std::abs(numbers[i]));
    }
    numbers_ = load_as<Words>(numbers);
    sizes_ = load_as<Words>(sizes);
  }
  float unit() const { return unit_; }
  Numbers read(Words words) const {
    const Words lower = words & 0x0f0f0f0f, upper = (words >> 4) & 0x0f0f0f0f;
    return {{looked_up(sizes_, lower), looked_up(sizes_, upper)}, {looked_up(numbers_, lower), looked_up(numbers_, upper)}};
  }
  static Shorts product(const Numbers& numbers, int half, Words inputs) {
    return multiply_bytes(numbers.sizes[half], with_signs(inputs, numbers.signed_[half]));
  }

 private:
  Words numbers_, sizes_;
  float unit_;
};

// Products of digits, see grouped.h.
template <typename Kind, typename Digits>
struct DigitProducts {
  using Register = Whole;
  static constexpr int ROWS = 4;

  // Of each output there are two sums.
  static constexpr int vectors(int rows) { return rows == 1 ? 3 : rows == 2 && WIDTH < 16 ? 2 : WIDTH == 16 ? 3 : 1; }

  explicit DigitProducts(const float* codebook) : digits_(codebook) {}

  // Returns rows of bytes; scales are, for each row and group, the scale and what is to be taken off the sum.
  template <typename T>
  static Input prepare(const T* from, int64_t rows, int64_t inputs, int64_t depth, const int32_t* starts,
                       int64_t groups) {
    const int64_t row_bytes = depth * Kind::DEPTH + LANES;  // the last numbers are written with some behind them
    Input input{nullptr, row_bytes, c10::GetCPUAllocator()->allocate(rows * row_bytes),
                std::vector<float>(2 * rows * groups)};
    auto* to = static_cast<int8_t*>(input.buffer.get());
    input.data = reinterpret_cast<const char*>(to);
    for_rows(rows, inputs, [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r)
        for (int64_t g = 0; g < groups; ++g) {
          const int64_t begin = starts[g] * Kind::DEPTH, end = starts[g + 1] * Kind::DEPTH;
          const int64_t count = std::clamp<int64_t>(inputs - begin, 0, end - begin);
          int8_t* row = to + r * row_bytes + begin;
          std::fill(row + count / LANES * LANES, row + (end - begin), int8_t{0});
          Ints sums = {};
          float* scales = &input.scales[2 * (r * groups + g)];
          scales[0] = round_row(from + r * inputs + begin, count, [&](int64_t k, Ints numbers) {
            keep(row + k, numbers);
            sums += numbers;
          });
          int32_t sum = 0;
          for (int i = 0; i < LANES; ++i) sum += sums[i];
          scales[1] = static_cast<float>(sum * Digits::ADDED);
        }
    });
    return input;
  }

  // Loops over registers must be unrolled before the compiler decides what is kept in registers, hence the pragmas.
  template <int R, int V>
  [[gnu::always_inline]] void add_words(const CodedProduct& product, int64_t row, const WantedWords& words, int column,
                                        int64_t first, int64_t last, Whole (&sums)[R][V]) const {
    const char* input = product.input + row * product.row_bytes;
    for (int64_t k = first; k < last;) {
      Shorts partial[R][V] = {};
      for (const int64_t stop = std::min(last, k + TOGETHER); k < stop; ++k) {
        words.want<V>(k, column);
        typename Digits::Numbers numbers[V];
#pragma GCC unroll 3
        for (int v = 0; v < V; ++v)
          numbers[v] = digits_.read(load_as<Words>(words.words + k * TILE_WORD + (column + v * WIDTH) * WORD));
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
          for (int half = 0; half < 2; ++half) {
            const Words x = Words{} + load_as<uint32_t>(input + r * product.row_bytes + k * Kind::DEPTH + half * WORD);
#pragma GCC unroll 3
            for (int v = 0; v < V; ++v) {
              if constexpr (Digits::FIT == 1)
                sums[r][v] += summed(Digits::product(numbers[v], half, x));
              else
                partial[r][v] += Digits::product(numbers[v], half, x);
            }
          }
      }
      if constexpr (Digits::FIT > 1)
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 3
          for (int v = 0; v < V; ++v) sums[r][v] += summed(partial[r][v]);
    }
  }

  Floats number(const CodedProduct& product, int64_t place, Whole sum) const {
    const float* scales = product.input_scales + 2 * place;
    return (__builtin_convertvector(sum, Floats) - scales[1]) * (scales[0] * digits_.unit());
  }

 private:
  static constexpr int64_t TOGETHER = std::max(1, Digits::FIT / 2);  // words whose products 16 bits hold the sum of

  static void keep(int8_t* to, Ints numbers) {
    using Bytes = int8_t __attribute__((vector_size(LANES)));
    store_as(to, __builtin_convertvector(
                     __builtin_shufflevector(numbers, numbers, 0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15),
                     Bytes));
  }

  // The two of each lane added up.
  static Whole summed(Shorts products) {
    const Shorts ones = Shorts{} + 1;
    return multiply_pairs(reinterpret_cast<const Whole&>(products), reinterpret_cast<const Whole&>(ones));
  }

  Digits digits_;
};

#endif

}  // namespace oatmill
