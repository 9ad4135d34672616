// GEMM by AMX: an instruction multiplies a tile of 16 rows with one of 16 outputs, 16 words deep.
//
// A tile of the packed weights (gemm.h) is three of AMX's side by side, each 16 outputs wide; 16 words of it are one
// load each. Two loads of the input, of 16 rows each, use them, and six accumulators stay in tile registers.
//
// Tiles: the processor's, or emulated ones in plain C++, with which tests run this file on every CPU.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define OATMILL_AMX 1
#else
#define OATMILL_AMX 0
#endif

#include "gemm/gemm.h"
#include "gemm/microkernel.h"

namespace oatmill {

constexpr int64_t SIDE = 16;  // rows, outputs and words of a matrix
constexpr int64_t SIDE_BYTES = SIDE * WORD;

// Unsigned bytes, times signed ones; and signed ones.
struct CodeBytes {
  using Number = uint8_t;
  static constexpr int64_t DEPTH = 4;
};
struct HighBytes {
  using Number = int8_t;
  static constexpr int64_t DEPTH = 4;
};

#if defined(OATMILL_EMULATED_TILES)

// Registers of SIDE rows of SIDE_BYTES each, as AMX has them: accumulators in 0 to 5, rows in 6, weights in 7, unless
// add is told others. words: of the last two.
template <typename Kind>
class EmulatedTiles {
 public:
  using Weights = Kind;
  explicit EmulatedTiles(int64_t words = SIDE) : words_(words) {}
  template <int I>
  void zero() {
    std::memset(registers_[I], 0, sizeof(registers_[I]));
  }
  template <int I>
  void load(const void* from, int64_t stride) {
    for (int64_t r = 0; r < (I == 7 ? words_ : SIDE); ++r)
      std::memcpy(registers_[I][r], static_cast<const char*>(from) + r * stride, I == 6 ? words_ * WORD : SIDE_BYTES);
  }
  template <int I>
  void store(void* to, int64_t stride) {
    for (int64_t r = 0; r < SIDE; ++r) std::memcpy(static_cast<char*>(to) + r * stride, registers_[I][r], SIDE_BYTES);
  }
  // Adds the products of rows and weights to a register.
  template <int SUM, int ROWS = 6, int WEIGHTS = 7, typename Bytes = Kind>
  void add() {
    using Sum = std::conditional_t<std::is_same_v<Bytes, Bf16Weights>, float, int32_t>;
    using Row = std::conditional_t<std::is_same_v<Bytes, Bf16Weights>, c10::BFloat16,
                                   std::conditional_t<std::is_same_v<Bytes, Int8Weights>, uint8_t, int8_t>>;
    for (int64_t r = 0; r < SIDE; ++r)
      for (int64_t n = 0; n < SIDE; ++n)
        for (int64_t k = 0; k < words_; ++k)
          for (int64_t d = 0; d < Bytes::DEPTH; ++d) {
            const int64_t size = sizeof(Row);
            at<Sum>(SUM, r, n) += static_cast<Sum>(at<Row>(ROWS, r, k, d * size)) *
                                  static_cast<Sum>(at<typename Bytes::Number>(WEIGHTS, k, n, d * size));
          }
  }

 private:
  template <typename Number>
  Number& at(int i, int64_t row, int64_t word, int64_t byte = 0) {
    return *reinterpret_cast<Number*>(registers_[i][row] + word * WORD + byte);
  }
  alignas(64) char registers_[8][SIDE][SIDE_BYTES];
  int64_t words_;
};

#endif

#if OATMILL_AMX

// The operating system gives a process the registers only when it asks for them.
inline bool amx_permitted() {
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // of Linux's arch_prctl
  static const bool permitted = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  return permitted;
}

// Registers of rows have so many words of each, those of weights so many words; the accumulators are whole. A constant
// in memory: of what the instruction reads, the compiler knows only the beginning, and might leave out stores to the
// rest.
struct alignas(64) AmxLayout {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {SIDE_BYTES, SIDE_BYTES, SIDE_BYTES, SIDE_BYTES,
                            SIDE_BYTES, SIDE_BYTES, SIDE_BYTES, SIDE_BYTES};
  uint8_t rows[16] = {SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE};
};
inline const auto AMX_LAYOUTS = [] {
  std::array<AmxLayout, SIDE + 1> layouts;
  for (int64_t words = 1; words <= SIDE; ++words) {
    layouts[words].row_bytes[6] = static_cast<uint16_t>(words * WORD);
    layouts[words].rows[7] = static_cast<uint8_t>(words);
  }
  return layouts;
}();

// A thread's matrices while this lives.
template <typename Kind>
class AmxTiles {
 public:
  using Weights = Kind;
  explicit AmxTiles(int64_t words = SIDE) { _tile_loadconfig(&AMX_LAYOUTS[words]); }
  ~AmxTiles() { _tile_release(); }
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;

