// WnA8: quantized weights of 4, 6 or 8 bits times inputs of 8 bits; an instruction multiplies four at a time. On ARM
// also W4A16, whose inputs of 16 bits are two bytes. Inputs stand in the order in which words of weights are unpacked.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "gemm/quantized_gemm.h"
#include "gemm/wna16.h"
#include "gemm/group_gemm.h"
#include "gemm/gemm.h"
#include "gemm/microkernel.h"
#include "simd/simd.h"

namespace oatmill {

#if OATMILL_INT8

// Products of four neighbours at once are added up in 32 bits, which is enough for any.
constexpr bool ADDS_FOUR = true;
inline void add_bytes(U32 numbers, U32 inputs, I32& sum) {
#if defined(__aarch64__)
  Int8Dot::add(inputs, numbers, sum);  // a lane of the first is multiplied
#else
  Int8Dot::add(numbers, inputs, sum);  // the first are unsigned
#endif
}

#else
constexpr bool ADDS_FOUR = false;
#endif

#if defined(__AVX2__) || OATMILL_INT8
#define OATMILL_WNA8 1

using Shorts = int16_t __attribute__((vector_size(WIDTH * 4)));

#if defined(__AVX2__)

// Products of unsigned by signed bytes, those of two neighbours added up; 16 bits have to be enough for that.
inline Shorts multiply_bytes(U32 a, U32 b) {
#if defined(__AVX512BW__)
  return reinterpret_cast<Shorts>(_mm512_maddubs_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#else
  return reinterpret_cast<Shorts>(_mm256_maddubs_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#endif
}

// sum += multiply_bytes(a, b); see dot_i16.
inline void add_bytes(U32 a, U32 b, Shorts& sum) {
  Shorts products, added = sum;
  asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+v"(added), "=&v"(products) : "v"(a), "v"(b));
  sum = added;
}

// Bytes of a, negative where those of b are, and zero where those of b are.
inline U32 with_signs(U32 a, U32 b) {
#if defined(__AVX512BW__)
  const __m512i bytes = reinterpret_cast<__m512i>(a);
  return reinterpret_cast<U32>(
      _mm512_mask_sub_epi8(bytes, _mm512_movepi8_mask(reinterpret_cast<__m512i>(b)), _mm512_setzero_si512(), bytes));
#else
  return reinterpret_cast<U32>(_mm256_sign_epi8(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#endif
}

#endif

// An accumulator where an instruction adds up two products only: 16 bits hold the sums of some, until `flush` adds them
// to the others.
struct SplitAccumulator {
  I32 sum = {};
  Shorts partial = {};
};

#if defined(__AVX2__)
inline void add_pairs(Shorts pairs, I32& sum) {
  const Shorts ones = Shorts{} + 1;
  sum += madd_i16(reinterpret_cast<const I32&>(pairs), reinterpret_cast<const I32&>(ones));
}
#if !OATMILL_INT8
inline void add_bytes(U32 numbers, U32 inputs, I32& sum) { add_pairs(multiply_bytes(numbers, inputs), sum); }
#endif
inline void flush_partial(SplitAccumulator& acc) {
  add_pairs(acc.partial, acc.sum);
  acc.partial = Shorts{};
}
#endif
inline I32 total(const SplitAccumulator& acc) { return acc.sum; }

// Weights as bytes: unpacked(words, step) are the four codes of each word that a step multiplies, numbers(unpacked)
// what they stand for; add(numbers, inputs, acc) adds their products, in pairs or, where ADDS_FOUR, by four; unit() is
// their scale. FIT: the products whose sum fits 16 bits. ZERO_POINT: what codes have added to them. ROWS: as of a Dot.

// Codes of 4 bits.
struct Nibbles {
  static U32 unpacked(U32 words, int step) { return (words >> (4 * step)) & 0x0f0f0f0f; }
};

// Integers from -8 to 7.
struct Int4Bytes : Nibbles {
  static constexpr bool UNSIGNED = true;
  static constexpr int FIT = 8, ZERO_POINT = Int4::ZERO_POINT, ROWS = WIDTH == 16 && ADDS_FOUR ? 8 : 4;

  explicit Int4Bytes(const float*) {}
  float unit() const { return 1; }
  static U32 numbers(U32 places) { return places; }
  template <typename Sum>
  static void add(U32 numbers, U32 inputs, Sum& sum) {
    if constexpr (std::is_same_v<Sum, SplitAccumulator>) add_bytes(numbers, inputs, sum.partial);
    else add_bytes(numbers, inputs, sum);
  }
};

// Integers from -32 to 31.
struct SixBitBytes {
  static constexpr bool UNSIGNED = true;
  static constexpr int FIT = 1, ZERO_POINT = Int6::ZERO_POINT, ROWS = 4;

  explicit SixBitBytes(const float*) {}
  float unit() const { return 1; }
  static U32 unpacked(const SixBits& words, int step) { return words.bytes(step); }
  static U32 numbers(U32 bytes) { return bytes; }
  static void add(U32 numbers, U32 inputs, I32& sum) { add_bytes(numbers, inputs, sum); }
};

#if defined(__AVX2__)
// Signed bytes, of which an instruction multiplies the sizes, by inputs that have their signs.
struct SignedBytes {
  U32 sizes, numbers;

  void add_to(U32 inputs, I32& sum) const { add_bytes(sizes, with_signs(inputs, numbers), sum); }
};
#endif

// Integers from -128 to 127.
struct Int8Bytes {
  static constexpr bool UNSIGNED = true;  // where instructions multiply so
  static constexpr int FIT = 1, ROWS = WIDTH == 16 && ADDS_FOUR ? 8 : 4;

  explicit Int8Bytes(const float*) {}
  float unit() const { return 1; }
#if OATMILL_INT8 && !defined(__aarch64__)
  static constexpr int ZERO_POINT = 128;  // the instruction's first operand is unsigned
  static U32 unpacked(U32 words, int) { return words ^ 0x80808080; }
#else
  static constexpr int ZERO_POINT = 0;
  static U32 unpacked(U32 words, int) { return words; }
#endif
#if OATMILL_INT8
  static U32 numbers(U32 bytes) { return bytes; }
  static void add(U32 numbers, U32 inputs, I32& sum) { add_bytes(numbers, inputs, sum); }
#else
  static SignedBytes numbers(U32 bytes) { return {with_signs(bytes, bytes), bytes}; }
  static void add(const SignedBytes& numbers, U32 inputs, I32& sum) { numbers.add_to(inputs, sum); }
#endif
};

// Any 16 numbers, rounded to 8 bits.
#if defined(__AVX2__)
class CodebookI8 : public Nibbles {
 public:
  static constexpr bool UNSIGNED = false;
  static constexpr int FIT = 1, ZERO_POINT = 0, ROWS = 4;

  explicit CodebookI8(const float* codebook) {
    const RoundedCodebook book(codebook, 127);
    unit_ = book.unit;
    alignas(64) int8_t numbers[WIDTH * 4], sizes[WIDTH * 4];
    for (int i = 0; i < WIDTH * 4; ++i) {
      numbers[i] = static_cast<int8_t>(book.numbers[i % 16]);
      sizes[i] = static_cast<int8_t>(std::abs(numbers[i]));
    }
    numbers_ = load_as<U32>(numbers);
    sizes_ = load_as<U32>(sizes);
  }
  float unit() const { return unit_; }
  SignedBytes numbers(U32 places) const { return {lut16(sizes_, places), lut16(numbers_, places)}; }
  static void add(const SignedBytes& numbers, U32 inputs, I32& sum) { numbers.add_to(inputs, sum); }

 private:
  U32 numbers_, sizes_;
  float unit_;
};
#else
class CodebookI8 : public Nibbles {
 public:
  static constexpr bool UNSIGNED = false;
  static constexpr int FIT = 1, ZERO_POINT = 0, ROWS = 4;

  explicit CodebookI8(const float* codebook) {
    const RoundedCodebook book(codebook, 127);
    unit_ = book.unit;
    alignas(16) int8_t numbers[16];
    std::copy_n(book.numbers, 16, numbers);
    numbers_ = load_as<U32>(numbers);
  }
  float unit() const { return unit_; }
  U32 numbers(U32 places) const { return lut16(numbers_, places); }
  static void add(U32 numbers, U32 inputs, I32& sum) { add_bytes(numbers, inputs, sum); }

 private:
  U32 numbers_;
  float unit_;
};
#endif

// int8 products, four at a time. Of the 8 inputs that stand for a word of weights, those of its lower
// halves of bytes come first, then those of the upper ones.
template <bool SPLIT, int64_t WORDS>
struct FlushEvery {};
template <int64_t WORDS>
struct FlushEvery<true, WORDS> {
  static constexpr int64_t FLUSH_WORDS = WORDS;
};

template <typename Digits>
constexpr bool SPLITS = !ADDS_FOUR && Digits::FIT > 1;

template <typename Kind, typename Digits>
struct WnA8Dot : FlushEvery<SPLITS<Digits>, Digits::FIT / 2> {
  using Accumulator = std::conditional_t<SPLITS<Digits>, SplitAccumulator, I32>;
  static constexpr int ROWS = Digits::ROWS, STEPS = Kind::DEPTH / 4, ZERO_POINT = Digits::ZERO_POINT;
  static constexpr int PLANES = planes_of<Kind>();
  static constexpr int64_t NUMBER = WORD;
  static constexpr int MANY = WIDTH == 16 ? (ADDS_FOUR ? 8 : 4) : REGISTERS == 32 ? 5 : 6;
  static constexpr int UNPACKED_VECTORS = WIDTH == 16 ? 3 : REGISTERS == 32 ? 4 : 2;
  static constexpr int64_t MOST = 128 / Kind::DEPTH;
  static constexpr bool GROUP_SUMS = false, TAKES_ZEROS = false;
  static constexpr bool CODE_TILES = WIDTH == 16 && ADDS_FOUR && Digits::UNSIGNED;

  // A row or two read the tile once, as it lies in memory: the loop waits for that, and not for accumulators that the
  // registers do not hold.
  static constexpr int vectors(int rows) {
    if (WIDTH == 16) return 3;
    if (rows <= 2) return COLUMNS / WIDTH;
    return REGISTERS == 32 ? 4 : 3;
  }

  explicit WnA8Dot(const float* codebook) : digits_(codebook) {}

  template <typename T>
  static Input prepare(const T* from, int64_t rows, int64_t inputs, int64_t depth, const int32_t* starts,
                       int64_t groups) {
    return quantized_rows<int8_t, Kind, MOST>(from, rows, inputs, depth, starts, groups, round<T>);
  }

  template <typename Words>
  static U32 unpacked(const Words& words, int step, U32) {
    return Digits::unpacked(words, step);
  }

  using Loads = OneAtATime;

  static U32 row(const char* input) { return U32{} + load_as<uint32_t>(input); }
  auto operand(U32 places) const { return digits_.numbers(places); }

  template <typename Numbers>
  static void add(U32 x, const Numbers& numbers, Accumulator& acc) {
    Digits::add(numbers, x, acc);
  }
#if defined(__AVX2__)
  static void flush(SplitAccumulator& acc) { flush_partial(acc); }
#endif

  F32 number(const QuantizedGemmArgs& product, int64_t place, const Accumulator& acc) const {
    return __builtin_convertvector(total(acc), F32) * (input_scale(product, place) * digits_.unit());
  }
  static float input_sum(const QuantizedGemmArgs& product, int64_t place) { return rounded_sum(product, place); }

 private:
  template <typename T>
  static std::pair<float, int64_t> round(const T* from, int64_t count, int8_t* to) {
    return quantize_row(from, count, [&](int64_t k, const int32_t* numbers) {
      if constexpr (Kind::DEPTH == 8) store_as(to + k, lowest_bytes<0, 4, 1, 5, 2, 6, 3, 7>(numbers));
      else store_as(to + k, lowest_bytes<0, 2, 1, 3, 4, 6, 5, 7>(numbers));
    });
  }

  Digits digits_;
};

#else
#define OATMILL_WNA8 0
struct Int4Bytes;
struct SixBitBytes;
struct Int8Bytes;
class CodebookI8;
#endif

#if defined(__ARM_FEATURE_DOTPROD)

// WnA16Dot for integers of 4 bits by int8 products, four at a time: an input is two bytes, a signed and an unsigned
// one, with an accumulator each. Of the 8 inputs that stand for a word of weights, those of its lower halves of bytes
// come first, in each the upper bytes.
struct SplitW4A16Dot {
  struct Accumulator {
    U32 high = {}, low = {};
  };
  static constexpr int ROWS = 6, MANY = 6, STEPS = 2, ZERO_POINT = Int4::ZERO_POINT, UNPACKED_VECTORS = 2, PLANES = 1;
  static constexpr int64_t NUMBER = 2 * WORD;
  static constexpr int64_t MOST = 128 / Int4::DEPTH;
  static constexpr bool GROUP_SUMS = false, TAKES_ZEROS = false;

  static constexpr int vectors(int rows) { return rows <= 2 ? 4 : rows == 3 ? 3 : 2; }

  explicit SplitW4A16Dot(const float*) {}

  template <typename T>
  static Input prepare(const T* from, int64_t rows, int64_t inputs, int64_t depth, const int32_t* starts,
                       int64_t groups) {
    return quantized_rows<int16_t, Int4, MOST>(from, rows, inputs, depth, starts, groups, round<T>);
  }

  static U32 unpacked(U32 words, int step, U32) { return (words >> (4 * step)) & 0x0f0f0f0f; }

  using Loads = OneAtATime;

  // An operand of each of the two words of a row that belong to it: upper bytes, then lower ones.
  static U32 row(const char* input) {
    U32 x = {};
    std::memcpy(&x, input, 2 * WORD);
    return x;
  }
  static U32 operand(U32 numbers) { return numbers; }

  // Adds the products of weights with four inputs.
  static void add(U32 x, U32 codes, Accumulator& sums) {
    U32 high = sums.high, low = sums.low;
    asm("sdot %0.4s, %1.16b, %2.4b[0]" : "+w"(high) : "w"(codes), "w"(x));
    asm("udot %0.4s, %1.16b, %2.4b[1]" : "+w"(low) : "w"(codes), "w"(x));
    sums = {high, low};
  }

  F32 number(const QuantizedGemmArgs& product, int64_t place, const Accumulator& sums) const {
    const U32 sum = (sums.high << 8) + sums.low;
    return __builtin_convertvector(reinterpret_cast<const I32&>(sum), F32) * input_scale(product, place);
  }
  static float input_sum(const QuantizedGemmArgs& product, int64_t place) { return rounded_sum(product, place); }

 private:
  template <typename T>
  static std::pair<float, int64_t> round(const T* from, int64_t count, int16_t* to) {
    return quantize_group_i16<IntegerI16<Int4>::INPUT_BITS>(from, count, [&](int64_t k, const int32_t* numbers) {
      for (int i = 0; i < LANES; i += 8) {
        const auto halves = lower_halves<0, 4, 1, 5, 2, 6, 3, 7>(numbers + i);
        using Halves = uint8_t __attribute__((vector_size(16)));
        const Halves bytes = reinterpret_cast<const Halves&>(halves);
        store_as(to + k + i,
                 __builtin_shufflevector(bytes, bytes, 1, 3, 5, 7, 0, 2, 4, 6, 9, 11, 13, 15, 8, 10, 12, 14));
      }
    });
  }
};

using Int4W4A16Dot = SplitW4A16Dot;

#else

using Int4W4A16Dot = WnA16Dot<Int4, IntegerI16<Int4> >;

#endif

}  // namespace oatmill
