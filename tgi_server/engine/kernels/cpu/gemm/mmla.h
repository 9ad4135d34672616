// GEMM by aarch64's instructions that multiply two rows with two outputs, two words deep (BFMMLA, SMMLA). They do twice
// what those for a single row do.
//
// Of two words that follow each other in a tile (gemm.h), the registers of each are interleaved: that gives two outputs
// to a register. Rows are packed in pairs, two words of one and two of the other in turns.

#pragma once

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && defined(__ARM_FEATURE_MATMUL_INT8)
#define OATMILL_MMLA 1

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "gemm/gemm.h"
#include "gemm/loop.h"
#include "gemm/microkernel.h"
#include "simd/simd.h"

namespace oatmill {

// The instructions for two rows in place of those for one: add(rows, outputs, acc) adds to the accumulators of the
// first row and both outputs, then to those of the second. Results are the same to the last bit.
struct Bf16Mmla : Bf16Dot {
  static constexpr int64_t NUMBER = 2 * WORD;
  static U32 row(const char* input) { return load_as<U32>(input); }
  static void add(U32 rows, U32 outputs, U32& sums) {
    U32 added = sums;
    asm("bfmmla %0.4s, %1.8h, %2.8h" : "+w"(added) : "w"(rows), "w"(outputs));
    sums = added;
  }
};

struct Int8Mmla : Int8Dot {
  static constexpr int64_t NUMBER = 2 * WORD;
  static U32 row(const char* input) { return load_as<U32>(input); }
  static void add(U32 rows, U32 outputs, U32& sums) {
    U32 added = sums;
    asm("smmla %0.4s, %1.16b, %2.16b" : "+w"(added) : "w"(rows), "w"(outputs));
    sums = added;
  }
};

// The kernel, see multiply_tile. It computes depths that are even.
template <typename Dot>
struct MmlaGemm {
  using Weights = typename Dot::Weights;
  static constexpr int64_t PAIR_WORD = 2 * WORD;  // bytes, a word of both rows
  static constexpr int64_t INPUT_WORD = PAIR_WORD, CHUNK_DEPTH = 96, UNIT = 2;
  static constexpr int OFFSET = Dot::OFFSET;

  template <typename T>
  static Input prepare(const T* from, int64_t rows, int64_t inputs, int64_t depth) {
    const int64_t pairs = ceil_div(rows, 2);
    Input single = Dot::prepare(from, rows, inputs, depth);
    const int64_t pair_bytes = row_stride(depth * PAIR_WORD, pairs);
    Input input{nullptr, pair_bytes / 2, c10::GetCPUAllocator()->allocate(pairs * pair_bytes),
                std::move(single.scales)};
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
                       int64_t depth, bool from_zero, char* acc) {
    for_each_block(ceil_div(rows, 2), PAIRS, [&](int64_t first, int64_t count) {
      BLOCKS[count - 1](input + 2 * first * row_bytes, 2 * row_bytes, weights, first == 0 ? next : nullptr, depth,
                        from_zero, acc + 2 * first * TILE_WORD);
    });
  }

 private:
  static constexpr int PAIRS = 6;  // of rows, of a block
  using Block = void (*)(const char*, int64_t, const char*, const char*, int64_t, bool, char*);

  // Registers of outputs that are computed together: as many as leave room beside the accumulators.
  static constexpr int vectors(int pairs) { return pairs == 1 ? 6 : pairs == 2 ? 4 : pairs == 3 ? 3 : 2; }

  // Numbers 0 and 1 of both registers, or 2 and 3.
  static U32 lower(U32 a, U32 b) { return __builtin_shufflevector(a, b, 0, 1, 4, 5); }
  static U32 upper(U32 a, U32 b) { return __builtin_shufflevector(a, b, 2, 3, 6, 7); }

  // Two words of V registers of outputs, from a column on, as 2 * V registers of two outputs. next: prefetched
  // meanwhile, or null.
  template <int V>
  struct TileWeights : OneAtATime {
    static constexpr int WORDS = 2;
    const char *words, *next;

    [[gnu::always_inline]] U32 load(int64_t k, int, int i) const {
      const char* at = words + k * TILE_WORD + i / 2 * WIDTH * WORD;
      const U32 first = load_as<U32>(at), second = load_as<U32>(at + TILE_WORD);
      return i % 2 == 0 ? __builtin_shufflevector(first, second, 0, 4, 1, 5)
                        : __builtin_shufflevector(first, second, 2, 6, 3, 7);
    }
    [[gnu::always_inline]] void prefetch(int64_t k) const {
      constexpr int64_t BYTES = 2 * V * WIDTH * WORD;
      if (next == nullptr) return;
#pragma GCC unroll 3
      for (int64_t byte = 0; byte < BYTES; byte += LINE) __builtin_prefetch(next + k / 2 * BYTES + byte, 0, 2);
    }
  };

  // next: prefetched meanwhile, or null.
  template <int P>
  static void multiply_block(const char* input, int64_t pair_bytes, const char* weights, const char* next,
                             int64_t depth, bool from_zero, char* acc) {
    constexpr int V = vectors(P);
    for (int column = 0; column < COLUMNS; column += V * WIDTH) {
      char* own = acc + column * WORD;
      U32 sums[P][2 * V];
#pragma GCC unroll 6
      for (int p = 0; p < P; ++p)
#pragma GCC unroll 6
        for (int v = 0; v < V; ++v) {
          const char* place = own + 2 * p * TILE_WORD + v * WIDTH * WORD;
          const U32 first = from_zero ? U32{} : load_as<U32>(place);
          const U32 second = from_zero ? U32{} : load_as<U32>(place + TILE_WORD);
          sums[p][2 * v] = lower(first, second);
          sums[p][2 * v + 1] = upper(first, second);
        }
      accumulate_words<Dot>(input, pair_bytes, 0, depth,
                            TileWeights<V>{{}, weights + column * WORD, next ? next + column * WORD * depth : nullptr},
                            sums);
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

  static constexpr auto BLOCKS = by_rows<PAIRS>([]<int P>() -> Block { return &multiply_block<P>; });
};

}  // namespace oatmill

#else
#define OATMILL_MMLA 0
#endif
