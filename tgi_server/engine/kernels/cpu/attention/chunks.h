// Attention of an item's rows, chunk by chunk: a chunk is a few neighbouring blocks of a sequence, of one KV head.
//
// Chunks begin at multiples of CHUNK, whatever item looks at them, and a row adds up what it looks at in the order of
// the positions, with nothing that depends on other rows. So its result is the same to the last bit in a prompt, in a
// part of one, among drafted tokens and alone, as a reply.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <type_traits>

#include "attention/attention.h"
#include "attention/microkernel.h"
#include "attention/online_softmax.h"
#include "gemm/loop.h"
#include "simd/dtypes.h"
#include "simd/simd16.h"

namespace oatmill {

constexpr int CHUNK_BLOCKS = 4, CHUNK = CHUNK_BLOCKS * BLOCK;

// Blocks of KV cache, of one KV head, from the token `start` on.
template <typename K, typename V>
struct Chunk {
  const K* keys[CHUNK_BLOCKS];
  const V* values[CHUNK_BLOCKS];
  int64_t start;
  int tokens;

  int blocks() const { return static_cast<int>(ceil_div(tokens, BLOCK)); }
};

// The part of a chunk at `start` that an item looks at, of its KV head h.
template <typename K, typename V, typename T>
Chunk<K, V> chunk_at(const AttentionLayer<T>& layer, const AttentionItem& item, int64_t start, int h) {
  const int64_t end = std::min(start / CHUNK * CHUNK + CHUNK, item.end());
  Chunk<K, V> chunk{{}, {}, start, static_cast<int>(end - start)};
  for (int b = 0; b < chunk.blocks(); ++b) {
    const int64_t place = layer.place(item.table[start / BLOCK + b], item.kv_head + h);
    chunk.keys[b] = layer.template keys_at<K>(place);
    chunk.values[b] = layer.template values_at<V>(place);
  }
  return chunk;
}

// Some rows of an item, of which the last one looks at so many tokens of a chunk.
struct Rows {
  int first, count, tokens;
};

// An item's rows of its KV head h, `most` at a time, without those that look at nothing in a chunk.
struct RowBlocks {
  std::array<Rows, PREFILL_ROWS> blocks;
  int count = 0;

  RowBlocks(const AttentionItem& item, int h, int most, int64_t start, int tokens) {
    const int end = (h + 1) * item.rows_a_kv_head();
    for (int first = h * item.rows_a_kv_head(); first < end; first += most) {
      const int rows = std::min(most, end - first);
      const int64_t seen = item.end(first + rows - 1) - start;
      if (seen > 0) blocks[count++] = {first, rows, static_cast<int>(std::min<int64_t>(seen, tokens))};
    }
  }
  const Rows* begin() const { return blocks.data(); }
  const Rows* end() const { return blocks.data() + count; }
};

// The blocks of a chunk as keys and values of these types, to which the cache's are turned if they are others.
template <typename Keys, typename Values = Keys>
struct Tile {
  const Keys* keys[CHUNK_BLOCKS];
  const Values* values[CHUNK_BLOCKS];

  template <typename K, typename V>
  void load(const Chunk<K, V>& chunk, int head_dim) {
    for (int b = 0; b < chunk.blocks(); ++b) {
      if constexpr (std::is_same_v<K, Keys>) {
        keys[b] = chunk.keys[b];
      } else {
        keys[b] = converted(chunk.keys[b], head_dim, BLOCK, room<Keys, 0>()[b]);
      }
      if constexpr (std::is_same_v<V, Values>) {
        values[b] = chunk.values[b];
      } else {
        constexpr int64_t TOGETHER = std::max(PAIR<V>, PAIR<Values>);
        const int64_t tokens = ceil_div(std::min(BLOCK, chunk.tokens - b * BLOCK), TOGETHER) * TOGETHER;
        values[b] = converted(chunk.values[b], tokens, head_dim, room<Values, 1>()[b]);
      }
    }
  }

