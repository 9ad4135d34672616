// Dequantize-then-GEMM for weights of 16 bits and many rows on CPUs that multiply floats only: a chunk of a tile
// becomes float32 once. The result is that of FmaDot to the last bit.

#pragma once

#include <cstdint>

#include "gemm/gemm.h"
#include "gemm/microkernel.h"
#include "simd/simd.h"

namespace oatmill {

// A kernel, see multiply_tile.
template <typename Kind>
struct Dequant16Gemm {
  using Weights = Kind;
  using Narrow = FmaDot<Kind>;
  using Wide = Gemm<FmaDot<FloatWeights>>;
  static constexpr int64_t INPUT_WORD = Kind::DEPTH * Wide::INPUT_WORD, CHUNK_DEPTH = Wide::CHUNK_DEPTH / Kind::DEPTH,
                           UNIT = 1;
  static constexpr int OFFSET = 0;
  static constexpr bool DEQUANTIZES = true;

  template <typename T>
  static Input prepare(const T* from, int64_t rows, int64_t inputs, int64_t depth) {
    return Narrow::prepare(from, rows, inputs, depth);
  }

  static void multiply(const char* input, int64_t row_bytes, int64_t rows, const char* weights, const char* next,
                       int64_t depth, bool from_zero, char* acc) {
    alignas(64) char wide[CHUNK_DEPTH * Kind::DEPTH * TILE_WORD];
    for (int64_t k = 0; k < depth; ++k)
      for (int64_t step = 0; step < Kind::DEPTH; ++step)
        for (int64_t column = 0; column < COLUMNS; column += WIDTH)
          store_as(wide + (k * Kind::DEPTH + step) * TILE_WORD + column * WORD,
                   Narrow::column(weights + k * TILE_WORD, column, step));
    Wide::multiply(input, row_bytes, rows, wide, next, depth * Kind::DEPTH, from_zero, acc);
  }
};

}  // namespace oatmill
