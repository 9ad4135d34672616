// Attention of a few queries, as replies have them: bound by memory. Tile by tile: a tile is a block of one KV head.

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "attention/attention.h"
#include "attention/microkernel.h"
#include "attention/online_softmax.h"
#include "simd/dtypes.h"
#include "simd/simd16.h"

namespace oatmill {

namespace {

constexpr bool AVX512 = WIDTH == 16;

// scores[r][j] = sum over d of query[r][d] * keys[d][j]
template <int R, typename C>
void score_tile(const char* query, const C* keys, const C* prefetched, int head_dim, float* scores) {
  using Dot = Columns<C>;
  constexpr int V = std::min(BLOCK / WIDTH, AVX512 || R > 3 ? 2 : 4);
  constexpr bool PAIRS = AVX512 && !std::is_same_v<typename Dot::Operand, float>;
  constexpr int P = PAIRS ? (R <= 2 ? 4 : R <= 4 ? 2 : 1) : std::max(1, 8 / (R * V));
  const int64_t row_bytes = int64_t(head_dim) * sizeof(typename Dot::Operand);
  for (int j = 0; j < BLOCK; j += V * WIDTH) {
    typename Dot::Accumulator sums[R][V] = {};
    const TileProduct product{query, row_bytes, reinterpret_cast<const char*>(keys + j * PAIR<C>),
                              BLOCK * PAIR<C> * sizeof(C), head_dim / PAIR<C>};
    add_products<Dot, R, V, P>(product, reinterpret_cast<const char*>(prefetched + j * PAIR<C>), sums);
    store_block(reinterpret_cast<char*>(scores + j), BLOCK * sizeof(float), sums);
  }
}

// V registers' worth of columns of value_tile.
template <int R, int V, typename C>
void value_columns(const char* weights, const float* decays, const C* values, const C* prefetched, int tokens, int head_dim,
                   float* output) {
  using Dot = Columns<C>;
  typename Dot::Accumulator sums[R][V];
  load_decayed(output, head_dim, decays, sums);
  const TileProduct product{weights, BLOCK * sizeof(typename Dot::Operand), reinterpret_cast<const char*>(values),
                            int64_t(head_dim) * PAIR<C> * static_cast<int64_t>(sizeof(C)),
                            (tokens + PAIR<C> - 1) / PAIR<C>};
  add_products<Dot, R, V, 1>(product, reinterpret_cast<const char*>(prefetched), sums);
  store_block(reinterpret_cast<char*>(output), head_dim * sizeof(float), sums);
}

// output[r][d] = output[r][d] * decays[r] + sum over j of weights[r][j] * values[j][d]
template <int R, typename C>
void value_tile(const char* weights, const float* decays, const C* values, const C* prefetched, int tokens, int head_dim,
                float* output) {
  constexpr int V = AVX512 ? (R <= 2 ? 4 : 2) : std::min((R <= 2 ? 4 : 2) * LANES / WIDTH, R > 3 ? 2 : 4);
  constexpr int REST = std::min(V, LANES / WIDTH);
  int d = 0;
  for (; d + V * WIDTH <= head_dim; d += V * WIDTH)
    value_columns<R, V>(weights, decays, values + d * PAIR<C>, prefetched + d * PAIR<C>, tokens, head_dim, output + d);
  for (; d < head_dim; d += REST * WIDTH)
    value_columns<R, REST>(weights, decays, values + d * PAIR<C>, prefetched + d * PAIR<C>, tokens, head_dim, output + d);
}

template <typename C>
constexpr int ROWS = Columns<C>::ROWS;
template <typename C>
constexpr auto SCORE_TILES = by_rows<ROWS<C>>([]<int R>() { return &score_tile<R, C>; });
template <typename C>
constexpr auto VALUE_TILES = by_rows<ROWS<C>>([]<int R>() { return &value_tile<R, C>; });

template <typename C>
struct Scratch {
  using Operand = typename Columns<C>::Operand;
  alignas(64) Operand query[DECODE_ROWS * MAX_HEAD_DIM];
  alignas(64) Operand weights[DECODE_ROWS * BLOCK];
  alignas(64) float output[DECODE_ROWS * MAX_HEAD_DIM];
  alignas(64) float scores[DECODE_ROWS * BLOCK];
  Softmax<DECODE_ROWS> softmax;
};

// The rows of one KV head against one tile. place: of the tile; later: of the one that comes next.
template <typename T, typename C>
void attend_tile(const AttentionLayer<T>& layer, const AttentionItem& item, int first_row, int64_t tile, int64_t place,
                 int64_t later, Scratch<C>& scratch) {
  const int head_dim = layer.head_dim, end_row = first_row + item.rows_a_kv_head();
  const int64_t start = tile * BLOCK;
  const int tokens = static_cast<int>(std::min<int64_t>(BLOCK, item.end() - start));
  // Tiles are read once for every ROWS rows; what comes later is asked for the first time.
  const auto prefetched = [&](int row) { return row == first_row ? later : place; };
  for (int r = first_row; r < end_row; r += ROWS<C>)
    SCORE_TILES<C>[std::min(ROWS<C>, end_row - r) - 1](
        reinterpret_cast<const char*>(scratch.query + r * head_dim), layer.template keys_at<C>(place),
        layer.template keys_at<C>(prefetched(r)), head_dim, scratch.scores + r * BLOCK);
  for (int r = first_row; r < end_row; ++r)
    weigh_row(layer.variant, item.head(r), item.position(r), start, BLOCK, tokens, r, scratch.softmax,
              scratch.scores + r * BLOCK);
  const auto* weights = as_operands(scratch.scores, first_row * BLOCK, item.rows_a_kv_head() * BLOCK, scratch.weights);
  for (int r = first_row; r < end_row; r += ROWS<C>)
    VALUE_TILES<C>[std::min(ROWS<C>, end_row - r) - 1](
        reinterpret_cast<const char*>(weights + r * BLOCK), scratch.softmax.decays + r,
        layer.template values_at<C>(place), layer.template values_at<C>(prefetched(r)), tokens, head_dim,
        scratch.output + r * head_dim);
}

template <typename T, typename C>
void attend(const AttentionLayer<T>& layer, const AttentionItem& item, const AttentionItem& next) {
  static thread_local Scratch<C> scratch;
  const int head_dim = layer.head_dim, rows = item.rows();
  const auto first_tile = [&](const AttentionItem& of) {
    return layer.variant.first_token(of.first_position) / BLOCK;
  };
  const auto place = [&](const AttentionItem& of, int64_t tile) { return layer.place(of.table[tile], of.kv_head); };
  scratch.softmax.begin(layer.variant, item);
  std::fill_n(scratch.output, rows * head_dim, 0.0f);
  for (int r = 0; r < rows; ++r)
    std::copy_n(layer.query_of(item.token(r), item.head(r)), head_dim, scratch.query + r * head_dim);
  for (int64_t tile = first_tile(item); tile * BLOCK < item.end(); ++tile) {
    const int64_t later = (tile + 1) * BLOCK < item.end() ? place(item, tile + 1) : place(next, first_tile(next));
    for (int h = 0; h < item.kv_heads; ++h) {
      const int64_t own = place(item, tile) + h * layer.head_elements();
      attend_tile(layer, item, h * item.rows_a_kv_head(), tile, own,
                  h + 1 < item.kv_heads ? own + layer.head_elements() : later, scratch);
    }
  }
  for (int r = 0; r < rows; ++r) {
    T* to = layer.output_of(item.token(r), item.head(r));
    const float scale = layer.variant.value_scale / scratch.softmax.total(r);
    for (int d = 0; d < head_dim; d += LANES) store(to + d, load(scratch.output + r * head_dim + d) * scale);
  }
}

}  // namespace

template <typename T>
void attend_decode(const AttentionLayer<T>& layer, const AttentionItem& item, const AttentionItem& next) {
  by_cache<T>(layer.cache, [&]<typename C>(C*) { attend<T, C>(layer, item, next); });
}

template void attend_decode(const AttentionLayer<float>&, const AttentionItem&, const AttentionItem&);
template void attend_decode(const AttentionLayer<c10::BFloat16>&, const AttentionItem&, const AttentionItem&);
template void attend_decode(const AttentionLayer<c10::Half>&, const AttentionItem&, const AttentionItem&);

}  // namespace oatmill
