// Numbers of 8 bits with an exponent (Micikevicius et al. 2022), in which a KV cache may be kept.
//
// They are read by way of halves, which both kinds are the upper bits of, or would be with another bias: a number is
// read as the UNITth part of what it stands for, and whoever sums them multiplies the sum. What is too large is written
// as the largest number, so no code that is written stands for infinity or for no number.

#pragma once

#include <cstdint>

#include "simd/simd.h"

namespace oatmill {

constexpr int HALF_BIAS = 15;

struct E4m3 {
  static constexpr int MANTISSA = 3, BIAS = 7;
  static constexpr float LARGEST = 448, UNIT = 1 << (HALF_BIAS - BIAS);
  uint8_t code;
};

struct E5m2 {
  static constexpr int MANTISSA = 2, BIAS = HALF_BIAS;
  static constexpr float LARGEST = 57344, UNIT = 1;
  uint8_t code;
};

template <typename T>
concept Fp8 = std::is_same_v<T, E4m3> || std::is_same_v<T, E5m2>;

// 2 to the power of n.
constexpr float power(int n) { return n < 0 ? 1.0f / power(-n) : static_cast<float>(int64_t(1) << n); }

// WIDTH numbers that stand side by side, each the UNITth part of what it stands for.
template <Fp8 Kind>
F32 load_f32(const Kind* from) {
  // Half numbers have 10 bits of mantissa: with the sign at its place, the others are this far from theirs.
  constexpr int SHIFT = 10 - Kind::MANTISSA;
#if defined(__AVX512BW__)
  const __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load_as<__m128i>(from)), SHIFT);
  const __m512 floats = _mm512_cvtph_ps(SHIFT == 7 ? _mm256_and_si256(words, _mm256_set1_epi16(-0x4001)) : words);
  return reinterpret_cast<const F32&>(floats);
#elif defined(__AVX2__) && defined(__F16C__)
  const __m128i words =
      _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))), SHIFT);
  const __m256 floats = _mm256_cvtph_ps(SHIFT == 7 ? _mm_and_si128(words, _mm_set1_epi16(-0x4001)) : words);
  return reinterpret_cast<const F32&>(floats);
#else
  using Bytes = uint8_t __attribute__((vector_size(WIDTH)));
  const I32 codes = __builtin_convertvector(load_as<Bytes>(from), I32), size = codes & 0x7f;
  const I32 normal = (size << (23 - Kind::MANTISSA)) + ((127 - HALF_BIAS) << 23);
  const F32 subnormal = __builtin_convertvector(size, F32) * power(1 - HALF_BIAS - Kind::MANTISSA);
  const I32 sizes = size < (1 << Kind::MANTISSA) ? reinterpret_cast<const I32&>(subnormal) : normal;
  const I32 signs = (codes & 0x80) << 24, numbers = sizes | signs;
  return reinterpret_cast<const F32&>(numbers);
#endif
}

// The nearest codes, ties to even.
template <Fp8 Kind>
U32 encoded(F32 x) {
  constexpr int SHIFT = 23 - Kind::MANTISSA, SMALLEST = 1 - Kind::BIAS;  // exponent of the smallest normal number
  const U32 bits = reinterpret_cast<const U32&>(x);
  const F32 size = vmin(as_floats(bits & 0x7fffffff), F32{} + Kind::LARGEST);
  const U32 whole = reinterpret_cast<const U32&>(size);
  const U32 normal =
      ((whole + ((1 << (SHIFT - 1)) - 1) + ((whole >> SHIFT) & 1)) >> SHIFT) - ((127 - Kind::BIAS) << Kind::MANTISSA);
  // Behind a number this large, floats are as far apart as the codes of subnormal numbers.
  const F32 base = F32{} + power(23 + SMALLEST - Kind::MANTISSA), lifted = size + base;
  const U32 subnormal = reinterpret_cast<const U32&>(lifted) - reinterpret_cast<const U32&>(base);
  return (size < power(SMALLEST) ? subnormal : normal) | ((bits >> 24) & 0x80);
}

// Writes `count` numbers, a multiple of WIDTH, divided by their scale.
template <Fp8 Kind, typename T>
void encode(const T* from, int64_t count, float scale, Kind* to) {
  using Bytes = uint8_t __attribute__((vector_size(WIDTH)));
  for (int64_t i = 0; i < count; i += WIDTH)
    store_as(to + i, __builtin_convertvector(encoded<Kind>(load_f32(from + i) / scale), Bytes));
}

}  // namespace oatmill
