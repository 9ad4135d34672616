// GEMM by AMX: an instruction multiplies a tile of 16 rows with one of 16 outputs, 16 words deep.
//
// A tile of the packed weights (gemm.h) is three of AMX's side by side, each 16 outputs wide; 16 words of it are one
// load each. Two loads of the input, of 16 rows each, use them, and six accumulators stay in tile registers.
//
// Tiles: the processor's, or emulated ones in plain C++, with which tests run this file on every CPU.

#pragma once

#include <cstdint>
#include <cstring>

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

#if defined(OATMILL_EMULATED_TILES)

// Registers of SIDE rows of SIDE_BYTES each, as AMX has them: accumulators in 0 to 5, rows in 6, weights in 7.
template <typename Kind>
class EmulatedTiles {
 public:
  using Weights = Kind;
  template <int I>
  void zero() {
    std::memset(registers_[I], 0, sizeof(registers_[I]));
  }
  template <int I>
  void load(const void* from, int64_t stride) {
    for (int64_t r = 0; r < SIDE; ++r)
      std::memcpy(registers_[I][r], static_cast<const char*>(from) + r * stride, SIDE_BYTES);
  }
  template <int I>
  void store(void* to, int64_t stride) {
    for (int64_t r = 0; r < SIDE; ++r) std::memcpy(static_cast<char*>(to) + r * stride, registers_[I][r], SIDE_BYTES);
  }
  // Adds the products of rows and weights to register I.
  template <int I>
  void add() {
    using Sum = std::conditional_t<std::is_same_v<Kind, Int8Weights>, int32_t, float>;
    using Row = std::conditional_t<std::is_same_v<Kind, Int8Weights>, uint8_t, c10::BFloat16>;
    for (int64_t r = 0; r < SIDE; ++r)
      for (int64_t n = 0; n < SIDE; ++n)
        for (int64_t k = 0; k < SIDE; ++k)
          for (int64_t d = 0; d < Kind::DEPTH; ++d) {
            const int64_t size = sizeof(Row);
            at<Sum>(I, r, n) += static_cast<Sum>(at<Row>(6, r, k, d * size)) *
                                static_cast<Sum>(at<typename Kind::Number>(7, k, n, d * size));
          }
  }

 private:
  template <typename Number>
  Number& at(int i, int64_t row, int64_t word, int64_t byte = 0) {
    return *reinterpret_cast<Number*>(registers_[i][row] + word * WORD + byte);
  }
  alignas(64) char registers_[8][SIDE][SIDE_BYTES];
};

#endif

#if OATMILL_AMX

// The operating system gives a process the registers only when it asks for them.
inline bool amx_permitted() {
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // of Linux's arch_prctl
  static const bool permitted = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  return permitted;
}

// The compiler wants the numbers of registers as literals: calls DO(0) where I is 0, and so on.
#define OATMILL_WITH_REGISTER(I, DO) \
  if constexpr (I == 0) {            \
    DO(0);                           \
  } else if constexpr (I == 1) {     \
    DO(1);                           \
  } else if constexpr (I == 2) {     \
    DO(2);                           \
  } else if constexpr (I == 3) {     \
    DO(3);                           \
  } else if constexpr (I == 4) {     \
    DO(4);                           \
  } else if constexpr (I == 5) {     \
    DO(5);                           \
  } else if constexpr (I == 6) {     \
    DO(6);                           \
  } else {                           \
    static_assert(I == 7);           \
    DO(7);                           \
  }

// All registers are whole. A constant in memory: of what the instruction reads, the compiler knows only the beginning,
// and might leave out stores to the rest.
struct alignas(64) AmxLayout {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {SIDE_BYTES, SIDE_BYTES, SIDE_BYTES, SIDE_BYTES,
                            SIDE_BYTES, SIDE_BYTES, SIDE_BYTES, SIDE_BYTES};
  uint8_t rows[16] = {SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE};
};
inline const AmxLayout AMX_LAYOUT;

// A thread's matrices while this lives.
template <typename Kind>
class AmxTiles {
 public:
  using Weights = Kind;
  AmxTiles() { _tile_loadconfig(&AMX_LAYOUT); }
  ~AmxTiles() { _tile_release(); }
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;

