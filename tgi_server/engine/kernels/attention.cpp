// Attention over the paged KV cache on a CPU (kv_layout.h says how it is stored). Caches may be float or bfloat16; sums
// are in float. The softmax is the online one of Milakov and Gimelshein (2018), tile by tile: a tile is a block of one
// KV head.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/BFloat16.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "dtypes.h"
#include "kv_layout.h"
#include "lanes.h"
#include "ops.h"
#include "parallel.h"
#include "registers.h"

namespace oatmill {

namespace {

constexpr int ROWS = WIDTH == 16 ? 8 : 6;  // rows that one pass over a tile serves: their sums stay in registers
constexpr int ITEM_ROWS = 4 * ROWS;        // of one work item: queries times the query heads that share a KV head
constexpr int COLUMNS = BLOCK / LANES;  // vectors of a tile's tokens
constexpr float MASKED = -std::numeric_limits<float>::infinity();
constexpr float SLACK = 8;  // weights are e^SLACK at most: what they are divided by in the end changes only then

// Asks for a line into the second cache, as kernels/linear.h does.
inline void want(const void* line) { __builtin_prefetch(line, 0, 2); }

inline float rounded(float x) { return static_cast<float>(c10::BFloat16(x)); }

// A register is added to only as fast as one sum follows another. With few rows there are few sums, so each is split
// into as many partial ones as keep the processor busy.
template <int R>
constexpr int PARTS = R <= 2 ? 4 : R <= 4 ? 2 : 1;

// sums[r][v] += sum over k below depth of rows[r][k] * columns[k], V registers of it. Rows are `stride` apart, and `step`
// is from columns of one k to the next. wanted: a tile that is needed soon; as much of it is asked for as is read of this
// one, since the processor itself does not guess which tile comes next. P: partial sums; depth is a multiple of it.
//
// Loops over registers must be unrolled before the compiler decides what is kept in registers, hence the pragmas.
template <int R, int V, int P, typename T>
inline void accumulate(const float* rows, int stride, const T* columns, const T* wanted, int step, int depth,
                       Floats (&sums)[R][V]) {
  constexpr int IN_LINE = std::max<int>(1, 64 / (WIDTH * sizeof(T)));  // registers
  Floats partial[P][R][V];
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p)
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) partial[p][r][v] = p == 0 ? sums[r][v] : Floats{};
  for (int k = 0; k < depth; k += P)
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      Floats column[V];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        column[v] = widened(columns + (k + p) * step + v * WIDTH);
        if (v % IN_LINE == 0) want(wanted + (k + p) * step + v * WIDTH);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Floats row = Floats{} + rows[r * stride + k + p];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) partial[p][r][v] = multiply_add(row, column[v], partial[p][r][v]);
      }
    }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      sums[r][v] = partial[0][r][v];
#pragma GCC unroll 4
      for (int p = 1; p < P; ++p) sums[r][v] += partial[p][r][v];
    }
}

// scores[r][j] = sum over d of query[r][d] * keys[d][j]
template <int R, typename T>
  requires(PAIR<T> == 1)
void score_tile(const float* query, const T* keys, const T* wanted, int head_dim, float* scores) {
  constexpr int V = std::min(BLOCK / WIDTH, WIDTH == 16 || R > 3 ? 2 : 4);
  constexpr int P = std::max(1, 8 / (R * V));
  for (int j = 0; j < BLOCK; j += V * WIDTH) {
    Floats sums[R][V] = {};
    accumulate<R, V, P>(query, head_dim, keys + j, wanted + j, BLOCK, head_dim, sums);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) store_as(scores + r * BLOCK + j + v * WIDTH, sums[r][v]);
  }
}

// C vectors' worth of columns of value_tile.
template <int R, int C, typename T>
  requires(PAIR<T> == 1)
void value_columns(const float* weights, const float* decay, const T* values, const T* wanted, int tokens, int head_dim,
                   float* output) {
  constexpr int V = WIDTH == 16 ? C : std::min(C * LANES / WIDTH, R > 3 ? 2 : 4);
  for (int d = 0; d < C * LANES; d += V * WIDTH) {
    Floats sums[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v)
        sums[r][v] = load_as<Floats>(output + r * head_dim + d + v * WIDTH) * decay[r];
    accumulate<R, V, 1>(weights, BLOCK, values + d, wanted + d, head_dim, tokens, sums);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) store_as(output + r * head_dim + d + v * WIDTH, sums[r][v]);
  }
}

