// Products with codes that are added up group by group of the weights. For few rows numbers are made of codes in registers,
// as often as rows are multiplied by them.
//
// Set is a type that is made of a codebook, with
//   Register, what the sums of a group are kept in;
//   ROWS, how many one pass over a tile's words serves; vectors(rows), the registers of outputs that are computed
//   together, as many as leave room for words and numbers beside the sums;
//   MOST, the words whose products a sum holds; ADDED, how much higher than they are numbers are read;
//   add_words(product, row, words, column, first, last, sums), which adds the products of words first .. last - 1;
//   number(product, place, sum), the float that a sum stands for, place being that of its row and group;
//   input_sum(product, place), the sum of a group's inputs;
//   prepare(from, rows, inputs, depth, starts, groups), which returns the rows as they are read: an Input;
//   GROUP_SUMS, true if input_sum needs those of the product; TAKES_ZEROS, if numbers are made with their zeros.
// One that makes its numbers of what it unpacks has STEPS, of a word, and instead of add_words
//   unpacked(words, step, zeros), what stands between words and numbers, zeros being in every byte of words;
//   MANY, the most rows of a block that shares it with others, and UNPACKED_VECTORS, such a block's registers of outputs;
//   add_steps(product, row, first, last, sums, at), where at(k, step, v) is what is unpacked of word k, of register v.
//
// Every row is added up in the same order, whatever rows are beside it.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "gemm/w4_gemm.h"
#include "gemm/gemm.h"
#include "simd/simd.h"

namespace oatmill {

// One by one: an array that is made zero at once is kept in memory.
template <int R, int V, typename Register>
[[gnu::always_inline]] inline void make_zero(Register (&sums)[R][V]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 6
    for (int v = 0; v < V; ++v) sums[r][v] = Register{};
}

// The kernel made of a set of instructions.
template <typename Set>
struct GroupedProducts {
  static bool needs_sums(const Scales& scales) { return Set::GROUP_SUMS && shifted(scales); }

  template <typename T>
  static Input prepare(const T* from, int64_t rows, int64_t inputs, int64_t depth, const int32_t* starts,
                       int64_t groups) {
    return Set::prepare(from, rows, inputs, depth, starts, groups);
  }

  static void multiply(const CodedProduct& product, int64_t first_row, int64_t rows, int64_t tile, int64_t next_tile,
                       char* totals) {
    const Set set(product.codebook);
    const Tile at{{product.words(tile), product.words(next_tile), product.depth},
                  tile * product.groups * COLUMNS,
                  next_tile * product.groups * COLUMNS};
    float* sums = reinterpret_cast<float*>(totals);
    std::fill_n(sums, rows * COLUMNS, 0.0f);
    if constexpr (UNPACKS) {
      if (rows > Set::ROWS) return multiply_unpacked(set, product, first_row, rows, at, sums);
    }
    for_each_block(rows, Set::ROWS, [&](int64_t first, int64_t count) {
      BLOCKS[count - 1](set, product, first_row + first, at, sums + first * COLUMNS);
    });
  }

 private:
  static constexpr bool UNPACKS = requires { Set::STEPS; }, FIRST_UNPACKS = REGISTERS == 32;
  static constexpr int64_t KEPT = 32;  // words whose unpacked ones the first cache holds, 24 KiB at most, and more besides

  // Says whether sums of inputs are part of the totals.
  static bool shifted(const Scales& scales) {
    return Set::ADDED != 0 || scales.offsets || (scales.zeros && !Set::TAKES_ZEROS);
  }

  // scaled: where the scales of the first group stand, and those of the tile that comes next.
  struct Tile {
    WantedWords words;
    int64_t scaled, next_scaled;
  };

  // Words of one group. begins: they are its first ones.
  struct Part {
    int64_t group, first, last;
    bool begins;
  };

  using Block = void (*)(const Set&, const CodedProduct&, int64_t, const Tile&, float*);

  // Calls work(part) for all words of a tile, and asks for the next tile's scales meanwhile.
  template <typename Work>
  static void for_each_part(const CodedProduct& product, const Tile& tile, const Work& work) {
    for (int64_t g = 0; g < product.groups; ++g) {
      product.scales.want(tile.next_scaled + g * COLUMNS);
      const int64_t begin = product.starts[g], end = product.starts[g + 1];
      for (int64_t first = begin; first < end; first += Set::MOST)
        work(Part{g, first, std::min<int64_t>(end, first + Set::MOST), first == begin});
    }
  }

