// GEMM, y = x W^T: the packed layout of weights, and the driver around all kernels: tasks, chunks of k, epilogue.
//
// Weights are packed in tiles of COLUMNS outputs, each a stream of words of four bytes that is read from beginning to
// end: one float, two numbers of 16 bits or four of 8. For every word of k a tile has one of each output. All kernels
// read this layout, so one copy of the weights serves whichever kernel is the fastest for a number of rows. README.md
// has a picture.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "simd/simd16.h"
#include "runtime/huge_pages.h"
#include "runtime/thread_pool.h"

namespace oatmill {

constexpr int64_t WORD = 4;                        // bytes
constexpr int64_t COLUMNS = 48;                    // outputs of a tile
constexpr int64_t TILE_WORD = COLUMNS * WORD;      // bytes, a word of each output
constexpr int64_t CHUNK_ROWS = 96;                 // rows of one task
constexpr int64_t MAX_TASK_ROWS = 4 * CHUNK_ROWS;  // of a task that dequantizes weights, see rows_per_task

// Kinds of weights: DEPTH numbers make a word; place(n, k) is where number k of output n's word stands in a tile's.
struct FloatWeights {
  using Number = float;
  static constexpr int64_t DEPTH = 1;
  static constexpr int64_t place(int64_t n, int64_t) { return n; }
};

struct Bf16Weights {
  using Number = c10::BFloat16;
  static constexpr int64_t DEPTH = 2;
  static constexpr int64_t place(int64_t n, int64_t k) { return n * DEPTH + k; }
};

// Not in pairs: instructions turn neighbouring halves into floats.
struct HalfWeights {
  using Number = c10::Half;
  static constexpr int64_t DEPTH = 2;
  static constexpr int64_t place(int64_t n, int64_t k) { return k * COLUMNS + n; }
};

struct Int8Weights {
  using Number = int8_t;
  static constexpr int64_t DEPTH = 4;
  static constexpr int64_t place(int64_t n, int64_t k) { return n * DEPTH + k; }
};

// Returns zeros into which outputs are packed: [outputs / COLUMNS, inputs / DEPTH, COLUMNS * DEPTH].
template <typename Weights>
at::Tensor room_for(const at::Tensor& weight, int64_t outputs) {
  constexpr int64_t DEPTH = Weights::DEPTH;
  return zeros_in_huge_pages({ceil_div(outputs, COLUMNS), ceil_div(weight.size(1), DEPTH), COLUMNS * DEPTH},
                             weight.options());
}

// Packs outputs of a weight, [outputs, inputs], into the first tiles.
template <typename Weights>
void pack_weight(const at::Tensor& weight, at::Tensor& packed) {
  using Number = typename Weights::Number;
  constexpr int64_t DEPTH = Weights::DEPTH;
  const int64_t outputs = weight.size(0), inputs = weight.size(1), depth = ceil_div(inputs, DEPTH);
  TORCH_CHECK(packed.is_contiguous() && packed.scalar_type() == weight.scalar_type() && packed.dim() == 3 &&
                  packed.size(0) >= ceil_div(outputs, COLUMNS) && packed.size(1) == depth &&
                  packed.size(2) == COLUMNS * DEPTH,
              "there is no room for ", outputs, " outputs of ", inputs, " inputs in ", packed.sizes());
  const at::Tensor dense = weight.contiguous();
  const Number* from = dense.const_data_ptr<Number>();
  Number* to = packed.mutable_data_ptr<Number>();
  parallel_for(ceil_div(outputs, COLUMNS), [&](int64_t tile) {
    const int64_t first = tile * COLUMNS, last = std::min(first + COLUMNS, outputs);
    for (int64_t k = 0; k < inputs; ++k)
      for (int64_t n = first; n < last; ++n)
        to[(tile * depth + k / DEPTH) * COLUMNS * DEPTH + Weights::place(n - first, k % DEPTH)] = from[n * inputs + k];
  });
}

// Returns what pack_weight was given.
template <typename Weights>
at::Tensor unpack_weight(const at::Tensor& packed, int64_t outputs, int64_t inputs) {
  using Number = typename Weights::Number;
  constexpr int64_t DEPTH = Weights::DEPTH;
  const int64_t depth = packed.size(1);
  at::Tensor weight = at::empty({outputs, inputs}, packed.options());
  const Number* from = packed.const_data_ptr<Number>();
  Number* to = weight.mutable_data_ptr<Number>();
  parallel_for(outputs, [&](int64_t n) {
    for (int64_t k = 0; k < inputs; ++k)
      to[n * inputs + k] =
          from[(n / COLUMNS * depth + k / DEPTH) * COLUMNS * DEPTH + Weights::place(n % COLUMNS, k % DEPTH)];
  });
  return weight;
}

// Rows as a kernel reads them, `row_bytes` from one to the next. scales: of rows that were quantized. tail: the last
// rows, where a kernel that takes several at once finds them with others behind them, `tail_row_bytes` apart; or null.
struct Input {
  const char* data;
  int64_t row_bytes;
  c10::DataPtr buffer;  // where they are, if they had to be copied
  std::vector<float> scales;
  const char* tail = nullptr;
  int64_t tail_row_bytes = 0;
  c10::DataPtr tail_buffer = {};
};

// tail, tail_row_bytes: as of an Input.
struct GemmArgs {
  const char* input;
  int64_t row_bytes;
  const char* weights;  // [tiles, depth, COLUMNS] words
  int64_t rows, depth, outputs;
  const char* tail = nullptr;
  int64_t tail_row_bytes = 0;
};

// Epilogue: bias, residual. adapted: of each row true if a LoRA delta comes before the residual, which is left to what
// adds it; null: of none.
template <typename T>
struct Epilogue {
  const float* bias;  // [outputs, padded to a tile], or null
  const T* residual;  // [rows, outputs], or null
  T* output;          // [rows, outputs]
  const bool* adapted;
};

// Calls work(first, count) for blocks of rows, or of words, of nearly the same size, at most `most` each.
template <typename Work>
void for_each_block(int64_t rows, int64_t most, const Work& work) {
  const int64_t blocks = ceil_div(rows, most);
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t begin = rows * b / blocks;
    work(begin, rows * (b + 1) / blocks - begin);
  }
}

