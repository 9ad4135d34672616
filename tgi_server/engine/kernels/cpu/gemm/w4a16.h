// Products of codes with inputs of 16 bits, group by group of the weights: of these, an instruction multiplies several times
// as many as of floats. They are whole numbers times a scale for each group of a row, or bfloat16 numbers. byte_digits.h has
// those that are made of products of bytes.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "gemm/w4_gemm.h"
#include "gemm/group_gemm.h"
#include "gemm/gemm.h"
#include "gemm/microkernel.h"
#include "simd/simd.h"

namespace oatmill {

// Rows of whole numbers of type To. round(from, count, to) rounds a group, and returns its scale and the sum of its
// numbers. The scales of an Input are, for each row and group, the scale and the sum of what the group became.
template <typename To, typename Kind, typename T, typename Round>
Input grouped_rows(const T* from, int64_t rows, int64_t inputs, int64_t depth, const int32_t* starts, int64_t groups,
                   const Round& round) {
  const int64_t room = depth * Kind::DEPTH + LANES;  // the last numbers are written with some behind them
  const int64_t row_bytes = apart(room * sizeof(To), rows);
  Input input{nullptr, row_bytes, c10::GetCPUAllocator()->allocate(rows * row_bytes),
              std::vector<float>(2 * rows * groups)};
  char* to = static_cast<char*>(input.buffer.get());
  input.data = to;
  for_rows(rows, inputs, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r)
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t begin = starts[g] * Kind::DEPTH, end = starts[g + 1] * Kind::DEPTH;
        const int64_t count = std::clamp<int64_t>(inputs - begin, 0, end - begin);
        To* numbers = reinterpret_cast<To*>(to + r * row_bytes) + begin;
        std::fill(numbers + count / LANES * LANES, numbers + (end - begin), To{0});
        const std::pair<float, int64_t> rounded = round(from + r * inputs + begin, count, numbers);
        float* scales = &input.scales[2 * (r * groups + g)];
        scales[0] = rounded.first;
        scales[1] = rounded.first * static_cast<float>(rounded.second);
      }
  });
  return input;
}

// What grouped_rows keeps in an Input: of a place, the scale, and the sum.
inline float input_scale(const CodedProduct& product, int64_t place) { return product.input_scales[2 * place]; }
inline float rounded_sum(const CodedProduct& product, int64_t place) { return product.input_scales[2 * place + 1]; }

// Adds products of what a set unpacks of a word. at: that of a step, numbered from 0, of register v.
template <int STEPS, int R, int V, typename At, typename Add>
[[gnu::always_inline]] inline void add_word(const char* input, int64_t row_bytes, const At& at, const Add& add) {
#pragma GCC unroll 4
  for (int step = 0; step < STEPS; ++step) {
    decltype(at(step, 0)) columns[V];
#pragma GCC unroll 6
    for (int v = 0; v < V; ++v) columns[v] = at(step, v);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Words x = Words{} + load_as<uint32_t>(input + r * row_bytes + step * WORD);
#pragma GCC unroll 6
      for (int v = 0; v < V; ++v) add(r, v, x, columns[v]);
    }
  }
}

// Numbers of 16 bits that codes stand for: unpacked(words, step) are those of each word that are multiplied in a step, which
// stand half a word apart, ADDED higher than they are; unit() is what they are multiplied by. INPUT_BITS: of the inputs,
// without the sign; TOGETHER: the products that are summed in 32 bits; ROWS: as of a set in grouped.h.

// Codes that are whole numbers.
template <typename Kind>
struct WholeNumbers {
  static constexpr int ADDED = Kind::ADDED, INPUT_BITS = 15, TOGETHER = 128, ROWS = WIDTH == 8 ? 5 : 4;

