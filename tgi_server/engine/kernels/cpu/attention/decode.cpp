// Attention of a few queries, as replies have them: bound by memory. The cache's numbers are multiplied as they are
// read, and what is needed next is prefetched.

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "attention/attention.h"
#include "attention/chunks.h"

namespace oatmill {

namespace {

constexpr bool AVX512 = WIDTH == 16;

// Products of few rows. Numbers of 8 bits are turned into pairs of bfloat16 where such pairs are multiplied: prompts
// are multiplied so, and both come to the same.
template <typename T, typename K, typename V>
class FewRows {
  template <typename C>
  static constexpr bool CONVERTED = Fp8<C> && !std::is_same_v<typename Columns<T>::Operand, float>;
  template <typename C>
  using Number = std::conditional_t<CONVERTED<C>, T, C>;
  using Key = Number<K>;
  using Value = Number<V>;
  using KeyDot = Columns<Key>;
  using ValueDot = Columns<Value>;

 public:
  using Operand = typename KeyDot::Operand;
  static_assert(std::is_same_v<Operand, typename ValueDot::Operand>);
  static constexpr int ROWS = std::min(KeyDot::ROWS, ValueDot::ROWS);

  void load(const Chunk<K, V>& chunk, const Chunk<K, V>& later, int head_dim) {
    tile_.load(chunk, head_dim);
    for (int b = 0; b < CHUNK_BLOCKS; ++b) {
      const int64_t bytes = b < later.blocks() ? BLOCK * head_dim : 0;
      prefetch_later(later.keys[b], bytes, later_.keys[b]);
      prefetch_later(later.values[b], bytes, later_.values[b]);
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
  // Prefetches what is converted before it is multiplied, or remembers it for the products, which prefetch it.
  template <typename C>
  static void prefetch_later(const C* later, int64_t bytes, const Number<C>*& remembered) {
    if constexpr (CONVERTED<C>) {
      for (int64_t byte = 0; byte < bytes; byte += LINE)
        __builtin_prefetch(reinterpret_cast<const char*>(later) + byte, 0, 2);
    } else {
      remembered = later;
    }
  }

  template <int R>
  static void add_all_columns(const char* weights, const float* decays, const Value* const* values,
                              const Value* const* prefetched, int tokens, int head_dim, float* output) {
    constexpr int COLUMNS = AVX512 ? (R <= 2 ? 4 : 2) : std::min((R <= 2 ? 4 : 2) * LANES / WIDTH, R > 3 ? 2 : 4);
    constexpr int REST = std::min(COLUMNS, LANES / WIDTH);
    int d = 0;
    for (; d + COLUMNS * WIDTH <= head_dim; d += COLUMNS * WIDTH)
      value_rows<ValueDot, R, COLUMNS>(weights, decays, values, prefetched, d, tokens, head_dim, output);
    for (; d < head_dim; d += REST * WIDTH)
      value_rows<ValueDot, R, REST>(weights, decays, values, prefetched, d, tokens, head_dim, output);
  }

  static constexpr auto SCORES = by_rows<ROWS>(
      []<int R>() { return &score_rows<KeyDot, R, std::min(BLOCK / WIDTH, AVX512 || R > 3 ? 2 : 4), Key>; });
  static constexpr auto VALUES = by_rows<ROWS>([]<int R>() { return &add_all_columns<R>; });

  Tile<Key, Value> tile_;
  struct {
    const Key* keys[CHUNK_BLOCKS] = {};
    const Value* values[CHUNK_BLOCKS] = {};
  } later_;
};

}  // namespace

template <typename T>
void attend_decode(const AttentionLayer<T>& layer, const AttentionItem& item, const AttentionItem& next) {
  by_cache<T>(layer.key_dtype, layer.value_dtype, [&]<typename K, typename V>(K*, V*) {
    attend_chunks<FewRows<T, K, V>, DECODE_ROWS, K, V>(layer, item, next);
  });
}

template void attend_decode(const AttentionLayer<float>&, const AttentionItem&, const AttentionItem&);
template void attend_decode(const AttentionLayer<c10::BFloat16>&, const AttentionItem&, const AttentionItem&);
template void attend_decode(const AttentionLayer<c10::Half>&, const AttentionItem&, const AttentionItem&);

}  // namespace oatmill