#if defined(__AVX512BF16__)

inline int32_t pair_at(const c10::BFloat16* from) {
  int32_t pair;
  std::memcpy(&pair, from, sizeof(pair));
  return pair;
}

// Loops over registers must be unrolled before the compiler decides what is kept in registers, hence the pragmas.
template <int R, typename T>
  requires(PAIR<T> == 2)
void score_tile(const T* query, const T* keys, const T* wanted, int head_dim, float* scores) {
  constexpr int P = PARTS<R>;
  __m512i sums[P][R][COLUMNS];
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p)
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int c = 0; c < COLUMNS; ++c) sums[p][r][c] = _mm512_setzero_si512();
  for (int d = 0; d < head_dim; d += 2 * P)
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      const int place = (d + 2 * p) * BLOCK;
      const __m512i first = _mm512_loadu_si512(keys + place), second = _mm512_loadu_si512(keys + place + 2 * LANES);
      want(wanted + place);
      want(wanted + place + 2 * LANES);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const __m512i row = _mm512_set1_epi32(pair_at(query + r * head_dim + d + 2 * p));
        AddPairs::add(sums[p][r][0], row, first);
        AddPairs::add(sums[p][r][1], row, second);
      }
    }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int c = 0; c < COLUMNS; ++c) {
      __m512 sum = _mm512_castsi512_ps(sums[0][r][c]);
#pragma GCC unroll 4
      for (int p = 1; p < P; ++p) sum = _mm512_add_ps(sum, _mm512_castsi512_ps(sums[p][r][c]));
      _mm512_storeu_ps(scores + r * BLOCK + c * LANES, sum);
    }
}

template <int R, int C, typename T>
  requires(PAIR<T> == 2)
