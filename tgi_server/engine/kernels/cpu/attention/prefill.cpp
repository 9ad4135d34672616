// Attention of many queries, as prompts have them: bound by what is computed. The products are made of vector
// registers, or of AMX tiles (matrix_attention.h), which then compute replies as well.

#include <algorithm>
#include <array>
#include <cstdint>
#include <type_traits>

#include "attention/attention.h"
#include "attention/chunks.h"
#include "attention/matrix_attention.h"

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

template <typename T>
void attend_prefill(const AttentionLayer<T>& layer, const AttentionItem& item, const AttentionItem& next) {
  by_cache<T>(layer.key_dtype, layer.value_dtype, [&]<typename K, typename V>(K*, V*) {
    attend_chunks<VectorTiles<T>, PREFILL_ROWS, K, V>(layer, item, next);
  });
}

template <typename Tiles>
void attend_by_matrices(const AttentionLayer<c10::BFloat16>& layer, const AttentionItem& item,
                        const AttentionItem& next) {
  by_cache<c10::BFloat16>(layer.key_dtype, layer.value_dtype, [&]<typename K, typename V>(K*, V*) {
    MatrixAttention<Tiles, K, V>(layer, item, next).run();
  });
}

bool always() { return true; }

template <typename T>
constexpr AttentionKernel<T> BY_VECTORS{always, 1, DECODE_ROWS, attend_prefill<T>, attend_decode<T>};

// A matrix of SIDE rows is multiplied as a whole, so other KV heads have no rows in its place.
template <typename Tiles>
constexpr AttentionKernel<c10::BFloat16> by_matrices(bool (*available)()) {
  return {available, 2 * SIDE, 1, attend_by_matrices<Tiles>, attend_by_matrices<Tiles>};
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
