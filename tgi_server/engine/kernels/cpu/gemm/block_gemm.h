// GEMM with K-quants and inputs of 8 bits: the weights of a block of 256 inputs are (code - zero) * factor in a unit of
// the block, and their offsets integers in another one, so the sums of a block are integers, which become floats once.
//
//     for blocks:                                        of a tile, and up to CHUNK_ROWS rows
//       unpack the block's weights into L1, for more rows than stay in registers
//       for blocks of rows, V registers of outputs:
//         for spans: acc[R][V] = zero-point compensation; += products (loop.h); totals[R][V] += acc * factors
//         row's sums += totals * the block's scale * scale of the row's inputs
//         totals[R][V] = sums of the groups' inputs * factors of their offsets; row's sums += the same with its offset
//
// Where block_amx.h computes the same sums by tiles, a weight and its offset are one integer, so both are added to the
// same totals: factors are exact in the unit that they share, and offsets are rounded to it, at most an eighth of the
// block's scale.
//
// A span is what an accumulator holds: a group, or half of one. Where an instruction adds up four products, the
// accumulator has 32 bits. Where it adds up two (AVX2), it is a pair of 16 bits: these wrap around, but a span is so
// short that its sum fits. One vpmaddwd multiplies both by the factor, and adds them up.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "gemm/amx.h"
#include "gemm/gemm.h"
#include "gemm/loop.h"
#include "gemm/microkernel.h"
#include "gemm/quantized_gemm.h"
#include "gemm/wna8.h"
#include "simd/simd.h"

namespace oatmill {

#if OATMILL_WNA8

#if OATMILL_CODE_TILES && OATMILL_INT8 && defined(__AVX512BW__)
#define OATMILL_BLOCK_AMX 1
#else
#define OATMILL_BLOCK_AMX 0
#endif

// True if the offsets of a block are in the unit of its factors.
constexpr bool SHARES_UNIT = OATMILL_BLOCK_AMX;

// How the groups of a weight lie in its blocks, in words. zero: what codes have added to them.
struct BlockLayout {
  int64_t blocks, groups_of_block, group_words, zero;

  int64_t block_words() const { return groups_of_block * group_words; }
};

// Rows of int8 in the order of unpacked weights, [blocks, rows, inputs of a block], with their scales [blocks, rows];
// starts, the first values of accumulators, [blocks, rows, spans of a block]; and sums, of the inputs of two groups in
// the halves of a word, [blocks, rows, groups of a block / 2].
struct BlockInput {
  int64_t rows;  // with those that fill the last tile
  c10::DataPtr bytes;
  std::vector<float> scales;
  std::vector<int32_t> starts, sums;
};

struct BlockGemmArgs : GemmArgs {
  Scales scales;
  BlockLayout layout;
  const BlockInput* rows_input;
  int64_t tile_bytes;

  // Returns the bytes of a row in a block.
  const char* bytes(int64_t block, int64_t row) const { return input + (block * rows_input->rows + row) * row_bytes; }
  const char* words(int64_t tile, int64_t block, int planes) const {
    return weights + tile * tile_bytes + block * layout.block_words() * planes * TILE_WORD;
  }
};

// Returns sum + the integers of a block in their unit. scale: of the row's inputs.
inline F32 scaled_sum(I32 totals, F32 unit, F32 scale, F32 sum) {
  return fma(__builtin_convertvector(totals, F32) * unit, scale, sum);
}

// Returns numbers as the halves of a word.
inline int32_t halves(int32_t low, int32_t high) {
  return static_cast<int32_t>((static_cast<uint32_t>(low) & 0xffff) | static_cast<uint32_t>(high) << 16);
}

// total += the sums of a span * the group's factors.
inline void add_scaled(I32 sums, I32 factors, I32& total) { total += sums * factors; }
inline void add_scaled(Shorts sums, I32 factors, I32& total) {
  total += madd_i16(reinterpret_cast<const I32&>(sums), factors);
}

template <typename Kind, typename Digits>
struct BlockDot {
  using Accumulator = std::conditional_t<ADDS_FOUR, I32, Shorts>;
  static constexpr int STEPS = Kind::DEPTH / 4;
  static constexpr int64_t NUMBER = WORD;
  // Of 16 inputs, eight are added up in each half of a word.
  static constexpr int64_t UNIT_WORDS = 16 / Kind::DEPTH,
                           MOST_WORDS = ADDS_FOUR || Kind::DEPTH == 8 ? 32 / Kind::DEPTH : UNIT_WORDS;
  static constexpr int PLANES = planes_of<Kind>();
  static constexpr int ROWS = WIDTH == 16 ? 8 : 4, MANY = WIDTH == 16 ? 8 : REGISTERS == 32 ? 5 : 6;
  static constexpr int UNPACKED_VECTORS = WIDTH == 16 ? 3 : REGISTERS == 32 ? 4 : 2;

