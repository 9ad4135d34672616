// Vector registers as wide as this instruction set has them, for loops whose accumulators stay in registers.

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
constexpr int WIDTH = 16;  // floats of a register. Code for registers of this width tests the same macro.
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

using F32 = float __attribute__((vector_size(WIDTH * 4)));
using U32 = uint32_t __attribute__((vector_size(WIDTH * 4)));
using I32 = int32_t __attribute__((vector_size(WIDTH * 4)));
using F64 = double __attribute__((vector_size(WIDTH * 4)));  // half as many numbers

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

inline F32 as_floats(U32 bits) { return reinterpret_cast<F32&>(bits); }

// Words without their lower halves. With 16 registers, none of them is spared for a mask.
inline U32 upper_halves(U32 words) {
#if defined(__AVX2__) && !defined(__AVX512BW__)
  U32 upper;
  asm("vpsrld $16, %1, %0\n\tvpslld $16, %0, %0" : "=x"(upper) : "x"(words));
  return upper;
#else
  return words & 0xffff0000;
#endif
}

// sum + a * b, with one rounding where the CPU has an instruction for it.
inline F32 fma(F32 a, F32 b, F32 sum) {
#if defined(__AVX512BW__)
  return reinterpret_cast<F32>(
      _mm512_fmadd_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(sum)));
#elif defined(__AVX2__) && defined(__FMA__)
  return reinterpret_cast<F32>(
      _mm256_fmadd_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b), reinterpret_cast<__m256>(sum)));
#elif defined(__aarch64__)
  return reinterpret_cast<F32>(vfmaq_f32(reinterpret_cast<float32x4_t>(sum), reinterpret_cast<float32x4_t>(a),
                                         reinterpret_cast<float32x4_t>(b)));
#else
  return sum + a * b;
#endif
}

// sum += a * b, in loops whose accumulators take nearly all registers. Compilers copy them around intrinsics until they
// no longer fit, so but for AVX-512 it is the instruction itself. Wherever an instruction is written so, what it
// changes is a copy of the accumulator: by a reference it would keep an array of them in memory. a: as of broadcast.
inline void accumulate(F32 a, F32 b, F32& sum) {
#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512BW__)
  F32 added = sum;
  asm("vfmadd231ps %2, %1, %0" : "+x"(added) : "x"(a), "x"(b));
  sum = added;
#elif defined(__aarch64__)
  F32 added = sum;
  asm("fmla %0.4s, %2.4s, %1.s[0]" : "+w"(added) : "w"(a), "w"(b));
  sum = added;
#else
  sum = fma(a, b, sum);
#endif
}

// A number of a row, in all lanes; or in the first one, where that is what instructions multiply by.
template <typename Register, typename Number>
Register broadcast(const char* from) {
#if defined(__aarch64__)
  Register loaded;
  asm("ldr %s0, %1" : "=w"(loaded) : "m"(*reinterpret_cast<const Number*>(from)));
  return loaded;
#else
  return Register{} + load_as<Number>(from);
#endif
}