  explicit WholeNumbers(const float*) {}
  static float unit() { return 1; }
  static Words unpacked(Words words, int step) {
    constexpr int BITS = 32 / Kind::DEPTH;
    if constexpr (ADDED != 0) {
      using Shorts = uint16_t __attribute__((vector_size(WIDTH * 4)));
      const Shorts numbers = reinterpret_cast<const Shorts&>(words) >> (BITS * step);
      const Words lowest = reinterpret_cast<const Words&>(numbers);
      return step == Kind::DEPTH / 2 - 1 ? lowest : lowest & 0x000f000f;
    } else {
      using Shorts = int16_t __attribute__((vector_size(WIDTH * 4)));
      const Shorts pairs = reinterpret_cast<const Shorts&>(words);
      const Shorts numbers = pairs << (16 - BITS * (step + 1)) >> (16 - BITS);
      return reinterpret_cast<const Words&>(numbers);
    }
  }
};

// A codebook as whole numbers, of which the largest is `most` or its negative, times a unit.
struct RoundedBook {
  int numbers[16];
  float unit;

  RoundedBook(const float* codebook, int most) {
    float peak = 0;
    for (int i = 0; i < 16; ++i) peak = std::max(peak, std::abs(codebook[i]));
    unit = peak > 0 ? peak / static_cast<float>(most) : 1.0f;
    for (int i = 0; i < 16; ++i) numbers[i] = static_cast<int>(std::lround(codebook[i] / unit));
  }
};

#if OATMILL_LOOK_UP

// Any 16 numbers, rounded to whole ones from -LARGEST to LARGEST times a unit: by at most 1/8064 of the largest. Those of FP4
// stay what they are: multiples of 1/192 of the largest, and of 1/12 in MXFP4. Products of so many bits and sums of 64 of
// them leave 13 bits to inputs. Both roundings together are a tenth of what rounding outputs to bfloat16 is, and a quarter
// where one input of a group is 50 times as large as the others.
class BookNumbers {
 public:
  static constexpr int ADDED = 0, INPUT_BITS = 13, TOGETHER = 64, ROWS = 2;

  explicit BookNumbers(const float* codebook) {
    const RoundedBook book(codebook, LARGEST);
    unit_ = book.unit;
    alignas(64) uint8_t low[WIDTH * 4], high[WIDTH * 4];
    for (int i = 0; i < WIDTH * 4; ++i) {
      low[i] = static_cast<uint8_t>(book.numbers[i % 16]);
      high[i] = static_cast<uint8_t>(book.numbers[i % 16] >> 8);
    }
    low_ = load_as<Words>(low);
    high_ = load_as<Words>(high);
  }
  float unit() const { return unit_; }

  [[gnu::always_inline]] Words unpacked(Words words, int step) const {
    const Words places = (words >> (4 * (step % 2))) & 0x0f0f0f0f;
    const Words low = looked_up(low_, places), high = looked_up(high_, places);
    return step < 2 ? even_pairs(low, high) : odd_pairs(low, high);
  }

 private:
  static constexpr int LARGEST = 4032;
  static_assert(LARGEST % 192 == 0 && LARGEST % 12 == 0);
  static_assert((int64_t{LARGEST} * TOGETHER << INPUT_BITS) < (int64_t{1} << 31));

  Words low_, high_;
  float unit_;
};

#endif

// Products of numbers of 16 bits, two at a time: those of codes that stand half a word apart. Set: has
// add(numbers, x, sum).
template <typename Set, typename Kind>
struct PairedCodes {
  static constexpr int MANY = WIDTH == 16 ? 8 : 6, STEPS = Kind::DEPTH / 2, UNPACKED_VECTORS = WIDTH == 16 ? 3 : 2;

  static constexpr int vectors(int rows) {
    if (WIDTH == 16) return 3;
    if (REGISTERS == 32) return rows == 1 ? 6 : rows == 2 ? 4 : 3;  // of PairSums
    return rows == 1 ? 6 : rows == 2 ? 3 : 2;
  }

  template <int R, int V, typename Sum, typename At>
  [[gnu::always_inline]] void add_steps(const CodedProduct& product, int64_t row, int64_t first, int64_t last,
                                        Sum (&sums)[R][V], const At& at) const {
    const char* input = product.input + row * product.row_bytes;
    for (int64_t k = first; k < last; ++k)
      add_word<STEPS, R, V>(
          input + k * STEPS * WORD, product.row_bytes, [&](int step, int v) { return at(k, step, v); },
          [&](int r, int v, Words x, Words numbers) { Set::add(numbers, x, sums[r][v]); });
  }
};