// Rows from first_row on times one tile. next_tile: the one that this thread will probably need next. acc:
// accumulators, [rows, COLUMNS] words.
//
// Kernel: a type with
//   Weights, the kind that it reads;
//   INPUT_WORD, the bytes of input for a word of weights;
//   CHUNK_DEPTH, the words of a tile that stay in L1 or L2 while all rows are multiplied by them, a multiple of UNIT;
//   multiply(input, row_bytes, rows, weights, next, depth, from_zero, acc), where `next` are the next weights;
//   prepare(from, rows, inputs, depth), which returns the rows as the kernel reads them: an Input.
template <typename Kernel>
void multiply_tile(const GemmArgs& product, int64_t first_row, int64_t rows, int64_t tile, int64_t next_tile,
                   char* acc) {
  constexpr int64_t UNIT = Kernel::UNIT;
  // Of nearly the same size: a chunk prefetches as many words of the next one as it has itself.
  for_each_block(product.depth / UNIT, Kernel::CHUNK_DEPTH / UNIT, [&](int64_t first_unit, int64_t units) {
    const int64_t k = first_unit * UNIT, depth = units * UNIT;
    const char* weights = product.weights + (tile * product.depth + k) * TILE_WORD;
    const bool last = k + depth == product.depth;
    const char* next = last ? product.weights + next_tile * product.depth * TILE_WORD : weights + depth * TILE_WORD;
    const char* input = product.input + first_row * product.row_bytes + k * Kernel::INPUT_WORD;
    Kernel::multiply(input, product.row_bytes, rows, weights, next, depth, k == 0, acc);
  });
}

// Prefetches what apply_epilogue is about to read and write.
template <typename T>
void prefetch_row(const GemmArgs& product, const Epilogue<T>& epilogue, int64_t row, int64_t first) {
  const int64_t place = row * product.outputs + first;
  for (int64_t n = 0; n < COLUMNS; n += LANES) {
    __builtin_prefetch(epilogue.output + place + n, 1);
    if (epilogue.residual) __builtin_prefetch(epilogue.residual + place + n);
  }
}

// number: (accumulators of WIDTH outputs, row, first of the outputs) -> F32
template <typename T, typename Number>
void apply_epilogue(const GemmArgs& product, const Epilogue<T>& epilogue, const char* acc, int64_t row, int64_t first,
                    const Number& number) {
  const bool adds = epilogue.residual && (!epilogue.adapted || !epilogue.adapted[row]);
  for (int64_t n = first; n < std::min(first + COLUMNS, product.outputs); n += WIDTH) {
    const int64_t count = std::min<int64_t>(WIDTH, product.outputs - n), place = row * product.outputs + n;
    F32 value = number(acc + (n - first) * WORD, row, n);
    if (epilogue.bias) value += load_f32(epilogue.bias + n);
    if (count == WIDTH) {
      if (adds) value += load_f32(epilogue.residual + place);
      store(epilogue.output + place, value);
    } else {
      T edge[WIDTH] = {};
      if (adds) std::copy_n(epilogue.residual + place, count, edge);
      if (adds) value += load_f32(edge);
      store(edge, value);
      std::copy_n(edge, count, epilogue.output + place);
    }
  }
}

