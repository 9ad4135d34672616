// The sums of block_gemm.h for many rows, by tiles: weights of 16 bits are two bytes, high and low.
//
//     for blocks, for some tiles of weights:             of a task, which has as many rows as stay in L2
//       unpack the block's weights into L1: by 16 outputs, the high bytes of 256 inputs, then the low ones
//       for 16 rows:
//         for 16 outputs, high and low bytes: a sum = 4 products, 64 inputs deep
//         accumulators += (high * 256 + low) * unit * scale of the row's inputs
//
// Beside the products of 16 rows, those of the 16 rows before leave their tiles, and are scaled. Sums are integers, so
// outputs are to the last bit those of block_gemm.h.

#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "gemm/amx.h"
#include "gemm/block_gemm.h"

namespace oatmill {

#if OATMILL_BLOCK_AMX

template <typename Kind, typename Digits>
struct BlockAmx {
  using Blocks = BlockGemm<Kind, Digits>;
  using Block = typename Blocks::Block;

  static bool takes(int64_t rows, const BlockLayout& layout) {
    return rows >= SIDE && layout.block_words() * Kind::DEPTH == BLOCK && code_tiles_permitted();
  }

  // run_gemm for these.
  template <typename T, typename Number>
  static void run(const BlockGemmArgs& product, const Epilogue<T>& epilogue, const std::vector<int64_t>* chosen,
                  const Number& number) {
    const int64_t tiles = chosen ? static_cast<int64_t>(chosen->size()) : ceil_div(product.outputs, COLUMNS);
    const int64_t enough = ENOUGH * loop_threads(), together = std::clamp<int64_t>(tiles / enough, 1, TOGETHER);
    const int64_t parts = ceil_div(tiles, together);
    int64_t chunks = ceil_div(product.rows, MOST_ROWS);
    while (parts * chunks < enough && product.rows > chunks * 4 * SIDE) ++chunks;
    const int64_t rows = ceil_div(ceil_div(product.rows, chunks), SIDE) * SIDE;
    parallel_for(parts * ceil_div(product.rows, rows), [&](int64_t item) {
      const int64_t row = item / parts * rows, last_row = std::min(row + rows, product.rows);
      const int64_t first = item % parts * together, count = std::min(together, tiles - first);
      const auto tile_at = [&](int64_t t) { return chosen ? (*chosen)[first + t] : first + t; };
      static thread_local std::vector<float> room;
      room.assign(count * rows * COLUMNS, 0.0f);
      CodeTiles registers;
      for (int64_t b = 0; b < product.layout.blocks; ++b)
        for (int64_t t = 0; t < count; ++t) {
          const bool last = t + 1 == count;
          const Block block(product, tile_at(t), b, tile_at(last ? 0 : t + 1),
                            std::min(last ? b + 1 : b, product.layout.blocks - 1));
          unpack(product, block);
          multiply(registers, block, product.bytes(b, row), ceil_div(last_row - row, SIDE),
                   product.rows_input->scales.data() + b * product.rows_input->rows + row,
                   room.data() + t * rows * COLUMNS);
        }
      for (int64_t r = row; r < last_row; ++r)
        for (int64_t t = 0; t < count; ++t) {
          if (r + EARLIER < last_row) prefetch_row(product, epilogue, r + EARLIER, tile_at(t) * COLUMNS);
          apply_epilogue(product, epilogue, reinterpret_cast<const char*>(&room[(t * rows + r - row) * COLUMNS]), r,
                         tile_at(t) * COLUMNS, number);
        }
    });
  }

 private:
  static constexpr int64_t BLOCK = 256;  // inputs
  static constexpr int64_t MOST_ROWS = 512, TOGETHER = 4, ENOUGH = 4, EARLIER = 16;
  static constexpr int DEPTH = BLOCK / SIDE_BYTES, THIRDS = COLUMNS / SIDE, SUMS = 2 * THIRDS;
  static constexpr int64_t TILE = SIDE * SIDE_BYTES;  // bytes
  using Shorts = int16_t __attribute__((vector_size(64)));
  using Sums = int32_t[SUMS][SIDE * SIDE];

  // Writes the bytes of a block's weights, [thirds, high and low, 64 words, 16 outputs].
  static void unpack(const BlockGemmArgs& product, const Block& block) {
    const BlockLayout& layout = product.layout;
    const auto both_halves = [](I32 numbers) {
      const I32 halves = (numbers & 0xffff) | numbers << 16;
      return reinterpret_cast<const Shorts&>(halves);
    };
    for (int64_t g = 0; g < layout.groups_of_block; ++g)
      for (int third = 0; third < THIRDS; ++third) {
        const int column = third * SIDE;
        const Shorts factor = both_halves(block.factor(layout, g, column));
        const Shorts offset =
            both_halves(block.offset(product, g, column)) - factor * static_cast<int16_t>(layout.zero);
        for (int64_t k = g * layout.group_words; k < (g + 1) * layout.group_words; ++k) {
          if (third == 0) block.words.template prefetch<THIRDS>(k, 0);
          const auto words = block.words.read(k, column);
          char* to = block.kept + third * 2 * DEPTH * TILE + k * Blocks::Dot::STEPS * SIDE_BYTES;
#pragma GCC unroll 4
          for (int step = 0; step < Blocks::Dot::STEPS; ++step, to += SIDE_BYTES) {
            const U32 codes = Digits::unpacked(words, step), even = codes & 0x00ff00ff;
            const Shorts first = reinterpret_cast<const Shorts&>(even) * factor + offset,
                         second = upper_bytes(reinterpret_cast<const Shorts&>(codes)) * factor + offset;
            store_as(to, in_turns(upper_bytes(first), second));
            store_as(to + DEPTH * TILE, in_turns(first, second << 8));
          }
        }
      }
  }