  template <int I>
  void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(I));
  }
  template <int I>
  void load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(I), "r"(from), "r"(stride) : "memory");
  }
  template <int I>
  void store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(I), "r"(to), "r"(stride) : "memory");
  }
  template <int SUM, int ROWS = 6, int WEIGHTS = 7, typename Bytes = Kind>
  void add() {
#define OATMILL_ADD(instruction) \
  asm volatile(instruction " %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(ROWS), "i"(WEIGHTS))
    if constexpr (std::is_same_v<Bytes, Int8Weights>) OATMILL_ADD("tdpbusd");
    else if constexpr (std::is_same_v<Bytes, CodeBytes>) OATMILL_ADD("tdpbsud");
    else if constexpr (std::is_same_v<Bytes, HighBytes>) OATMILL_ADD("tdpbssd");
    else OATMILL_ADD("tdpbf16ps");
#undef OATMILL_ADD
  }
};

#endif

// Matrices of codes and of rows that were quantized to bytes.
#if defined(OATMILL_EMULATED_TILES)
#define OATMILL_CODE_TILES 1
using CodeTiles = EmulatedTiles<CodeBytes>;
inline bool code_tiles_permitted() { return true; }
#elif OATMILL_AMX
#define OATMILL_CODE_TILES 1
using CodeTiles = AmxTiles<CodeBytes>;
inline bool code_tiles_permitted() { return amx_permitted(); }
#else
#define OATMILL_CODE_TILES 0
#endif

// The kernel, see multiply_tile. It computes rows in groups of SIDE, and depths that are a multiple of SIDE.
//
// Of many rows a task has as many as stay in a core's L2 while weights go by, so that these are read from memory once
// for all of them. Where that would be few, the depth is cut into passes, and a task has several tiles. Beside the
// products, the next weights are prefetched, and the outputs of the rows before are finished.
template <typename Tiles>
struct AmxGemm {
  using Weights = typename Tiles::Weights;
  static constexpr int64_t INPUT_WORD = WORD, CHUNK_DEPTH = 1536, UNIT = SIDE;
  static constexpr int OFFSET = INPUT_ZERO_POINT;
  static_assert(CHUNK_DEPTH % SIDE == 0 && COLUMNS == 3 * SIDE);

  template <typename T>
  static Input prepare(const T* from, int64_t rows, int64_t inputs, int64_t depth) {
    const int64_t whole = rows / SIDE * SIDE, padded = depth * Weights::DEPTH;
    if constexpr (std::is_same_v<Weights, Int8Weights>) {
      return quantized_rows_int8<uint8_t>(from, rows, inputs, ceil_div(rows, SIDE) * SIDE, padded, uint8_t{OFFSET},
                                          keep_bytes<OFFSET>);
    } else {
      Input input = converted_rows<c10::BFloat16>(from, whole, inputs, whole, padded);
      if (whole < rows) {
        Input last = converted_rows<c10::BFloat16>(from + whole * inputs, rows - whole, inputs, SIDE, padded);
        input.tail = last.data, input.tail_row_bytes = last.row_bytes, input.tail_buffer = std::move(last.buffer);
      }
      return input;
    }
  }

  static void multiply(const char* input, int64_t row_bytes, int64_t rows, const char* weights, const char* next,
                       int64_t depth, bool from_zero, char* acc) {
    Tiles tiles;
    const int64_t groups = ceil_div(rows, 2 * SIDE);
    for (int64_t g = 0; g < groups; ++g) {
      const char* first = input + 2 * g * SIDE * row_bytes;
      const Prefetch prefetch(weights, next, depth, g, groups);
      multiply_rows(tiles, rows - 2 * g * SIDE, {first, row_bytes}, {first + SIDE * row_bytes, row_bytes}, weights,
                    depth, from_zero, acc + 2 * g * SIDE * TILE_WORD, [&](int64_t step) { prefetch.at(step); });
    }
  }

