// The GEMM kernels for dense weights: dot-product policies (loop.h), and the row blocks around the loop.
//
// A Dot for dense weights has, beside what loop.h needs,
//   Weights, the kind of weights; column(words, column, step), the operand of WIDTH outputs;
//   OFFSET, the zero point of 8-bit inputs; prepare, which returns the rows as it reads them;
//   CHUNK_DEPTH and AHEAD, in words; ROWS, the most rows of a block: as many as leave room in registers for what the
//   weights are unpacked with.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "gemm/gemm.h"
#include "gemm/loop.h"
#include "simd/simd.h"

namespace oatmill {

// float32 FMA, for weights of any float type: they are widened as they are loaded. Every CPU has these.
template <typename Kind>
struct FmaDot {
  using Weights = Kind;
  using Accumulator = F32;
  static constexpr int64_t STEPS = Kind::DEPTH, NUMBER = sizeof(float);
  // A chunk and the rows beside it fit an L1 cache of 32 KiB.
  static constexpr int64_t CHUNK_DEPTH = 96, AHEAD = 96;
  static constexpr int OFFSET = 0;
  static constexpr int ROWS = WIDTH == 16 ? 8 : REGISTERS == 32 && Kind::DEPTH > 1 ? 5 : 6;

  static F32 column(const char* words, int64_t column, int64_t step) {
    if constexpr (std::is_same_v<Kind, FloatWeights>) return load_as<F32>(words + column * WORD);
    if constexpr (std::is_same_v<Kind, HalfWeights>)
      return load_f32(reinterpret_cast<const c10::Half*>(words) + Kind::place(column, step));
    const U32 pairs = load_as<U32>(words + column * WORD);  // the lower half is the first number
    return as_floats(step == 0 ? pairs << 16 : upper_halves(pairs));
  }

  static F32 row(const char* input) { return broadcast<F32, float>(input); }

  static void add(F32 row, F32 column, F32& sum) { accumulate(row, column, sum); }

  template <typename T>
  static Input prepare(const T* from, int64_t rows, int64_t inputs, int64_t depth) {
    return converted_rows<float>(from, rows, inputs, rows, depth * Kind::DEPTH);
  }
};

// Calls work(k, values) for WIDTH numbers of a row at a time, with zeros behind the last up to a multiple of LANES.
template <typename T, typename Work>
[[gnu::always_inline]] inline void for_registers(const T* from, int64_t size, const Work& work) {
  T edge[LANES] = {};
  for (int64_t k = 0; k < size; k += LANES) {
    if (k + LANES > size) std::copy(from + k, from + size, edge);
    const T* values = k + LANES > size ? edge : from + k;
#pragma GCC unroll 4
    for (int i = 0; i < LANES; i += WIDTH) work(k + i, load_f32(values + i));
  }
}

// Makes integers of a row: round(values) a register of them, keep(k, numbers) writes LANES. Returns their sum. These
// two are inline lest their captures go through memory.
template <typename T, typename Round, typename Keep>
[[gnu::always_inline]] inline int64_t for_integers(const T* from, int64_t size, const Round& round, const Keep& keep) {
  I32 sums = {};
  alignas(64) int32_t numbers[LANES];
  for_registers(from, size, [&](int64_t k, F32 values) {
    const I32 rounded = round(values);
    sums += rounded;
    store_as(numbers + k % LANES, rounded);
    if ((k + WIDTH) % LANES == 0) keep(k / LANES * LANES, numbers);
  });
  return sum(sums);
}

// Quantizes a row to 8 bits. Returns its scale, and the sum of the integers.
template <typename T, typename Keep>
std::pair<float, int64_t> quantize_row(const T* from, int64_t size, const Keep& keep) {
  F32 peaks = {};
  for_registers(from, size, [&](int64_t, F32 values) { peaks = vmax(vmax(values, -values), peaks); });
  const float peak = reduce_max(peaks), factor = peak > 0 ? 127.0f / peak : 0.0f;
  const int64_t sum = for_integers(from, size, [&](F32 values) { return round_i32(values * factor); }, keep);
  return {peak / 127.0f, sum};
}

// The lower halves of 8 numbers, in the order of their PLACES.
template <int... PLACES>
auto lower_halves(const int32_t* numbers) {
  using Halves = int16_t __attribute__((vector_size(8 * sizeof(int16_t))));
  return __builtin_shufflevector(load_as<Halves>(numbers), load_as<Halves>(numbers + 4), 2 * PLACES...);
}

// The lowest bytes of LANES numbers, of each 8 in the order of their PLACES.
template <int... PLACES>
auto lowest_bytes(const int32_t* numbers) {
  using Bytes = uint8_t __attribute__((vector_size(LANES)));
#if defined(__AVX512BW__)
  const I32x16 all = load_as<I32x16>(numbers);
  const I32x16 in_order = __builtin_shufflevector(all, all, PLACES..., 8 + PLACES...);
  return reinterpret_cast<Bytes>(_mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(in_order)));
#else
  const auto first = lower_halves<PLACES...>(numbers), second = lower_halves<PLACES...>(numbers + 8);
  return __builtin_shufflevector(reinterpret_cast<const Bytes&>(first), reinterpret_cast<const Bytes&>(second),  //
                                 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
#endif
}

// Rows quantized to 8 bits, in numbers of type To: [padded_rows, padded], `empty` behind the last. keep(to, numbers)
// writes LANES of them.
template <typename To, typename T, typename Keep>
Input quantized_rows_int8(const T* from, int64_t rows, int64_t inputs, int64_t padded_rows, int64_t padded, To empty,
                          const Keep& keep) {
  const int64_t room = row_stride(padded * sizeof(To), padded_rows) / sizeof(To);
  Input input{nullptr, room * static_cast<int64_t>(sizeof(To)),
              c10::GetCPUAllocator()->allocate(padded_rows * room * sizeof(To)), std::vector<float>(rows)};
  To* to = static_cast<To*>(input.buffer.get());
  input.data = reinterpret_cast<const char*>(to);
  for_rows(padded_rows, room, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      To* row = to + r * room;
      if (r < rows)
        input.scales[r] = quantize_row(from + r * inputs, inputs, [&](int64_t k, const int32_t* numbers) {
                            keep(row + k, numbers);
                          }).first;
      const int64_t done = r < rows ? ceil_div(inputs, LANES) * LANES : 0;
      std::fill(row + done, row + room, empty);
    }
  });
  return input;
}

