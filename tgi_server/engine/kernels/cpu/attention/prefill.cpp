// Attention of many queries, as prompts have them: bound by what is computed. The products are made of vector
// registers, or of AMX tiles (amx.h), which then compute replies as well.

#include <algorithm>
#include <array>
#include <cstdint>
#include <type_traits>

#include "attention/attention.h"
#include "attention/chunks.h"
#include "gemm/amx.h"

namespace oatmill {

namespace {

// Registers of columns that are computed together.
constexpr int VECTORS = WIDTH == 4 && REGISTERS == 32 ? 4 : 2;

// Products in vector registers. Numbers of 16 bits are turned into floats once for all rows, where floats are
// multiplied.
template <typename T>
class VectorTiles {
  static constexpr bool WIDENED = sizeof(T) == 2 && std::is_same_v<typename Columns<T>::Operand, float>;
  using Number = std::conditional_t<WIDENED, float, T>;
  using Dot = Columns<Number>;

 public:
  using Operand = typename Dot::Operand;
  static constexpr int ROWS = Dot::ROWS;

  template <typename K, typename V>
  void load(const Chunk<K, V>& chunk, const Chunk<K, V>&, int head_dim) {
    tile_.load(chunk, head_dim);
  }

  void score(const RowBlocks& blocks, const Operand* query, int head_dim, float* scores) {
    for (int b = 0; b < CHUNK_BLOCKS; ++b)
      for (const Rows& rows : blocks)
        if (rows.tokens > b * BLOCK)
          SCORES[rows.count - 1](reinterpret_cast<const char*>(query + rows.first * head_dim), tile_.keys[b], nullptr,
                                 head_dim, std::min(BLOCK, rows.tokens - b * BLOCK),
                                 scores + rows.first * CHUNK + b * BLOCK);
  }

  void add_values(const RowBlocks& blocks, const Operand* weights, const float* decays, int head_dim, float* output) {
    int d = 0;
    for (; d + VECTORS * WIDTH <= head_dim; d += VECTORS * WIDTH)
      add_columns(VALUES<VECTORS>, blocks, weights, decays, head_dim, d, output);
    for (; d < head_dim; d += WIDTH) add_columns(VALUES<1>, blocks, weights, decays, head_dim, d, output);
  }

 private:
  template <typename Functions>
  void add_columns(const Functions& functions, const RowBlocks& blocks, const Operand* weights, const float* decays,
                   int head_dim, int d, float* output) {
    for (const Rows& rows : blocks)
      functions[rows.count - 1](reinterpret_cast<const char*>(weights + rows.first * CHUNK), decays + rows.first,
                                tile_.values, nullptr, d, rows.tokens, head_dim, output + rows.first * head_dim);
  }

  static constexpr auto SCORES = by_rows<ROWS>([]<int R>() { return &score_rows<Dot, R, VECTORS, Number>; });
  template <int V>
  static constexpr auto VALUES = by_rows<ROWS>([]<int R>() { return &value_rows<Dot, R, V, Number>; });

  Tile<Number> tile_;
};

// Products by matrices of SIDE rows, SIDE words and SIDE columns. The sums of two by two of them stay in registers.
template <typename Tiles>
class MatrixTiles {
 public:
  using Operand = c10::BFloat16;
  static constexpr int ROWS = 2 * SIDE;
  static_assert(BLOCK == 2 * SIDE && PREFILL_ROWS % ROWS == 0);

  // A block is multiplied as a whole. Weights of tokens that nobody looks at are zero, but what stands there may be no
  // number.
  template <typename K, typename V>
  void load(const Chunk<K, V>& chunk, const Chunk<K, V>&, int head_dim) {
    tile_.load(chunk, head_dim);
    alignas(64) static thread_local Operand padded[BLOCK * MAX_HEAD_DIM];
    const int last = chunk.tokens / BLOCK, numbers = static_cast<int>(ceil_div(chunk.tokens % BLOCK, 2)) * 2 * head_dim;
    if (numbers == 0) return;
    std::copy_n(tile_.values[last], numbers, padded);
    std::fill(padded + numbers, padded + BLOCK * head_dim, Operand(0.0f));
    tile_.values[last] = padded;
  }

  void score(const RowBlocks& blocks, const Operand* query, int head_dim, float* scores) {
    for (const Rows& rows : blocks)
      for (int j = 0; j < rows.tokens; j += BLOCK)
        for_groups(rows, [&]<int GROUPS>() {
          for_sums<GROUPS>([&]<int I>() { matrices_.template zero<I>(); });
          for (int d = 0; d < head_dim; d += 2 * SIDE)
            multiply<GROUPS>(query + rows.first * head_dim + d, head_dim, tile_.keys[j / BLOCK] + d * BLOCK, BLOCK);
          for_sums<GROUPS>([&]<int I>() {
            matrices_.template store<I>(place<I>(scores + rows.first * CHUNK + j, CHUNK), CHUNK * sizeof(float));
          });
        });
  }

