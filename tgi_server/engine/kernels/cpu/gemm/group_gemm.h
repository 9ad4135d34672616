// GEMM with quantized weights that are scaled group by group: accumulators of a group are multiplied by its scales.
// Weights are unpacked in registers; for many rows once, for all blocks of rows.
//
// A Dot for quantized weights is made of a codebook, and has, beside what loop.h needs,
//   ROWS, the most rows of a block; vectors(rows), the registers of outputs that are computed together, as many as
//   leave room for words and operands beside the accumulators; MOST, the words whose products an accumulator holds;
//   ZERO_POINT, which codes have added to them; number(product, place, acc), the float value of an accumulator, of the
//   row and part at a place; input_sum(product, place), the sum of a part's inputs; GROUP_SUMS, if that needs those of
//   the product; TAKES_ZEROS, if unpacking subtracts the zero points; prepare, which returns the rows as it reads them;
//   Loads, the static part of the policy that loads its weights; PLANES, as of their kind.
//   CODE_TILES, if unpacked weights are unsigned bytes that are multiplied by signed ones, as AMX does, too.
//   MANY, the most rows of a block that shares unpacked weights with others, and UNPACKED_VECTORS, such a block's
//   registers of outputs.
// Weights are unpacked by
//   unpacked(words, step, zeros) and operand(unpacked), zeros being in every byte of words; or by
//   numbers(words, part, to), several at once, which are operands as they are.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "gemm/quantized_gemm.h"
#include "gemm/amx.h"
#include "gemm/gemm.h"
#include "gemm/loop.h"
#include "simd/simd.h"

namespace oatmill {

// The kernel made of a Dot.
template <typename Dot>
struct GroupGemm {
  static constexpr int64_t MOST = Dot::MOST;

  static bool needs_sums(const Scales& scales) { return Dot::GROUP_SUMS && shifted(scales); }

  template <typename T>
  static Input prepare(const T* from, int64_t rows, int64_t inputs, int64_t depth, const int32_t* starts,
                       int64_t groups) {
    return Dot::prepare(from, rows, inputs, depth, starts, groups);
  }

  static void multiply(const QuantizedGemmArgs& product, int64_t first_row, int64_t rows, int64_t tile,
                       int64_t next_tile, char* acc) {
    const Dot dot(product.codebook);
    const Tile at{{product.words(tile), product.words(next_tile), product.depth},
                  tile * product.groups * COLUMNS,
                  next_tile * product.groups * COLUMNS};
    float* sums = reinterpret_cast<float*>(acc);
    std::fill_n(sums, rows * COLUMNS, 0.0f);
    if (rows > Dot::ROWS) return multiply_unpacked(dot, product, first_row, rows, at, sums);
    for_each_block(rows, Dot::ROWS, [&](int64_t first, int64_t count) {
      BLOCKS[count - 1](dot, product, first_row + first, at, sums + first * COLUMNS);
    });
  }

 private:
  using Words = decltype(WeightStream<Dot::PLANES>{}.read(0, 0));
  static constexpr bool BY_STEPS = requires(const Dot& dot, Words words) { dot.unpacked(words, 0, U32{}); };
  static constexpr bool FIRST_UNPACKS = BY_STEPS && REGISTERS == 32;
  static constexpr bool CODE_TILES = [] {
    if constexpr (OATMILL_CODE_TILES && requires { Dot::CODE_TILES; }) return Dot::CODE_TILES;
    return false;
  }();
  // Words that are unpacked into L1: 24 KiB at most, which leaves room beside them.
  static constexpr int64_t KEPT = std::min<int64_t>(32, 24 * 1024 / (Dot::STEPS * TILE_WORD));

  // Returns true if sums of inputs are part of the result.
  static bool shifted(const Scales& scales) {
    return Dot::ZERO_POINT != 0 || scales.offsets || scales.zero != 0 || (scales.zeros && !Dot::TAKES_ZEROS);
  }