  static constexpr int vectors(int rows) {
    if (WIDTH == 16) return 3;
    if (rows <= 2) return COLUMNS / WIDTH;
    return REGISTERS == 32 ? 4 : rows == 3 ? 3 : 2;
  }

  // Returns true if no sum of a span leaves the bits that it has.
  static constexpr bool fits(int64_t zero) {
    if (ADDS_FOUR) return 0 <= zero && zero < 64;
    return Kind::DEPTH == 8 ? 0 <= zero && zero < 16 : zero == 32;
  }

  static U32 row(const char* input) { return U32{} + load_as<uint32_t>(input); }
  static void add(U32 x, U32 numbers, Accumulator& acc) { add_bytes(numbers, x, acc); }

  // The first value of an accumulator, which subtracts the zero point. sums: of the inputs that either half adds up.
  static int32_t start(int64_t zero, const int32_t (&sums)[2]) {
    const auto shift = static_cast<int32_t>(-zero);
    return ADDS_FOUR ? shift * (sums[0] + sums[1]) : halves(shift * sums[0], shift * sums[1]);
  }
  static Accumulator started(int32_t start) {
    const I32 words = I32{} + start;
    return reinterpret_cast<const Accumulator&>(words);
  }

  // A group's factor as add_scaled takes it.
  static I32 factor(I32 number) {
    if constexpr (ADDS_FOUR) return number;
    else return (number & 0xffff) | number << 16;
  }
};

template <typename Kind, typename Digits>
struct BlockGemm {
  using Codes = Digits;
  using Dot = BlockDot<Kind, Digits>;
  static constexpr int64_t MOST_BLOCK = 512;  // inputs

  // Returns the layout of weights that this multiplies; no blocks: it does not.
  static BlockLayout layout(const Scales& scales, const int32_t* starts, int64_t groups, int64_t blocks,
                            int64_t depth) {
    constexpr BlockLayout NONE{};
    if (!scales.factors) return NONE;
    const BlockLayout layout{blocks, groups / blocks, starts[1], Kind::ZERO_POINT + static_cast<int64_t>(scales.zero)};
    const bool regular = layout.groups_of_block % 2 == 0 && groups * layout.group_words == depth &&
                         layout.block_words() * Kind::DEPTH <= MOST_BLOCK;
    const bool of_spans = layout.group_words == Dot::UNIT_WORDS || layout.group_words == 2 * Dot::UNIT_WORDS;
    for (int64_t g = 0; g < groups; ++g)
      if (starts[g] != g * layout.group_words) return NONE;
    return regular && of_spans && Dot::fits(layout.zero) ? layout : NONE;
  }

  static int64_t span_words(const BlockLayout& layout) { return std::min(layout.group_words, Dot::MOST_WORDS); }