void value_columns(const T* weights, const float* decay, const T* values, const T* wanted, int tokens, int head_dim,
                   float* output) {
  __m512i sums[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c)
      sums[r][c] = _mm512_castps_si512(
          _mm512_mul_ps(_mm512_loadu_ps(output + r * head_dim + c * LANES), _mm512_set1_ps(decay[r])));
  for (int j = 0; j < tokens; j += 2) {
    __m512i columns[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      columns[c] = _mm512_loadu_si512(values + j * head_dim + c * 2 * LANES);
      want(wanted + j * head_dim + c * 2 * LANES);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const __m512i row = _mm512_set1_epi32(pair_at(weights + r * BLOCK + j));
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) AddPairs::add(sums[r][c], row, columns[c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c)
      _mm512_storeu_ps(output + r * head_dim + c * LANES, _mm512_castsi512_ps(sums[r][c]));
}

#endif

// What the products are made of: a cache's own numbers where pairs are multiplied, else floats.
template <typename T>
using Operand = std::conditional_t<PAIR<T> == 2, T, float>;

// output[r][d] = output[r][d] * decay[r] + sum over j of weights[r][j] * values[j][d]
template <int R, typename T>
void value_tile(const Operand<T>* weights, const float* decay, const T* values, const T* wanted, int tokens,
                int head_dim, float* output) {
  constexpr int C = R <= 2 ? 4 : 2;
  int d = 0;
  for (; d + C * LANES <= head_dim; d += C * LANES)
    value_columns<R, C, T>(weights, decay, values + d * PAIR<T>, wanted + d * PAIR<T>, tokens, head_dim, output + d);
  for (; d < head_dim; d += LANES)
    value_columns<R, 1, T>(weights, decay, values + d * PAIR<T>, wanted + d * PAIR<T>, tokens, head_dim, output + d);
}

template <typename T>
using ScoreTile = void (*)(const Operand<T>*, const T*, const T*, int, float*);
template <typename T>
using ValueTile = void (*)(const Operand<T>*, const float*, const T*, const T*, int, int, float*);

template <typename T>
constexpr auto SCORE_TILES = []<int... R>(std::integer_sequence<int, R...>) {
  return std::array<ScoreTile<T>, ROWS>{score_tile<R + 1, T>...};
}(std::make_integer_sequence<int, ROWS>());
template <typename T>
constexpr auto VALUE_TILES = []<int... R>(std::integer_sequence<int, R...>) {
  return std::array<ValueTile<T>, ROWS>{value_tile<R + 1, T>...};
}(std::make_integer_sequence<int, ROWS>());

struct Variant {
  float scaling;
  int64_t window;  // 0: all
  float softcap;   // 0: off
  const float* alibi_slopes;
  bool rounded_alibi;

  // Whether scores need no more than scaling, where nothing is masked.
  bool plain() const { return softcap == 0 && !alibi_slopes; }
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

// Some queries of one sequence with KV heads and query heads that share them. With several queries that is one KV head
// and the query heads that share it, or as many as an item has rows for; with one query it is several KV heads, which
// stand side by side in memory. Rows are KV heads, queries, query heads, the last ones fastest.
struct Item {
  const int32_t* table;
  int64_t first_token;     // of the item's queries, among the pass's tokens
  int64_t first_position;  // of the item's first query, in its sequence
  int queries;
  int kv_head, kv_heads;  // the first one, how many
  int first_head, heads;  // the first query head, how many for each KV head

  int rows() const { return kv_heads * queries * heads; }
  int rows_a_kv_head() const { return queries * heads; }
  int query(int row) const { return row % rows_a_kv_head() / heads; }
  int head(int row) const { return first_head + row / rows_a_kv_head() * heads + row % heads; }
};

template <typename T>
struct Scratch {
  Operand<T> query[ITEM_ROWS * MAX_HEAD_DIM];
  Operand<T> weights[ITEM_ROWS * BLOCK];
  float output[ITEM_ROWS * MAX_HEAD_DIM];
  float scores[ITEM_ROWS * BLOCK];
  float totals[ITEM_ROWS * LANES];  // of weights, added up in the end
  float reference[ITEM_ROWS];       // weights are e to the score minus this
  float decay[ITEM_ROWS];
};

template <typename T>
void load_query(const Layer<T>& layer, const Item& item, Scratch<T>& scratch) {
  const int rows = item.rows();
  for (int r = 0; r < rows; ++r) {
    const T* from = layer.query + (item.first_token + item.query(r)) * layer.query_token_stride +
                    item.head(r) * layer.query_head_stride;
    std::copy_n(from, layer.head_dim, scratch.query + r * layer.head_dim);
    scratch.reference[r] = MASKED;
  }
  std::fill_n(scratch.totals, rows * LANES, 0.0f);
  std::fill_n(scratch.output, rows * layer.head_dim, 0.0f);
}

// Softcap, alibi and the mask, on the scaled scores of row r. first, last: the tokens of the tile that it may look at.
template <typename T>
void adjust_scores(const Layer<T>& layer, const Item& item, int r, int64_t tile_start, int64_t first, int64_t last,
                   float* scores) {
  const Variant& variant = layer.variant;
  if (variant.softcap != 0)
    for (int j = 0; j < BLOCK; ++j) scores[j] = variant.softcap * std::tanh(scores[j] / variant.softcap);
  if (variant.alibi_slopes) {
    const float slope = variant.alibi_slopes[item.head(r)];
    const int64_t distance = tile_start - item.first_position - item.query(r);
    if (variant.rounded_alibi)
      for (int j = 0; j < BLOCK; ++j)
        scores[j] += variant.scaling * rounded(slope * rounded(static_cast<float>(tile_start + j)));
    else
      for (int j = 0; j < BLOCK; ++j) scores[j] += slope * static_cast<float>(distance + j);
  }
  std::fill(scores, scores + first, MASKED);
  std::fill(scores + last, scores + BLOCK, MASKED);
}

// Turns the scores of row r against the tile's tokens into softmax weights, and says how much the sums so far decay.
template <typename T>
void weigh_row(const Layer<T>& layer, const Item& item, int r, int64_t tile_start, int tokens,
               Scratch<T>& scratch) {
  const Variant& variant = layer.variant;
  const int64_t position = item.first_position + item.query(r);
  float* scores = scratch.scores + r * BLOCK;
  Operand<T>* weights = scratch.weights + r * BLOCK;
  Lanes columns[COLUMNS];
  for (int c = 0; c < COLUMNS; ++c) columns[c] = load(scores + c * LANES) * variant.scaling;
  const int64_t last = std::clamp<int64_t>(position - tile_start + 1, 0, tokens);
  const int64_t first =
      variant.window ? std::clamp<int64_t>(position - variant.window + 1 - tile_start, 0, BLOCK) : 0;
  if (first > 0 || last < BLOCK || !variant.plain()) {
    for (int c = 0; c < COLUMNS; ++c) store(scores + c * LANES, columns[c]);
    adjust_scores(layer, item, r, tile_start, first, last, scores);
    for (int c = 0; c < COLUMNS; ++c) columns[c] = load(scores + c * LANES);
  }
  Lanes highest = columns[0];
  for (int c = 1; c < COLUMNS; ++c) highest = larger(highest, columns[c]);
  Lanes total = load(scratch.totals + r * LANES);
  scratch.decay[r] = 1;
  if (any_above(highest, scratch.reference[r] + SLACK)) {
    const float peak = largest(highest);
    scratch.decay[r] = std::exp(scratch.reference[r] - peak);
    scratch.reference[r] = peak;
    total *= scratch.decay[r];
  } else if (scratch.reference[r] == MASKED) {
    std::fill_n(weights, BLOCK, Operand<T>(0.0f));
    return;
  }
  for (int c = 0; c < COLUMNS; ++c) {
    const Lanes weight = exponential(columns[c] - scratch.reference[r]);
    store(weights + c * LANES, weight);
    total += weight;
  }
  store(scratch.totals + r * LANES, total);
}

// Of the keys and of the values: where the item's part of a block begins.
template <typename T>
int64_t tile_place(const Layer<T>& layer, const Item& item, int64_t tile) {
  return item.table[tile] * layer.block_elements() + int64_t(item.kv_head) * layer.head_dim * BLOCK;
}

template <typename T>
int64_t first_tile(const Layer<T>& layer, const Item& item) {
  return layer.variant.window ? std::max<int64_t>(0, item.first_position - layer.variant.window + 1) / BLOCK : 0;
}

// The rows of one KV head against one tile. place: of the tile; later: of the one that comes next.
template <typename T>
void attend_tile(const Layer<T>& layer, const Item& item, int first_row, int64_t tile, int64_t place, int64_t later,
                 Scratch<T>& scratch) {
  const int head_dim = layer.head_dim, end_row = first_row + item.rows_a_kv_head();
  const int64_t start = tile * BLOCK, end = item.first_position + item.queries;
  const int tokens = static_cast<int>(std::min<int64_t>(BLOCK, end - start));
  // Tiles are read once for every ROWS rows; what comes later is asked for the first time.
  for (int r = first_row; r < end_row; r += ROWS)
    SCORE_TILES<T>[std::min(ROWS, end_row - r) - 1](scratch.query + r * head_dim, layer.keys + place,
                                                    layer.keys + (r == first_row ? later : place), head_dim,
                                                    scratch.scores + r * BLOCK);
  for (int r = first_row; r < end_row; ++r) weigh_row(layer, item, r, start, tokens, scratch);
  for (int r = first_row; r < end_row; r += ROWS)
    VALUE_TILES<T>[std::min(ROWS, end_row - r) - 1](scratch.weights + r * BLOCK, scratch.decay + r,
                                                    layer.values + place,
                                                    layer.values + (r == first_row ? later : place), tokens, head_dim,
                                                    scratch.output + r * head_dim);
}

// next: the item that this thread will probably do next.
template <typename T>
void attend_item(const Layer<T>& layer, const Item& item, const Item& next, Scratch<T>& scratch) {
  const int head_dim = layer.head_dim, head_elements = head_dim * BLOCK;
  const int64_t end = item.first_position + item.queries;  // no query of the item looks further
  load_query(layer, item, scratch);
  for (int64_t tile = first_tile(layer, item); tile * BLOCK < end; ++tile) {
    const int64_t place = tile_place(layer, item, tile);
    const int64_t later = (tile + 1) * BLOCK < end ? tile_place(layer, item, tile + 1)
                                                   : tile_place(layer, next, first_tile(layer, next));
    for (int h = 0; h < item.kv_heads; ++h) {
      const int64_t own = place + h * head_elements;
      attend_tile(layer, item, h * item.rows_a_kv_head(), tile, own,
                  h + 1 < item.kv_heads ? own + head_elements : later, scratch);
    }
  }
  for (int r = 0; r < item.rows(); ++r) {
    T* to = layer.output + ((item.first_token + item.query(r)) * layer.heads + item.head(r)) * head_dim;
    const float scale = 1.0f / sum(load(scratch.totals + r * LANES));
    for (int d = 0; d < head_dim; d += LANES) store(to + d, load(scratch.output + r * head_dim + d) * scale);
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
  const int most_kv_heads = std::max(1, std::min(ITEM_ROWS / item_heads, (layer.kv_heads + 1) / 2));
  for (int64_t s = 0; s < kv_lengths.size(0); ++s) {
    const int count = starts[s + 1] - starts[s];
    const int32_t* table = tables.const_data_ptr<int32_t>() + s * tables.stride(0);
    if (count == 1 && item_heads == group) {
      for (int head = 0; head < layer.kv_heads; head += most_kv_heads)
        items.push_back({table, starts[s], lengths[s] - 1, 1, head, std::min(most_kv_heads, layer.kv_heads - head),
                         head * group, group});
      continue;
    }
    for (int head = 0; head < layer.kv_heads; ++head)
      for (int h = 0; h < group; h += item_heads)
        for (int q = 0; q < count; q += item_queries)
          items.push_back({table, starts[s] + q, lengths[s] - count + q, std::min(item_queries, count - q), head, 1,
                           head * group + h, std::min(item_heads, group - h)});
  }
  return items;
}

template <typename T>
void attend(const Layer<T>& layer, const std::vector<Item>& items) {
  const int64_t count = static_cast<int64_t>(items.size()), threads = at::get_num_threads();
  for_each_item(count, [&](int64_t i) {
    static thread_local Scratch<T> scratch;
    attend_item(layer, items[i], items[std::min(i + threads, count - 1)], scratch);
  });
}

}  // namespace

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
  by_dtype(query, [&]<typename T>(T*) {
    const Layer<T> layer{query.const_data_ptr<T>(), query.stride(0), query.stride(1), output.mutable_data_ptr<T>(),
                         keys.const_data_ptr<T>(), values.const_data_ptr<T>(), static_cast<int>(heads),
                         static_cast<int>(kv_heads), static_cast<int>(head_dim), variant};
    attend(layer, plan(layer, tables, kv_lengths, query_starts));
  });
  return output;
}

// key, value: [tokens, kv_heads, head_dim]; slots: [tokens], block * BLOCK + offset of each.
void write_kv(const at::Tensor& key, const at::Tensor& value, at::Tensor& keys, at::Tensor& values,
              const at::Tensor& slots) {
  TORCH_CHECK(key.stride(2) == 1 && value.stride(2) == 1 && key.scalar_type() == keys.scalar_type());
  const int64_t head_dim = key.size(2);
  by_dtype(keys, [&]<typename T>(T*) {
    write_blocks<T>(slots, key, value, keys, values,
                    [&](int64_t, int64_t, const T* from, T* to) { std::copy_n(from, head_dim, to); });
  });
}

}  // namespace oatmill

TORCH_LIBRARY_FRAGMENT(oatmill, library) {
  library.def(
      "paged_attention(Tensor query, Tensor keys, Tensor values, Tensor tables, Tensor kv_lengths, "
      "Tensor query_starts, float scaling, int window, float softcap, Tensor? alibi_slopes, bool rounded_alibi) "
      "-> Tensor");
  library.def("write_kv(Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values, Tensor slots) -> ()");
}

TORCH_LIBRARY_IMPL(oatmill, CPU, library) {
  library.impl("paged_attention", &oatmill::paged_attention);
  library.impl("write_kv", &oatmill::write_kv);
}