// int16 products, two at a time; accumulators are exact. Weights of 8 bits are widened as they are loaded: of a word's
// bytes the first and third make one register, the others a second one; rows stand in the same order.
struct Int16Dot {
  using Weights = Int8Weights;
  using Accumulator = I32;
  static constexpr int64_t STEPS = 2, NUMBER = 2 * sizeof(int16_t);
  static constexpr int64_t CHUNK_DEPTH = 96, AHEAD = 96;
  static constexpr int OFFSET = 0;
  static constexpr int ROWS = WIDTH == 16 ? 8 : 5;

  static I32 column(const char* words, int64_t column, int64_t step) {
    using Shorts = int16_t __attribute__((vector_size(WIDTH * 4)));
    const Shorts pairs = load_as<Shorts>(words + column * WORD);
    const Shorts numbers = step == 0 ? (pairs << 8) >> 8 : pairs >> 8;
    return reinterpret_cast<const I32&>(numbers);
  }

  static I32 row(const char* input) { return I32{} + load_as<int32_t>(input); }

  static void add(I32 row, I32 column, I32& sum) { dot_i16(row, column, sum); }

  static void keep(int16_t* to, const int32_t* numbers) {
    for (int i = 0; i < LANES; i += 8) store_as(to + i, lower_halves<0, 2, 1, 3, 4, 6, 5, 7>(numbers + i));
  }

  template <typename T>
  static Input prepare(const T* from, int64_t rows, int64_t inputs, int64_t depth) {
    return quantized_rows_int8<int16_t>(from, rows, inputs, rows, depth * Weights::DEPTH, int16_t{0}, keep);
  }
};

// The two below are instructions rather than intrinsics, see accumulate in simd.h.
struct WordDot {
  using Accumulator = U32;
  static constexpr int64_t STEPS = 1, NUMBER = WORD;
#if defined(__AVX512BW__)
  // Weights are prefetched into L2 only: L1 has so few outstanding misses that they could use half of the bandwidth.
  // For two to four rows Zen 4 reads weights 1.2 to 1.4 times as fast if they are prefetched later.
  static constexpr int64_t CHUNK_DEPTH = 1536, AHEAD = 32, AHEAD_OF_FEW_ROWS = 8;
  static constexpr int ROWS = 8;
#else
  static constexpr int64_t CHUNK_DEPTH = 96, AHEAD = 96;
  static constexpr int ROWS = 6;
#endif

