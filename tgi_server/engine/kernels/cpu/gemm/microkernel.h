// Kernels that multiply rows with a tile of weights in vector registers, and the instructions that they are made of.
//
// An instruction set is a type with
//   Weights, the kind of weights; Register, what sums are kept in;
//   STEPS, the instructions for a word of weights, and NUMBER, the bytes of input for each;
//   column(words, column, step), the weights of WIDTH outputs; row(input), numbers of a row, in all lanes;
//   add(row, column, sum); OFFSET, how much higher than they are 8-bit inputs are stored;
//   CHUNK_DEPTH and AHEAD, in words, see below; ROWS, how many one pass over a tile's words serves: as many as leave
//   room in registers for what the weights are unpacked with; prepare as in linear.h.
//
// Every one adds up a sum in the same order whatever the number of rows is, so a row's result does not depend on the
// rows beside it.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "gemm/gemm.h"
#include "simd/simd.h"

namespace oatmill {

// Products of floats, for weights of any float type: they are widened on their way from memory. Every CPU has these.
template <typename Kind>
struct FloatProducts {
  using Weights = Kind;
  using Register = Floats;
  static constexpr int64_t STEPS = Kind::DEPTH, NUMBER = sizeof(float);
  // What a chunk takes, and the rows beside it, fit a first cache of 32 KiB.
  static constexpr int64_t CHUNK_DEPTH = 96, AHEAD = 96;
  static constexpr int OFFSET = 0;
  static constexpr int ROWS = WIDTH == 16 ? 8 : REGISTERS == 32 && Kind::DEPTH > 1 ? 5 : 6;

  static Floats column(const char* words, int64_t column, int64_t step) {
    if constexpr (std::is_same_v<Kind, FloatWeights>) return load_as<Floats>(words + column * WORD);
    if constexpr (std::is_same_v<Kind, HalfWeights>)
      return widened(reinterpret_cast<const c10::Half*>(words) + Kind::place(column, step));
    const Words pairs = load_as<Words>(words + column * WORD);  // the lower half is the first number
    return as_floats(step == 0 ? pairs << 16 : upper_halves(pairs));
  }

  static Floats row(const char* input) { return in_lanes<Floats, float>(input); }

  static void add(Floats row, Floats column, Floats& sum) { accumulate(row, column, sum); }

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
    for (int i = 0; i < LANES; i += WIDTH) work(k + i, widened(values + i));
  }
}

// Makes whole numbers of a row: round(values) a register of them, keep(k, numbers) writes LANES. Returns their sum. These two
// are inline lest their captures go through memory.
template <typename T, typename Round, typename Keep>
[[gnu::always_inline]] inline int64_t for_whole_numbers(const T* from, int64_t size, const Round& round, const Keep& keep) {
  Whole sums = {};
  alignas(64) int32_t numbers[LANES];
  for_registers(from, size, [&](int64_t k, Floats values) {
    const Whole rounded = round(values);
    sums += rounded;
    store_as(numbers + k % LANES, rounded);
    if ((k + WIDTH) % LANES == 0) keep(k / LANES * LANES, numbers);
  });
  return sum(sums);
}

// Rounds a row to whole numbers of 8 bits, see for_whole_numbers. Returns its scale, and the sum of the numbers.
template <typename T, typename Keep>
std::pair<float, int64_t> round_row(const T* from, int64_t size, const Keep& keep) {
  Floats peaks = {};
  for_registers(from, size, [&](int64_t, Floats values) { peaks = larger(larger(values, -values), peaks); });
  const float peak = largest(peaks), factor = peak > 0 ? 127.0f / peak : 0.0f;
  const int64_t sum = for_whole_numbers(from, size, [&](Floats values) { return nearest(values * factor); }, keep);
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
  const Ints all = load_as<Ints>(numbers);
  const Ints in_order = __builtin_shufflevector(all, all, PLACES..., 8 + PLACES...);
  return reinterpret_cast<Bytes>(_mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(in_order)));
