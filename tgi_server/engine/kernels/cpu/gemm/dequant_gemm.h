// Dequantize-then-GEMM for many rows: a panel of a tile becomes float32 or bfloat16 once for all rows, and goes through the
// kernels for those.

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "gemm/gemm.h"
#include "gemm/microkernel.h"
#include "gemm/w4_gemm.h"
#include "simd/simd.h"

namespace oatmill {

// Weights of 16 bits, on CPUs that multiply floats only. The result is that of FmaDot to the last bit.
template <typename Kind>
struct Dequant16Gemm {
  using Weights = Kind;
  using Narrow = FmaDot<Kind>;
  using Wide = Gemm<FmaDot<FloatWeights>>;
  static constexpr int64_t INPUT_WORD = Kind::DEPTH * Wide::INPUT_WORD, CHUNK_DEPTH = Wide::CHUNK_DEPTH / Kind::DEPTH, UNIT = 1;
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

// A thread's panel, the same for all kernels whose panels are as large.
template <int64_t BYTES>
char* thread_panel() {
  alignas(64) static thread_local char part[BYTES];
  return part;
}

// Quantized weights. Inner: the kernel that multiplies rows by the panel.
template <typename Kind, typename Inner>
struct DequantGemm {
  using Weights = typename Inner::Weights;
  static bool needs_sums(const Scales&) { return false; }
  static constexpr bool DEQUANTIZES = true;
  // Inputs of a part, for few rows and for many: multiples of what every Inner takes at once.
  static constexpr int64_t FEW_INPUTS = 96,
                           INPUTS = std::max<int64_t>(192, Inner::CHUNK_DEPTH * Weights::DEPTH);

  template <typename T>
  static Input prepare(const T* from, int64_t rows, int64_t inputs, int64_t depth, const int32_t*, int64_t) {
    return Inner::prepare(from, rows, inputs, depth * Kind::DEPTH / Weights::DEPTH);
  }

  static void multiply(const QuantizedGemmArgs& product, int64_t first_row, int64_t rows, int64_t tile, int64_t next_tile,
                       char* acc) {
    constexpr int64_t FEW_ROWS = 48;
    const int64_t whole = (rows < FEW_ROWS ? FEW_INPUTS : INPUTS) / Kind::DEPTH;
    char* part = thread_panel<INPUTS / Weights::DEPTH * TILE_WORD>();
    const WeightStream words{product.words(tile), product.words(next_tile), product.depth};
    const Kind kind(product.codebook);
    int64_t group = 0;
    for (int64_t k = 0; k < product.depth; k += whole) {
      const int64_t depth = std::min(whole, product.depth - k);
      dequantize(product, kind, words, tile, k, k + depth, group, part);
      const char* input =
          product.input + first_row * product.row_bytes + k * Kind::DEPTH / Weights::DEPTH * Inner::INPUT_WORD;
      Inner::multiply(input, product.row_bytes, rows, part, part, depth * Kind::DEPTH / Weights::DEPTH, k == 0, acc);
    }
  }

 private:
  // Makes weights of words first .. last - 1. group: of the first; on return, of the last.
  static void dequantize(const QuantizedGemmArgs& product, const Kind& kind, const WeightStream& words, int64_t tile,
                     int64_t first, int64_t last, int64_t& group, char* part) {
    for (int64_t k = first; k < last; ++k) words.prefetch<COLUMNS / WIDTH>(k, 0);
    for (int64_t begin = first, end; begin < last; begin = end) {
      while (begin >= product.starts[group + 1]) ++group;
      end = std::min<int64_t>(last, product.starts[group + 1]);
      for (int column = 0; column < COLUMNS; column += WIDTH) {
        const int64_t scaled = (tile * product.groups + group) * COLUMNS + column;
        F32 scales[1], offsets[1];
        product.scales.template read<0, true>(scaled, scales, offsets);
        for (int64_t k = begin; k < end; ++k)
          dequantize_word(kind, words.read(k, column), scales[0], offsets[0],
                      part + (k - first) * Kind::DEPTH / Weights::DEPTH * TILE_WORD + column * WORD);
      }
    }
  }

  // Makes weights of a word of WIDTH outputs; to: where their first words go.
  [[gnu::always_inline]] static void dequantize_word(const Kind& kind, U32 word, F32 scales, F32 offsets, char* to) {
    F32 weights[Kind::DEPTH];
#pragma GCC unroll 8
    for (int part = 0; part < Kind::DEPTH / Kind::TOGETHER; ++part) {
      F32 numbers[Kind::TOGETHER];
      kind.numbers(word, part, numbers);
#pragma GCC unroll 4
      for (int i = 0; i < Kind::TOGETHER; ++i) weights[Kind::step(part, i)] = fma(numbers[i], scales, offsets);
    }
#pragma GCC unroll 8
    for (int step = 0; step < Kind::DEPTH; step += Weights::DEPTH) {
      char* place = to + step / Weights::DEPTH * TILE_WORD;
      if constexpr (std::is_same_v<Weights, FloatWeights>)
        store_as(place, weights[step]);
      else
        store_as(place, bf16_pairs(weights[step], weights[step + 1]));
    }
  }
};

}  // namespace oatmill