  template <int I>
  void zero() {
#define OATMILL_DO(n) _tile_zero(n)
    OATMILL_WITH_REGISTER(I, OATMILL_DO)
#undef OATMILL_DO
  }
  template <int I>
  void load(const void* from, int64_t stride) {
#define OATMILL_DO(n) _tile_loadd(n, from, stride)
    asm volatile("" ::: "memory");  // which the compiler does not know to be read
    OATMILL_WITH_REGISTER(I, OATMILL_DO)
#undef OATMILL_DO
  }
  template <int I>
  void store(void* to, int64_t stride) {
#define OATMILL_DO(n) _tile_stored(n, to, stride)
    OATMILL_WITH_REGISTER(I, OATMILL_DO)
#undef OATMILL_DO
  }
  template <int I>
  void add() {
#define OATMILL_DO(n)                                \
  if constexpr (std::is_same_v<Kind, Int8Weights>) { \
    _tile_dpbusd(n, 6, 7);                           \
  } else {                                           \
    _tile_dpbf16ps(n, 6, 7);                         \
  }
    OATMILL_WITH_REGISTER(I, OATMILL_DO)
#undef OATMILL_DO
  }
};

#endif

// The kernel, see multiply_tile. It computes rows in groups of SIDE, and depths that are a multiple of SIDE.
template <typename Tiles>
struct AmxGemm {
  using Weights = typename Tiles::Weights;
  static constexpr int64_t INPUT_WORD = WORD, CHUNK_DEPTH = 1536, UNIT = SIDE;
  static constexpr int OFFSET = INPUT_ZERO_POINT;
  static_assert(CHUNK_DEPTH % SIDE == 0 && CHUNK_ROWS % (2 * SIDE) == 0 && COLUMNS == 3 * SIDE);

  template <typename T>
  static Input prepare(const T* from, int64_t rows, int64_t inputs, int64_t depth) {
    const int64_t padded_rows = ceil_div(rows, SIDE) * SIDE, padded = depth * Weights::DEPTH;
    if constexpr (std::is_same_v<Weights, Int8Weights>)
      return quantized_rows_int8<uint8_t>(from, rows, inputs, padded_rows, padded, uint8_t{OFFSET}, keep_bytes<OFFSET>);
    else return converted_rows<c10::BFloat16>(from, rows, inputs, padded_rows, padded);
  }

  static void multiply(const char* input, int64_t row_bytes, int64_t rows, const char* weights, const char* next,
                       int64_t depth, bool from_zero, char* acc) {
    Tiles tiles;
    for (int64_t r = 0; r < rows; r += 2 * SIDE) {
      const char* later = r == 0 ? next : nullptr;
      if (rows - r > SIDE)
        multiply_groups<2>(tiles, input + r * row_bytes, row_bytes, weights, later, depth, from_zero,
                           acc + r * TILE_WORD);
      else
        multiply_groups<1>(tiles, input + r * row_bytes, row_bytes, weights, later, depth, from_zero,
                           acc + r * TILE_WORD);
    }
  }

 private:
  static constexpr int64_t AHEAD = 2 * SIDE;  // words

  // GROUPS: of SIDE rows. next: what is needed after these weights, or null when they have been read before.
  template <int GROUPS>
  static void multiply_groups(Tiles& tiles, const char* input, int64_t row_bytes, const char* weights, const char* next,
                              int64_t depth, bool from_zero, char* acc) {
    for_sums<GROUPS>([&]<int I>() {
      if (from_zero) tiles.template zero<I>();
      else tiles.template load<I>(place<I>(acc), TILE_WORD);
    });
    for (int64_t k = 0; k < depth; k += SIDE) {
      const char* words = weights + k * TILE_WORD;
      tiles.template load<6>(input + k * WORD, row_bytes);
      add_product<0>(tiles, words);
      add_product<1>(tiles, words);
      add_product<2>(tiles, words);
      if constexpr (GROUPS == 2) {  // the third matrix of weights is in its register already
        tiles.template load<6>(input + SIDE * row_bytes + k * WORD, row_bytes);
        tiles.template add<5>();
        add_product<4>(tiles, words);
        add_product<3>(tiles, words);
      }
      if (next == nullptr) continue;
      const char* prefetched = k + AHEAD < depth ? words + AHEAD * TILE_WORD : next + (k + AHEAD - depth) * TILE_WORD;
      for (int64_t byte = 0; byte < SIDE * TILE_WORD; byte += 64) __builtin_prefetch(prefetched + byte, 0, 2);
    }
    for_sums<GROUPS>([&]<int I>() { tiles.template store<I>(place<I>(acc), TILE_WORD); });
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
