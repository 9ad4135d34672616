// WnA16: quantized weights of 4, 6 or 8 bits times inputs of 16 bits, of which an instruction multiplies several times
// as many as of floats. Inputs are int16 with a scale for each group of a row, or bfloat16. wna8.h has the variants
// that are made of int8 products.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "gemm/quantized_gemm.h"
#include "gemm/group_gemm.h"
#include "gemm/gemm.h"
#include "gemm/microkernel.h"
#include "simd/simd.h"

namespace oatmill {

// Rows quantized to integers of type To. round(from, count, to) quantizes a part, and returns its scale and the sum of
// its integers. The scales of an Input are, for each row and part, the scale and the sum of the quantized inputs.
template <typename To, typename Kind, int64_t MOST, typename T, typename Round>
Input quantized_rows(const T* from, int64_t rows, int64_t inputs, int64_t depth, const int32_t* starts, int64_t groups,
                     const Round& round) {
  const int64_t room = depth * Kind::DEPTH + LANES;  // the last integers are written with some behind them
  const int64_t row_bytes = row_stride(room * sizeof(To), rows);
  const int64_t parts = count_parts<MOST>(starts, groups);
  Input input{nullptr, row_bytes, c10::GetCPUAllocator()->allocate(rows * row_bytes),
              std::vector<float>(2 * rows * parts)};
  char* to = static_cast<char*>(input.buffer.get());
  input.data = to;
  for_rows(rows, inputs, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r)
      for_each_part<MOST>(starts, groups, [&](const Part& part) {
        const int64_t begin = part.first * Kind::DEPTH, end = part.last * Kind::DEPTH;
        const int64_t count = std::clamp<int64_t>(inputs - begin, 0, end - begin);
        To* numbers = reinterpret_cast<To*>(to + r * row_bytes) + begin;
        std::fill(numbers + count / LANES * LANES, numbers + (end - begin), To{0});
        const std::pair<float, int64_t> rounded = round(from + r * inputs + begin, count, numbers);
        float* scales = &input.scales[2 * (r * parts + part.index)];
        scales[0] = rounded.first;
        scales[1] = rounded.first * static_cast<float>(rounded.second);
      });
  });
  return input;
}

// Weights as int16: unpacked(words, step) are the two of each word that a step multiplies, 16 bits apart, plus
// ZERO_POINT; unit() is their scale. INPUT_BITS: of the inputs, without the sign; TOGETHER: the products that are
// summed in 32 bits; ROWS: as of a Dot in group_gemm.h.

// Codes that are integers.
template <typename Kind>
struct IntegerI16 {
  static constexpr int ZERO_POINT = Kind::ZERO_POINT, INPUT_BITS = 15, TOGETHER = 128, ROWS = WIDTH == 8 ? 5 : 4;

  explicit IntegerI16(const float*) {}
  static float unit() { return 1; }
  static U32 unpacked(U32 words, int step) {
    constexpr int BITS = 32 / Kind::DEPTH;
    if constexpr (ZERO_POINT != 0) {
      using Shorts = uint16_t __attribute__((vector_size(WIDTH * 4)));
      const Shorts numbers = reinterpret_cast<const Shorts&>(words) >> (BITS * step);
      const U32 lowest = reinterpret_cast<const U32&>(numbers);
      return step == Kind::DEPTH / 2 - 1 ? lowest : lowest & 0x000f000f;
    } else {
      using Shorts = int16_t __attribute__((vector_size(WIDTH * 4)));
      const Shorts pairs = reinterpret_cast<const Shorts&>(words);
      const Shorts numbers = pairs << (16 - BITS * (step + 1)) >> (16 - BITS);
      return reinterpret_cast<const U32&>(numbers);
    }
  }
};

// Of 6 bits. Where other kinds have pairs of 4-bit codes, these have bytes.
struct SixBitI16 {
  static constexpr int ZERO_POINT = Int6::ZERO_POINT, INPUT_BITS = 15, TOGETHER = 128, ROWS = WIDTH == 8 ? 5 : 4;

