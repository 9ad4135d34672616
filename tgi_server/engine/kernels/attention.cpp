// Attention over the paged KV cache on a CPU.
//
// A block of a layer's cache holds BLOCK tokens of each KV head: keys as [head_dim][BLOCK], values as
// [BLOCK][head_dim]. With keys stored that way both products of attention are the same small one, rows times a tile
// whose columns lie side by side in memory: vector registers run along the columns and nothing is ever summed across
// a register. Caches may be float or bfloat16; all arithmetic is in float. The softmax is the online one of
// Milakov and Gimelshein (2018), tile by tile.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/BFloat16.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "lanes.h"

namespace {

using namespace oatmill;

constexpr int BLOCK = 32;      // tokens of a KV block
constexpr int ROWS = 8;        // rows that one pass over a tile serves: their sums stay in registers
constexpr int ITEM_ROWS = 32;  // rows of one work item: queries times the query heads that share a KV head
constexpr int MAX_HEAD_DIM = 256;
constexpr float MASKED = -std::numeric_limits<float>::infinity();

inline float rounded(float x) { return static_cast<float>(c10::BFloat16(x)); }

// A register is added to only as fast as one sum follows another. With few rows there are few sums, so each is split
// into as many partial ones as keep the processor busy.
template <int R>
constexpr int PARTS = R <= 2 ? 4 : R <= 4 ? 2 : 1;

// scores[r][j] = sum over d of query[r][d] * keys[d][j]
template <int R, typename T>
void score_tile(const float* query, const T* keys, int head_dim, float* scores) {
  constexpr int COLUMNS = BLOCK / LANES;
  Lanes sums[PARTS<R>][R][COLUMNS] = {};
  for (int d = 0; d < head_dim; d += PARTS<R>)
    for (int p = 0; p < PARTS<R>; ++p)
      for (int c = 0; c < COLUMNS; ++c) {
        const Lanes key = load(keys + (d + p) * BLOCK + c * LANES);
        for (int r = 0; r < R; ++r) sums[p][r][c] += key * query[r * head_dim + d + p];
      }
  for (int p = 1; p < PARTS<R>; ++p)
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < COLUMNS; ++c) sums[0][r][c] += sums[p][r][c];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < COLUMNS; ++c) store(scores + r * BLOCK + c * LANES, sums[0][r][c]);
}

// C registers' worth of columns of value_tile.
template <int R, int C, typename T>
void value_columns(const float* weights, const float* decay, const T* values, int tokens, int head_dim, float* output) {
  Lanes sums[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) sums[r][c] = load(output + r * head_dim + c * LANES) * decay[r];
  for (int j = 0; j < tokens; ++j)
    for (int c = 0; c < C; ++c) {
      const Lanes value = load(values + j * head_dim + c * LANES);
      for (int r = 0; r < R; ++r) sums[r][c] += value * weights[r * BLOCK + j];
    }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store(output + r * head_dim + c * LANES, sums[r][c]);
}

// output[r][d] = output[r][d] * decay[r] + sum over j of weights[r][j] * values[j][d]
template <int R, typename T>
void value_tile(const float* weights, const float* decay, const T* values, int tokens, int head_dim, float* output) {
  int d = 0;
  for (; d + PARTS<R> * LANES <= head_dim; d += PARTS<R> * LANES)
    value_columns<R, PARTS<R>>(weights, decay, values + d, tokens, head_dim, output + d);
  for (; d < head_dim; d += LANES) value_columns<R, 1>(weights, decay, values + d, tokens, head_dim, output + d);
}

template <typename T>
using ScoreTile = void (*)(const float*, const T*, int, float*);
template <typename T>
using ValueTile = void (*)(const float*, const float*, const T*, int, int, float*);

template <typename T>
constexpr ScoreTile<T> SCORE_TILES[ROWS] = {score_tile<1, T>, score_tile<2, T>, score_tile<3, T>, score_tile<4, T>,
                                            score_tile<5, T>, score_tile<6, T>, score_tile<7, T>, score_tile<8, T>};