  template <int R>
  static void multiply_block(const Set& shared, const CodedProduct& product, int64_t row, const Tile& tile,
                             float* totals) {
    constexpr int V = Set::vectors(R);
    for (int column = 0; column < COLUMNS; column += V * WIDTH) {
      const Set set = shared;  // a copy, which stays in registers
      for_each_part(product, tile, [&](const Part& part) {
        typename Set::Register sums[R][V];
        make_zero(sums);
        const int64_t scaled = tile.scaled + part.group * COLUMNS + column;
        if constexpr (UNPACKS) {
          const Zeros<V> zeros(product, scaled);
          set.add_steps(product, row, part.first, part.last, sums, [&](int64_t k, int step, int v) {
            return unpacked<V>(set, tile.words, column, k, step, v, zeros);
          });
        } else {
          set.add_words(product, row, tile.words, column, part.first, part.last, sums);
        }
        add_to_totals(set, product, row, part, scaled, sums, totals + column);
      });
    }
  }

  // The zeros of V registers of outputs, where numbers are made with them.
  template <int V>
  struct Zeros {
    Words bytes[V];

    // scaled: as of add_to_totals.
    [[gnu::always_inline]] Zeros(const CodedProduct& product, int64_t scaled) {
      if constexpr (Set::TAKES_ZEROS)
#pragma GCC unroll 6
        for (int v = 0; v < V; ++v) bytes[v] = product.scales.zero_bytes(scaled + v * WIDTH);
    }
  };

  // What is multiplied in a step of word k, of register v from a column on. Asks for later words.
  template <int V>
  [[gnu::always_inline]] static Words unpacked(const Set& set, const WantedWords& words, int column, int64_t k, int step,
                                               int v, const Zeros<V>& zeros) {
    if (step == 0 && v == 0) words.want<V>(k, column);
    return set.unpacked(words.read(k, column + v * WIDTH), step, zeros.bytes[v]);
  }

  // Words are unpacked once for all rows: by the first block of rows, beside its products, or before it where that would
  // take more registers than there are. Several parts at once, whose inputs and totals of a block of rows stay in the first
  // cache meanwhile.
  static void multiply_unpacked(const Set& set, const CodedProduct& product, int64_t first_row, int64_t rows,
                                const Tile& tile, float* totals) {
    static_assert(Set::MOST <= KEPT);
    alignas(64) static thread_local char of_thread[KEPT * Set::STEPS * TILE_WORD];
    char* kept = of_thread;
    std::array<Part, KEPT> parts;
    int64_t count = 0;
    const auto multiply_parts = [&] {
      for_each_block(rows, Set::MANY, [&](int64_t first, int64_t block_rows) {
        const auto block = (first == 0 ? FIRST_BLOCKS : OTHER_BLOCKS)[block_rows - 1];
        for (int64_t p = 0; p < count; ++p) {
          char* own = place(kept, parts[p].first - parts[0].first, 0, 0);
          if (first == 0 && !FIRST_UNPACKS) unpack(set, product, parts[p], tile, own);
          block(set, product, first_row + first, parts[p], tile, own, totals + first * COLUMNS);
        }
      });
      count = 0;
    };
    for_each_part(product, tile, [&](const Part& part) {
      if (count > 0 && part.last - parts[0].first > KEPT) multiply_parts();
      parts[count++] = part;
    });
    multiply_parts();
  }

  // Where what is unpacked of a part's word is kept.
  static char* place(char* kept, int64_t word, int step, int column) {
    return kept + (word * Set::STEPS + step) * TILE_WORD + column * WORD;
  }

  static void unpack(const Set& set, const CodedProduct& product, const Part& part, const Tile& tile, char* kept) {
    constexpr int V = COLUMNS / WIDTH;
    const Zeros<V> zeros(product, tile.scaled + part.group * COLUMNS);
    for (int64_t k = part.first; k < part.last; ++k) {
      tile.words.template want<V>(k, 0);
#pragma GCC unroll 6
      for (int v = 0; v < V; ++v)
#pragma GCC unroll 4
        for (int step = 0; step < Set::STEPS; ++step)
          store_as(place(kept, k - part.first, step, v * WIDTH),
                   set.unpacked(tile.words.read(k, v * WIDTH), step, zeros.bytes[v]));
    }
  }

  template <int R, bool FIRST>
  static void multiply_unpacked_block(const Set& shared, const CodedProduct& whole, int64_t row, const Part& of_tile,
                                      const Tile& at, char* kept, float* totals) {
    constexpr int V = Set::UNPACKED_VECTORS;
    const Set set = shared;  // copies, of which the compiler knows that no store changes them
    const CodedProduct product = whole;
    const Part part = of_tile;
    const Tile tile = at;
    for (int column = 0; column < COLUMNS; column += V * WIDTH) {
      typename Set::Register sums[R][V];
      make_zero(sums);
      [[maybe_unused]] const Zeros<FIRST ? V : 0> zeros(product, tile.scaled + part.group * COLUMNS + column);
      set.add_steps(product, row, part.first, part.last, sums, [&](int64_t k, int step, int v) {
        char* own = place(kept, k - part.first, step, column + v * WIDTH);
        if constexpr (FIRST) {
          const Words numbers = unpacked<V>(set, tile.words, column, k, step, v, zeros);
          store_as(own, numbers);
          return numbers;
        } else {
          return load_as<Words>(own);
        }
      });
      add_to_totals(set, product, row, part, tile.scaled + part.group * COLUMNS + column, sums, totals + column);
    }
  }

