// The products of attention in vector registers: some rows times a tile, whose columns lie side by side in memory.
//
// Both are made of the Dots of microkernel.h. Of a cache's numbers, PAIR make a word: what an instruction, or
// two, multiply by each number of a row.

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "attention/kv_layout.h"
#include "gemm/loop.h"
#include "gemm/microkernel.h"

namespace oatmill {

// Products of floats, for a cache of smaller numbers that do not stand in pairs.
template <typename C>
struct WidenedColumns {
  using Accumulator = F32;
  using Operand = float;
  static constexpr int STEPS = 1, NUMBER = sizeof(float), ROWS = FmaDot<FloatWeights>::ROWS;
  static constexpr int WORD_BYTES = sizeof(C);

  static F32 column(const char* words, int64_t column, int64_t) {
    return load_f32(reinterpret_cast<const C*>(words) + column);
  }
  static F32 row(const char* input) { return broadcast<F32, float>(input); }
  static void add(F32 row, F32 column, F32& sum) { accumulate(row, column, sum); }
};

// The instruction set that reads words of numbers of type C. Operand: what rows have to be made of.
template <typename C>
struct Columns : WidenedColumns<C> {};
template <>
struct Columns<float> : FmaDot<FloatWeights> {
  using Operand = float;
  static constexpr int WORD_BYTES = WORD;
};
#if OATMILL_BF16
template <>
struct Columns<c10::BFloat16> : Bf16Dot {
  using Operand = c10::BFloat16;
  static constexpr int WORD_BYTES = WORD;
};
#else
template <>
struct Columns<c10::BFloat16> : FmaDot<Bf16Weights> {
  using Operand = float;
  static constexpr int WORD_BYTES = WORD;
};
#endif

// Turns rows of a tile, an even number of them where numbers stand in pairs, into those of a cache of another type.
template <typename To, typename From>
const To* converted(const From* tile, int64_t rows, int64_t columns, To* to) {
  static_assert(PAIR<To> == 1 || PAIR<From> == 1);
  if constexpr (PAIR<To> == 2) {  // the upper halves of floats are bfloat16 numbers, to which no number is rounded here
    for (int64_t row = 0; row < rows; row += 2)
      for (int64_t column = 0; column < columns; column += WIDTH) {
        const F32 low = load_f32(tile + row * columns + column), high = load_f32(tile + (row + 1) * columns + column);
        store_as(to + row * columns + 2 * column,
                 (reinterpret_cast<const U32&>(low) >> 16) | (reinterpret_cast<const U32&>(high) & 0xffff0000));
      }
  } else {
    for (int64_t row = 0; row < rows; row += PAIR<From>)
      for (int64_t step = 0; step < PAIR<From>; ++step)
        for (int64_t column = 0; column < columns; column += WIDTH)
          store_as(to + (row + step) * columns + column,
                   Columns<From>::column(reinterpret_cast<const char*>(tile + row * columns), column, step));
  }
  return to;
}

// Rows and a tile: words[k][column] are what rows[r][k] is multiplied by.
struct TileProduct {
  const char* rows;
  int64_t row_bytes;
  const char* tile;
  int64_t word_bytes;  // from a word of a column to the column's next
  int words;
};

// sums[r][v] += the products of R rows with V registers of columns, one word after the other whatever R and V are.
// prefetched: a tile that is needed soon, of which as much is prefetched as is read of this one, since the processor
// itself does not guess which tile comes next; or null.
template <typename Dot, int R, int V>
inline void add_products(const TileProduct& product, const char* prefetched, typename Dot::Accumulator (&sums)[R][V]) {
  constexpr int REGISTER_BYTES = WIDTH * Dot::WORD_BYTES;
  constexpr int IN_LINE = std::max(1, 64 / REGISTER_BYTES);
  const auto add_words = [&](auto prefetches) {
    for (int k = 0; k < product.words; ++k) {
      const char* words = product.tile + k * product.word_bytes;
      if constexpr (prefetches)
#pragma GCC unroll 8
        for (int v = 0; v < V; v += IN_LINE)
          __builtin_prefetch(prefetched + k * product.word_bytes + v * REGISTER_BYTES, 0, 2);
#pragma GCC unroll 2
      for (int step = 0; step < Dot::STEPS; ++step)
        add_outer<Dot>(
            [&](int r) {
              return Dot::row(product.rows + r * product.row_bytes + (k * Dot::STEPS + step) * Dot::NUMBER);
            },
            [&](int v) { return Dot::column(words, v * WIDTH, step); }, sums);
    }
  };
  prefetched ? add_words(std::true_type()) : add_words(std::false_type());
}

// Loads what rows have summed of values so far, [R, columns] with so many floats from a row to the next, times their
// decays.
template <int R, int V, typename Accumulator>
inline void load_decayed(const float* from, int64_t columns, const float* decays, Accumulator (&acc)[R][V]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v)
      acc[r][v] = __builtin_bit_cast(Accumulator, load_as<F32>(from + r * columns + v * WIDTH) * decays[r]);
}

}  // namespace oatmill