#else
  const auto first = lower_halves<PLACES...>(numbers), second = lower_halves<PLACES...>(numbers + 8);
  return __builtin_shufflevector(reinterpret_cast<const Bytes&>(first), reinterpret_cast<const Bytes&>(second),  //
                                 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
#endif
}

// Rows rounded to 8 bits, in numbers of type To: [padded_rows, padded], `empty` behind the last. keep(to, numbers)
// writes LANES of them.
template <typename To, typename T, typename Keep>
Input rounded_rows(const T* from, int64_t rows, int64_t inputs, int64_t padded_rows, int64_t padded, To empty,
                   const Keep& keep) {
  const int64_t room = apart(padded * sizeof(To), padded_rows) / sizeof(To);
  Input input{nullptr, room * static_cast<int64_t>(sizeof(To)),
              c10::GetCPUAllocator()->allocate(padded_rows * room * sizeof(To)), std::vector<float>(rows)};
  To* to = static_cast<To*>(input.buffer.get());
  input.data = reinterpret_cast<const char*>(to);
  for_rows(padded_rows, room, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      To* row = to + r * room;
      if (r < rows)
        input.scales[r] =
            round_row(from + r * inputs, inputs, [&](int64_t k, const int32_t* numbers) { keep(row + k, numbers); }).first;
      const int64_t done = r < rows ? parts(inputs, LANES) * LANES : 0;
      std::fill(row + done, row + room, empty);
    }
  });
  return input;
}

// Products of numbers of 16 bits, two at a time, summed exactly. Weights of 8 bits are widened on their way from memory:
// of a word's bytes the first and third make one register, the others a second one; rows stand in the same order.
struct ShortProducts {
  using Weights = Int8Weights;
  using Register = Whole;
  static constexpr int64_t STEPS = 2, NUMBER = 2 * sizeof(int16_t);
  static constexpr int64_t CHUNK_DEPTH = 96, AHEAD = 96;
  static constexpr int OFFSET = 0;
  static constexpr int ROWS = WIDTH == 16 ? 8 : 5;

  static Whole column(const char* words, int64_t column, int64_t step) {
    using Shorts = int16_t __attribute__((vector_size(WIDTH * 4)));
    const Shorts pairs = load_as<Shorts>(words + column * WORD);
    const Shorts numbers = step == 0 ? (pairs << 8) >> 8 : pairs >> 8;
    return reinterpret_cast<const Whole&>(numbers);
  }

  static Whole row(const char* input) { return Whole{} + load_as<int32_t>(input); }

  static void add(Whole row, Whole column, Whole& sum) { add_pairs(row, column, sum); }

  static void keep(int16_t* to, const int32_t* numbers) {
    for (int i = 0; i < LANES; i += 8) store_as(to + i, lower_halves<0, 2, 1, 3, 4, 6, 5, 7>(numbers + i));
  }

  template <typename T>
  static Input prepare(const T* from, int64_t rows, int64_t inputs, int64_t depth) {
    return rounded_rows<int16_t>(from, rows, inputs, rows, depth * Weights::DEPTH, int16_t{0}, keep);
  }
};

// The two below add as an instruction rather than by its intrinsic, see accumulate in registers.h.
struct WordProducts {
  using Register = Words;
  static constexpr int64_t STEPS = 1, NUMBER = WORD;
#if defined(__AVX512BW__)
  // Weights are asked for into the second cache only: the first one has so few requests on the way to memory that half of
  // the bandwidth is all they could use.
  static constexpr int64_t CHUNK_DEPTH = 1536, AHEAD = 32;
  static constexpr int ROWS = 8;
#else
  static constexpr int64_t CHUNK_DEPTH = 96, AHEAD = 96;
  static constexpr int ROWS = 6;
#endif

