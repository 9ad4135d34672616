// Products of codes with inputs of 8 bits, or of 16 bits as two bytes: of these, an instruction multiplies four at a time. Inputs
// stand in the order in which words of weights are unpacked.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "gemm/w4_gemm.h"
#include "gemm/w4a16.h"
#include "gemm/group_gemm.h"
#include "gemm/gemm.h"
#include "gemm/microkernel.h"
#include "simd/simd.h"

namespace oatmill {

#if OATMILL_INT8

// Products of four neighbours at once are added up in 32 bits, which is enough for any.
constexpr bool ADDS_FOUR = true;
inline void add_bytes(Words numbers, Words inputs, Whole& sum) {
#if defined(__aarch64__)
  ByteProducts::add(inputs, numbers, sum);  // a lane of the first is multiplied
#else
  ByteProducts::add(numbers, inputs, sum);  // the first are unsigned
#endif
}

#else
constexpr bool ADDS_FOUR = false;
#endif

#if defined(__AVX2__) || OATMILL_INT8
#define OATMILL_CODES_INT8 1

using Shorts = int16_t __attribute__((vector_size(WIDTH * 4)));

#if defined(__AVX2__)

// Products of unsigned by signed bytes, those of two neighbours added up; 16 bits have to be enough for that.
inline Shorts multiply_bytes(Words a, Words b) {
#if defined(__AVX512BW__)
  return reinterpret_cast<Shorts>(_mm512_maddubs_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#else
  return reinterpret_cast<Shorts>(_mm256_maddubs_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#endif
}

// sum += multiply_bytes(a, b); see add_pairs.
inline void add_bytes(Words a, Words b, Shorts& sum) {
  Shorts products, added = sum;
  asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+v"(added), "=&v"(products) : "v"(a), "v"(b));
  sum = added;
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

#endif

// Kinds of codes: numbers(places) are those of WIDTH * 4 codes, each in a byte; add(numbers, inputs, sum) adds their
// products, in pairs or, where ADDS_FOUR, by four; unit() is what numbers are multiplied by. FIT: how many products 16 bits
// hold the sum of. ADDED: how much higher than they are numbers are read.

// Whole numbers from -8 to 7.
struct NibbleDigits {
  static constexpr int FIT = 8, ADDED = Nibbles::ADDED;

  explicit NibbleDigits(const float*) {}
  float unit() const { return 1; }
  static Words numbers(Words places) { return places; }
  template <typename Sum>
  static void add(Words numbers, Words inputs, Sum& sum) {
    add_bytes(numbers, inputs, sum);
  }
};

// Any 16 numbers, rounded to 8 bits.
#if defined(__AVX2__)
class BookDigits {
 public:
  static constexpr int FIT = 1, ADDED = 0;
  struct Numbers {
    Words sizes, signed_;
  };

  explicit BookDigits(const float* codebook) {
    const RoundedBook book(codebook, 127);
    unit_ = book.unit;
    alignas(64) int8_t numbers[WIDTH * 4], sizes[WIDTH * 4];
    for (int i = 0; i < WIDTH * 4; ++i) {
      numbers[i] = static_cast<int8_t>(book.numbers[i % 16]);
      sizes[i] = static_cast<int8_t>(std::abs(numbers[i]));
    }
    numbers_ = load_as<Words>(numbers);
    sizes_ = load_as<Words>(sizes);
  }
  float unit() const { return unit_; }
  Numbers numbers(Words places) const { return {looked_up(sizes_, places), looked_up(numbers_, places)}; }
  template <typename Sum>
  static void add(const Numbers& numbers, Words inputs, Sum& sum) {
    if constexpr (std::is_same_v<Sum, Shorts>)
      sum += multiply_bytes(numbers.sizes, with_signs(inputs, numbers.signed_));
    else
      add_bytes(numbers.sizes, with_signs(inputs, numbers.signed_), sum);
  }

 private:
  Words numbers_, sizes_;
  float unit_;
};
#else
class BookDigits {
 public:
  static constexpr int FIT = 1, ADDED = 0;

  explicit BookDigits(const float* codebook) {
    const RoundedBook book(codebook, 127);
    unit_ = book.unit;
    alignas(16) int8_t numbers[16];
    std::copy_n(book.numbers, 16, numbers);
    numbers_ = load_as<Words>(numbers);
  }
  float unit() const { return unit_; }
  Words numbers(Words places) const { return looked_up(numbers_, places); }
  static void add(Words numbers, Words inputs, Whole& sum) { add_bytes(numbers, inputs, sum); }

 private:
  Words numbers_;
  float unit_;
};
#endif

// Products of whole numbers of 8 bits, four at a time. Of the 8 inputs that stand for a word of weights, those of its lower
// halves of bytes come first, then those of the upper ones.
template <typename Kind, typename Digits>
struct DigitProducts {
  using Register = Whole;
  static constexpr int ROWS = 4, STEPS = 2, ADDED = Digits::ADDED;
  static constexpr int MANY = WIDTH == 16 ? (ADDS_FOUR ? 8 : 4) : REGISTERS == 32 ? 5 : 6;
  static constexpr int UNPACKED_VECTORS = WIDTH == 16 ? 3 : REGISTERS == 32 ? 4 : 2;
  static constexpr int64_t MOST = 128 / Kind::DEPTH;
  static constexpr bool GROUP_SUMS = false, TAKES_ZEROS = false;

  // Of each output there are two sums, but where four products are added at once.
  static constexpr int vectors(int rows) {
    if (REGISTERS == 32) return WIDTH == 16 ? 3 : 4;
    return rows == 1 ? 3 : rows == 2 ? 2 : 1;
  }

  explicit DigitProducts(const float* codebook) : digits_(codebook) {}

  template <typename T>
  static Input prepare(const T* from, int64_t rows, int64_t inputs, int64_t depth, const int32_t* starts,
                       int64_t groups) {
    return grouped_rows<int8_t, Kind>(from, rows, inputs, depth, starts, groups, round<T>);
  }

  static Words unpacked(Words words, int step, Words) { return (words >> (4 * step)) & 0x0f0f0f0f; }

  template <int R, int V, typename At>
  [[gnu::always_inline]] void add_steps(const CodedProduct& product, int64_t row, int64_t first, int64_t last,
                                        Whole (&sums)[R][V], const At& at) const {
    const char* input = product.input + row * product.row_bytes;
    if constexpr (ADDS_FOUR) {
      for (int64_t k = first; k < last; ++k)
        add_word<STEPS, R, V>(
            input + k * STEPS * WORD, product.row_bytes, [&](int step, int v) { return digits_.numbers(at(k, step, v)); },
            [&](int r, int v, Words x, const auto& numbers) { Digits::add(numbers, x, sums[r][v]); });
    } else {
      for (int64_t k = first; k < last; k += TOGETHER) {
        Shorts partial[R][V];
        make_zero(partial);
        for (int64_t i = k; i < std::min(last, k + TOGETHER); ++i)
          add_word<STEPS, R, V>(
              input + i * STEPS * WORD, product.row_bytes, [&](int step, int v) { return digits_.numbers(at(i, step, v)); },
              [&](int r, int v, Words x, const auto& numbers) {
                Digits::add(numbers, x, partial[r][v]);
                if constexpr (Digits::FIT == 1) move(partial[r][v], sums[r][v]);
              });
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 6
          for (int v = 0; v < V; ++v) move(partial[r][v], sums[r][v]);
      }
    }
  }

  Floats number(const CodedProduct& product, int64_t place, Whole sum) const {
    return __builtin_convertvector(sum, Floats) * (input_scale(product, place) * digits_.unit());
  }
  static float input_sum(const CodedProduct& product, int64_t place) { return rounded_sum(product, place); }

 private:
  static constexpr int64_t TOGETHER = std::max(1, Digits::FIT / 2);  // words whose products 16 bits hold the sum of

  // Adds the two of each lane.
  static void move(Shorts& from, Whole& to) {
    const Shorts ones = Shorts{} + 1;
    to += multiply_pairs(reinterpret_cast<const Whole&>(from), reinterpret_cast<const Whole&>(ones));
    from = Shorts{};
  }

  template <typename T>
  static std::pair<float, int64_t> round(const T* from, int64_t count, int8_t* to) {
    return round_row(from, count, [&](int64_t k, const int32_t* numbers) {
      store_as(to + k, lowest_bytes<0, 4, 1, 5, 2, 6, 3, 7>(numbers));
    });
  }

  Digits digits_;
};

#else
#define OATMILL_CODES_INT8 0
struct NibbleDigits;
class BookDigits;
#endif

#if defined(__ARM_FEATURE_DOTPROD)

// What ShortDigitProducts computes of whole numbers of 4 bits, by products of bytes, four at a time: an input is two bytes, a
// signed and an unsigned one, whose sums are kept apart. Of the 8 inputs that stand for a word of weights, those of its
// lower halves of bytes come first, in each the upper bytes.
struct SplitDigitProducts {
  struct Register {
    Words high = {}, low = {};
  };
  static constexpr int ROWS = 6, MANY = 6, STEPS = 2, ADDED = Nibbles::ADDED, UNPACKED_VECTORS = 2;
  static constexpr int64_t MOST = 128 / Nibbles::DEPTH;
  static constexpr bool GROUP_SUMS = false, TAKES_ZEROS = false;

  static constexpr int vectors(int rows) { return rows <= 2 ? 4 : rows == 3 ? 3 : 2; }

  explicit SplitDigitProducts(const float*) {}

  template <typename T>
  static Input prepare(const T* from, int64_t rows, int64_t inputs, int64_t depth, const int32_t* starts,
                       int64_t groups) {
    return grouped_rows<int16_t, Nibbles>(from, rows, inputs, depth, starts, groups, round<T>);
  }

  static Words unpacked(Words words, int step, Words) { return (words >> (4 * step)) & 0x0f0f0f0f; }

  template <int R, int V, typename At>
  [[gnu::always_inline]] void add_steps(const CodedProduct& product, int64_t row, int64_t first, int64_t last,
                                        Register (&sums)[R][V], const At& at) const {
    const char* input = product.input + row * product.row_bytes;
    for (int64_t k = first; k < last; ++k) {
      Words lower[V], upper[V];
#pragma GCC unroll 6
      for (int v = 0; v < V; ++v) lower[v] = at(k, 0, v);
#pragma GCC unroll 6
      for (int v = 0; v < V; ++v) upper[v] = at(k, 1, v);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Words x = load_as<Words>(input + r * product.row_bytes + k * Nibbles::DEPTH * 2);
#pragma GCC unroll 6
        for (int v = 0; v < V; ++v) {
          add<0>(lower[v], x, sums[r][v]);
          add<2>(upper[v], x, sums[r][v]);
        }
      }
    }
  }

  Floats number(const CodedProduct& product, int64_t place, const Register& sums) const {
    const Words sum = (sums.high << 8) + sums.low;
    return __builtin_convertvector(reinterpret_cast<const Whole&>(sum), Floats) * input_scale(product, place);
  }
  static float input_sum(const CodedProduct& product, int64_t place) { return rounded_sum(product, place); }

 private:
  // Adds the products of codes with four inputs, whose upper bytes are a word of x, and the lower ones the next.
  template <int WORD_OF_X>
  static void add(Words codes, Words x, Register& sums) {
    Words high = sums.high, low = sums.low;
    asm("sdot %0.4s, %1.16b, %2.4b[%3]" : "+w"(high) : "w"(codes), "w"(x), "i"(WORD_OF_X));
    asm("udot %0.4s, %1.16b, %2.4b[%3]" : "+w"(low) : "w"(codes), "w"(x), "i"(WORD_OF_X + 1));
    sums = {high, low};
  }

  template <typename T>
  static std::pair<float, int64_t> round(const T* from, int64_t count, int16_t* to) {
    return round_by_power<WholeNumbers<Nibbles>::INPUT_BITS>(from, count, [&](int64_t k, const int32_t* numbers) {
      for (int i = 0; i < LANES; i += 8) {
        const auto halves = lower_halves<0, 4, 1, 5, 2, 6, 3, 7>(numbers + i);
        using Halves = uint8_t __attribute__((vector_size(16)));
        const Halves bytes = reinterpret_cast<const Halves&>(halves);
        store_as(to + k + i, __builtin_shufflevector(bytes, bytes, 1, 3, 5, 7, 0, 2, 4, 6, 9, 11, 13, 15, 8, 10, 12, 14));
      }
    });
  }
};

using NibbleShorts = SplitDigitProducts;

#else

using NibbleShorts = ShortDigitProducts<Nibbles, WholeNumbers<Nibbles>>;

#endif

}  // namespace oatmill