  static U32 column(const char* words, int64_t column, int64_t) { return load_as<U32>(words + column * WORD); }
  static U32 row(const char* input) { return broadcast<U32, uint32_t>(input); }
};

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define OATMILL_BF16 1

// bfloat16 products, two at a time.
struct Bf16Dot : WordDot {
  using Weights = Bf16Weights;
  static constexpr int OFFSET = 0;

  static void add(U32 row, U32 column, U32& sum) {
    U32 added = sum;
#if defined(__aarch64__)
    asm("bfdot %0.4s, %2.8h, %1.2h[0]" : "+w"(added) : "w"(row), "w"(column));
#else
    asm("vdpbf16ps %2, %1, %0" : "+v"(added) : "v"(row), "v"(column));
#endif
    sum = added;
  }

  template <typename T>
  static Input prepare(const T* from, int64_t rows, int64_t inputs, int64_t depth) {
    return converted_rows<c10::BFloat16>(from, rows, inputs, rows, depth * Weights::DEPTH);
  }
};

#else
#define OATMILL_BF16 0
#endif

// The zero point of inputs for instructions that multiply unsigned by signed bytes. It times the sum of an output's
// weights is the compensation that the epilogue subtracts.
constexpr int INPUT_ZERO_POINT = 128;

// Bytes of integers, plus a zero point.
template <int OFFSET>
void keep_bytes(uint8_t* to, const int32_t* numbers) {
  store_as(to, lowest_bytes<0, 1, 2, 3, 4, 5, 6, 7>(numbers) + static_cast<uint8_t>(OFFSET));
}

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_DOTPROD)
#define OATMILL_INT8 1

// int8 products, four at a time; accumulators are exact.
struct Int8Dot : WordDot {
  using Weights = Int8Weights;

#if defined(__aarch64__)
  static constexpr int OFFSET = 0;
#else
  static constexpr int OFFSET = INPUT_ZERO_POINT;
#endif

  template <typename Sum>
  static void add(U32 row, U32 column, Sum& sum) {
    Sum added = sum;
#if defined(__aarch64__)
    asm("sdot %0.4s, %2.16b, %1.4b[0]" : "+w"(added) : "w"(row), "w"(column));
#elif defined(__AVX512VNNI__)
    asm("vpdpbusd %2, %1, %0" : "+v"(added) : "v"(row), "v"(column));
#else
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(added) : "x"(row), "x"(column));
#endif
    sum = added;
  }

  template <typename T>
  static Input prepare(const T* from, int64_t rows, int64_t inputs, int64_t depth) {
    return quantized_rows_int8<uint8_t>(from, rows, inputs, rows, depth * Weights::DEPTH, uint8_t{OFFSET},
                                        keep_bytes<OFFSET>);
  }
};

#else
#define OATMILL_INT8 0
#endif

// The kernel made of a Dot, see multiply_tile.
template <typename Dot>
struct Gemm {
  using Weights = typename Dot::Weights;
  static constexpr int64_t INPUT_WORD = Dot::STEPS * Dot::NUMBER, CHUNK_DEPTH = Dot::CHUNK_DEPTH, UNIT = 1;
  static constexpr int OFFSET = Dot::OFFSET;  // of the inputs, see INPUT_ZERO_POINT
  static constexpr int ROWS = Dot::ROWS;

  // Registers of outputs that are computed together: as many as leave room for the weights beside the accumulators.
  static constexpr int vectors(int rows) {
    if (WIDTH == 16) return 3;
    if (REGISTERS == 32) return rows <= 2 ? 6 : 4;
    return rows <= 2 ? 6 : rows <= 3 ? 3 : 2;
  }

  template <typename T>
  static Input prepare(const T* from, int64_t rows, int64_t inputs, int64_t depth) {
    return Dot::prepare(from, rows, inputs, depth);
  }