  // tiled: for block_amx.h, which takes SIDE rows at once, and needs no sums.
  template <typename T>
  static BlockInput prepare(const T* from, int64_t rows, int64_t inputs, const BlockLayout& layout, bool tiled) {
    const int64_t of_block = layout.block_words() * Kind::DEPTH, room = tiled ? ceil_div(rows, SIDE) * SIDE : rows;
    const int64_t spans = tiled ? 0 : layout.block_words() / span_words(layout);
    const int64_t pairs = tiled ? 0 : layout.groups_of_block / 2;
    BlockInput input{room, c10::GetCPUAllocator()->allocate(layout.blocks * room * of_block),
                     std::vector<float>(layout.blocks * room), std::vector<int32_t>(layout.blocks * room * spans),
                     std::vector<int32_t>(layout.blocks * room * pairs)};
    int8_t* to = static_cast<int8_t*>(input.bytes.get());
    for_rows(rows, inputs, [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r)
        for (int64_t b = 0; b < layout.blocks; ++b) {
          const int64_t place = b * room + r;
          int8_t* bytes = to + place * of_block;
          input.scales[place] = round_to_bytes(from + r * inputs + b * of_block, of_block, bytes);
          if (!tiled)
            sum_up(bytes, layout, spans, input.starts.data() + place * spans, input.sums.data() + place * pairs);
        }
    });
    return input;
  }

  static void multiply(const BlockGemmArgs& product, int64_t first_row, int64_t rows, int64_t tile, int64_t next_tile,
                       char* acc) {
    float* sums = reinterpret_cast<float*>(acc);
    std::fill_n(sums, rows * COLUMNS, 0.0f);
    for (int64_t b = 0; b < product.layout.blocks; ++b) {
      const bool last = b + 1 == product.layout.blocks;
      const Block block(product, tile, b, last ? next_tile : tile, last ? 0 : b + 1);
      const bool many = rows > Dot::ROWS;
      if (many && !FIRST_UNPACKS) unpack(product, block);
      for_each_block(rows, many ? Dot::MANY : Dot::ROWS, [&](int64_t first, int64_t count) {
        const Function* functions = !many ? FEW.data() : first == 0 && FIRST_UNPACKS ? FIRST.data() : OTHERS.data();
        functions[count - 1](product, block, first_row + first, sums + first * COLUMNS);
      });
    }
  }

  // A block of a tile: its words, followed by those of the next one; its units, and the integers that products take.
  struct Block {
    static constexpr int MOST_SPANS = MOST_BLOCK / 16;

    int64_t index;
    WeightStream<Dot::PLANES> words;
    char* kept = BlockGemm::kept();
    alignas(64) float units[COLUMNS], offset_units[COLUMNS];
    alignas(64) int32_t factors[MOST_SPANS * COLUMNS];      // of each span
    alignas(64) int32_t offsets[MOST_SPANS / 2 * COLUMNS];  // of two groups, in the halves of a word