// Rounds a group to whole numbers of so many bits, without the sign, times a power of two, see for_whole_numbers: bfloat16
// numbers stay what they are, but for those below 1/128 of the largest of their group, and of 13 bits 1/32. Returns the
// scale, and the sum of the numbers.
template <int BITS, typename T, typename Keep>
std::pair<float, int64_t> round_by_power(const T* from, int64_t count, const Keep& keep) {
  constexpr uint32_t EXPONENT = 23, INFINITE = 255u << EXPONENT;
  constexpr uint32_t LARGEST = (BITS - 1) << EXPONENT;  // of the power of two that the largest one becomes
  constexpr float MOST_NUMBER = (1 << BITS) - 1;
  Words peaks = {};  // as bits: infinity is above all numbers, and what is no number above infinity
  for_registers(from, count, [&](int64_t, Floats values) {
    const Words magnitudes = reinterpret_cast<const Words&>(values) & 0x7fffffff;
    peaks = magnitudes > peaks ? magnitudes : peaks;
  });
  const uint32_t exponent = largest(peaks) & INFINITE;
  const uint32_t bits = exponent > LARGEST ? exponent - LARGEST : 0;
  const uint32_t inverse = bits > 0 ? (254u << EXPONENT) - bits : 0;
  const float scale = load_as<float>(&bits), factor = load_as<float>(&inverse);
  const int64_t sum = for_whole_numbers(
      from, count, [&](Floats values) { return nearest(smaller(values * factor, Floats{} + MOST_NUMBER)); }, keep);
  return {exponent < INFINITE ? scale : std::numeric_limits<float>::quiet_NaN(), sum};
}

// Products of whole numbers of 16 bits, two at a time; round_by_power says what inputs become.
template <typename Kind, typename Numbers>
struct ShortDigitProducts : PairedCodes<ShortDigitProducts<Kind, Numbers>, Kind> {
  using Register = PairSums;
  static constexpr int ROWS = Numbers::ROWS, ADDED = Numbers::ADDED;
  static constexpr int64_t MOST = Numbers::TOGETHER / Kind::DEPTH;
  static constexpr bool GROUP_SUMS = false, TAKES_ZEROS = false;

  explicit ShortDigitProducts(const float* codebook) : numbers_(codebook) {}

  template <typename T>
  static Input prepare(const T* from, int64_t rows, int64_t inputs, int64_t depth, const int32_t* starts,
                       int64_t groups) {
    return grouped_rows<int16_t, Kind>(from, rows, inputs, depth, starts, groups, round<T>);
  }

  Words unpacked(Words words, int step, Words) const { return numbers_.unpacked(words, step); }
  static void add(Words numbers, Words x, PairSums& sums) {
    add_pairs(reinterpret_cast<const Whole&>(x), reinterpret_cast<const Whole&>(numbers), sums);
  }

  Floats number(const CodedProduct& product, int64_t place, const PairSums& sums) const {
    return __builtin_convertvector(total(sums), Floats) * (input_scale(product, place) * numbers_.unit());
  }
  static float input_sum(const CodedProduct& product, int64_t place) { return rounded_sum(product, place); }

 private:
  template <typename T>
  static std::pair<float, int64_t> round(const T* from, int64_t count, int16_t* to) {
    return round_by_power<Numbers::INPUT_BITS>(from, count, [&](int64_t k, const int32_t* numbers) {
      for (int i = 0; i < LANES; i += 8) store_as(to + k + i, lower_halves<0, 1, 2, 3, 4, 5, 6, 7>(numbers + i));
    });
  }

  Numbers numbers_;
};

#if defined(__AVX512BF16__)

// Codes as bfloat16 numbers: unpacked(words, step, zeros) are those of each word that are multiplied in a step.
// TAKES_ZEROS: as of a set in grouped.h. Whole numbers of 4 bits stay what they are; a codebook is rounded.
template <typename Kind>
class Bf16Numbers {
 public:
  static constexpr bool TAKES_ZEROS = std::is_same_v<Kind, Nibbles>;