// Rows of a task. Kernels that dequantize a panel before they multiply by it have DEQUANTIZES: they do it for several
// chunks at once, if that leaves every thread so many tasks that none waits long for another.
template <typename Kernel>
int64_t rows_per_task(int64_t rows, int64_t tiles) {
  constexpr int64_t ENOUGH = 8;  // tasks of a thread
  int64_t chunk = CHUNK_ROWS;
  if constexpr (requires { Kernel::DEQUANTIZES; })
    while (chunk < MAX_TASK_ROWS && tiles * ceil_div(rows, 2 * chunk) >= ENOUGH * loop_threads()) chunk *= 2;
  return chunk;
}

inline char* thread_accumulators() {
  alignas(64) static thread_local char acc[MAX_TASK_ROWS * COLUMNS * WORD];
  return acc;
}

// chosen: the tiles to compute, or null for all. Task: GemmArgs, or what has its own multiply_tile. A kernel may have a
// driver of its own, `run`.
template <typename Kernel, typename Task, typename T, typename Number>
void run_gemm(const Task& product, const Epilogue<T>& epilogue, const std::vector<int64_t>* chosen,
              const Number& number) {
  if constexpr (requires { Kernel::run(product, epilogue, chosen, number); }) {
    Kernel::run(product, epilogue, chosen, number);
  } else {
    constexpr int64_t EARLIER = 8;  // rows
    const int64_t tiles = chosen ? static_cast<int64_t>(chosen->size()) : ceil_div(product.outputs, COLUMNS);
    const int64_t chunk_rows = rows_per_task<Kernel>(product.rows, tiles), chunks = ceil_div(product.rows, chunk_rows);
    const auto tile_at = [&](int64_t i) { return chosen ? (*chosen)[i] : i; };
    parallel_for(tiles * chunks, [&](int64_t item, int64_t next) {
      char* acc = thread_accumulators();
      const int64_t chunk = item % chunks, tile = tile_at(item / chunks);
      const int64_t begin = chunk * chunk_rows, end = std::min(begin + chunk_rows, product.rows);
      for (int64_t row = begin; row < std::min(begin + EARLIER, end); ++row)
        prefetch_row(product, epilogue, row, tile * COLUMNS);
      multiply_tile<Kernel>(product, begin, end - begin, tile, tile_at(next / chunks), acc);
      for (int64_t row = begin; row < end; ++row) {
        if (row + EARLIER < end) prefetch_row(product, epilogue, row + EARLIER, tile * COLUMNS);
        apply_epilogue(product, epilogue, acc + (row - begin) * TILE_WORD, row, tile * COLUMNS, number);
      }
    });
  }
}

// Calls work(first, last) for rows of `size` numbers, on several threads where that is worth it.
template <typename Work>
void for_rows(int64_t rows, int64_t size, const Work& work) {
  const int64_t together = std::max<int64_t>(1, worth_a_thread() / size);
  parallel_for(ceil_div(rows, together),
               [&](int64_t item) { work(item * together, std::min(rows, (item + 1) * together)); });
}

// Row stride in bytes, an odd number of cache lines: rows a power of two apart would share a few sets of L1, and
// reading them side by side would take twice as long.
inline int64_t row_stride(int64_t bytes, int64_t rows) {
  return (rows == 1 ? ceil_div(bytes, LINE) : ceil_div(bytes, LINE) | 1) * LINE;
}

// Rows of numbers of type T as rows of type To, [padded_rows, padded]; zeros behind the last input and the last row.
// Copies are avoided, unless the rows share too few sets of L1.
template <typename To, typename T>
Input converted_rows(const T* from, int64_t rows, int64_t inputs, int64_t padded_rows, int64_t padded) {
  constexpr int64_t FEW_PLACES = 64 * LINE;
  const int64_t bytes = inputs * sizeof(To);
  if (std::is_same_v<To, T> && inputs == padded && rows == padded_rows && (rows == 1 || bytes % FEW_PLACES != 0))
    return {reinterpret_cast<const char*>(from), bytes, {}, {}};
  const int64_t row_bytes = row_stride(padded * sizeof(To), padded_rows), room = row_bytes / sizeof(To);
  Input input{nullptr, row_bytes, c10::GetCPUAllocator()->allocate(padded_rows * row_bytes), {}};
  To* to = static_cast<To*>(input.buffer.get());
  input.data = reinterpret_cast<const char*>(to);
  for_rows(padded_rows, padded, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      const int64_t size = r < rows ? inputs : 0;
      int64_t k = 0;
      for (; k + LANES <= size; k += LANES) store(to + r * room + k, load(from + r * inputs + k));
      for (; k < size; ++k) to[r * room + k] = static_cast<To>(static_cast<float>(from[r * inputs + k]));
      std::fill(to + r * room + k, to + r * room + padded, To(0.0f));
    }
  });
  return input;
}

}  // namespace oatmill