template <typename T>
constexpr ValueTile<T> VALUE_TILES[ROWS] = {value_tile<1, T>, value_tile<2, T>, value_tile<3, T>, value_tile<4, T>,
                                            value_tile<5, T>, value_tile<6, T>, value_tile<7, T>, value_tile<8, T>};

struct Variant {
  float scaling;
  int64_t window;  // 0: all
  float softcap;   // 0: off
  const float* alibi_slopes;
  bool rounded_alibi;
};

template <typename T>
struct Layer {
  const T* query;  // [tokens, heads, head_dim] with these strides
  int64_t query_token_stride, query_head_stride;
  T* output;  // [tokens, heads, head_dim]
  const T* keys;
  const T* values;
  int heads, kv_heads, head_dim;
  Variant variant;

  int group() const { return heads / kv_heads; }
  int64_t block_elements() const { return int64_t(kv_heads) * head_dim * BLOCK; }
};

// Some queries of one sequence with query heads that share one KV head: all of them, or as many as an item has rows for.
// Row r is query r / heads, head first_head + r % heads.
struct Item {
  const int32_t* table;
  int64_t first_token;     // of the item's queries, among the pass's tokens
  int64_t first_position;  // of the item's first query, in its sequence
  int queries;
  int kv_head;
  int first_head;
  int heads;
};

struct Scratch {
  float query[ITEM_ROWS * MAX_HEAD_DIM];
  float output[ITEM_ROWS * MAX_HEAD_DIM];
  float scores[ITEM_ROWS * BLOCK];
  float largest[ITEM_ROWS], total[ITEM_ROWS], decay[ITEM_ROWS];
};

template <typename T>
void load_query(const Layer<T>& layer, const Item& item, Scratch& scratch) {
  const int rows = item.queries * item.heads;
  for (int r = 0; r < rows; ++r) {
    const T* from = layer.query + (item.first_token + r / item.heads) * layer.query_token_stride +
                    (item.first_head + r % item.heads) * layer.query_head_stride;
    for (int d = 0; d < layer.head_dim; ++d)
      scratch.query[r * layer.head_dim + d] = static_cast<float>(from[d]) * layer.variant.scaling;
    scratch.largest[r] = MASKED;
    scratch.total[r] = 0;
  }
  std::fill_n(scratch.output, rows * layer.head_dim, 0.0f);
}

// Turns the scores of row r against the tile's tokens into softmax weights, and says how much the sums so far decay.
template <typename T>
void weigh_row(const Layer<T>& layer, const Item& item, int r, int64_t tile_start, int tokens, Scratch& scratch) {
  const Variant& variant = layer.variant;
  const int64_t position = item.first_position + r / item.heads;
  float* scores = scratch.scores + r * BLOCK;
  if (variant.softcap != 0)
    for (int j = 0; j < BLOCK; ++j) scores[j] = variant.softcap * std::tanh(scores[j] / variant.softcap);
  if (variant.alibi_slopes) {
    const float slope = variant.alibi_slopes[item.first_head + r % item.heads];
    if (variant.rounded_alibi)
      for (int j = 0; j < BLOCK; ++j)
        scores[j] += variant.scaling * rounded(slope * rounded(static_cast<float>(tile_start + j)));
    else
      for (int j = 0; j < BLOCK; ++j) scores[j] += slope * static_cast<float>(tile_start + j - position);
  }
  const int64_t last = std::min<int64_t>(tokens, position - tile_start + 1);
  const int64_t first = variant.window ? std::max<int64_t>(0, position - variant.window + 1 - tile_start) : 0;
  for (int j = 0; j < std::min<int64_t>(first, BLOCK); ++j) scores[j] = MASKED;
  for (int j = std::max<int64_t>(0, last); j < BLOCK; ++j) scores[j] = MASKED;
  Lanes highest = load(scores);
  for (int j = LANES; j < BLOCK; j += LANES) highest = larger(highest, load(scores + j));
  const float peak = std::max(scratch.largest[r], largest(highest));
  if (peak == MASKED) {
    std::fill_n(scores, BLOCK, 0.0f);
    scratch.decay[r] = 1;
    return;
  }
  Lanes total = {};
  for (int j = 0; j < BLOCK; j += LANES) {
    const Lanes weights = exponential(load(scores + j) - peak);
    store(scores + j, weights);
    total += weights;
  }
  scratch.decay[r] = std::exp(scratch.largest[r] - peak);
  scratch.total[r] = scratch.total[r] * scratch.decay[r] + sum(total);
  scratch.largest[r] = peak;
}