  explicit SixBitI16(const float*) {}
  static float unit() { return 1; }
  static U32 unpacked(const SixBits& words, int step) { return words.bytes(step / 2) >> (8 * (step % 2)) & 0x00ff00ff; }
};

// A codebook as integers, of which the largest is `most` or its negative, times a unit.
struct RoundedCodebook {
  int numbers[16];
  float unit;

  RoundedCodebook(const float* codebook, int most) {
    float peak = 0;
    for (int i = 0; i < 16; ++i) peak = std::max(peak, std::abs(codebook[i]));
    unit = peak > 0 ? peak / static_cast<float>(most) : 1.0f;
    for (int i = 0; i < 16; ++i) numbers[i] = static_cast<int>(std::lround(codebook[i] / unit));
  }
};

#if OATMILL_LUT

// Any 16 numbers, rounded to integers from -LARGEST to LARGEST times a unit: by at most 1/8064 of the largest. Those of
// FP4 stay what they are: multiples of 1/192 of the largest, and of 1/12 in MXFP4. Products of so many bits and sums of
// 64 of them leave 13 bits to inputs. Both roundings together are a tenth of what rounding outputs to bfloat16 is, and
// a quarter where one input of a group is 50 times as large as the others.
class CodebookI16 {
 public:
  static constexpr int ZERO_POINT = 0, INPUT_BITS = 13, TOGETHER = 64, ROWS = 2;

  explicit CodebookI16(const float* codebook) {
    const RoundedCodebook book(codebook, LARGEST);
    unit_ = book.unit;
    alignas(64) uint8_t low[WIDTH * 4], high[WIDTH * 4];
    for (int i = 0; i < WIDTH * 4; ++i) {
      low[i] = static_cast<uint8_t>(book.numbers[i % 16]);
      high[i] = static_cast<uint8_t>(book.numbers[i % 16] >> 8);
    }
    low_ = load_as<U32>(low);
    high_ = load_as<U32>(high);
  }
  float unit() const { return unit_; }

  [[gnu::always_inline]] U32 unpacked(U32 words, int step) const {
    const U32 places = (words >> (4 * (step % 2))) & 0x0f0f0f0f;
    const U32 low = lut16(low_, places), high = lut16(high_, places);
    return step < 2 ? even_pairs(low, high) : odd_pairs(low, high);
  }

 private:
  static constexpr int LARGEST = 4032;
  static_assert(LARGEST % 192 == 0 && LARGEST % 12 == 0);
  static_assert((int64_t{LARGEST} * TOGETHER << INPUT_BITS) < (int64_t{1} << 31));

  U32 low_, high_;
  float unit_;
};

#endif

// Products of 16-bit operands, two at a time: those of weights that are 16 bits apart.
template <typename Kind>
struct PairDot {
  static constexpr int MANY = WIDTH == 16 ? 8 : 6, STEPS = Kind::DEPTH / 2, UNPACKED_VECTORS = WIDTH == 16 ? 3 : 2;
  static constexpr int PLANES = planes_of<Kind>();
  static constexpr int64_t NUMBER = WORD;

  static constexpr int vectors(int rows) {
    if (WIDTH == 16) return 3;
    if (REGISTERS == 32) return rows == 1 ? 6 : rows == 2 ? 4 : 3;  // of DotI16Accumulator
    return rows == 1 ? 6 : rows == 2 ? 3 : 2;
  }

  using Loads = OneAtATime;

  static U32 row(const char* input) { return U32{} + load_as<uint32_t>(input); }
  static U32 operand(U32 numbers) { return numbers; }
};