    Block(const BlockGemmArgs& product, int64_t tile, int64_t index, int64_t next_tile, int64_t next_index)
        : index(index), words{product.words(tile, index, Dot::PLANES),
                              product.words(next_tile, next_index, Dot::PLANES), product.layout.block_words()} {
      const BlockLayout& layout = product.layout;
      const Scales& from = product.scales;
      const int64_t place = (tile * layout.blocks + index) * COLUMNS, group = place * layout.groups_of_block;
      from.prefetch_block((next_tile * layout.blocks + next_index) * COLUMNS, layout.groups_of_block);
      const int64_t spans = layout.group_words / span_words(layout);
      F32 ratios[COLUMNS / WIDTH], offset_ratios[COLUMNS / WIDTH];  // to a shared unit
#pragma GCC unroll 12
      for (int n = 0; n < COLUMNS; n += WIDTH) {
        const F32 scale = load_f32(static_cast<const c10::Half*>(from.scales) + place + n);
        const F32 offset = from.offsets ? load_f32(static_cast<const c10::Half*>(from.offsets) + place + n) : F32{};
        const F32 unit = SHARES_UNIT && from.offsets ? unit_of(scale, offset) : scale;
        store(units + n, unit);
        store(offset_units + n, offset);
        ratios[n / WIDTH] = scale / unit, offset_ratios[n / WIDTH] = offset / unit;
      }
      const auto integers = [&](const int8_t* numbers, int64_t g, int n, const F32* ratio) {
        const int8_t* own = numbers + group + g * COLUMNS + n;
        return SHARES_UNIT && from.offsets ? round_i32(load_f32(own) * ratio[n / WIDTH]) : load_i32(own);
      };
      for (int64_t g = 0; g < layout.groups_of_block; ++g)
        for (int64_t span = g * spans; span < (g + 1) * spans; ++span)
#pragma GCC unroll 12
          for (int n = 0; n < COLUMNS; n += WIDTH)
            store_as(factors + span * COLUMNS + n, Dot::factor(integers(from.factors, g, n, ratios)));
      for (int64_t g = 0; from.offsets && g < layout.groups_of_block; g += 2)
#pragma GCC unroll 12
        for (int n = 0; n < COLUMNS; n += WIDTH)
          store_as(offsets + g / 2 * COLUMNS + n, (integers(from.offset_factors, g, n, offset_ratios) & 0xffff) |
                                                      integers(from.offset_factors, g + 1, n, offset_ratios) << 16);
    }

    // Those of SIDE outputs, from a column on.
    I32 factor(const BlockLayout& layout, int64_t group, int column) const {
      return load_as<I32>(factors + group * (layout.group_words / span_words(layout)) * COLUMNS + column);
    }
    I32 offset(const BlockGemmArgs& product, int64_t group, int column) const {
      const I32 both = product.scales.offsets ? load_as<I32>(offsets + group / 2 * COLUMNS + column) : I32{};
      return group % 2 == 0 ? both & 0xffff : both >> 16;
    }

    // A power of two that divides the scale by 16 or 8, unless offsets are so large that they would leave 16 bits; then
    // less. Factors and offset factors have six bits in K-quants with offsets, and codes four or five.
    static F32 unit_of(F32 scale, F32 offset) {
      constexpr float MOST = Kind::DEPTH == 8 ? 16 : 8;
      const F32 size = vmax(scale, -scale), most = vmax(offset, -offset) * (1 / 256.0f);
      const F32 ratio = size / most;
      const F32 whole = as_floats(reinterpret_cast<const U32&>(ratio) & 0x7f800000);
      const F32 unit = size / vmax(vmin(whole, F32{} + MOST), F32{} + 0x1p-14f);
      return vmax(vmax(unit, most), F32{} + 0x1p-126f);  // if the scale is zero, or both
    }
  };

 private:
  static constexpr bool FIRST_UNPACKS = REGISTERS == 32;
  static char* kept() {
    alignas(64) static thread_local char of_thread[MOST_BLOCK * COLUMNS];
    return of_thread;
  }

  template <typename T>
  static float round_to_bytes(const T* from, int64_t count, int8_t* to) {
    return quantize_row(from, count,
                        [&](int64_t k, const int32_t* numbers) {
                          if constexpr (Kind::DEPTH == 8)
                            store_as(to + k, lowest_bytes<0, 4, 1, 5, 2, 6, 3, 7>(numbers));
                          else store_as(to + k, lowest_bytes<0, 2, 1, 3, 4, 6, 5, 7>(numbers));
                        })
        .first;
  }

  // bytes: of a row in a block.
  static void sum_up(const int8_t* bytes, const BlockLayout& layout, int64_t spans, int32_t* starts, int32_t* sums) {
    const int64_t of_span = span_words(layout) * Kind::DEPTH, of_group = layout.group_words / span_words(layout);
    int32_t group[2] = {};
    for (int64_t span = 0; span < spans; ++span) {
      int32_t both[2] = {};
      for (int64_t k = 0; k < of_span; k += 16) add_pair_sums(bytes + span * of_span + k, both);
      starts[span] = Dot::start(layout.zero, both);
      const int64_t g = span / of_group;
      group[g % 2] += both[0] + both[1];
      if (span % (2 * of_group) == 2 * of_group - 1) {
        sums[g / 2] = halves(group[0], group[1]);
        group[0] = group[1] = 0;
      }
    }
  }