// Products of numbers of 16 bits, the two of each lane added up.
inline I32 madd_i16(I32 a, I32 b) {
#if defined(__AVX512BW__)
  return reinterpret_cast<I32>(_mm512_madd_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<I32>(_mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#elif defined(__SSE2__)
  return reinterpret_cast<I32>(_mm_madd_epi16(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
#else
  return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

// sum += madd_i16(a, b). As instructions rather than by their intrinsics, see accumulate: of these, compilers compute
// many products before they add the first, and the sums no longer fit the registers.
inline void dot_i16(I32 a, I32 b, I32& sum) {
#if defined(__AVX512VNNI__)
  I32 added = sum;
  asm("vpdpwssd %2, %1, %0" : "+v"(added) : "v"(a), "v"(b));
  sum = added;
#elif defined(__AVXVNNI__)
  I32 added = sum;
  asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(added) : "x"(a), "x"(b));
  sum = added;
#elif defined(__AVX2__)
  I32 products, added = sum;
  asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+v"(added), "=&v"(products) : "v"(a), "v"(b));
  sum = added;
#elif defined(__aarch64__)
  I32 low, high, added = sum;
  asm("smull %1.4s, %3.4h, %4.4h\n\tsmull2 %2.4s, %3.8h, %4.8h\n\taddp %1.4s, %1.4s, %2.4s\n\tadd %0.4s, %0.4s, %1.4s"
      : "+w"(added), "=&w"(low), "=&w"(high)
      : "w"(a), "w"(b));
  sum = added;
#else
  sum += madd_i16(a, b);
#endif
}

// The same in fewer instructions, where there are registers for twice as many sums: `total` adds up the halves.
#if defined(__aarch64__)
struct DotI16Accumulator {
  I32 low, high;  // two numbers of each lane of a register, of the lower and of the upper lanes
};
inline void dot_i16(I32 a, I32 b, DotI16Accumulator& sums) {
  I32 low = sums.low, high = sums.high;
  asm("smlal %0.4s, %1.4h, %2.4h" : "+w"(low) : "w"(a), "w"(b));
  asm("smlal2 %0.4s, %1.8h, %2.8h" : "+w"(high) : "w"(a), "w"(b));
  sums = {low, high};
}
inline I32 total(const DotI16Accumulator& sums) {
  return reinterpret_cast<I32>(
      vpaddq_s32(reinterpret_cast<int32x4_t>(sums.low), reinterpret_cast<int32x4_t>(sums.high)));
}
#else
using DotI16Accumulator = I32;
#endif
inline I32 total(I32 sums) { return sums; }

#if defined(__SSSE3__) || defined(__aarch64__)
#define OATMILL_LUT 1

// Of each byte of places, which is below 16, that byte of a table that stands in every 16 bytes.
inline U32 lut16(U32 table, U32 places) {
#if defined(__AVX512BW__)
  return reinterpret_cast<U32>(
      _mm512_shuffle_epi8(reinterpret_cast<__m512i>(table), reinterpret_cast<__m512i>(places)));
#elif defined(__AVX2__)
  return reinterpret_cast<U32>(
      _mm256_shuffle_epi8(reinterpret_cast<__m256i>(table), reinterpret_cast<__m256i>(places)));
#elif defined(__SSSE3__)
  return reinterpret_cast<U32>(_mm_shuffle_epi8(reinterpret_cast<__m128i>(table), reinterpret_cast<__m128i>(places)));
#else
  return reinterpret_cast<U32>(vqtbl1q_u8(reinterpret_cast<uint8x16_t>(table), reinterpret_cast<uint8x16_t>(places)));
#endif
}

// Numbers of 16 bits, with their lower bytes from one register and their upper ones from another: of the bytes at even
// places of both, and of those at odd ones.
#if defined(__aarch64__)
inline U32 even_pairs(U32 lower, U32 upper) {
  return reinterpret_cast<U32>(
      vsliq_n_u16(reinterpret_cast<uint16x8_t>(lower), reinterpret_cast<uint16x8_t>(upper), 8));
}
inline U32 odd_pairs(U32 lower, U32 upper) {
  return reinterpret_cast<U32>(
      vsriq_n_u16(reinterpret_cast<uint16x8_t>(upper), reinterpret_cast<uint16x8_t>(lower), 8));
}
#else
inline U32 even_and_odd(U32 even, U32 odd) {
#if defined(__AVX2__) && !defined(__AVX512BW__)
  return reinterpret_cast<U32>(_mm256_blendv_epi8(reinterpret_cast<__m256i>(even), reinterpret_cast<__m256i>(odd),
                                                  _mm256_set1_epi16(static_cast<int16_t>(0xff00))));
#else
  return (even & 0x00ff00ff) | (odd & 0xff00ff00);
#endif
}
inline U32 even_pairs(U32 lower, U32 upper) { return even_and_odd(lower, upper << 8); }
inline U32 odd_pairs(U32 lower, U32 upper) { return even_and_odd(lower >> 8, upper); }
#endif

#else
#define OATMILL_LUT 0
#endif

// WIDTH numbers that stand side by side, as floats.
inline F32 load_f32(const float* from) { return load_as<F32>(from); }

inline F32 load_f32(const c10::BFloat16* from) {
#if defined(__AVX512BW__)
  const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  return as_floats(reinterpret_cast<const U32&>(words) << 16);
#elif defined(__AVX2__)
  const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return as_floats(reinterpret_cast<const U32&>(words) << 16);
#else
  using Short = uint16_t __attribute__((vector_size(WIDTH * 2)));
  return as_floats(__builtin_convertvector(load_as<Short>(from), U32) << 16);
#endif
}

inline F32 load_f32(const int8_t* from) {
#if defined(__AVX512BW__)
  const __m512i words = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return __builtin_convertvector(reinterpret_cast<const I32&>(words), F32);
#elif defined(__AVX2__)
  const __m256i words = _mm256_cvtepi8_epi32(_mm_loadu_si64(from));
  return __builtin_convertvector(reinterpret_cast<const I32&>(words), F32);
#else
  using Bytes = int8_t __attribute__((vector_size(WIDTH)));
  return __builtin_convertvector(load_as<Bytes>(from), F32);
#endif
}

inline F32 load_f32(const c10::Half* from) {
#if defined(__AVX512BW__)
  const __m512 floats = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  return reinterpret_cast<const F32&>(floats);
#elif defined(__AVX2__) && defined(__F16C__)
  const __m256 floats = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return reinterpret_cast<const F32&>(floats);
#elif defined(__aarch64__)
  return reinterpret_cast<F32>(vcvt_f32_f16(load_as<float16x4_t>(from)));
#else
  F32 floats;
  for (int i = 0; i < WIDTH; ++i) floats[i] = static_cast<float>(from[i]);
  return floats;
#endif
}

// WIDTH / 2 floats that stand side by side, as doubles.
inline F64 load_f64(const float* from) {
  using Half = float __attribute__((vector_size(WIDTH * 2)));
  return __builtin_convertvector(load_as<Half>(from), F64);
}

inline void store(float* to, F32 floats) { store_as(to, floats); }

// The nearest bfloat16 numbers, ties to even, in the upper halves of words. NaN may become infinity.
inline U32 round_bf16(F32 floats) {
  const U32 bits = reinterpret_cast<const U32&>(floats);
  return bits + 0x7fff + ((bits >> 16) & 1);
}

// Rounds to the nearest bfloat16, ties to even. NaN stays NaN.
inline void store(c10::BFloat16* to, F32 floats) {
#if defined(__AVX512BF16__)
  const __m256bh halves = _mm512_cvtneps_pbh(reinterpret_cast<const __m512&>(floats));
  std::memcpy(to, &halves, sizeof(halves));
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  store_as(to, vcvt_bf16_f32(reinterpret_cast<float32x4_t>(floats)));
#else
  using Short = uint16_t __attribute__((vector_size(WIDTH * 2)));
  const U32 kept = floats == floats ? round_bf16(floats) : reinterpret_cast<const U32&>(floats) | 0x400000;
  store_as(to, __builtin_convertvector(kept >> 16, Short));
#endif
}

// Rounds to the nearest half, ties to even.
inline void store(c10::Half* to, F32 floats) {
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

inline F32 vmax(F32 a, F32 b) { return a > b ? a : b; }
inline F32 vmin(F32 a, F32 b) { return a < b ? a : b; }

// mask: of each lane 0, which takes b, or -1, which takes a.
inline F32 select(I32 mask, F32 a, F32 b) { return mask ? a : b; }

inline float reduce_max(F32 x) {
#if defined(__AVX512BW__)
  return _mm512_reduce_max_ps(reinterpret_cast<const __m512&>(x));
#else
  float most = x[0];
  for (int i = 1; i < WIDTH; ++i) most = most > x[i] ? most : x[i];
  return most;
#endif
}

inline float sum(F32 x) {
#if defined(__AVX512BW__)
  return _mm512_reduce_add_ps(reinterpret_cast<const __m512&>(x));
#else
  float total = 0;
  for (int i = 0; i < WIDTH; ++i) total += x[i];
  return total;
#endif
}

inline int32_t sum(I32 x) {
#if defined(__AVX512BW__)
  return _mm512_reduce_add_epi32(reinterpret_cast<const __m512i&>(x));
#else
  int32_t total = 0;
  for (int i = 0; i < WIDTH; ++i) total += x[i];
  return total;
#endif
}

inline uint32_t reduce_max(U32 x) {
#if defined(__AVX512BW__)
  return _mm512_reduce_max_epu32(reinterpret_cast<const __m512i&>(x));
#else
  uint32_t most = x[0];
  for (int i = 1; i < WIDTH; ++i) most = most > x[i] ? most : x[i];
  return most;
#endif
}

// Returns true if any of them is above the limit.
inline bool any_greater(F32 x, float limit) {
#if defined(__AVX512BW__)
  return _mm512_cmp_ps_mask(reinterpret_cast<const __m512&>(x), _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps(_mm256_cmp_ps(reinterpret_cast<const __m256&>(x), _mm256_set1_ps(limit), _CMP_GT_OQ)) != 0;
#else
  return reduce_max(x) > limit;
#endif
}

// Returns true if a lane of a mask is set; each is 0 or -1.
inline bool any(I32 mask) {
#if defined(__AVX512BW__)
  return _mm512_movepi32_mask(reinterpret_cast<const __m512i&>(mask)) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps(reinterpret_cast<const __m256&>(mask)) != 0;
#else
  return reduce_max(reinterpret_cast<const U32&>(mask)) != 0;
#endif
}

// The largest whole numbers that are not above.
inline F32 round_down(F32 x) {
#if defined(__AVX512BW__)
  return reinterpret_cast<F32>(_mm512_floor_ps(reinterpret_cast<const __m512&>(x)));
#elif defined(__AVX2__)
  return reinterpret_cast<F32>(_mm256_floor_ps(reinterpret_cast<const __m256&>(x)));
#else
  for (int i = 0; i < WIDTH; ++i) x[i] = __builtin_floorf(x[i]);
  return x;
#endif
}

// The nearest whole numbers; of halves, either one.
inline I32 round_i32(F32 x) {
#if defined(__AVX512BW__)
  return reinterpret_cast<I32>(_mm512_cvtps_epi32(reinterpret_cast<const __m512&>(x)));
#elif defined(__AVX2__)
  return reinterpret_cast<I32>(_mm256_cvtps_epi32(reinterpret_cast<const __m256&>(x)));
#elif defined(__aarch64__)
  return reinterpret_cast<I32>(vcvtnq_s32_f32(reinterpret_cast<float32x4_t>(x)));
#else
  return __builtin_convertvector(x + (x < 0.0f ? F32{} - 0.5f : F32{} + 0.5f), I32);
#endif
}

// e^x to a few units in the last place, by the polynomial of the Cephes library. Below -87 it is 0, above 88 e^88.
inline F32 exponential(F32 x) {
  const F32 clamped = vmin(vmax(x, F32{} - 87.0f), F32{} + 88.0f);
  const I32 whole = round_i32(clamped * 1.44269504f);
  const F32 turns = __builtin_convertvector(whole, F32);
  const F32 rest = fma(turns, F32{} + 2.12194440e-4f, fma(turns, F32{} - 0.693359375f, clamped));
  F32 series = fma(rest, F32{} + 1.9875691500e-4f, F32{} + 1.3981999507e-3f);
  series = fma(series, rest, F32{} + 8.3334519073e-3f);
  series = fma(series, rest, F32{} + 4.1665795894e-2f);
  series = fma(series, rest, F32{} + 1.6666665459e-1f);
  series = fma(series, rest, F32{} + 5.0000001201e-1f);
  series = fma(series, rest * rest, rest + 1.0f);
  const I32 exponent = (whole + 127) << 23;
  return x < -87.0f ? F32{} : series * reinterpret_cast<const F32&>(exponent);
}

}  // namespace oatmill