// Quantizes a group to integers of BITS bits, without the sign, times a power of two: bfloat16 inputs are exact, but
// for those below 1/128 of the largest of their group, and with 13 bits 1/32. Returns the scale, and the sum of the
// integers.
template <int BITS, typename T, typename Keep>
std::pair<float, int64_t> quantize_group_i16(const T* from, int64_t count, const Keep& keep) {
  constexpr uint32_t EXPONENT = 23, INFINITE = 255u << EXPONENT;
  constexpr uint32_t LARGEST = (BITS - 1) << EXPONENT;  // of the power of two that the largest one becomes
  constexpr float MOST_NUMBER = (1 << BITS) - 1;
  U32 peaks = {};  // as bits: infinity is above all numbers, and what is no number above infinity
  for_registers(from, count, [&](int64_t, F32 values) {
    const U32 magnitudes = reinterpret_cast<const U32&>(values) & 0x7fffffff;
    peaks = magnitudes > peaks ? magnitudes : peaks;
  });
  const uint32_t exponent = reduce_max(peaks) & INFINITE;
  const uint32_t bits = exponent > LARGEST ? exponent - LARGEST : 0;
  const uint32_t inverse = bits > 0 ? (254u << EXPONENT) - bits : 0;
  const float scale = load_as<float>(&bits), factor = load_as<float>(&inverse);
  const int64_t sum = for_integers(
      from, count, [&](F32 values) { return round_i32(vmin(values * factor, F32{} + MOST_NUMBER)); }, keep);
  return {exponent < INFINITE ? scale : std::numeric_limits<float>::quiet_NaN(), sum};
}

// int16 products, two at a time; quantize_group_i16 quantizes the inputs.
template <typename Kind, typename Numbers>
struct WnA16Dot : PairDot<Kind> {
  using Accumulator = DotI16Accumulator;
  static constexpr int ROWS = Numbers::ROWS, ZERO_POINT = Numbers::ZERO_POINT;
  static constexpr int64_t MOST = Numbers::TOGETHER / Kind::DEPTH;
  static constexpr bool GROUP_SUMS = false, TAKES_ZEROS = false;

  explicit WnA16Dot(const float* codebook) : numbers_(codebook) {}

  template <typename T>
  static Input prepare(const T* from, int64_t rows, int64_t inputs, int64_t depth, const int32_t* starts,
                       int64_t groups) {
    return quantized_rows<int16_t, Kind, MOST>(from, rows, inputs, depth, starts, groups, round<T>);
  }

  template <typename Words>
  U32 unpacked(const Words& words, int step, U32) const {
    return numbers_.unpacked(words, step);
  }
  static void add(U32 x, U32 numbers, DotI16Accumulator& sums) {
    dot_i16(reinterpret_cast<const I32&>(x), reinterpret_cast<const I32&>(numbers), sums);
  }

  F32 number(const QuantizedGemmArgs& product, int64_t place, const DotI16Accumulator& sums) const {
    return __builtin_convertvector(total(sums), F32) * (input_scale(product, place) * numbers_.unit());
  }
  static float input_sum(const QuantizedGemmArgs& product, int64_t place) { return rounded_sum(product, place); }

 private:
  template <typename T>
  static std::pair<float, int64_t> round(const T* from, int64_t count, int16_t* to) {
    return quantize_group_i16<Numbers::INPUT_BITS>(from, count, [&](int64_t k, const int32_t* numbers) {
      for (int i = 0; i < LANES; i += 8) store_as(to + k + i, lower_halves<0, 1, 2, 3, 4, 5, 6, 7>(numbers + i));
    });
  }

  Numbers numbers_;
};

#if defined(__AVX512BF16__)

// Weights as bfloat16, by LUT: unpacked(words, step, zeros) are the two of each word that a step multiplies.
// TAKES_ZEROS: as of a Dot in group_gemm.h. Integers of 4 bits are exact; a codebook is rounded.
template <typename Kind>
class Bf16Lut {
 public:
  static constexpr bool TAKES_ZEROS = std::is_same_v<Kind, Int4>;

  explicit Bf16Lut(const float* codebook) {
    const Kind kind(codebook);
    c10::BFloat16 numbers[2 * WIDTH];  // zero points from -8 to 8 make indices from -8 to 23 of codes
    for (int i = 0; i < 2 * WIDTH; ++i)
      if constexpr (TAKES_ZEROS) numbers[i] = static_cast<float>((i < 24 ? i : i - 32) - Kind::ZERO_POINT);
      else numbers[i] = kind.number(i % WIDTH);
    numbers_ = load_as<__m512i>(numbers);
  }