  // scaled: where the scales of the first group stand, and those of the tile that comes next.
  struct Tile {
    WeightStream<Dot::PLANES> words;
    int64_t scaled, next_scaled;
  };

  using Block = void (*)(const Dot&, const QuantizedGemmArgs&, int64_t, const Tile&, float*);

  // Calls work(part) for all words of a tile, and prefetches the next tile's scales.
  template <typename Work>
  static void for_each_part(const QuantizedGemmArgs& product, const Tile& tile, const Work& work) {
    oatmill::for_each_part<Dot::MOST>(product.starts, product.groups, [&](const Part& part) {
      if (part.first == product.starts[part.group]) product.scales.prefetch(tile.next_scaled + part.group * COLUMNS);
      work(part);
    });
  }

  template <int R>
  static void multiply_block(const Dot& shared, const QuantizedGemmArgs& product, int64_t row, const Tile& tile,
                             float* acc) {
    constexpr int V = Dot::vectors(R);
    for (int column = 0; column < COLUMNS; column += V * WIDTH) {
      const Dot dot = shared;  // a copy, which stays in registers
      for_each_part(product, tile, [&](const Part& part) {
        typename Dot::Accumulator sums[R][V];
        make_zero(sums);
        const int64_t scaled = tile.scaled + part.group * COLUMNS + column;
        accumulate_words<Dot>(product.input + row * product.row_bytes, product.row_bytes, part.first, part.last,
                              QuantizedTile<V>(dot, product, tile.words, column, scaled), sums);
        add_scaled(dot, product, row, part, scaled, sums, acc + column);
      });
    }
  }

  // The zero points of V registers of outputs, if unpacking subtracts them.
  template <int V>
  struct Zeros {
    U32 bytes[V];

    // scaled: as of add_scaled.
    [[gnu::always_inline]] Zeros(const QuantizedGemmArgs& product, int64_t scaled) {
      if constexpr (Dot::TAKES_ZEROS)
#pragma GCC unroll 12
        for (int v = 0; v < V; ++v) bytes[v] = product.scales.zero_bytes(scaled + v * WIDTH);
    }
  };

  // V registers of outputs of a tile, from a column on, whose weights are unpacked in registers. scaled: as of
  // add_scaled.
  template <int V>
  struct QuantizedTile : Dot::Loads {
    const Dot& dot;
    const WeightStream<Dot::PLANES>& words;
    int column;
    [[no_unique_address]] Zeros<V> zeros;

    [[gnu::always_inline]] QuantizedTile(const Dot& dot, const QuantizedGemmArgs& product,
                                         const WeightStream<Dot::PLANES>& words, int column, int64_t scaled)
        : dot(dot), words(words), column(column), zeros(product, scaled) {}

    [[gnu::always_inline]] void prefetch(int64_t k) const { words.template prefetch<V>(k, column); }
    [[gnu::always_inline]] U32 unpacked(int64_t k, int step, int v) const {
      return dot.unpacked(words.read(k, column + v * WIDTH), step, zeros.bytes[v]);
    }
    [[gnu::always_inline]] auto load(int64_t k, int step, int v) const {
      if constexpr (BY_STEPS) return dot.operand(unpacked(k, step, v));
      else return dot.number_of(words.read(k, column + v * WIDTH), step);
    }
    template <typename Operand, int TOGETHER>
    [[gnu::always_inline]] void load(int64_t k, int part, int v, Operand (&columns)[TOGETHER]) const {
      dot.numbers(words.read(k, column + v * WIDTH), part, columns);
    }
  };

  // The same, with a copy of what was unpacked for the blocks of rows that follow.
  template <int V>
  struct UnpackingTile : QuantizedTile<V> {
    char* kept;
    int64_t first;

    [[gnu::always_inline]] auto load(int64_t k, int step, int v) const {
      const U32 numbers = this->unpacked(k, step, v);
      store_as(place(kept, k - first, step, this->column + v * WIDTH), numbers);
      return this->dot.operand(numbers);
    }
  };

