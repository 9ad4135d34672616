// The product of rows with weights that were arranged for it once, for instructions that multiply and add several
// numbers of four bytes in all: four of a byte, or two of bfloat16. Those four bytes are a word here.
//
// Weights stand in tiles of COLUMNS outputs, each a stream of words that is read from beginning to end: for every word
// of the input, one of each output.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/BFloat16.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "lanes.h"
#include "parallel.h"

namespace oatmill {

constexpr int64_t WORD = 4;                   // bytes
constexpr int64_t VECTORS = 3;                // registers of outputs that are computed together
constexpr int64_t COLUMNS = VECTORS * LANES;  // outputs of a tile
constexpr int64_t VECTOR = LANES * WORD;      // bytes, as is the next one
constexpr int64_t TILE_WORD = VECTORS * VECTOR;
constexpr int64_t ROWS = 8;                   // rows that share a pass over a tile's words: their sums fill the registers
constexpr int64_t CHUNK_ROWS = 12 * ROWS;     // rows of one work item
constexpr int64_t CHUNK_DEPTH = 1536;         // words of a tile that stay in a core's cache from one pass to the next
constexpr int64_t AHEAD = 32;                 // words; what is read from memory is asked for that much earlier

// weight: [outputs, inputs]. Returns [outputs / COLUMNS, inputs / DEPTH, COLUMNS, DEPTH], padded with zeros, where
// DEPTH numbers make a word.
template <typename T>
at::Tensor pack_weight(const at::Tensor& weight) {
  constexpr int64_t DEPTH = WORD / sizeof(T);
  const int64_t outputs = weight.size(0), inputs = weight.size(1), depth = parts(inputs, DEPTH);
  at::Tensor packed = at::zeros({parts(outputs, COLUMNS), depth, COLUMNS, DEPTH}, weight.options());
  const at::Tensor dense = weight.contiguous();
  const T* from = dense.const_data_ptr<T>();
  T* to = packed.mutable_data_ptr<T>();
  for_each_item(outputs, [&](int64_t n) {
    for (int64_t k = 0; k < inputs; ++k)
      to[((n / COLUMNS * depth + k / DEPTH) * COLUMNS + n % COLUMNS) * DEPTH + k % DEPTH] = from[n * inputs + k];
  });
  return packed;
}

struct Product {
  const char* input;    // [rows, depth] words
  const char* weights;  // [tiles, depth, COLUMNS] words
  int64_t rows, depth, outputs;
};

// What happens to a sum on its way out, besides what makes a number of it: the bias is added, negative ones become
// zero if asked, and the residual is added.
template <typename T>
struct Finish {
  const float* bias;  // [outputs, padded to a tile], or null
  bool relu;
  const T* residual;  // [rows, outputs], or null
  T* output;          // [rows, outputs]
};

#if defined(__AVX512F__)

// Adds the products of `depth` words of R rows to totals: [R, COLUMNS], which are numbers of the instruction's kind.
// Add: a type with add(total, row, column), the instruction. next: the weights that are needed after these.
//
// Weights are asked for into the second cache only: the first one has so few requests on the way to memory that half
// of the bandwidth is all they could use.
// Loops over registers must be unrolled before the compiler decides what is kept in registers, hence the pragmas.
template <typename Add, int R>
void multiply(const char* input, int64_t row_words, const char* weights, const char* next, int64_t depth,
              bool from_zero, char* totals) {
  __m512i sums[R][VECTORS];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v)
      sums[r][v] = from_zero ? _mm512_setzero_si512() : _mm512_loadu_si512(totals + (r * VECTORS + v) * VECTOR);
  const int64_t own = std::max<int64_t>(depth - AHEAD, 0);
  for (int64_t k = 0, end = own; k < depth; end = depth) {
    const char* wanted = k < own ? weights + AHEAD * TILE_WORD : next - own * TILE_WORD;
    for (; k < end; ++k) {
      __m512i columns[VECTORS];
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) {
        columns[v] = _mm512_loadu_si512(weights + k * TILE_WORD + v * VECTOR);
        _mm_prefetch(wanted + k * TILE_WORD + v * VECTOR, _MM_HINT_T1);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        int32_t word;
        std::memcpy(&word, input + (r * row_words + k) * WORD, WORD);
        const __m512i row = _mm512_set1_epi32(word);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) Add::add(sums[r][v], row, columns[v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) _mm512_storeu_si512(totals + (r * VECTORS + v) * VECTOR, sums[r][v]);
}

using Multiply = void (*)(const char*, int64_t, const char*, const char*, int64_t, bool, char*);
template <typename Add>
constexpr Multiply MULTIPLY[ROWS] = {multiply<Add, 1>, multiply<Add, 2>, multiply<Add, 3>, multiply<Add, 4>,
                                     multiply<Add, 5>, multiply<Add, 6>, multiply<Add, 7>, multiply<Add, 8>};

// Rows from first_row on times one tile. next_tile: the one that this thread will probably need next.
template <typename Add>
void multiply_rows(const Product& product, int64_t first_row, int64_t rows, int64_t tile, int64_t next_tile,
                   char* totals) {
  const int64_t blocks = parts(rows, ROWS);
  for (int64_t k = 0; k < product.depth; k += CHUNK_DEPTH) {
    const int64_t depth = std::min(CHUNK_DEPTH, product.depth - k);
    const char* weights = product.weights + (tile * product.depth + k) * TILE_WORD;
    const char* input = product.input + (first_row * product.depth + k) * WORD;
    const bool last = k + depth == product.depth;
    const char* next = last ? product.weights + next_tile * product.depth * TILE_WORD : weights + depth * TILE_WORD;
    for (int64_t b = 0; b < blocks; ++b) {  // of nearly the same size
      const int64_t begin = rows * b / blocks, end = rows * (b + 1) / blocks;
      MULTIPLY<Add>[end - begin - 1](input + begin * product.depth * WORD, product.depth, weights, next, depth, k == 0,
                                     totals + begin * COLUMNS * WORD);
    }
  }
}

// Asks for what finish_row is about to read and write.
template <typename T>
void want_row(const Product& product, const Finish<T>& finish, int64_t row, int64_t first) {
  const int64_t place = row * product.outputs + first;
  for (int64_t n = 0; n < COLUMNS; n += LANES) {
    __builtin_prefetch(finish.output + place + n, 1);
    if (finish.residual) __builtin_prefetch(finish.residual + place + n);
  }
}

// number: (totals of LANES outputs, row, first of the outputs) -> Lanes
template <typename T, typename Number>
void finish_row(const Product& product, const Finish<T>& finish, const char* totals, int64_t row, int64_t first,
                const Number& number) {
  for (int64_t n = first; n < std::min(first + COLUMNS, product.outputs); n += LANES) {
    const int64_t count = std::min<int64_t>(LANES, product.outputs - n), place = row * product.outputs + n;
    Lanes value = number(totals + (n - first) * WORD, row, n);
    if (finish.bias) value += load(finish.bias + n);
    if (finish.relu) value = larger(value, Lanes{});
    if (count == LANES) {
      if (finish.residual) value += load(finish.residual + place);
      store(finish.output + place, value);
    } else {
      T edge[LANES] = {};
      if (finish.residual) std::copy_n(finish.residual + place, count, edge);
      if (finish.residual) value += load(edge);
      store(edge, value);
      std::copy_n(edge, count, finish.output + place);
    }
  }
}

template <typename Add, typename T, typename Number>
void run_product(const Product& product, const Finish<T>& finish, const Number& number) {
  const int64_t chunks = parts(product.rows, CHUNK_ROWS), tiles = parts(product.outputs, COLUMNS);
  for_each_item(tiles * chunks, [&](int64_t item) {
    alignas(64) static thread_local char totals[CHUNK_ROWS * COLUMNS * WORD];
    const int64_t tile = item / chunks, chunk = item % chunks;
    const int64_t begin = chunk * CHUNK_ROWS, end = std::min(begin + CHUNK_ROWS, product.rows);
    const int64_t next_tile = std::min(tile + at::get_num_threads(), tiles - 1);
    for (int64_t row = begin; row < std::min(begin + ROWS, end); ++row)
      want_row(product, finish, row, tile * COLUMNS);
    multiply_rows<Add>(product, begin, end - begin, tile, next_tile, totals);
    for (int64_t row = begin; row < end; ++row) {
      if (row + ROWS < end) want_row(product, finish, row + ROWS, tile * COLUMNS);
      finish_row(product, finish, totals + (row - begin) * COLUMNS * WORD, row, tile * COLUMNS, number);
    }
  });
}

#endif

}  // namespace oatmill