  static Words column(const char* words, int64_t column, int64_t) { return load_as<Words>(words + column * WORD); }
  static Words row(const char* input) { return in_lanes<Words, uint32_t>(input); }
};

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define OATMILL_BF16 1

// Products of bfloat16 numbers, two at a time.
struct PairProducts : WordProducts {
  using Weights = Bf16Weights;
  static constexpr int OFFSET = 0;

#if defined(__aarch64__)
  static constexpr const char* NAME = "neon_bf16";
#else
  static constexpr const char* NAME = "avx512_bf16";
#endif

  static void add(Words row, Words column, Words& sum) {
    Words added = sum;
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

// Inputs of instructions that multiply unsigned by signed bytes: stored OFFSET higher than they are. OFFSET times the
// sum of an output's weights is taken off again at the end.
constexpr int UNSIGNED_OFFSET = 128;

// Bytes of numbers, stored so much higher than they are.
template <int OFFSET>
void keep_bytes(uint8_t* to, const int32_t* numbers) {
  store_as(to, lowest_bytes<0, 1, 2, 3, 4, 5, 6, 7>(numbers) + static_cast<uint8_t>(OFFSET));
}

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_DOTPROD)
#define OATMILL_INT8 1

// Products of bytes, four at a time, summed exactly.
struct ByteProducts : WordProducts {
  using Weights = Int8Weights;

#if defined(__aarch64__)
  static constexpr const char* NAME = "neon_dotprod";
  static constexpr int OFFSET = 0;
#else
  static constexpr const char* NAME = WIDTH == 16 ? "avx512_vnni" : "avx_vnni";
  static constexpr int OFFSET = UNSIGNED_OFFSET;
#endif

  template <typename Sum>
  static void add(Words row, Words column, Sum& sum) {
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
    return rounded_rows<uint8_t>(from, rows, inputs, rows, depth * Weights::DEPTH, uint8_t{OFFSET}, keep_bytes<OFFSET>);
  }
};

#else
#define OATMILL_INT8 0
#endif

// sums[r][v] += row_at(r) * column_at(v). Beside the sums, the fewer of rows and columns stay in registers.
//
// Loops over registers must be unrolled before the compiler decides what is kept in registers, hence the pragmas.
template <typename Set, int R, int V, typename Row, typename Column>
[[gnu::always_inline]] inline void add_outer(const Row& row_at, const Column& column_at,
                                             typename Set::Register (&sums)[R][V]) {
  using Register = typename Set::Register;
  if constexpr (R < V) {
    Register rows[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) rows[r] = row_at(r);
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      const Register column = column_at(v);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) Set::add(rows[r], column, sums[r][v]);
    }
  } else {
    Register columns[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) columns[v] = column_at(v);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Register row = row_at(r);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) Set::add(row, columns[v], sums[r][v]);
    }
  }
}

// The kernel made of an instruction set, see multiply_rows.
template <typename Set>
struct Products {
  using Weights = typename Set::Weights;
  static constexpr int64_t INPUT_WORD = Set::STEPS * Set::NUMBER, CHUNK_DEPTH = Set::CHUNK_DEPTH, UNIT = 1;
  static constexpr int OFFSET = Set::OFFSET;  // of the inputs, see UNSIGNED_OFFSET
  static constexpr int ROWS = Set::ROWS;

  // Registers of outputs that are computed together: as many as leave room for the weights beside the sums.
  static constexpr int vectors(int rows) {
    if (WIDTH == 16) return 3;
    if (REGISTERS == 32) return rows <= 2 ? 6 : 4;
    return rows <= 2 ? 6 : rows <= 3 ? 3 : 2;
  }

  template <typename T>
  static Input prepare(const T* from, int64_t rows, int64_t inputs, int64_t depth) {
    return Set::prepare(from, rows, inputs, depth);
  }