 private:
  // A thread's, for keys (0) or values (1).
  template <typename To>
  using Room = To[CHUNK_BLOCKS][BLOCK * MAX_HEAD_DIM];
  template <typename To, int KIND>
  static Room<To>& room() {
    alignas(64) static thread_local Room<To> room;
    return room;
  }
};

// scores[r][j] = sum over d of query[r][d] * keys[d][j], for the columns of one block that rows look at. prefetched:
// the keys of a block that is needed soon, or null.
template <typename Dot, int R, int V, typename Number>
void score_rows(const char* query, const Number* keys, const Number* prefetched, int head_dim, int columns,
                float* scores) {
  const int64_t row_bytes = int64_t(head_dim) * sizeof(typename Dot::Operand);
  for (int j = 0; j < columns; j += V * WIDTH) {
    typename Dot::Accumulator sums[R][V];
    make_zero(sums);
    const TileProduct product{query, row_bytes, reinterpret_cast<const char*>(keys + j * PAIR<Number>),
                              BLOCK * PAIR<Number> * sizeof(Number), head_dim / PAIR<Number>};
    add_products<Dot, R, V>(product,
                            prefetched ? reinterpret_cast<const char*>(prefetched + j * PAIR<Number>) : nullptr, sums);
    store_block(reinterpret_cast<char*>(scores + j), CHUNK * sizeof(float), sums);
  }
}

// output[r][d] = output[r][d] * decays[r] + sum over j of weights[r][j] * values[j][d], for V registers of columns from
// `first` on. prefetched: the values of blocks that are needed soon; null: of none.
template <typename Dot, int R, int V, typename Number>
void value_rows(const char* weights, const float* decays, const Number* const* values, const Number* const* prefetched,
                int64_t first, int tokens, int head_dim, float* output) {
  typename Dot::Accumulator sums[R][V];
  load_decayed(output + first, head_dim, decays, sums);
  for (int j = 0; j < tokens; j += BLOCK) {
    const Number* later = prefetched ? prefetched[j / BLOCK] : nullptr;
    const TileProduct product{weights + j * sizeof(typename Dot::Operand), CHUNK * sizeof(typename Dot::Operand),
                              reinterpret_cast<const char*>(values[j / BLOCK] + first * PAIR<Number>),
                              int64_t(head_dim) * PAIR<Number> * static_cast<int64_t>(sizeof(Number)),
                              static_cast<int>(ceil_div(std::min(BLOCK, tokens - j), PAIR<Number>))};
    add_products<Dot, R, V>(product, later ? reinterpret_cast<const char*>(later + first * PAIR<Number>) : nullptr,
                            sums);
  }
  store_block(reinterpret_cast<char*>(output + first), head_dim * sizeof(float), sums);
}

template <typename Operand, int ROWS>
struct Scratch {
  alignas(64) Operand query[ROWS * MAX_HEAD_DIM];
  alignas(64) Operand weights[ROWS * CHUNK];
  alignas(64) float output[ROWS * MAX_HEAD_DIM];
  alignas(64) float scores[ROWS * CHUNK];
  Softmax<ROWS> softmax;
};

// Returns where the first chunk begins that an item looks at.
template <typename T>
int64_t first_start(const AttentionLayer<T>& layer, const AttentionItem& item) {
  return layer.variant.first_token(item.first_position) / BLOCK * BLOCK;
}

// Makes room ready for an item's rows: their queries, and sums of nothing.
template <typename T, typename Scratch>
void begin_item(const AttentionLayer<T>& layer, const AttentionItem& item, Scratch& scratch) {
  scratch.softmax.begin(layer.variant, item);
  std::fill_n(scratch.output, item.rows() * layer.head_dim, 0.0f);
  for (int r = 0; r < item.rows(); ++r)
    std::copy_n(layer.query_of(item.token(r), item.head(r)), layer.head_dim, scratch.query + r * layer.head_dim);
}

// Writes the outputs of an item's rows.
template <typename T, typename Scratch>
void finish_item(const AttentionLayer<T>& layer, const AttentionItem& item, const Scratch& scratch) {
  const int head_dim = layer.head_dim;
  for (int r = 0; r < item.rows(); ++r) {
    T* to = layer.output_of(item.token(r), item.head(r));
    const float scale = layer.variant.value_scale / scratch.softmax.total(r);
    for (int d = 0; d < head_dim; d += LANES) store(to + d, load(scratch.output + r * head_dim + d) * scale);
  }
}

// Returns the rows' weights.
template <typename T, typename Operand, int ROWS>
const Operand* weigh(const AttentionLayer<T>& layer, const AttentionItem& item, const RowBlocks& blocks, int64_t start,
                     Scratch<Operand, ROWS>& scratch) {
  const Operand* weights = nullptr;
  for (const Rows& rows : blocks) {
    for (int r = rows.first; r < rows.first + rows.count; ++r) {
      float* scores = scratch.scores + r * CHUNK;
      const int64_t end = item.end(r);
      const int seen = static_cast<int>(std::clamp<int64_t>(end - start, 1, rows.tokens));
      const int columns = static_cast<int>(ceil_div(seen, LANES)) * LANES;
      weigh_row<NaturalPower>(layer.variant, item.head(r), item.position(r), end, start, columns, rows.tokens, r,
                              scratch.softmax, scores, [&](int c, F32 weights) { store_as(scores + c, weights); });
      std::fill(scores + columns, scores + CHUNK, 0.0f);
    }
    weights = as_operands(scratch.scores, rows.first * CHUNK, rows.count * CHUNK, scratch.weights);
  }
  return weights;
}

// Computes an item of at most ROWS rows of a cache of keys K and values V. next: the item that this thread will
// probably do next. Tiles: what multiplies, with
//   Operand, what rows are made of; ROWS, the most of them that are multiplied together;
//   load(chunk, later, head_dim), which takes the chunk that the other two methods read; later is needed soon;
//   score(blocks, query, head_dim, scores) and add_values(blocks, weights, decays, head_dim, output), as score_rows and
//   value_rows for all blocks of rows.
template <typename Tiles, int ROWS, typename K, typename V, typename T>
void attend_chunks(const AttentionLayer<T>& layer, const AttentionItem& item, const AttentionItem& next) {
  static thread_local Scratch<typename Tiles::Operand, ROWS> scratch;
  Tiles tiles;
  const int head_dim = layer.head_dim;
  begin_item(layer, item, scratch);
  for (int64_t start = first_start(layer, item), end; start < item.end(); start = end) {
    end = start / CHUNK * CHUNK + CHUNK;
    Chunk<K, V> chunk = chunk_at<K, V>(layer, item, start, 0);
    for (int h = 0; h < item.kv_heads; ++h) {
      const Chunk<K, V> later = h + 1 < item.kv_heads ? chunk_at<K, V>(layer, item, start, h + 1)
                                : end < item.end()    ? chunk_at<K, V>(layer, item, end, 0)
                                                      : chunk_at<K, V>(layer, next, first_start(layer, next), 0);
      const RowBlocks blocks(item, h, Tiles::ROWS, start, chunk.tokens);
      tiles.load(chunk, later, head_dim);
      tiles.score(blocks, scratch.query, head_dim, scratch.scores);
      const auto* weights = weigh(layer, item, blocks, start, scratch);
      tiles.add_values(blocks, weights, scratch.softmax.decays, head_dim, scratch.output);
      chunk = later;
    }
  }
  finish_item(layer, item, scratch);
}

}  // namespace oatmill