  void add_values(const RowBlocks& blocks, const Operand* weights, const float* decays, int head_dim, float* output) {
    for (const Rows& rows : blocks) {
      for (int r = rows.first; r < rows.first + rows.count; ++r)
        if (decays[r] != 1)
          for (int d = 0; d < head_dim; d += LANES)
            store(output + r * head_dim + d, oatmill::load(output + r * head_dim + d) * decays[r]);
      for (int d = 0; d < head_dim; d += 2 * SIDE) {
        float* sums = output + rows.first * head_dim + d;
        for_groups(rows, [&]<int GROUPS>() {
          for_sums<GROUPS>(
              [&]<int I>() { matrices_.template load<I>(place<I>(sums, head_dim), head_dim * sizeof(float)); });
          for (int j = 0; j < rows.tokens; j += BLOCK)
            multiply<GROUPS>(weights + rows.first * CHUNK + j, CHUNK, tile_.values[j / BLOCK] + 2 * d, head_dim);
          for_sums<GROUPS>(
              [&]<int I>() { matrices_.template store<I>(place<I>(sums, head_dim), head_dim * sizeof(float)); });
        });
      }
    }
  }

 private:
  // Adds the products of GROUPS times SIDE rows with two matrices that stand side by side in a tile of `columns`.
  template <int GROUPS>
  void multiply(const Operand* rows, int64_t row_numbers, const Operand* tile, int64_t columns) {
    const int64_t row_bytes = row_numbers * sizeof(Operand), word_bytes = columns * WORD;
    matrices_.template load<6>(rows, row_bytes);
    matrices_.template load<7>(tile, word_bytes);
    matrices_.template add<0>();
    matrices_.template load<7>(tile + 2 * SIDE, word_bytes);
    matrices_.template add<1>();
    if constexpr (GROUPS == 2) {  // the second matrix of the tile is in its register already
      matrices_.template load<6>(rows + SIDE * row_numbers, row_bytes);
      matrices_.template add<3>();
      matrices_.template load<7>(tile, word_bytes);
      matrices_.template add<2>();
    }
  }

  // Where sum I stands in rows of so many numbers.
  template <int I>
  static float* place(float* sums, int64_t row_numbers) {
    return sums + I / 2 * SIDE * row_numbers + I % 2 * SIDE;
  }

  template <typename Work>
  static void for_groups(const Rows& rows, const Work& work) {
    rows.count > SIDE ? work.template operator()<2>() : work.template operator()<1>();
  }

  template <int GROUPS, typename Work>
  static void for_sums(const Work& work) {
    [&]<int... I>(std::integer_sequence<int, I...>) {
      (work.template operator()<I>(), ...);
    }(std::make_integer_sequence<int, 2 * GROUPS>());
  }

  Tiles matrices_;
  Tile<Operand> tile_;
};

template <typename T, typename Tiles>
void attend_prefill(const AttentionLayer<T>& layer, const AttentionItem& item, const AttentionItem& next) {
  by_cache<T>(layer.key_dtype, layer.value_dtype,
              [&]<typename K, typename V>(K*, V*) { attend_chunks<Tiles, PREFILL_ROWS, K, V>(layer, item, next); });
}

bool always() { return true; }

template <typename T>
constexpr AttentionKernel<T> BY_VECTORS{always, 1, DECODE_ROWS, attend_prefill<T, VectorTiles<T>>, attend_decode<T>};

// A matrix of SIDE rows is multiplied as a whole, so other KV heads have no rows in its place.
template <typename Tiles>
constexpr AttentionKernel<c10::BFloat16> by_matrices(bool (*available)()) {
  constexpr auto ATTEND = attend_prefill<c10::BFloat16, MatrixTiles<Tiles>>;
  return {available, 2 * SIDE, 1, ATTEND, ATTEND};
}

// The best is the first.
constexpr std::array FLOAT_KERNELS{BY_VECTORS<float>};
constexpr std::array HALF_KERNELS{BY_VECTORS<c10::Half>};
constexpr std::array BF16_KERNELS{
#if defined(OATMILL_EMULATED_TILES)
    by_matrices<EmulatedTiles<Bf16Weights>>(always),
#elif OATMILL_AMX
    by_matrices<AmxTiles<Bf16Weights>>(amx_permitted),
#endif
    BY_VECTORS<c10::BFloat16>,
};

}  // namespace

template <>
std::span<const AttentionKernel<float>> attention_kernels() {
  return FLOAT_KERNELS;
}
template <>
std::span<const AttentionKernel<c10::Half>> attention_kernels() {
  return HALF_KERNELS;
}
template <>
std::span<const AttentionKernel<c10::BFloat16>> attention_kernels() {
  return BF16_KERNELS;
}

}  // namespace oatmill
