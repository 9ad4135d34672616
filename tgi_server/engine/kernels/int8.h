// Products of bytes, four at a time, summed exactly.
//
// The instruction multiplies unsigned by signed bytes, so inputs are stored OFFSET higher than they are, and OFFSET times
// the sum of an output's weights is taken off again at the end.

#pragma once

#include <cstdint>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "lanes.h"

namespace oatmill {

using Bytes = uint8_t __attribute__((vector_size(LANES)));

constexpr int OFFSET = 128;

#if defined(__AVX512VNNI__)

constexpr bool MULTIPLIES_BYTES = true;

// As an instruction rather than by its intrinsic, around which compilers copy the totals to and fro until they no
// longer fit the registers.
struct AddBytes {
  static void add(__m512i& total, __m512i row, __m512i column) {
    asm("vpdpbusd %2, %1, %0" : "+v"(total) : "v"(row), "v"(column));
  }
};

#else

constexpr bool MULTIPLIES_BYTES = false;

#endif

}  // namespace oatmill
