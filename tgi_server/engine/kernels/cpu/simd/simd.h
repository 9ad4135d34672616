// Vector registers as wide as this instruction set has them, for loops that keep sums in registers.

#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace oatmill {

#if defined(__AVX512BW__)
constexpr int WIDTH = 16;  // floats of a register. What is written for registers of so many asks for the same macro.
constexpr int REGISTERS = 32;
#elif defined(__AVX2__)
constexpr int WIDTH = 8;
constexpr int REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int WIDTH = 4;
constexpr int REGISTERS = 32;
#else
constexpr int WIDTH = 4;
constexpr int REGISTERS = 16;
#endif

using Floats = float __attribute__((vector_size(WIDTH * 4)));
using Words = uint32_t __attribute__((vector_size(WIDTH * 4)));
using Whole = int32_t __attribute__((vector_size(WIDTH * 4)));

template <typename Register>
Register load_as(const void* from) {
  Register loaded;
  std::memcpy(&loaded, from, sizeof(loaded));
  return loaded;
}

template <typename Register>
void store_as(void* to, Register value) {
  std::memcpy(to, &value, sizeof(value));
}

inline Floats as_floats(Words bits) { return reinterpret_cast<Floats&>(bits); }

// Words without their lower halves. With 16 registers, none of them is spared for a mask.
inline Words upper_halves(Words words) {
#if defined(__AVX2__) && !defined(__AVX512BW__)
  Words upper;
  asm("vpsrld $16, %1, %0\n\tvpslld $16, %0, %0" : "=x"(upper) : "x"(words));
  return upper;
#else
  return words & 0xffff0000;
#endif
}

// sum + a * b, with one rounding where the CPU has an instruction for it.
inline Floats multiply_add(Floats a, Floats b, Floats sum) {
#if defined(__AVX512BW__)
  return reinterpret_cast<Floats>(_mm512_fmadd_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(sum)));
#elif defined(__AVX2__) && defined(__FMA__)
  return reinterpret_cast<Floats>(_mm256_fmadd_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b), reinterpret_cast<__m256>(sum)));
#elif defined(__aarch64__)
  return reinterpret_cast<Floats>(vfmaq_f32(reinterpret_cast<float32x4_t>(sum), reinterpret_cast<float32x4_t>(a), reinterpret_cast<float32x4_t>(b)));
#else
  return sum + a * b;
#endif
}

// sum += a * b, in loops whose sums take nearly all registers. Compilers copy sums to and fro around intrinsics until they no
// longer fit, so but for AVX-512 it is the instruction itself. Wherever an instruction is written so, what it changes is a
// copy of the sum: by a reference it would keep an array of sums in memory. a: as of in_lanes.
inline void accumulate(Floats a, Floats b, Floats& sum) {
#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512BW__)
  Floats added = sum;
  asm("vfmadd231ps %2, %1, %0" : "+x"(added) : "x"(a), "x"(b));
  sum = added;
#elif defined(__aarch64__)
  Floats added = sum;
  asm("fmla %0.4s, %2.4s, %1.s[0]" : "+w"(added) : "w"(a), "w"(b));
  sum = added;
#else
  sum = multiply_add(a, b, sum);
#endif
}

// A number of a row, in all lanes; or in the first one, where that is what instructions multiply by.
template <typename Register, typename Number>
Register in_lanes(const char* from) {
#if defined(__aarch64__)
  Register loaded;
  asm("ldr %s0, %1" : "=w"(loaded) : "m"(*reinterpret_cast<const Number*>(from)));
  return loaded;
#else
  return Register{} + load_as<Number>(from);
#endif
}