  // What has been unpacked before, in the order in which it is loaded.
  struct UnpackedTile : Dot::Loads {
    const Dot& dot;
    const char* kept;
    int64_t first;
    int column;

    [[gnu::always_inline]] UnpackedTile(const Dot& dot, const char* kept, int64_t first, int column)
        : dot(dot), kept(kept), first(first), column(column) {}
    [[gnu::always_inline]] void prefetch(int64_t) const {}
    [[gnu::always_inline]] auto load(int64_t k, int step, int v) const {
      const U32 numbers = load_as<U32>(place(kept, k - first, step, column + v * WIDTH));
      if constexpr (BY_STEPS) return dot.operand(numbers);
      else return as_floats(numbers);
    }
    template <int TOGETHER>
    [[gnu::always_inline]] void load(int64_t k, int part, int v, F32 (&columns)[TOGETHER]) const {
#pragma GCC unroll 4
      for (int i = 0; i < TOGETHER; ++i)
        columns[i] = load_as<F32>(place(kept, k - first, part * TOGETHER + i, column + v * WIDTH));
    }
  };

  // Words are unpacked once for all rows: by the first block of rows, beside its products, or before it where that
  // would take more registers than there are. Several parts at once, whose inputs and accumulators of a block of rows
  // stay in L1 meanwhile.
  static void multiply_unpacked(const Dot& dot, const QuantizedGemmArgs& product, int64_t first_row, int64_t rows,
                                const Tile& tile, float* acc) {
    static_assert(Dot::MOST <= KEPT);
    alignas(64) static thread_local char of_thread[KEPT * Dot::STEPS * TILE_WORD];
    char* kept = of_thread;
    std::array<Part, KEPT> parts;
    int64_t count = 0;
    const auto kept_of = [&](int64_t p) { return place(kept, parts[p].first - parts[0].first, 0, 0); };
    const auto multiply_parts = [&] {
      int64_t by_tiles = 0;  // rows
#if OATMILL_CODE_TILES
      if constexpr (CODE_TILES) {
        if (words_of_tile(parts[0]) > 0 && code_tiles_permitted()) by_tiles = rows / SIDE * SIDE;
        if (by_tiles > 0) {
          for (int64_t p = 0; p < count; ++p) unpack(dot, product, parts[p], tile, kept_of(p));
          CodeTiles tiles(words_of_tile(parts[0]));
          for (int64_t first = 0; first < by_tiles; first += TILED_ROWS)
            multiply_by_tiles(tiles, dot, product, first_row + first, std::min(TILED_ROWS, by_tiles - first),
                              parts.data(), count, tile, kept, acc + first * COLUMNS);
        }
      }
#endif
      for_each_block(rows - by_tiles, Dot::MANY, [&](int64_t first, int64_t block_rows) {
        const bool unpacks = by_tiles == 0 && first == 0;
        const auto block = (unpacks ? FIRST_BLOCKS : OTHER_BLOCKS)[block_rows - 1];
        first += by_tiles;
        for (int64_t p = 0; p < count; ++p) {
          if (unpacks && !FIRST_UNPACKS) unpack(dot, product, parts[p], tile, kept_of(p));
          block(dot, product, first_row + first, parts[p], tile, kept_of(p), acc + first * COLUMNS);
        }
      });
      count = 0;
    };
    for_each_part(product, tile, [&](const Part& part) {
      if (count > 0 && (part.last - parts[0].first > KEPT || (CODE_TILES && differs(part, parts[0])))) multiply_parts();
      parts[count++] = part;
    });
    multiply_parts();
  }

  static bool differs(const Part& a, const Part& b) { return a.last - a.first != b.last - b.first; }

