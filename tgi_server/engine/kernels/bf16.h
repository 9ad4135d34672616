// Products of bfloat16 numbers, two at a time, summed in float.

#pragma once

#include <c10/util/BFloat16.h>

#include <type_traits>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace oatmill {

#if defined(__AVX512BF16__)

constexpr bool MULTIPLIES_PAIRS = true;

// As an instruction rather than by its intrinsic, around which compilers copy the totals to and fro until they no
// longer fit the registers.
struct AddPairs {
  static void add(__m512i& total, __m512i row, __m512i column) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(total) : "v"(row), "v"(column));
  }
};

#else

constexpr bool MULTIPLIES_PAIRS = false;

#endif

// How many numbers of type T one instruction multiplies and adds for each float.
template <typename T>
constexpr int PAIR = MULTIPLIES_PAIRS && std::is_same_v<T, c10::BFloat16> ? 2 : 1;

}  // namespace oatmill