template <typename T>
void attend_item(const Layer<T>& layer, const Item& item, Scratch& scratch) {
  const int head_dim = layer.head_dim, rows = item.queries * item.heads;
  const int64_t end = item.first_position + item.queries;  // no query of the item looks further
  int64_t tile = 0;
  if (layer.variant.window) tile = std::max<int64_t>(0, item.first_position - layer.variant.window + 1) / BLOCK;
  load_query(layer, item, scratch);
  for (; tile * BLOCK < end; ++tile) {
    const int64_t start = tile * BLOCK;
    const int tokens = static_cast<int>(std::min<int64_t>(BLOCK, end - start));
    const int64_t offset = item.table[tile] * layer.block_elements() + int64_t(item.kv_head) * head_dim * BLOCK;
    for (int r = 0; r < rows; r += ROWS)
      SCORE_TILES<T>[std::min(ROWS, rows - r) - 1](scratch.query + r * head_dim, layer.keys + offset, head_dim,
                                                    scratch.scores + r * BLOCK);
    for (int r = 0; r < rows; ++r) weigh_row(layer, item, r, start, tokens, scratch);
    for (int r = 0; r < rows; r += ROWS)
      VALUE_TILES<T>[std::min(ROWS, rows - r) - 1](scratch.scores + r * BLOCK, scratch.decay + r,
                                                    layer.values + offset, tokens, head_dim,
                                                    scratch.output + r * head_dim);
  }
  for (int r = 0; r < rows; ++r) {
    T* to = layer.output +
            ((item.first_token + r / item.heads) * layer.heads + item.first_head + r % item.heads) * head_dim;
    const float scale = 1.0f / scratch.total[r];
    for (int d = 0; d < head_dim; ++d) to[d] = static_cast<T>(scratch.output[r * head_dim + d] * scale);
  }
}

template <typename T>
std::vector<Item> plan(const Layer<T>& layer, const at::Tensor& tables, const at::Tensor& kv_lengths,
                       const at::Tensor& query_starts) {
  std::vector<Item> items;
  const int32_t* lengths = kv_lengths.const_data_ptr<int32_t>();
  const int32_t* starts = query_starts.const_data_ptr<int32_t>();
  const int group = layer.group();
  const int item_heads = std::min(group, ITEM_ROWS), item_queries = ITEM_ROWS / item_heads;
  for (int64_t s = 0; s < kv_lengths.size(0); ++s) {
    const int count = starts[s + 1] - starts[s];
    const int32_t* table = tables.const_data_ptr<int32_t>() + s * tables.stride(0);
    for (int head = 0; head < layer.kv_heads; ++head)
      for (int h = 0; h < group; h += item_heads)
        for (int q = 0; q < count; q += item_queries)
          items.push_back({table, starts[s] + q, lengths[s] - count + q, std::min(item_queries, count - q), head,
                           head * group + h, std::min(item_heads, group - h)});
  }
  return items;
}

template <typename T>
void attend(const Layer<T>& layer, const std::vector<Item>& items) {
  at::parallel_for(0, static_cast<int64_t>(items.size()), 1, [&](int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    for (int64_t i = begin; i < end; ++i) attend_item(layer, items[i], scratch);
  });
}