  static void multiply(const char* input, int64_t row_bytes, int64_t rows, const char* weights, const char* next,
                       int64_t depth, bool from_zero, char* acc) {
    const int64_t blocks = ceil_div(rows, ROWS);
    Later later{next, next, blocks > 3 ? TILE_WORD / blocks : 0};
    for_each_block(rows, ROWS, [&](int64_t first, int64_t count) {
      BLOCKS[count - 1](input + first * row_bytes, row_bytes, weights, later, depth, from_zero,
                        acc + first * TILE_WORD);
      later.part += depth * later.stride;
    });
  }

 private:
  // The next weights. Of more than three blocks of rows each prefetches its part of them, `stride` bytes with every
  // word: if the first prefetched all, memory would be idle while the others compute. Fewer blocks never leave it idle.
  struct Later {
    const char *next, *part;
    int64_t stride;
  };

  using Accumulator = typename Dot::Accumulator;
  using Block = void (*)(const char*, int64_t, const char*, const Later&, int64_t, bool, char*);

  template <int R>
  static void multiply_block(const char* input, int64_t row_bytes, const char* weights, const Later& later,
                             int64_t depth, bool from_zero, char* acc) {
    constexpr int V = vectors(R);
    for (int column = 0; column < COLUMNS; column += V * WIDTH)
      multiply_columns<R, V>(input, row_bytes, weights, later, depth, from_zero, column, acc + column * WORD);
  }

  // V registers of outputs of a tile, from a column on. ahead, next_part: what is prefetched with the next word, and
  // the bytes by which it moves on with every word.
  template <int R, int V>
  struct TileWeights : OneAtATime {
    static constexpr bool RELOADS = REGISTERS == 16;
    static constexpr bool BESIDE_OTHERS = 2 * R >= ROWS;  // maybe: for_each_block makes no smaller ones of many rows
    const char* words;  // from the column on: registers are at constant distances, and need no addresses of their own
    const char* ahead;
    int64_t ahead_stride;
    const char* next_part;
    int64_t next_stride;

    [[gnu::always_inline]] auto load(int64_t k, int step, int v) const {
      return Dot::column(words + k * TILE_WORD, v * WIDTH, step);
    }
    [[gnu::always_inline]] void prefetch(int64_t) {
#pragma GCC unroll 6
      for (int v = 0; v < V; v += 16 / WIDTH) __builtin_prefetch(ahead + v * WIDTH * WORD, 0, 2);
      ahead += ahead_stride;
      if constexpr (BESIDE_OTHERS) {
        __builtin_prefetch(next_part, 0, 2);
        __builtin_prefetch(next_part + 64, 0, 2);
        next_part += next_stride;
      }
    }
  };

  template <int R>
  static constexpr int64_t ahead() {
    if constexpr (requires { Dot::AHEAD_OF_FEW_ROWS; } && 2 <= R && R <= 4) return Dot::AHEAD_OF_FEW_ROWS;
    return Dot::AHEAD;
  }

  // The words of these weights are prefetched as well, AHEAD of them: nobody has done so where they are a thread's
  // first. later.next: prefetched as soon as no more than AHEAD words of these are left.
  template <int R, int V>
  static void multiply_columns(const char* input, int64_t row_bytes, const char* weights, const Later& later,
                               int64_t depth, bool from_zero, int64_t column, char* acc) {
    Accumulator sums[R][V];
    if (from_zero) make_zero(sums);
    else load_block(acc, TILE_WORD, sums);
    TileWeights<R, V> tile{{},
                           weights + Weights::place(column, 0) * sizeof(typename Weights::Number),
                           nullptr,
                           0,
                           later.part + depth * later.stride * column / COLUMNS,
                           later.stride * V * WIDTH / COLUMNS};
    constexpr int64_t AHEAD = ahead<R>();
    const int64_t own = std::max<int64_t>(depth - AHEAD, 0);
    for (int64_t k = 0, end = own; k < depth; k = end, end = depth) {
      // The next weights are prefetched in the order of memory: by columns, memory would give less than it can.
      tile.ahead = k < own ? weights + AHEAD * TILE_WORD + column * WORD : later.next + column * WORD * (depth - own);
      tile.ahead_stride = k < own ? TILE_WORD : V * WIDTH * WORD;
      accumulate_words<Dot>(input, row_bytes, k, end, tile, sums);
    }
    store_block(acc, TILE_WORD, sums);
  }

  static constexpr auto BLOCKS = by_rows<ROWS>([]<int R>() -> Block { return &multiply_block<R>; });
};

}  // namespace oatmill