  // Adds up the first two and the last two bytes of four words.
  static void add_pair_sums(const int8_t* bytes, int32_t (&sums)[2]) {
#if defined(__SSSE3__)
    __m128i pairs = _mm_maddubs_epi16(_mm_set1_epi8(1), _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
    pairs = _mm_add_epi16(pairs, _mm_shuffle_epi32(pairs, 0x4e));
    pairs = _mm_add_epi16(pairs, _mm_shuffle_epi32(pairs, 0xb1));
    const int32_t both = _mm_cvtsi128_si32(pairs);
    sums[0] += static_cast<int16_t>(both), sums[1] += both >> 16;
#else
    for (int i = 0; i < 16; ++i) sums[i / 2 % 2] += bytes[i];
#endif
  }

  static I32 load_i32(const int8_t* from) {
#if defined(__AVX512BW__)
    return reinterpret_cast<I32>(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
    return reinterpret_cast<I32>(_mm256_cvtepi8_epi32(_mm_loadu_si64(from)));
#else
    using Bytes = int8_t __attribute__((vector_size(WIDTH)));
    return __builtin_convertvector(load_as<Bytes>(from), I32);
#endif
  }

  // Weights of V registers of outputs from a column on, unpacked in registers.
  template <int V>
  struct Packed : OneAtATime {
    const WeightStream<Dot::PLANES>& words;
    int column;

    [[gnu::always_inline]] Packed(const Block& block, int column) : words(block.words), column(column) {}
    [[gnu::always_inline]] void prefetch(int64_t k) const { words.template prefetch<V>(k, column); }
    [[gnu::always_inline]] U32 load(int64_t k, int step, int v) const {
      return Digits::unpacked(words.read(k, column + v * WIDTH), step);
    }
  };

  // The same, which also keeps them for the blocks of rows that follow.
  template <int V>
  struct Unpacking : Packed<V> {
    char* kept;

    [[gnu::always_inline]] Unpacking(const Block& block, int column) : Packed<V>(block, column), kept(block.kept) {}
    [[gnu::always_inline]] U32 load(int64_t k, int step, int v) const {
      const U32 numbers = Packed<V>::load(k, step, v);
      store_as(place(kept, k, step, this->column + v * WIDTH), numbers);
      return numbers;
    }
  };

  template <int V>
  struct Unpacked : OneAtATime {
    const char* kept;
    int column;

    [[gnu::always_inline]] Unpacked(const Block& block, int column) : kept(block.kept), column(column) {}
    [[gnu::always_inline]] void prefetch(int64_t) const {}
    [[gnu::always_inline]] U32 load(int64_t k, int step, int v) const {
      return load_as<U32>(place(kept, k, step, column + v * WIDTH));
    }
  };

  template <typename Byte>
  static Byte* place(Byte* kept, int64_t word, int step, int column) {
    return kept + (word * Dot::STEPS + step) * TILE_WORD + column * WORD;
  }

  static void unpack(const BlockGemmArgs& product, const Block& block) {
    constexpr int V = COLUMNS / WIDTH;
    for (int64_t k = 0; k < product.layout.block_words(); ++k) {
      block.words.template prefetch<V>(k, 0);
#pragma GCC unroll 12
      for (int v = 0; v < V; ++v) {
        const auto words = block.words.read(k, v * WIDTH);
#pragma GCC unroll 4
        for (int step = 0; step < Dot::STEPS; ++step)
          store_as(place(block.kept, k, step, v * WIDTH), Digits::unpacked(words, step));
      }
    }
  }

  template <int R, int V, template <int> typename Weights>
  static void multiply_block(const BlockGemmArgs& whole, const Block& block, int64_t row, float* acc) {
    const BlockGemmArgs product = whole;  // a copy, of which the compiler knows that no store changes it
    const BlockInput& input = *product.rows_input;
    const char* bytes = product.bytes(block.index, row);
    const int64_t words = span_words(product.layout), spans = product.layout.block_words() / words;
    const int64_t pairs = product.layout.groups_of_block / 2, place = block.index * input.rows + row;
    const int32_t* starts = input.starts.data() + place * spans;
    const int32_t* sums = input.sums.data() + place * pairs;
    const float* scales = input.scales.data() + place;
    for (int column = 0; column < COLUMNS; column += V * WIDTH) {
      const Weights<V> weights(block, column);
      I32 totals[R][V];
      make_zero(totals);
      for (int64_t span = 0; span < spans; ++span) {
        typename Dot::Accumulator accumulators[R][V];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const auto started = Dot::started(starts[r * spans + span]);
#pragma GCC unroll 12
          for (int v = 0; v < V; ++v) accumulators[r][v] = started;
        }
        accumulate_words<Dot>(bytes, product.row_bytes, span * words, (span + 1) * words, weights, accumulators);
        const int32_t* factors = block.factors + span * COLUMNS + column;
#pragma GCC unroll 12
        for (int v = 0; v < V; ++v) {
          const I32 factor = load_as<I32>(factors + v * WIDTH);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) add_scaled(accumulators[r][v], factor, totals[r][v]);
        }
      }
      const auto leave = [&](const float* units) __attribute__((always_inline)) {
#pragma GCC unroll 12
        for (int v = 0; v < V; ++v) {
          const F32 unit = load_as<F32>(units + column + v * WIDTH);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            float* to = acc + r * COLUMNS + column + v * WIDTH;
            store(to, scaled_sum(totals[r][v], unit, F32{} + scales[r], load_as<F32>(to)));
          }
        }
      };
      if (!SHARES_UNIT || !product.scales.offsets) leave(block.units);
      if (!product.scales.offsets) continue;
      if (!SHARES_UNIT) make_zero(totals);
      for (int64_t pair = 0; pair < pairs; ++pair) {
        const int32_t* offsets = block.offsets + pair * COLUMNS + column;
        const auto sum_of = [&](int r) { return I32{} + sums[r * pairs + pair]; };
        add_outer<PairSums>(sum_of, [&](int v) { return load_as<I32>(offsets + v * WIDTH); }, totals);
      }
      leave(SHARES_UNIT ? block.units : block.offset_units);
    }
  }

  struct PairSums {
    using Accumulator = I32;
    static void add(I32 sums, I32 factors, I32& total) { dot_i16(sums, factors, total); }
  };

  using Function = void (*)(const BlockGemmArgs&, const Block&, int64_t, float*);
  static constexpr auto FEW =
      by_rows<Dot::ROWS>([]<int R>() -> Function { return &multiply_block<R, Dot::vectors(R), Packed>; });
  static constexpr auto FIRST = by_rows<FIRST_UNPACKS ? Dot::MANY : 1>(
      []<int R>() -> Function { return &multiply_block<R, Dot::UNPACKED_VECTORS, Unpacking>; });
  static constexpr auto OTHERS =
      by_rows<Dot::MANY>([]<int R>() -> Function { return &multiply_block<R, Dot::UNPACKED_VECTORS, Unpacked>; });
};

// See gemm.h: run_gemm calls this for blocks.
template <typename Kernel>
void multiply_tile(const BlockGemmArgs& product, int64_t first_row, int64_t rows, int64_t tile, int64_t next_tile,
                   char* acc) {
  Kernel::multiply(product, first_row, rows, tile, next_tile, acc);
}

#endif

}  // namespace oatmill