  // scaled: where the scales of the first of the outputs stand.
  template <int R, int V>
  [[gnu::always_inline]] static void add_to_totals(const Set& set, const CodedProduct& product, int64_t row,
                                                   const Part& part, int64_t scaled,
                                                   const typename Set::Register (&sums)[R][V], float* totals) {
    Floats scales[V], offsets[V];
    product.scales.template read<Set::ADDED, !Set::TAKES_ZEROS>(scaled, scales, offsets);
    const bool with_sums = shifted(product.scales);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const int64_t place = (row + r) * product.groups + part.group;
      const Floats input_sum = Floats{} + (with_sums && part.begins ? Set::input_sum(product, place) : 0.0f);
#pragma GCC unroll 6
      for (int v = 0; v < V; ++v) {
        float* total = totals + r * COLUMNS + v * WIDTH;
        Floats sum = multiply_add(set.number(product, place, sums[r][v]), scales[v], load_as<Floats>(total));
        if (with_sums) sum = multiply_add(input_sum, offsets[v], sum);
        store_as(total, sum);
      }
    }
  }

  static constexpr auto BLOCKS = []<int... R>(std::integer_sequence<int, R...>) {
    return std::array<Block, Set::ROWS>{&multiply_block<R + 1>...};
  }(std::make_integer_sequence<int, Set::ROWS>());

  template <bool FIRST>
  static constexpr auto UNPACKED_BLOCKS = [] {
    if constexpr (UNPACKS)
      return []<int... R>(std::integer_sequence<int, R...>) {
        return std::array{&multiply_unpacked_block<R + 1, FIRST>...};
      }(std::make_integer_sequence<int, Set::MANY>());
    else
      return 0;
  }();
  static constexpr auto FIRST_BLOCKS = UNPACKED_BLOCKS<FIRST_UNPACKS>, OTHER_BLOCKS = UNPACKED_BLOCKS<false>;
};

// Products of floats.
template <typename Kind>
struct CodeProducts {
  using Register = Floats;
  static constexpr int ROWS = WIDTH == 16 ? 6 : 4, ADDED = 0;
  static constexpr int64_t MOST = int64_t{1} << 32;
  static constexpr bool GROUP_SUMS = true, TAKES_ZEROS = false;

  static constexpr int vectors(int rows) {
    if (WIDTH == 16) return 3;
    if (REGISTERS == 32) return Kind::TOGETHER > 1 ? (rows == 1 ? 3 : 2) : rows == 1 ? 6 : 3;
    if (Kind::TOGETHER > 1) return rows == 1 ? 3 : rows == 2 ? 2 : 1;
    return rows == 1 ? 6 : rows == 2 ? 3 : 2;
  }

  explicit CodeProducts(const float* codebook) : kind_(codebook) {}

  template <typename T>
  static Input prepare(const T* from, int64_t rows, int64_t inputs, int64_t depth, const int32_t*, int64_t) {
    return converted_rows<float>(from, rows, inputs, rows, depth * Kind::DEPTH);
  }

  // Loops over registers must be unrolled before the compiler decides what is kept in registers, hence the pragmas.
  template <int R, int V>
  [[gnu::always_inline]] void add_words(const CodedProduct& product, int64_t row, const WantedWords& words, int column,
                                        int64_t first, int64_t last, Floats (&sums)[R][V]) const {
    const char* input = product.input + row * product.row_bytes;
    for (int64_t k = first; k < last; ++k) {
      words.want<V>(k, column);
      Words read[V];
#pragma GCC unroll 6
      for (int v = 0; v < V; ++v) read[v] = words.read(k, column + v * WIDTH);
#pragma GCC unroll 8
      for (int part = 0; part < Kind::DEPTH / Kind::TOGETHER; ++part) {
        Floats numbers[V][Kind::TOGETHER];
#pragma GCC unroll 6
        for (int v = 0; v < V; ++v) kind_.numbers(read[v], part, numbers[v]);
#pragma GCC unroll 4
        for (int i = 0; i < Kind::TOGETHER; ++i) {
          const char* place = input + (k * Kind::DEPTH + Kind::step(part, i)) * sizeof(float);
#pragma GCC unroll 6
          for (int r = 0; r < R; ++r) {
            const Floats x = Floats{} + load_as<float>(place + r * product.row_bytes);
#pragma GCC unroll 6
            for (int v = 0; v < V; ++v) sums[r][v] = multiply_add(x, numbers[v][i], sums[r][v]);
          }
        }
      }
    }
  }

  Floats number(const CodedProduct&, int64_t, Floats sum) const { return sum; }
  static float input_sum(const CodedProduct& product, int64_t place) { return product.sums[place]; }

 private:
  Kind kind_;
};

}  // namespace oatmill