  U32 unpacked(U32 words, int step, U32 zeros) const {
    return reinterpret_cast<U32>(_mm512_permutexvar_epi16(places(words, step, zeros), numbers_));
  }

 private:
  // The indices into the LUT, in the lowest five bits of each half of a word.
  static __m512i places(U32 words, int step, U32 zeros) {
    if constexpr (!TAKES_ZEROS) return _mm512_srli_epi16(reinterpret_cast<__m512i>(words), 4 * step);
    const U32 codes = (words >> (step % 2 * 4)) & 0x0f0f0f0f;
    const __m512i less = _mm512_sub_epi8(reinterpret_cast<__m512i>(codes), reinterpret_cast<__m512i>(zeros));
    return step < 2 ? less : _mm512_srli_epi16(less, 8);
  }

  __m512i numbers_;
};

// Floats of 8 bits stay what they are, too: six bits of one say where it stands in either half of a table of
// magnitudes.
template <>
class Bf16Lut<Fp8Weights> {
 public:
  static constexpr bool TAKES_ZEROS = false;

  explicit Bf16Lut(const float*) {
    c10::BFloat16 numbers[4 * 2 * WIDTH];
    for (int i = 0; i < 4 * 2 * WIDTH; ++i)
      numbers[i] = static_cast<float>(c10::Float8_e4m3fn(static_cast<uint8_t>(i), c10::Float8_e4m3fn::from_bits()));
    for (int i = 0; i < 4; ++i) numbers_[i] = load_as<__m512i>(numbers + i * 2 * WIDTH);
  }

  U32 unpacked(U32 words, int step, U32) const {
    const __m512i both = reinterpret_cast<__m512i>(words);
    const __m512i low = step == 0 ? both : _mm512_srli_epi16(both, 8),
                  high = step == 0 ? _mm512_slli_epi16(both, 8) : both;
    const __m512i small = _mm512_permutex2var_epi16(numbers_[0], low, numbers_[1]);
    const __m512i large = _mm512_permutex2var_epi16(numbers_[2], low, numbers_[3]);
    const __mmask32 is_large = _mm512_test_epi16_mask(low, _mm512_set1_epi16(0x40));
    const U32 size = reinterpret_cast<U32>(_mm512_mask_mov_epi16(small, is_large, large));
    return size | (reinterpret_cast<U32>(high) & 0x80008000);
  }

 private:
  __m512i numbers_[4];
};

// bfloat16 products, two at a time.
template <typename Kind>
class Bf16GroupDot : public PairDot<Kind> {
 public:
  using Accumulator = U32;
  static constexpr int ROWS = 4, ZERO_POINT = 0;
  static constexpr int64_t MOST = 128 / Kind::DEPTH;
  static constexpr bool GROUP_SUMS = true, TAKES_ZEROS = Bf16Lut<Kind>::TAKES_ZEROS;

  explicit Bf16GroupDot(const float* codebook) : numbers_(codebook) {}

  template <typename T>
  static Input prepare(const T* from, int64_t rows, int64_t inputs, int64_t depth, const int32_t*, int64_t) {
    return converted_rows<c10::BFloat16>(from, rows, inputs, rows, depth * Kind::DEPTH);
  }

  U32 unpacked(U32 words, int step, U32 zeros) const { return numbers_.unpacked(words, step, zeros); }
  static void add(U32 x, U32 numbers, U32& sum) { Bf16Dot::add(x, numbers, sum); }

  F32 number(const QuantizedGemmArgs&, int64_t, U32 sum) const { return as_floats(sum); }
  static float input_sum(const QuantizedGemmArgs& product, int64_t place) { return product.sums[place]; }

 private:
  Bf16Lut<Kind> numbers_;
};

#endif

}  // namespace oatmill
