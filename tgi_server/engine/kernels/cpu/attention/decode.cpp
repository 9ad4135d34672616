// Attention of a few queries, as replies have them: bound by memory. The cache's numbers are multiplied as they are read,
// and what is needed next is prefetched.

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "attention/attention.h"
#include "attention/chunks.h"

namespace oatmill {

namespace {

constexpr bool AVX512 = WIDTH == 16;

// Products of few rows. Numbers of 8 bits are turned into pairs of bfloat16 where such pairs are multiplied: prompts are
// multiplied so, and both come to the same.
template <typename T, typename C>
class FewRows {
  static constexpr bool CONVERTED = Fp8<C> && !std::is_same_v<typename Columns<T>::Operand, float>;
  using Number = std::conditional_t<CONVERTED, T, C>;
  using Dot = Columns<Number>;

 public:
  using Operand = typename Dot::Operand;
  static constexpr int ROWS = Dot::ROWS;

  void load(const Chunk<C>& chunk, const Chunk<C>& later, int head_dim) {
    tile_.load(chunk, head_dim);
    for (int b = 0; b < CHUNK_BLOCKS; ++b)
      if constexpr (CONVERTED) {
        for (int64_t byte = 0; b < later.blocks() && byte < BLOCK * head_dim; byte += LINE) {
          __builtin_prefetch(reinterpret_cast<const char*>(later.keys[b]) + byte, 0, 2);
          __builtin_prefetch(reinterpret_cast<const char*>(later.values[b]) + byte, 0, 2);
        }
      } else {
        later_.keys[b] = later.keys[b];
        later_.values[b] = later.values[b];
      }
  }

  // Blocks are read once for every ROWS rows; what comes later is prefetched the first time.
  void score(const RowBlocks& blocks, const Operand* query, int head_dim, float* scores) {
    for (int b = 0; b < CHUNK_BLOCKS; ++b)
      for (const Rows& rows : blocks)
        if (rows.tokens > b * BLOCK)
          SCORES[rows.count - 1](reinterpret_cast<const char*>(query + rows.first * head_dim), tile_.keys[b],
                                 &rows == blocks.begin() ? later_.keys[b] : nullptr, head_dim,
                                 std::min(BLOCK, rows.tokens - b * BLOCK), scores + rows.first * CHUNK + b * BLOCK);
  }

  void add_values(const RowBlocks& blocks, const Operand* weights, const float* decays, int head_dim, float* output) {
    for (const Rows& rows : blocks)
      VALUES[rows.count - 1](reinterpret_cast<const char*>(weights + rows.first * CHUNK), decays + rows.first,
                             tile_.values, &rows == blocks.begin() ? later_.values : nullptr, rows.tokens, head_dim,
                             output + rows.first * head_dim);
  }

 private:
  template <int R>
  static void add_all_columns(const char* weights, const float* decays, const Number* const* values,
                              const Number* const* prefetched, int tokens, int head_dim, float* output) {
    constexpr int V = AVX512 ? (R <= 2 ? 4 : 2) : std::min((R <= 2 ? 4 : 2) * LANES / WIDTH, R > 3 ? 2 : 4);
    constexpr int REST = std::min(V, LANES / WIDTH);
    int d = 0;
    for (; d + V * WIDTH <= head_dim; d += V * WIDTH)
      value_rows<Dot, R, V>(weights, decays, values, prefetched, d, tokens, head_dim, output);
    for (; d < head_dim; d += REST * WIDTH)
      value_rows<Dot, R, REST>(weights, decays, values, prefetched, d, tokens, head_dim, output);
  }

  static constexpr auto SCORES = by_rows<ROWS>([]<int R>() {
    return &score_rows<Dot, R, std::min(BLOCK / WIDTH, AVX512 || R > 3 ? 2 : 4), Number>;
  });
  static constexpr auto VALUES = by_rows<ROWS>([]<int R>() { return &add_all_columns<R>; });

  Tile<Number> tile_;
  struct {
    const Number *keys[CHUNK_BLOCKS] = {}, *values[CHUNK_BLOCKS] = {};
  } later_;
};

}  // namespace

template <typename T>
void attend_decode(const AttentionLayer<T>& layer, const AttentionItem& item, const AttentionItem& next) {
  by_cache<T>(layer.cache, [&]<typename C>(C*) { attend_chunks<FewRows<T, C>, DECODE_ROWS, C>(layer, item, next); });
}

template void attend_decode(const AttentionLayer<float>&, const AttentionItem&, const AttentionItem&);
template void attend_decode(const AttentionLayer<c10::BFloat16>&, const AttentionItem&, const AttentionItem&);
template void attend_decode(const AttentionLayer<c10::Half>&, const AttentionItem&, const AttentionItem&);

}  // namespace oatmill
