// Products by small matrices: a kernel for aarch64's instructions that multiply two rows with two outputs, two words deep
// (BFMMLA, SMMLA). They do twice what those for a single row do.
//
// Of two words that follow each other in a tile (linear.h), the registers of each are interleaved: that gives two outputs to
// a register. Rows are kept in pairs, two words of one and two of the other in turns.

#pragma once

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && defined(__ARM_FEATURE_MATMUL_INT8)
#define OATMILL_MMLA 1

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#include "gemm/gemm.h"
#include "gemm/microkernel.h"
#include "simd/simd.h"

namespace oatmill {

// The instructions that stand for two rows in place of those for one: add(rows, outputs, sums) adds to the sums of the first
// row and both outputs, then to those of the second. Sums are the same to the last bit.
struct Bf16Matrices : PairProducts {
  static void add(Words rows, Words outputs, Words& sums) {
    Words added = sums;
    asm("bfmmla %0.4s, %1.8h, %2.8h" : "+w"(added) : "w"(rows), "w"(outputs));
    sums = added;
  }
};

struct Int8Matrices : ByteProducts {
  static void add(Words rows, Words outputs, Words& sums) {
    Words added = sums;
    asm("smmla %0.4s, %1.16b, %2.16b" : "+w"(added) : "w"(rows), "w"(outputs));
    sums = added;
  }
};

// The kernel, see multiply_rows. It computes depths that are even.
template <typename Set>
struct PairedRowProducts {
  using Weights = typename Set::Weights;
  static constexpr int64_t PAIR_WORD = 2 * WORD;  // bytes, a word of both rows
  static constexpr int64_t INPUT_WORD = PAIR_WORD, CHUNK_DEPTH = 96, UNIT = 2;
  static constexpr int OFFSET = Set::OFFSET;

  template <typename T>
  static Input prepare(const T* from, int64_t rows, int64_t inputs, int64_t depth) {
    const int64_t pairs = parts(rows, 2);
    Input single = Set::prepare(from, rows, inputs, depth);
    const int64_t pair_bytes = apart(depth * PAIR_WORD, pairs);
    Input input{nullptr, pair_bytes / 2, c10::GetCPUAllocator()->allocate(pairs * pair_bytes), std::move(single.scales)};
    char* to = static_cast<char*>(input.buffer.get());
    input.data = to;
    if (rows % 2 == 1) std::memset(to + (pairs - 1) * pair_bytes, 0, pair_bytes);
    for_rows(rows, depth * Weights::DEPTH, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row)
        for (int64_t k = 0; k < depth; k += 2)
          std::memcpy(to + row / 2 * pair_bytes + k * PAIR_WORD + row % 2 * PAIR_WORD,
                      single.data + row * single.row_bytes + k * WORD, 2 * WORD);
    });
    return input;
  }

  static void multiply(const char* input, int64_t row_bytes, int64_t rows, const char* weights, const char* next,
                       int64_t depth, bool from_zero, char* totals) {
    for_each_block(parts(rows, 2), PAIRS, [&](int64_t first, int64_t count) {
      BLOCKS[count - 1](input + 2 * first * row_bytes, 2 * row_bytes, weights, first == 0 ? next : nullptr, depth,
                        from_zero, totals + 2 * first * TILE_WORD);
    });
  }

 private:
  static constexpr int PAIRS = 6;  // of rows, of a block
  using Block = void (*)(const char*, int64_t, const char*, const char*, int64_t, bool, char*);

  // Registers of outputs that are computed together: as many as leave room beside the sums.
  static constexpr int vectors(int pairs) { return pairs == 1 ? 6 : pairs == 2 ? 4 : pairs == 3 ? 3 : 2; }

  // Numbers 0 and 1 of both registers, or 2 and 3.
  static Words lower(Words a, Words b) { return __builtin_shufflevector(a, b, 0, 1, 4, 5); }
  static Words upper(Words a, Words b) { return __builtin_shufflevector(a, b, 2, 3, 6, 7); }

  // next: asked for meanwhile, or null.
  template <int P>
  static void multiply_block(const char* input, int64_t pair_bytes, const char* weights, const char* next, int64_t depth,
                             bool from_zero, char* totals) {
    constexpr int V = vectors(P);
    for (int column = 0; column < COLUMNS; column += V * WIDTH) {
      char* own = totals + column * WORD;
      Words sums[P][2 * V];
#pragma GCC unroll 6
      for (int p = 0; p < P; ++p)
#pragma GCC unroll 6
        for (int v = 0; v < V; ++v) {
          const char* place = own + 2 * p * TILE_WORD + v * WIDTH * WORD;
          const Words first = from_zero ? Words{} : load_as<Words>(place);
          const Words second = from_zero ? Words{} : load_as<Words>(place + TILE_WORD);
          sums[p][2 * v] = lower(first, second);
          sums[p][2 * v + 1] = upper(first, second);
        }
      const char* wanted = next ? next + column * WORD * depth : nullptr;
      for (int64_t k = 0; k < depth; k += 2) {
        const char* words = weights + k * TILE_WORD + column * WORD;
        Words outputs[2 * V];
#pragma GCC unroll 6
        for (int v = 0; v < V; ++v) {
          const Words first = load_as<Words>(words + v * WIDTH * WORD);
          const Words second = load_as<Words>(words + TILE_WORD + v * WIDTH * WORD);
          outputs[2 * v] = __builtin_shufflevector(first, second, 0, 4, 1, 5);
          outputs[2 * v + 1] = __builtin_shufflevector(first, second, 2, 6, 3, 7);
        }
#pragma GCC unroll 6
        for (int p = 0; p < P; ++p) {
          const Words rows = load_as<Words>(input + p * pair_bytes + k * PAIR_WORD);
#pragma GCC unroll 12
          for (int i = 0; i < 2 * V; ++i) Set::add(rows, outputs[i], sums[p][i]);
        }
        if (wanted == nullptr) continue;
#pragma GCC unroll 3
        for (int64_t byte = 0; byte < 2 * V * WIDTH * WORD; byte += LINE) __builtin_prefetch(wanted + byte, 0, 2);
        wanted += 2 * V * WIDTH * WORD;
      }
#pragma GCC unroll 6
      for (int p = 0; p < P; ++p)
#pragma GCC unroll 6
        for (int v = 0; v < V; ++v) {
          char* place = own + 2 * p * TILE_WORD + v * WIDTH * WORD;
          store_as(place, lower(sums[p][2 * v], sums[p][2 * v + 1]));
          store_as(place + TILE_WORD, upper(sums[p][2 * v], sums[p][2 * v + 1]));
        }
    }
  }

  static constexpr auto BLOCKS = []<int... P>(std::integer_sequence<int, P...>) {
    return std::array<Block, PAIRS>{&multiply_block<P + 1>...};
  }(std::make_integer_sequence<int, PAIRS>());
};

}  // namespace oatmill

#else
#define OATMILL_MMLA 0
#endif