  // run_gemm for these.
  template <typename T, typename Number>
  static void run(const GemmArgs& product, const Epilogue<T>& epilogue, const std::vector<int64_t>* chosen,
                  const Number& number) {
    const Plan plan(product, chosen ? static_cast<int64_t>(chosen->size()) : ceil_div(product.outputs, COLUMNS));
    const auto tile_at = [&](int64_t i) { return chosen ? (*chosen)[i] : i; };
    parallel_for(plan.blocks * plan.chunks, [&](int64_t item, int64_t next) {
      const int64_t begin = item / plan.blocks * plan.rows, rows = std::min(plan.rows, product.rows - begin);
      const int64_t first = item % plan.blocks * plan.together, count = std::min(plan.together, plan.tiles - first);
      const int64_t groups = ceil_div(rows, 2 * SIDE);
      const auto words = [&](int64_t pass, int64_t tile) {
        return product.weights + (tile_at(tile) * product.depth + plan.first_word(pass)) * TILE_WORD;
      };
      char* acc = accumulators(plan.passes == 1 ? 2 * GROUP : count * groups * GROUP);
      Tiles tiles;
      Finished<T> before;  // rows whose sums are complete
      for (int64_t pass = 0, part = 0; pass < plan.passes; ++pass)
        for (int64_t t = 0; t < count; ++t) {
          const int64_t depth = plan.first_word(pass + 1) - plan.first_word(pass);
          const char* weights = words(pass, first + t);
          const char* later = t + 1 < count            ? words(pass, first + t + 1)
                              : pass + 1 < plan.passes ? words(pass + 1, first)
                                                       : words(0, next % plan.blocks * plan.together);
          for (int64_t g = 0; g < groups; ++g, ++part) {
            const int64_t row = begin + 2 * g * SIDE, of_group = std::min(2 * SIDE, begin + rows - row);
            char* sums = acc + (plan.passes == 1 ? part % 2 : t * groups + g) * GROUP;
            const Prefetch prefetch(weights, later, depth, g, groups);
            const int64_t steps = depth / SIDE, tile = tile_at(first + t);
            const bool last = pass + 1 == plan.passes;
            before.spread(steps);
            multiply_rows(tiles, of_group, rows_at(product, row, plan.first_word(pass)),
                          rows_at(product, row + SIDE, plan.first_word(pass)), weights, depth, pass == 0, sums,
                          [&](int64_t step) {
                            prefetch.at(step);
                            before.finish_some(product, epilogue, number);
                          });
            before.finish(product, epilogue, number);
            if (last) before = {sums, row, of_group, tile * COLUMNS};
          }
        }
      before.finish(product, epilogue, number);
    });
  }

 private:
  static constexpr int64_t AHEAD = 2 * SIDE;              // words
  static constexpr int64_t GROUP = 2 * SIDE * TILE_WORD;  // bytes, the accumulators of rows that are computed together
  static constexpr int64_t L2_BYTES = 1 << 20;            // of inputs: half of what these CPUs have
  static constexpr int64_t PASS_DEPTH = 768, TOGETHER = 4;  // words, tiles
  static constexpr int64_t ENOUGH = 4;                      // tasks of a thread
  static constexpr int64_t STEPS_AWAKE = 8;

  // Tasks: blocks of `together` tiles times chunks of rows, in passes over parts of the depth.
  struct Plan {
    int64_t tiles, units, passes = 1, rows, together = 1, blocks, chunks;

    Plan(const GemmArgs& product, int64_t tiles) : tiles(tiles), units(product.depth / SIDE) {
      const int64_t threads = loop_threads();
      if (product.rows * product.depth * WORD > L2_BYTES) {
        passes = ceil_div(product.depth, PASS_DEPTH);
        if (passes > 1) together = std::clamp<int64_t>(tiles / (ENOUGH * threads), 1, TOGETHER);
      }
      blocks = ceil_div(tiles, together);
      const int64_t fitting = L2_BYTES / (ceil_div(units, passes) * SIDE * WORD);
      chunks = ceil_div(product.rows, std::max(fitting, 2 * SIDE));
      while (blocks * chunks < ENOUGH * threads && product.rows > chunks * 4 * SIDE) ++chunks;
      rows = ceil_div(ceil_div(product.rows, chunks), 2 * SIDE) * 2 * SIDE;
      chunks = ceil_div(product.rows, rows);
    }
    int64_t first_word(int64_t pass) const { return units * pass / passes * SIDE; }
  };

  struct Rows {
    const char* data;
    int64_t row_bytes;
  };

  // Returns SIDE rows from a row on, which is a multiple of SIDE, from a word on.
  static Rows rows_at(const GemmArgs& product, int64_t row, int64_t word) {
    if (product.tail && row + SIDE > product.rows) return {product.tail + word * WORD, product.tail_row_bytes};
    return {product.input + row * product.row_bytes + word * WORD, product.row_bytes};
  }

