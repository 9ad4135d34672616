// Products with codes for few rows: numbers are made of codes in registers, as often as rows are multiplied by them, and
// added up group by group of the weights.
//
// Set is a type that is made of a codebook, with
//   Register, what the sums of a group are kept in;
//   ROWS, how many one pass over a tile's words serves; vectors(rows), the registers of outputs that are computed
//   together, as many as leave room for words and numbers beside the sums;
//   add_words(product, row, words, column, first, last, sums), which adds the products of words first .. last - 1;
//   number(product, place, sum), the float that a sum stands for, place being that of its row and group;
//   prepare(from, rows, inputs, depth, starts, groups), which returns the rows as add_words reads them: an Input.
//
// Every row is added up in the same order, whatever rows are beside it.

#pragma once

#include <array>
#include <cstdint>
#include <utility>

#include "codes.h"
#include "linear.h"
#include "registers.h"

namespace oatmill {

// The kernel made of a set of instructions.
template <typename Set>
struct GroupedProducts {
  template <typename T>
  static Input prepare(const T* from, int64_t rows, int64_t inputs, int64_t depth, const int32_t* starts,
                       int64_t groups) {
    return Set::prepare(from, rows, inputs, depth, starts, groups);
  }

  static void multiply(const CodedProduct& product, int64_t first_row, int64_t rows, int64_t tile, int64_t next_tile,
                       char* totals) {
    const Set set(product.codebook);
    const WantedWords words{product.words(tile), product.words(next_tile), product.depth};
    for_each_block(rows, Set::ROWS, [&](int64_t first, int64_t count) {
      BLOCKS[count - 1](set, product, first_row + first, words, tile * product.groups * COLUMNS,
                        reinterpret_cast<float*>(totals) + first * COLUMNS);
    });
  }

 private:
  using Block = void (*)(const Set&, const CodedProduct&, int64_t, const WantedWords&, int64_t, float*);

  // scaled: where the scales of the tile's first group stand.
  template <int R>
  static void multiply_block(const Set& set, const CodedProduct& product, int64_t row, const WantedWords& words,
                             int64_t scaled, float* totals) {
    constexpr int V = Set::vectors(R);
    for (int column = 0; column < COLUMNS; column += V * WIDTH)
      multiply_columns<R, V>(set, product, row, words, scaled + column, column, totals + column);
  }

  template <int R, int V>
  static void multiply_columns(const Set& shared, const CodedProduct& product, int64_t row, const WantedWords& words,
                               int64_t scaled, int column, float* totals) {
    const Set set = shared;  // a copy, which stays in registers
    for (int64_t g = 0; g < product.groups; ++g, scaled += COLUMNS) {
      typename Set::Register sums[R][V] = {};
      set.add_words(product, row, words, column, product.starts[g], product.starts[g + 1], sums);
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const int64_t place = (row + r) * product.groups + g;
#pragma GCC unroll 6
        for (int v = 0; v < V; ++v) {
          float* total = totals + r * COLUMNS + v * WIDTH;
          const Floats before = g == 0 ? Floats{} : load_as<Floats>(total);
          const Floats scale = product.scales.scale(scaled + v * WIDTH);
          Floats sum = multiply_add(set.number(product, place, sums[r][v]), scale, before);
          if (product.scales.shifted())
            sum = multiply_add(Floats{} + product.sums[place], product.scales.offset(scaled + v * WIDTH, scale), sum);
          store_as(total, sum);
        }
      }
    }
  }

  static constexpr auto BLOCKS = []<int... R>(std::integer_sequence<int, R...>) {
    return std::array<Block, Set::ROWS>{&multiply_block<R + 1>...};
  }(std::make_integer_sequence<int, Set::ROWS>());
};

// Products of floats.
template <typename Kind>
struct CodeProducts {
  using Register = Floats;
  static constexpr int ROWS = WIDTH == 16 ? 6 : 4;

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
      for (int v = 0; v < V; ++v) read[v] = load_as<Words>(words.words + k * TILE_WORD + (column + v * WIDTH) * WORD);
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

 private:
  Kind kind_;
};

}  // namespace oatmill