  // Returns where unpacked weights of a part's word are stored.
  template <typename Byte>
  static Byte* place(Byte* kept, int64_t word, int step, int column) {
    return kept + (word * Dot::STEPS + step) * TILE_WORD + column * WORD;
  }

  static void unpack(const Dot& dot, const QuantizedGemmArgs& product, const Part& part, const Tile& tile, char* kept) {
    constexpr int V = COLUMNS / WIDTH;
    const Zeros<V> zeros(product, tile.scaled + part.group * COLUMNS);
    for (int64_t k = part.first; k < part.last; ++k) {
      tile.words.template prefetch<V>(k, 0);
#pragma GCC unroll 12
      for (int v = 0; v < V; ++v) {
        const auto words = tile.words.read(k, v * WIDTH);
        char* to = place(kept, k - part.first, 0, v * WIDTH);
        if constexpr (BY_STEPS) {
#pragma GCC unroll 4
          for (int step = 0; step < Dot::STEPS; ++step)
            store_as(to + step * TILE_WORD, dot.unpacked(words, step, zeros.bytes[v]));
        } else {
          constexpr int TOGETHER = Dot::Loads::TOGETHER;
#pragma GCC unroll 8
          for (int64_t step = 0; step < Dot::STEPS; step += TOGETHER) {
            F32 numbers[TOGETHER];
            dot.numbers(words, step / TOGETHER, numbers);
#pragma GCC unroll 4
            for (int i = 0; i < TOGETHER; ++i) store_as(to + (step + i) * TILE_WORD, numbers[i]);
          }
        }
      }
    }
  }

  template <int R, bool FIRST>
  static void multiply_unpacked_block(const Dot& shared, const QuantizedGemmArgs& whole, int64_t row,
                                      const Part& of_tile, const Tile& at, char* kept, float* acc) {
    constexpr int V = Dot::UNPACKED_VECTORS;
    const Dot dot = shared;  // copies, of which the compiler knows that no store changes them
    const QuantizedGemmArgs product = whole;
    const Part part = of_tile;
    const Tile tile = at;
    for (int column = 0; column < COLUMNS; column += V * WIDTH) {
      typename Dot::Accumulator sums[R][V];
      make_zero(sums);
      const int64_t scaled = tile.scaled + part.group * COLUMNS + column;
      const char* input = product.input + row * product.row_bytes;
      if constexpr (FIRST)
        accumulate_words<Dot>(input, product.row_bytes, part.first, part.last,
                              UnpackingTile<V>{{dot, product, tile.words, column, scaled}, kept, part.first}, sums);
      else
        accumulate_words<Dot>(input, product.row_bytes, part.first, part.last,
                              UnpackedTile(dot, kept, part.first, column), sums);
      add_scaled(dot, product, row, part, scaled, sums, acc + column);
    }
  }

  // The scales of a part, of V registers of outputs. scaled: the place of those of the first output.
  template <int V>
  struct PartScales {
    F32 scales[V], offsets[V];
    bool with_sums;

    [[gnu::always_inline]] PartScales(const QuantizedGemmArgs& product, int64_t scaled)
        : with_sums(shifted(product.scales)) {
      product.scales.read(scaled, scales);
      if (with_sums) product.scales.template read_offsets<Dot::ZERO_POINT, !Dot::TAKES_ZEROS>(scaled, scales, offsets);
    }

    // acc += a row's sums of the part * its scales. place: of the row and the part.
    [[gnu::always_inline]] void add(const Dot& dot, const QuantizedGemmArgs& product, int64_t place,
                                    const typename Dot::Accumulator (&sums)[V], float* acc) const {
      const F32 input_sum = F32{} + (with_sums ? Dot::input_sum(product, place) : 0.0f);
#pragma GCC unroll 12
      for (int v = 0; v < V; ++v) {
        F32 sum = fma(dot.number(product, place, sums[v]), scales[v], load_as<F32>(acc + v * WIDTH));
        if (with_sums) sum = fma(input_sum, offsets[v], sum);
        store_as(acc + v * WIDTH, sum);
      }
    }
  };