at::Tensor paged_attention(const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values,
                           const at::Tensor& tables, const at::Tensor& kv_lengths, const at::Tensor& query_starts,
                           double scaling, int64_t window, double softcap,
                           const std::optional<at::Tensor>& alibi_slopes, bool rounded_alibi) {
  const int64_t heads = query.size(1), kv_heads = keys.size(1), head_dim = query.size(2);
  TORCH_CHECK(head_dim % LANES == 0 && head_dim <= MAX_HEAD_DIM, "head_dim must be a multiple of 16 up to 256");
  TORCH_CHECK(heads % kv_heads == 0, "each KV head must serve the same number of query heads");
  TORCH_CHECK(query.stride(2) == 1 && tables.stride(1) == 1 && query.scalar_type() == keys.scalar_type());
  at::Tensor output = at::empty(query.sizes(), query.options());
  const Variant variant{static_cast<float>(scaling), window, static_cast<float>(softcap),
                        alibi_slopes ? alibi_slopes->const_data_ptr<float>() : nullptr, rounded_alibi};
  const auto run = [&]<typename T>(T*) {
    const Layer<T> layer{query.const_data_ptr<T>(), query.stride(0), query.stride(1), output.mutable_data_ptr<T>(),
                         keys.const_data_ptr<T>(), values.const_data_ptr<T>(), static_cast<int>(heads),
                         static_cast<int>(kv_heads), static_cast<int>(head_dim), variant};
    attend(layer, plan(layer, tables, kv_lengths, query_starts));
  };
  if (query.scalar_type() == at::kBFloat16)
    run(static_cast<c10::BFloat16*>(nullptr));
  else
    run(static_cast<float*>(nullptr));
  return output;
}

template <typename T>
void write_tokens(const at::Tensor& key, const at::Tensor& value, at::Tensor& keys, at::Tensor& values,
                  const at::Tensor& slots) {
  const int64_t kv_heads = keys.size(1), head_dim = keys.size(2);
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  for (int64_t t = 0; t < slots.size(0); ++t)
    for (int64_t h = 0; h < kv_heads; ++h) {
      const int64_t block = slot[t] / BLOCK, offset = slot[t] % BLOCK;
      const int64_t base = (block * kv_heads + h) * head_dim * BLOCK;
      const T* from = key.const_data_ptr<T>() + t * key.stride(0) + h * key.stride(1);
      T* to = keys.mutable_data_ptr<T>() + base + offset;
      for (int64_t d = 0; d < head_dim; ++d) to[d * BLOCK] = from[d];
      std::memcpy(values.mutable_data_ptr<T>() + base + offset * head_dim,
                  value.const_data_ptr<T>() + t * value.stride(0) + h * value.stride(1), head_dim * sizeof(T));
    }
}

// key, value: [tokens, kv_heads, head_dim]; slots: [tokens], block * BLOCK + offset of each.
void write_kv(const at::Tensor& key, const at::Tensor& value, at::Tensor& keys, at::Tensor& values,
              const at::Tensor& slots) {
  TORCH_CHECK(key.stride(2) == 1 && value.stride(2) == 1 && key.scalar_type() == keys.scalar_type());
  if (keys.scalar_type() == at::kBFloat16)
    write_tokens<c10::BFloat16>(key, value, keys, values, slots);
  else
    write_tokens<float>(key, value, keys, values, slots);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(oatmill, library) {
  library.def(
      "paged_attention(Tensor query, Tensor keys, Tensor values, Tensor tables, Tensor kv_lengths, "
      "Tensor query_starts, float scaling, int window, float softcap, Tensor? alibi_slopes, bool rounded_alibi) "
      "-> Tensor");
  library.def("write_kv(Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values, Tensor slots) -> ()");
}

TORCH_LIBRARY_IMPL(oatmill, CPU, library) {
  library.impl("paged_attention", &paged_attention);
  library.impl("write_kv", &write_kv);
}
