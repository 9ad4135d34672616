// The loop over k of every GEMM kernel but AMX's:
//
//     for k: prefetch later weights
//            for each step of a word: acc[r][v] += row r's inputs * register v of the weights
//
// Two policies are its parameters.
//
// Dot: how inputs and weights are multiplied (fma, bf16, int16, int8, MMLA).
//   Accumulator; add(row, column, acc), one instruction or two;
//   row(input), the inputs of a row that one instruction takes; STEPS, the instructions for a word of weights, and
//   NUMBER, the bytes of input for each. MMLA's rows are pairs of rows. flush(acc) and FLUSH_WORDS, if an accumulator
//   holds the products of so many words only until it is flushed.
//
// Weights: what is loaded (floats, 16 bits, 8 bits, 4 bits, codebook), and made operands of the Dot in registers.
//   load(k, part, v, columns) makes what stands in register v of word k, TOGETHER operands at once: those of the steps
//   step(part, 0), step(part, 1), ...; WORDS, the words of k that one iteration takes; prefetch(k).
//   RELOADS: the operands of all steps do not fit the registers, so each step loads its words again.
//
// Every accumulator is added to in the same order, whatever the number of rows is: a row's result does not depend on
// the rows beside it.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "gemm/gemm.h"
#include "simd/simd.h"

namespace oatmill {

// Loads one operand at a time, of one word.
struct OneAtATime {
  static constexpr int TOGETHER = 1, WORDS = 1;
  static constexpr bool RELOADS = false;
  static constexpr int step(int part, int) { return part; }
};

// One by one: an array that is made zero at once is kept in memory.
template <int R, int V, typename Accumulator>
[[gnu::always_inline]] inline void make_zero(Accumulator (&acc)[R][V]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 12
    for (int v = 0; v < V; ++v) acc[r][v] = Accumulator{};
}

// Loads the accumulators of a block of R rows and V registers. stride: bytes from a row to the next.
template <int R, int V, typename Accumulator>
[[gnu::always_inline]] inline void load_block(const char* from, int64_t stride, Accumulator (&acc)[R][V]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 12
    for (int v = 0; v < V; ++v) acc[r][v] = load_as<Accumulator>(from + r * stride + v * sizeof(Accumulator));
}

template <int R, int V, typename Accumulator>
[[gnu::always_inline]] inline void store_block(char* to, int64_t stride, const Accumulator (&acc)[R][V]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 12
    for (int v = 0; v < V; ++v) store_as(to + r * stride + v * sizeof(Accumulator), acc[r][v]);
}

// Returns an array of the functions for blocks of 1, 2, ... ROWS rows: of what visit<1>(), visit<2>(), ... return.
template <int ROWS, typename Visit>
constexpr auto by_rows(const Visit& visit) {
  return [&]<int... R>(std::integer_sequence<int, R...>) {
    return std::array{visit.template operator()<R + 1>()...};
  }(std::make_integer_sequence<int, ROWS>());
}

// acc[r][v] += row_at(r) * column_at(v). Beside the accumulators, the fewer of rows and columns stay in registers.
//
// Loops over registers must be unrolled before the compiler decides what stays in registers, hence the pragmas.
template <typename Dot, int R, int V, typename Row, typename Column>
[[gnu::always_inline]] inline void add_outer(const Row& row_at, const Column& column_at,
                                             typename Dot::Accumulator (&acc)[R][V]) {
  if constexpr (R < V) {
    decltype(row_at(0)) rows[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) rows[r] = row_at(r);
#pragma GCC unroll 12
    for (int v = 0; v < V; ++v) {
      const auto column = column_at(v);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) Dot::add(rows[r], column, acc[r][v]);
    }
  } else {
    decltype(column_at(0)) columns[V];
#pragma GCC unroll 12
    for (int v = 0; v < V; ++v) columns[v] = column_at(v);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const auto row = row_at(r);
#pragma GCC unroll 12
      for (int v = 0; v < V; ++v) Dot::add(row, columns[v], acc[r][v]);
    }
  }
}

// Where the inputs of up to eight rows stand. Left alone, compilers hold an offset for each row, for which registers
// are missing; x86 addresses all of them by two pointers, the row stride and three times that.
template <int R>
class RowPointers {
 public:
  [[gnu::always_inline]] RowPointers(const char* first, int64_t row_bytes)
      : low_(first), high_(first + 4 * row_bytes), stride_(row_bytes), three_(hidden(3 * row_bytes)) {}
  [[gnu::always_inline]] const char* at(int r) const {
    return (r < 4 ? low_ : high_) + (r % 4 == 3 ? three_ : r % 4 * stride_);
  }
  [[gnu::always_inline]] void advance(int64_t bytes) {
    low_ = hidden(low_ + bytes);
    if constexpr (R > 4) high_ = hidden(high_ + bytes);
  }

 private:
  static_assert(R <= 8);

  // Returns a value of which the compiler does not know how it came about: it would compute it again from others.
  template <typename T>
  [[gnu::always_inline]] static T hidden(T value) {
#if defined(__x86_64__)
    asm("" : "+r"(value));
#endif
    return value;
  }

  const char *low_, *high_;
  int64_t stride_, three_;
};

// acc[r][v] += the products of words first .. last - 1. input: of the first row, at word 0; row_bytes: to the next row.
template <typename Dot, typename Weights, int R, int V>
[[gnu::always_inline]] inline void accumulate_words(const char* input, int64_t row_bytes, int64_t first, int64_t last,
                                                    Weights&& weights, typename Dot::Accumulator (&acc)[R][V]) {
  using Policy = std::remove_cvref_t<Weights>;
  constexpr int TOGETHER = Policy::TOGETHER;
  RowPointers<R> rows(input + first * Dot::STEPS * Dot::NUMBER, row_bytes);
  const auto row_at = [&](int r, int step) { return Dot::row(rows.at(r) + step * Dot::NUMBER); };
  const auto add_word = [&](int64_t k) {
    weights.prefetch(k);
#pragma GCC unroll 8
    for (int part = 0; part < Dot::STEPS / TOGETHER; ++part) {
      if constexpr (Policy::RELOADS) asm volatile("" ::: "memory");
      if constexpr (TOGETHER == 1) {
        add_outer<Dot>([&](int r) { return row_at(r, part); }, [&](int v) { return weights.load(k, part, v); }, acc);
      } else {
        typename Policy::Operand columns[V][TOGETHER];
#pragma GCC unroll 6
        for (int v = 0; v < V; ++v) weights.load(k, part, v, columns[v]);
#pragma GCC unroll 4
        for (int i = 0; i < TOGETHER; ++i)
          add_outer<Dot>([&](int r) { return row_at(r, Policy::step(part, i)); }, [&](int v) { return columns[v][i]; },
                         acc);
      }
    }
    rows.advance(Policy::WORDS * Dot::STEPS * Dot::NUMBER);
  };
  if constexpr (requires { Dot::FLUSH_WORDS; }) {
    for (int64_t k = first; k < last;) {
      for (const int64_t end = std::min<int64_t>(last, k + Dot::FLUSH_WORDS); k < end; ++k) add_word(k);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 12
        for (int v = 0; v < V; ++v) Dot::flush(acc[r][v]);
    }
  } else {
    for (int64_t k = first; k < last; k += Policy::WORDS) add_word(k);
  }
}

}  // namespace oatmill