  // acc += sums of a part * its scales. scaled: the place of the scales of the first output.
  template <int R, int V>
  [[gnu::always_inline]] static void add_scaled(const Dot& dot, const QuantizedGemmArgs& product, int64_t row,
                                                const Part& part, int64_t scaled,
                                                const typename Dot::Accumulator (&sums)[R][V], float* acc) {
    const PartScales<V> scales(product, scaled);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
      scales.add(dot, product, (row + r) * product.parts + part.index, sums[r], acc + r * COLUMNS);
  }

#if OATMILL_CODE_TILES
  static constexpr int64_t TILED_ROWS = 2 * SIDE;  // whose accumulators stay in L1

  // Words of a register of AMX's that has a part's weights, or a half or less of them; 0: it would be nearly empty, and
  // take as long as a full one, or parts are no multiple of it.
  static int64_t words_of_tile(const Part& part) {
    constexpr int64_t FEW = SIDE / 2;
    const int64_t words = (part.last - part.first) * Dot::STEPS;
    return words < FEW ? 0 : words <= SIDE ? words : words % SIDE == 0 ? SIDE : 0;
  }

  // Adds the sums of rows and a part, [rows, COLUMNS] of which first is the first one, to the accumulators. Everything
  // is a copy, of which the compiler knows that no store changes it.
  static void scale_rows(const Dot dot, const QuantizedGemmArgs product, const PartScales<COLUMNS / WIDTH> scales,
                         int64_t place, const int32_t* sums, int64_t first, int64_t last, float* acc) {
    for (int64_t r = first; r < last; ++r) {
      typename Dot::Accumulator own[1][COLUMNS / WIDTH];
      load_block(reinterpret_cast<const char*>(sums + r * COLUMNS), TILE_WORD, own);
      scales.add(dot, product, place + r * product.parts, own[0], acc + r * COLUMNS);
    }
  }

  // The same as multiply_unpacked_block by AMX for rows that are a multiple of SIDE, and some parts of one size: sums
  // are integers, and exact. A unit of work is SIDE rows and a part. While a unit is multiplied, the sums of the one
  // before are stored, and those of the one before that are scaled: a store waits long for products.
  static void multiply_by_tiles(CodeTiles& tiles, const Dot& shared, const QuantizedGemmArgs& whole, int64_t row,
                                int64_t rows, const Part* parts, int64_t count, const Tile& tile, const char* kept,
                                float* acc) {
    alignas(64) int32_t sums[2][SIDE * COLUMNS];
    const Dot dot = shared;
    const QuantizedGemmArgs product = whole;
    const int64_t words = (parts[0].last - parts[0].first) * Dot::STEPS, of_tile = words_of_tile(parts[0]);
    const int64_t groups = rows / SIDE, units = groups * count;
    const auto step = [&]<int PARITY>(int64_t unit) {
      const int64_t group = unit % groups, part = std::min(unit / groups, count - 1);
      const char* input =
          product.input + (row + group * SIDE) * product.row_bytes + parts[part].first * Dot::STEPS * WORD;
      const char* numbers = place(kept, parts[part].first - parts[0].first, 0, 0);
      const int64_t scaled = std::clamp<int64_t>(unit - 2, 0, units - 1), first = scaled % groups * SIDE;
      const Part& of_scaled = parts[scaled / groups];
      const PartScales<COLUMNS / WIDTH> scales(product, tile.scaled + of_scaled.group * COLUMNS);
      const auto third = [&]<int C>() {
        if (unit < units) {
          tiles.template zero<3 * PARITY + C>();
          for (int64_t k = 0; k < words; k += of_tile) {
            if (C == 0 || of_tile < words) tiles.template load<6>(input + k * WORD, product.row_bytes);
            tiles.template load<7>(numbers + k * TILE_WORD + C * SIDE_BYTES, TILE_WORD);
            tiles.template add<3 * PARITY + C>();
          }
        }
        if (1 <= unit && unit <= units)
          tiles.template store<3 * (1 - PARITY) + C>(sums[1 - PARITY] + C * SIDE, TILE_WORD);
        if (2 <= unit && unit < units + 2)
          scale_rows(dot, product, scales, (row + first) * product.parts + of_scaled.index, sums[PARITY], SIDE * C / 3,
                     SIDE * (C + 1) / 3, acc + first * COLUMNS);
      };
      third.template operator()<0>(), third.template operator()<1>(), third.template operator()<2>();
    };
    for (int64_t unit = 0; unit < units + 2; unit += 2) {
      step.template operator()<0>(unit);
      step.template operator()<1>(unit + 1);
    }
  }
#endif