  static void multiply(const char* input, int64_t row_bytes, int64_t rows, const char* weights, const char* next,
                       int64_t depth, bool from_zero, char* totals) {
    const int64_t blocks = parts(rows, ROWS);
    Later later{next, next, blocks > 3 ? TILE_WORD / blocks : 0};
    for_each_block(rows, ROWS, [&](int64_t first, int64_t count) {
      BLOCKS[count - 1](input + first * row_bytes, row_bytes, weights, later, depth, from_zero,
                        totals + first * TILE_WORD);
      later.part += depth * later.stride;
    });
  }

 private:
  // What is needed after these weights. Of more than three blocks of rows each asks for its part of it, `stride` bytes with
  // every word: were all asked for by the first one, memory would rest while the others compute. Fewer never let it rest.
  struct Later {
    const char *next, *part;
    int64_t stride;
  };

  using Register = typename Set::Register;
  using Block = void (*)(const char*, int64_t, const char*, const Later&, int64_t, bool, char*);

  template <int R>
  static void multiply_block(const char* input, int64_t row_bytes, const char* weights, const Later& later, int64_t depth,
                             bool from_zero, char* totals) {
    constexpr int V = vectors(R);
    for (int column = 0; column < COLUMNS; column += V * WIDTH)
      multiply_columns<R, V>(input, row_bytes, weights, later, depth, from_zero, column, totals + column * WORD);
  }

  // The words of these weights are asked for as well, AHEAD of them: nobody has done so where they are a thread's first.
  // later.next: asked for meanwhile, as soon as no more than AHEAD words of these are left.
  template <int R, int V>
  static void multiply_columns(const char* input, int64_t row_bytes, const char* weights, const Later& later,
                               int64_t depth, bool from_zero, int64_t column, char* totals) {
    constexpr bool BESIDE_OTHERS = 2 * R >= ROWS;  // maybe: for_each_block makes no smaller ones of many rows
    const char* part = later.part + depth * later.stride * column / COLUMNS;
    const int64_t part_stride = later.stride * V * WIDTH / COLUMNS;
    Register sums[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 6
      for (int v = 0; v < V; ++v)
        sums[r][v] = from_zero ? Register{} : load_as<Register>(totals + r * TILE_WORD + v * WIDTH * WORD);
    const int64_t own = std::max<int64_t>(depth - Set::AHEAD, 0);
    for (int64_t k = 0, end = own; k < depth; end = depth) {
      // What is needed later is asked for in the order of memory: by columns, memory would give less than it can.
      const int64_t stride = k < own ? TILE_WORD : V * WIDTH * WORD;
      const char* wanted =
          k < own ? weights + Set::AHEAD * TILE_WORD + column * WORD : later.next + column * WORD * (depth - own);
      for (; k < end; ++k, wanted += stride) {
#pragma GCC unroll 6
        for (int v = 0; v < V; v += 16 / WIDTH) __builtin_prefetch(wanted + v * WIDTH * WORD, 0, 2);
        if constexpr (BESIDE_OTHERS) {
          __builtin_prefetch(part, 0, 2);
          __builtin_prefetch(part + 64, 0, 2);
          part += part_stride;
        }
#pragma GCC unroll 2
        for (int step = 0; step < Set::STEPS; ++step) {
          // The words of all steps do not fit the registers: each step reads them again.
          if constexpr (REGISTERS == 16) asm volatile("" ::: "memory");
          add_outer<Set>(
              [&](int r) { return Set::row(input + r * row_bytes + k * INPUT_WORD + step * Set::NUMBER); },
              [&](int v) { return Set::column(weights + k * TILE_WORD, column + v * WIDTH, step); }, sums);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 6
      for (int v = 0; v < V; ++v) store_as(totals + r * TILE_WORD + v * WIDTH * WORD, sums[r][v]);
  }

  static constexpr auto BLOCKS = []<int... R>(std::integer_sequence<int, R...>) {
    return std::array<Block, ROWS>{&multiply_block<R + 1>...};
  }(std::make_integer_sequence<int, ROWS>());
};

}  // namespace oatmill