  static Shorts upper_bytes(Shorts numbers) {
    return reinterpret_cast<Shorts>(_mm512_srli_epi16(reinterpret_cast<__m512i>(numbers), 8));
  }

  // Returns the lower bytes of the first, and the upper ones of the second.
  static __m512i in_turns(Shorts first, Shorts second) {
    constexpr __mmask64 UPPER = 0xaaaaaaaaaaaaaaaa;
    return _mm512_mask_blend_epi8(UPPER, reinterpret_cast<__m512i>(first), reinterpret_cast<__m512i>(second));
  }

  static constexpr int ACCUMULATORS = 3, WEIGHTS = 3, ROWS = 4;  // registers

  static void load_rows(CodeTiles& tiles, const char* input) {
    repeat<DEPTH>([&]<int K>() { tiles.template load<ROWS + K>(input + K * SIDE_BYTES, BLOCK); });
  }

  template <int COUNT, typename Work>
  [[gnu::always_inline]] static void repeat(const Work& work) {
    [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
      (work.template operator()<I>(), ...);
    }(std::make_integer_sequence<int, COUNT>());
  }

  // Adds the products of rows, groups of SIDE, with a block's weights to the accumulators.
  static void multiply(CodeTiles& tiles, const Block& block, const char* input, int64_t groups, const float* scales,
                       float* acc) {
    alignas(64) Sums sums[2];
    F32 units[THIRDS];
    for (int third = 0; third < THIRDS; ++third) units[third] = load_f32(block.units + third * SIDE);
    const char* weights = block.kept;
    load_rows(tiles, input);
    multiply_rows<true, false>(tiles, input + (groups > 1) * SIDE * BLOCK, weights, sums[0], sums[1], units, scales,
                               acc);
    for (int64_t g = 1; g < groups; ++g)
      multiply_rows<true, true>(tiles, input + std::min(g + 1, groups - 1) * SIDE * BLOCK, weights, sums[g % 2],
                                sums[1 - g % 2], units, scales + (g - 1) * SIDE, acc + (g - 1) * SIDE * COLUMNS);
    multiply_rows<false, true>(tiles, input, weights, sums[groups % 2], sums[1 - groups % 2], units,
                               scales + (groups - 1) * SIDE, acc + (groups - 1) * SIDE * COLUMNS);
  }

  // Registers: three sums, of which one leaves while the next is added up; a tile of weights; SIDE rows of the block.
  // MULTIPLIES: these rows; next: those that are loaded then. SCALES: the sums of the rows before; scales and acc are
  // theirs. The last of these sums leaves its tile here, since a store waits long for products.
  template <bool MULTIPLIES, bool SCALES>
  [[gnu::always_inline]] static void multiply_rows(CodeTiles& tiles, const char* next, const char* weights, Sums& sums,
                                                   Sums& before, const F32 (&units)[THIRDS], const float* scales,
                                                   float* acc) {
    constexpr int PRODUCTS = SUMS * DEPTH, FIRST = 4;
    repeat<PRODUCTS>([&]<int I>() __attribute__((always_inline)) {
      constexpr int SUM = I / DEPTH, K = I % DEPTH, BEFORE = (SUM + SUMS - 1) % SUMS;
      if constexpr (MULTIPLIES) {
        if constexpr (K == 0) tiles.template zero<SUM % ACCUMULATORS>();
        tiles.template load<WEIGHTS>(weights + I * TILE, SIDE_BYTES);
        tiles.template add<SUM % ACCUMULATORS, ROWS + K, WEIGHTS,
                           std::conditional_t<SUM % 2 == 0, HighBytes, CodeBytes>>();
        if constexpr (SUM == SUMS - 1) tiles.template load<ROWS + K>(next + K * SIDE_BYTES, BLOCK);
      }
      if constexpr (K == 2 && (SUM == 0 ? SCALES : MULTIPLIES))
        tiles.template store<BEFORE % ACCUMULATORS>(SUM == 0 ? before[BEFORE] : sums[BEFORE], SIDE_BYTES);
      if constexpr (SCALES && I >= FIRST)
        for (int r = (I - FIRST) * SIDE / (PRODUCTS - FIRST); r < (I - FIRST + 1) * SIDE / (PRODUCTS - FIRST); ++r) {
          const F32 scale = F32{} + scales[r];
#pragma GCC unroll 3
          for (int third = 0; third < THIRDS; ++third) {
            const I32 high = load_as<I32>(before[2 * third] + r * SIDE),
                      low = load_as<I32>(before[2 * third + 1] + r * SIDE);
            float* to = acc + r * COLUMNS + third * SIDE;
            store(to, scaled_sum((high << 8) + low, units[third], scale, load_f32(to)));
          }
        }
    });
  }
};

#endif

}  // namespace oatmill