// Products of numbers of 16 bits, the two of each lane added up.
inline Whole multiply_pairs(Whole a, Whole b) {
#if defined(__AVX512BW__)
  return reinterpret_cast<Whole>(_mm512_madd_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<Whole>(_mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#elif defined(__SSE2__)
  return reinterpret_cast<Whole>(_mm_madd_epi16(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
#else
  return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

// sum += multiply_pairs(a, b). As instructions rather than by their intrinsics, see accumulate: of these, compilers compute
// many products before they add the first, and the sums no longer fit the registers.
inline void add_pairs(Whole a, Whole b, Whole& sum) {
#if defined(__AVX512VNNI__)
  Whole added = sum;
  asm("vpdpwssd %2, %1, %0" : "+v"(added) : "v"(a), "v"(b));
  sum = added;
#elif defined(__AVXVNNI__)
  Whole added = sum;
  asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(added) : "x"(a), "x"(b));
  sum = added;
#elif defined(__AVX2__)
  Whole products, added = sum;
  asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+v"(added), "=&v"(products) : "v"(a), "v"(b));
  sum = added;
#elif defined(__aarch64__)
  Whole low, high, added = sum;
  asm("smull %1.4s, %3.4h, %4.4h\n\tsmull2 %2.4s, %3.8h, %4.8h\n\taddp %1.4s, %1.4s, %2.4s\n\tadd %0.4s, %0.4s, %1.4s"
      : "+w"(added), "=&w"(low), "=&w"(high)
      : "w"(a), "w"(b));
  sum = added;
#else
  sum += multiply_pairs(a, b);
#endif
}

// The same in fewer instructions, where there are registers for twice as many sums: `total` adds up the halves.
#if defined(__aarch64__)
struct PairSums {
  Whole low, high;  // two numbers of each lane of a register, of the lower and of the upper lanes
};
inline void add_pairs(Whole a, Whole b, PairSums& sums) {
  Whole low = sums.low, high = sums.high;
  asm("smlal %0.4s, %1.4h, %2.4h" : "+w"(low) : "w"(a), "w"(b));
  asm("smlal2 %0.4s, %1.8h, %2.8h" : "+w"(high) : "w"(a), "w"(b));
  sums = {low, high};
}
inline Whole total(const PairSums& sums) {
  return reinterpret_cast<Whole>(vpaddq_s32(reinterpret_cast<int32x4_t>(sums.low), reinterpret_cast<int32x4_t>(sums.high)));
}
#else
using PairSums = Whole;
inline Whole total(Whole sums) { return sums; }
#endif

#if defined(__SSSE3__) || defined(__aarch64__)
#define OATMILL_LOOK_UP 1

// Of each byte of places, which is below 16, that byte of a table that stands in every 16 bytes.
inline Words looked_up(Words table, Words places) {
#if defined(__AVX512BW__)
  return reinterpret_cast<Words>(_mm512_shuffle_epi8(reinterpret_cast<__m512i>(table), reinterpret_cast<__m512i>(places)));
#elif defined(__AVX2__)
  return reinterpret_cast<Words>(_mm256_shuffle_epi8(reinterpret_cast<__m256i>(table), reinterpret_cast<__m256i>(places)));
#elif defined(__SSSE3__)
  return reinterpret_cast<Words>(_mm_shuffle_epi8(reinterpret_cast<__m128i>(table), reinterpret_cast<__m128i>(places)));
#else
  return reinterpret_cast<Words>(vqtbl1q_u8(reinterpret_cast<uint8x16_t>(table), reinterpret_cast<uint8x16_t>(places)));
#endif
}

// Numbers of 16 bits, with their lower bytes from one register and their upper ones from another: of the bytes at even
// places of both, and of those at odd ones.
#if defined(__aarch64__)
inline Words even_pairs(Words lower, Words upper) {
  return reinterpret_cast<Words>(vsliq_n_u16(reinterpret_cast<uint16x8_t>(lower), reinterpret_cast<uint16x8_t>(upper), 8));
}
inline Words odd_pairs(Words lower, Words upper) {
  return reinterpret_cast<Words>(vsriq_n_u16(reinterpret_cast<uint16x8_t>(upper), reinterpret_cast<uint16x8_t>(lower), 8));
}
#else
inline Words even_and_odd(Words even, Words odd) {
#if defined(__AVX2__) && !defined(__AVX512BW__)
  return reinterpret_cast<Words>(_mm256_blendv_epi8(reinterpret_cast<__m256i>(even), reinterpret_cast<__m256i>(odd),
                                                    _mm256_set1_epi16(static_cast<int16_t>(0xff00))));
#else
  return (even & 0x00ff00ff) | (odd & 0xff00ff00);
#endif
}
inline Words even_pairs(Words lower, Words upper) { return even_and_odd(lower, upper << 8); }
inline Words odd_pairs(Words lower, Words upper) { return even_and_odd(lower >> 8, upper); }
#endif

#else
#define OATMILL_LOOK_UP 0
#endif

// WIDTH numbers that stand side by side, as floats.
inline Floats widened(const float* from) { return load_as<Floats>(from); }

inline Floats widened(const c10::BFloat16* from) {
#if defined(__AVX512BW__)
  const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  return as_floats(reinterpret_cast<const Words&>(words) << 16);
#elif defined(__AVX2__)
  const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return as_floats(reinterpret_cast<const Words&>(words) << 16);
#else
  using Short = uint16_t __attribute__((vector_size(WIDTH * 2)));
  return as_floats(__builtin_convertvector(load_as<Short>(from), Words) << 16);
#endif
}

inline Floats widened(const int8_t* from) {
#if defined(__AVX512BW__)
  const __m512i words = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return __builtin_convertvector(reinterpret_cast<const Whole&>(words), Floats);
#elif defined(__AVX2__)
  const __m256i words = _mm256_cvtepi8_epi32(_mm_loadu_si64(from));
  return __builtin_convertvector(reinterpret_cast<const Whole&>(words), Floats);
#else
  using Bytes = int8_t __attribute__((vector_size(WIDTH)));
  return __builtin_convertvector(load_as<Bytes>(from), Floats);
#endif
}

inline Floats widened(const c10::Half* from) {
#if defined(__AVX512BW__)
  const __m512 floats = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  return reinterpret_cast<const Floats&>(floats);
#elif defined(__AVX2__) && defined(__F16C__)
  const __m256 floats = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return reinterpret_cast<const Floats&>(floats);
#elif defined(__aarch64__)
  return reinterpret_cast<Floats>(vcvt_f32_f16(load_as<float16x4_t>(from)));
#else
  Floats floats;
  for (int i = 0; i < WIDTH; ++i) floats[i] = static_cast<float>(from[i]);
  return floats;
#endif
}

inline void store(float* to, Floats floats) { store_as(to, floats); }

// The nearest bfloat16 numbers, ties to even, in the upper halves of words. NaN may become infinity.
inline Words nearest_bf16(Floats floats) {
  const Words bits = reinterpret_cast<const Words&>(floats);
  return bits + 0x7fff + ((bits >> 16) & 1);
}

// Words of two bfloat16 numbers, the nearest to a float of each vector, ties to even. NaN may become infinity.
inline Words bf16_pairs(Floats low, Floats high) {
#if defined(__AVX512BF16__)
  const __m512i in_turns = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,  //
                                            23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512bh halves = _mm512_cvtne2ps_pbh(reinterpret_cast<__m512&>(high), reinterpret_cast<__m512&>(low));
  return reinterpret_cast<Words>(_mm512_permutexvar_epi16(in_turns, reinterpret_cast<const __m512i&>(halves)));
#else
  return nearest_bf16(low) >> 16 | (nearest_bf16(high) & 0xffff0000);
#endif
}

// Rounds to the nearest bfloat16, ties to even. NaN stays NaN.
inline void store(c10::BFloat16* to, Floats floats) {
#if defined(__AVX512BF16__)
  const __m256bh halves = _mm512_cvtneps_pbh(reinterpret_cast<const __m512&>(floats));
  std::memcpy(to, &halves, sizeof(halves));
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  store_as(to, vcvt_bf16_f32(reinterpret_cast<float32x4_t>(floats)));
#else
  using Short = uint16_t __attribute__((vector_size(WIDTH * 2)));
  const Words kept = floats == floats ? nearest_bf16(floats) : reinterpret_cast<const Words&>(floats) | 0x400000;
  store_as(to, __builtin_convertvector(kept >> 16, Short));
#endif
}

// Rounds to the nearest half, ties to even.
inline void store(c10::Half* to, Floats floats) {
#if defined(__AVX512BW__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(reinterpret_cast<const __m512&>(floats), 0));
#elif defined(__AVX2__) && defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(reinterpret_cast<const __m256&>(floats), 0));
#elif defined(__aarch64__)
  store_as(to, vcvt_f16_f32(reinterpret_cast<float32x4_t>(floats)));
#else
  for (int i = 0; i < WIDTH; ++i) to[i] = static_cast<c10::Half>(floats[i]);
#endif
}

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }
inline Floats smaller(Floats a, Floats b) { return a < b ? a : b; }

// mask: of each lane 0, which takes b, or -1, which takes a.
inline Floats chosen(Whole mask, Floats a, Floats b) { return mask ? a : b; }

inline float largest(Floats x) {
#if defined(__AVX512BW__)
  return _mm512_reduce_max_ps(reinterpret_cast<const __m512&>(x));
#else
  float most = x[0];
  for (int i = 1; i < WIDTH; ++i) most = most > x[i] ? most : x[i];
  return most;
#endif
}

inline float sum(Floats x) {
#if defined(__AVX512BW__)
  return _mm512_reduce_add_ps(reinterpret_cast<const __m512&>(x));
#else
  float total = 0;
  for (int i = 0; i < WIDTH; ++i) total += x[i];
  return total;
#endif
}

inline int32_t sum(Whole x) {
#if defined(__AVX512BW__)
  return _mm512_reduce_add_epi32(reinterpret_cast<const __m512i&>(x));
#else
  int32_t total = 0;
  for (int i = 0; i < WIDTH; ++i) total += x[i];
  return total;
#endif
}

inline uint32_t largest(Words x) {
#if defined(__AVX512BW__)
  return _mm512_reduce_max_epu32(reinterpret_cast<const __m512i&>(x));
#else
  uint32_t most = x[0];
  for (int i = 1; i < WIDTH; ++i) most = most > x[i] ? most : x[i];
  return most;
#endif
}

// Returns true if any of them is above the limit.
inline bool any_above(Floats x, float limit) {
#if defined(__AVX512BW__)
  return _mm512_cmp_ps_mask(reinterpret_cast<const __m512&>(x), _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps(_mm256_cmp_ps(reinterpret_cast<const __m256&>(x), _mm256_set1_ps(limit), _CMP_GT_OQ)) != 0;
#else
  return largest(x) > limit;
#endif
}

// The nearest whole numbers; of halves, either one.
inline Whole nearest(Floats x) {
#if defined(__AVX512BW__)
  return reinterpret_cast<Whole>(_mm512_cvtps_epi32(reinterpret_cast<const __m512&>(x)));
#elif defined(__AVX2__)
  return reinterpret_cast<Whole>(_mm256_cvtps_epi32(reinterpret_cast<const __m256&>(x)));
#elif defined(__aarch64__)
  return reinterpret_cast<Whole>(vcvtnq_s32_f32(reinterpret_cast<float32x4_t>(x)));
#else
  return __builtin_convertvector(x + (x < 0.0f ? Floats{} - 0.5f : Floats{} + 0.5f), Whole);
#endif
}

// e^x to a few units in the last place, by the polynomial of the Cephes library. Below -87 it is 0, above 88 e^88.
inline Floats exponential(Floats x) {
  const Floats clamped = smaller(larger(x, Floats{} - 87.0f), Floats{} + 88.0f);
  const Whole whole = nearest(clamped * 1.44269504f);
  const Floats turns = __builtin_convertvector(whole, Floats);
  const Floats rest = (clamped - turns * 0.693359375f) + turns * 2.12194440e-4f;
  Floats series = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  series = series * rest + 8.3334519073e-3f;
  series = series * rest + 4.1665795894e-2f;
  series = series * rest + 1.6666665459e-1f;
  series = series * rest + 5.0000001201e-1f;
  series = series * (rest * rest) + (rest + 1.0f);
  const Whole exponent = (whole + 127) << 23;
  return x < -87.0f ? Floats{} : series * reinterpret_cast<const Floats&>(exponent);
}

}  // namespace oatmill