  // What group g of the rows prefetches: its share of the next weights; the only one all, AHEAD of their use.
  class Prefetch {
   public:
    Prefetch(const char* weights, const char* next, int64_t depth, int64_t g, int64_t groups)
        : weights_(weights), next_(next), size_(depth * TILE_WORD), first_(AHEAD * TILE_WORD),
          bytes_(SIDE * TILE_WORD) {
      if (groups == 1) return;
      bytes_ = ceil_div(bytes_, groups * LINE) * LINE;
      first_ = size_ + g * (depth / SIDE) * bytes_;
    }
    void at(int64_t step) const {
      const int64_t begin = first_ + step * bytes_, end = std::min(begin + bytes_, 2 * size_);
      const char* from = begin < size_ ? weights_ : next_ - size_;
      for (int64_t byte = begin; byte < end; byte += LINE) __builtin_prefetch(from + byte, 0, 2);
    }

   private:
    const char *weights_, *next_;
    int64_t size_, first_, bytes_;  // of both side by side: these weights, then the next ones
  };

  // Rows whose sums are complete, and whose outputs are written some at a time.
  template <typename T>
  struct Finished {
    const char* sums = nullptr;
    int64_t row = 0, rows = 0, first = 0, at_once = 0;

    void spread(int64_t steps) { at_once = ceil_div(rows, std::max<int64_t>(steps - 2, 1)); }
    template <typename Number>
    void finish_some(const GemmArgs& product, const Epilogue<T>& epilogue, const Number& number) {
      for (int64_t i = 0; i < at_once && rows > 0; ++i, ++row, --rows, sums += TILE_WORD)
        apply_epilogue(product, epilogue, sums, row, first, number);
    }
    template <typename Number>
    void finish(const GemmArgs& product, const Epilogue<T>& epilogue, const Number& number) {
      at_once = rows;
      finish_some(product, epilogue, number);
    }
  };

  // Returns room for accumulators of this thread.
  static char* accumulators(int64_t bytes) {
    struct alignas(64) Line {
      char bytes[LINE];
    };
    static thread_local std::vector<Line> room;
    if (static_cast<int64_t>(room.size()) * LINE < bytes) room.resize(ceil_div(bytes, LINE));
    return room.data()->bytes;
  }

  // Rows: of SIDE each, the second ones if there are more than SIDE. between(step): done between the products.
  template <typename Between>
  static void multiply_rows(Tiles& tiles, int64_t rows, const Rows& first, const Rows& second, const char* weights,
                            int64_t depth, bool from_zero, char* acc, const Between& between) {
    if (rows > SIDE) multiply_groups<2>(tiles, first, second, weights, depth, from_zero, acc, between);
    else multiply_groups<1>(tiles, first, second, weights, depth, from_zero, acc, between);
  }

  // GROUPS: of SIDE rows.
  template <int GROUPS, typename Between>
  static void multiply_groups(Tiles& tiles, const Rows& first, const Rows& second, const char* weights, int64_t depth,
                              bool from_zero, char* acc, const Between& between) {
    for_sums<GROUPS>([&]<int I>() {
      if (from_zero) tiles.template zero<I>();
      else tiles.template load<I>(place<I>(acc), TILE_WORD);
    });
    for (int64_t k = 0; k < depth; k += SIDE) {
      const char* words = weights + k * TILE_WORD;
      tiles.template load<6>(first.data + k * WORD, first.row_bytes);
      add_product<0>(tiles, words);
      add_product<1>(tiles, words);
      add_product<2>(tiles, words);
      if constexpr (GROUPS == 2) {  // the third matrix of weights is in its register already
        tiles.template load<6>(second.data + k * WORD, second.row_bytes);
        tiles.template add<5>();
        add_product<4>(tiles, words);
        add_product<3>(tiles, words);
      }
      if (k / SIDE % STEPS_AWAKE == STEPS_AWAKE - 1) keep_awake(tiles);
      between(k / SIDE);
    }
    for_sums<GROUPS>([&]<int I>() { tiles.template store<I>(place<I>(acc), TILE_WORD); });
  }

  // On Granite Rapids the first store of a tile after some 600 ns without one takes 270 ns more.
  static void keep_awake(Tiles& tiles) {
    alignas(64) static thread_local char unused[SIDE * SIDE_BYTES];
    tiles.template store<7>(unused, SIDE_BYTES);
  }

  template <int I>
  static void add_product(Tiles& tiles, const char* words) {
    tiles.template load<7>(words + I % 3 * SIDE_BYTES, TILE_WORD);
    tiles.template add<I>();
  }

  // Returns the place of accumulator I.
  template <int I>
  static char* place(char* acc) {
    return acc + I / 3 * SIDE * TILE_WORD + I % 3 * SIDE_BYTES;
  }

  template <int GROUPS, typename Work>
  static void for_sums(const Work& work) {
    [&]<int... I>(std::integer_sequence<int, I...>) {
      (work.template operator()<I>(), ...);
    }(std::make_integer_sequence<int, 3 * GROUPS>());
  }
};

}  // namespace oatmill