  explicit Bf16Numbers(const float* codebook) {
    const Kind kind(codebook);
    c10::BFloat16 numbers[2 * WIDTH];  // zeros from -8 to 8 make places from -8 to 23 of codes
    for (int i = 0; i < 2 * WIDTH; ++i)
      if constexpr (TAKES_ZEROS)
        numbers[i] = static_cast<float>((i < 24 ? i : i - 32) - Kind::ADDED);
      else
        numbers[i] = kind.number(i % WIDTH);
    numbers_ = load_as<__m512i>(numbers);
  }

  Words unpacked(Words words, int step, Words zeros) const {
    return reinterpret_cast<Words>(_mm512_permutexvar_epi16(places(words, step, zeros), numbers_));
  }

 private:
  // Which of the numbers are meant, in the lowest five bits of each half of a word.
  static __m512i places(Words words, int step, Words zeros) {
    if constexpr (!TAKES_ZEROS) return _mm512_srli_epi16(reinterpret_cast<__m512i>(words), 4 * step);
    const Words codes = (words >> (step % 2 * 4)) & 0x0f0f0f0f;
    const __m512i less = _mm512_sub_epi8(reinterpret_cast<__m512i>(codes), reinterpret_cast<__m512i>(zeros));
    return step < 2 ? less : _mm512_srli_epi16(less, 8);
  }

  __m512i numbers_;
};

// Floats of 8 bits stay what they are, too: six bits of one say where it stands in either half of a table of magnitudes.
template <>
class Bf16Numbers<SmallFloats> {
 public:
  static constexpr bool TAKES_ZEROS = false;

  explicit Bf16Numbers(const float*) {
    c10::BFloat16 numbers[4 * 2 * WIDTH];
    for (int i = 0; i < 4 * 2 * WIDTH; ++i)
      numbers[i] = static_cast<float>(c10::Float8_e4m3fn(static_cast<uint8_t>(i), c10::Float8_e4m3fn::from_bits()));
    for (int i = 0; i < 4; ++i) numbers_[i] = load_as<__m512i>(numbers + i * 2 * WIDTH);
  }

  Words unpacked(Words words, int step, Words) const {
    const __m512i both = reinterpret_cast<__m512i>(words);
    const __m512i low = step == 0 ? both : _mm512_srli_epi16(both, 8), high = step == 0 ? _mm512_slli_epi16(both, 8) : both;
    const __m512i small = _mm512_permutex2var_epi16(numbers_[0], low, numbers_[1]);
    const __m512i large = _mm512_permutex2var_epi16(numbers_[2], low, numbers_[3]);
    const __mmask32 is_large = _mm512_test_epi16_mask(low, _mm512_set1_epi16(0x40));
    const Words size = reinterpret_cast<Words>(_mm512_mask_mov_epi16(small, is_large, large));
    return size | (reinterpret_cast<Words>(high) & 0x80008000);
  }

 private:
  __m512i numbers_[4];
};

// Products of bfloat16 numbers, two at a time.
template <typename Kind>
class Bf16DigitProducts : public PairedCodes<Bf16DigitProducts<Kind>, Kind> {
 public:
  using Register = Words;
  static constexpr int ROWS = 4, ADDED = 0;
  static constexpr int64_t MOST = 128 / Kind::DEPTH;
  static constexpr bool GROUP_SUMS = true, TAKES_ZEROS = Bf16Numbers<Kind>::TAKES_ZEROS;

  explicit Bf16DigitProducts(const float* codebook) : numbers_(codebook) {}

  template <typename T>
  static Input prepare(const T* from, int64_t rows, int64_t inputs, int64_t depth, const int32_t*, int64_t) {
    return converted_rows<c10::BFloat16>(from, rows, inputs, rows, depth * Kind::DEPTH);
  }

  Words unpacked(Words words, int step, Words zeros) const { return numbers_.unpacked(words, step, zeros); }
  static void add(Words numbers, Words x, Words& sum) { PairProducts::add(x, numbers, sum); }

  Floats number(const CodedProduct&, int64_t, Words sum) const { return as_floats(sum); }
  static float input_sum(const CodedProduct& product, int64_t place) { return product.sums[place]; }

 private:
  Bf16Numbers<Kind> numbers_;
};

#endif

}  // namespace oatmill
