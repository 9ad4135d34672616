// Vector registers by the compiler's own vector types, so that one source serves every instruction set.

#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace oatmill {

// Floats of a vector, which is one register with AVX-512, and several of them with other instruction sets. Layouts in
// memory are made for this number, on every CPU.
constexpr int LANES = 16;

using Lanes = float __attribute__((vector_size(LANES * sizeof(float))));
using Ints = int32_t __attribute__((vector_size(LANES * sizeof(int32_t))));
using Bits = uint32_t __attribute__((vector_size(LANES * sizeof(uint32_t))));
using Halves = uint16_t __attribute__((vector_size(LANES * sizeof(uint16_t))));

inline Lanes load(const float* from) {
  Lanes lanes;
  std::memcpy(&lanes, from, sizeof(lanes));
  return lanes;
}

inline Lanes load(const c10::BFloat16* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof(halves));
  const Bits bits = __builtin_convertvector(halves, Bits) << 16;
  return reinterpret_cast<const Lanes&>(bits);
}

inline Lanes load(const c10::Half* from) {
#if defined(__AVX512F__)
  const __m512 lanes = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  return reinterpret_cast<const Lanes&>(lanes);
#else
  Lanes lanes;
#if defined(__F16C__)
  for (int i = 0; i < LANES; i += 8)
    _mm256_storeu_ps(reinterpret_cast<float*>(&lanes) + i,
                     _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
#else
  for (int i = 0; i < LANES; ++i) lanes[i] = static_cast<float>(from[i]);
#endif
  return lanes;
#endif
}

inline void store(float* to, Lanes lanes) { std::memcpy(to, &lanes, sizeof(lanes)); }

// Rounds to the nearest bfloat16, ties to even. NaN stays NaN.
inline void store(c10::BFloat16* to, Lanes lanes) {
#if defined(__AVX512BF16__)
  const __m256bh halves = _mm512_cvtneps_pbh(reinterpret_cast<const __m512&>(lanes));
#else
  const Bits bits = reinterpret_cast<const Bits&>(lanes);
  const Bits rounded = bits + 0x7fff + ((bits >> 16) & 1);
  const Bits chosen = lanes == lanes ? rounded : bits | 0x400000;
  const Halves halves = __builtin_convertvector(chosen >> 16, Halves);
#endif
  std::memcpy(to, &halves, sizeof(halves));
}

// Rounds to the nearest half, ties to even.
inline void store(c10::Half* to, Lanes lanes) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(reinterpret_cast<const __m512&>(lanes), 0));
#elif defined(__F16C__)
  for (int i = 0; i < LANES; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(reinterpret_cast<const float*>(&lanes) + i), 0));
#else
  for (int i = 0; i < LANES; ++i) to[i] = static_cast<c10::Half>(lanes[i]);
#endif
}

inline Lanes larger(Lanes a, Lanes b) { return a > b ? a : b; }
inline Lanes smaller(Lanes a, Lanes b) { return a < b ? a : b; }

inline float largest(Lanes lanes) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(reinterpret_cast<const __m512&>(lanes));
#else
  for (int width = LANES / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
  return lanes[0];
#endif
}

// Whether any of them is above the limit.
inline bool any_above(Lanes lanes, float limit) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(reinterpret_cast<const __m512&>(lanes), _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
#else
  return largest(lanes) > limit;
#endif
}

inline float sum(Lanes lanes) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(reinterpret_cast<const __m512&>(lanes));
#else
  for (int width = LANES / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
#endif
}

// The nearest whole numbers; of halves, either one.
inline Ints nearest(Lanes x) {
#if defined(__AVX512F__)
  const __m512i whole = _mm512_cvtps_epi32(reinterpret_cast<const __m512&>(x));
  return reinterpret_cast<const Ints&>(whole);
#else
  return __builtin_convertvector(x + (x < 0.0f ? Lanes{} - 0.5f : Lanes{} + 0.5f), Ints);
#endif
}

// e^x to a few units in the last place, by the polynomial of the Cephes library. Below -87 it is 0, above 88 e^88.
inline Lanes exponential(Lanes x) {
  const Lanes clamped = smaller(larger(x, Lanes{} - 87.0f), Lanes{} + 88.0f);
  const Ints whole = nearest(clamped * 1.44269504f);
  const Lanes turns = __builtin_convertvector(whole, Lanes);
  const Lanes rest = (clamped - turns * 0.693359375f) + turns * 2.12194440e-4f;
  Lanes series = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  series = series * rest + 8.3334519073e-3f;
  series = series * rest + 4.1665795894e-2f;
  series = series * rest + 1.6666665459e-1f;
  series = series * rest + 5.0000001201e-1f;
  series = series * rest * rest + rest + 1.0f;
  const Ints exponent = (whole + 127) << 23;
  const Lanes power = reinterpret_cast<const Lanes&>(exponent);
  return x < -87.0f ? Lanes{} : series * power;
}

}  // namespace oatmill