  static constexpr auto BLOCKS = by_rows<Dot::ROWS>([]<int R>() -> Block { return &multiply_block<R>; });

  template <bool FIRST>
  static constexpr auto UNPACKED_BLOCKS =
      by_rows<Dot::MANY>([]<int R>() { return &multiply_unpacked_block<R, FIRST>; });
  static constexpr auto FIRST_BLOCKS = UNPACKED_BLOCKS<FIRST_UNPACKS>, OTHER_BLOCKS = UNPACKED_BLOCKS<false>;
};

// float32 FMA.
template <typename Kind>
struct FmaGroupDot {
  using Accumulator = F32;
  static constexpr int64_t STEPS = Kind::DEPTH, NUMBER = sizeof(float);
  static constexpr int ROWS = WIDTH == 16 ? 6 : 4, ZERO_POINT = 0, PLANES = planes_of<Kind>();
  struct Loads : OneAtATime {
    using Operand = F32;
    static constexpr int TOGETHER = Kind::TOGETHER;
    static constexpr int step(int part, int i) { return Kind::step(part, i); }
  };
  static constexpr int64_t MOST = 128 / Kind::DEPTH;
  static constexpr int MANY = WIDTH == 16 ? 8 : 6, UNPACKED_VECTORS = REGISTERS == 32 ? 3 : 2;
  static constexpr bool GROUP_SUMS = true, TAKES_ZEROS = false;

  static constexpr int vectors(int rows) {
    if (WIDTH == 16) return 3;
    if (REGISTERS == 32) return Kind::TOGETHER > 1 ? (rows == 1 ? 3 : 2) : rows == 1 ? 6 : 3;
    if (Kind::TOGETHER > 1) return rows == 1 ? 3 : rows == 2 ? 2 : 1;
    return rows == 1 ? 6 : rows == 2 ? 3 : 2;
  }

  explicit FmaGroupDot(const float* codebook) : kind_(codebook) {}

  template <typename T>
  static Input prepare(const T* from, int64_t rows, int64_t inputs, int64_t depth, const int32_t*, int64_t) {
    return converted_rows<float>(from, rows, inputs, rows, depth * Kind::DEPTH);
  }

  static F32 row(const char* input) { return F32{} + load_as<float>(input); }
  static void add(F32 x, F32 number, F32& sum) { sum = fma(x, number, sum); }

  // Dequantizes TOGETHER weights of the words of WIDTH outputs, or one.
  template <typename Words>
  [[gnu::always_inline]] void numbers(const Words& words, int part, F32 (&to)[Kind::TOGETHER]) const {
    kind_.numbers(words, part, to);
  }
  template <typename Words>
  [[gnu::always_inline]] F32 number_of(const Words& words, int step) const {
    F32 number;
    kind_.numbers(words, step, &number);
    return number;
  }

  F32 number(const QuantizedGemmArgs&, int64_t, F32 sum) const { return sum; }
  static float input_sum(const QuantizedGemmArgs& product, int64_t place) { return product.sums[place]; }

 private:
  Kind kind_;
};

}  // namespace oatmill
