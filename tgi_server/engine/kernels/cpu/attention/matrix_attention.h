// Attention of prompts and replies by products of matrices, as AMX has them.
//
// ROWS rows at a time look at a chunk: their scores, which leave the matrices through memory, stay in L1 until they are
// weights, in the same place, and values have been multiplied by them.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "attention/attention.h"
#include "attention/chunks.h"
#include "attention/online_softmax.h"
#include "gemm/amx.h"

namespace oatmill {

// Tiles: see gemm/amx.h. K, V: of the cache's keys and values. Matrices have SIDE rows, SIDE words and SIDE columns;
// the sums of two by two of them stay in registers.
template <typename Tiles, typename K, typename V>
class MatrixAttention {
 public:
  using Operand = c10::BFloat16;
  static constexpr int ROWS = 2 * SIDE;
  static_assert(BLOCK == 2 * SIDE && PREFILL_ROWS % ROWS == 0);

  // item: of one KV head. next: the item that this thread will probably do next.
  MatrixAttention(const AttentionLayer<Operand>& layer, const AttentionItem& item, const AttentionItem& next)
      : layer_(layer), item_(item), next_(next), head_dim_(layer.head_dim), room_(thread_room()) {}

  void run() {
    begin_item(layer_, item_, room_);
    for (int64_t start = first_start(layer_, item_), end; start < item_.end(); start = end) {
      end = start / CHUNK * CHUNK + CHUNK;
      const auto chunk = chunk_at<K, V>(layer_, item_, start, 0);
      later_ = end < item_.end() ? chunk_at<K, V>(layer_, item_, end, 0)
                                 : chunk_at<K, V>(layer_, next_, first_start(layer_, next_), 0);
      prefetched_blocks_ = prefetched_ = 0;
      load(chunk);
      for (const Rows& rows : RowBlocks(item_, 0, ROWS, start, chunk.tokens)) {
        score(rows);
        weigh(rows, start);
        add_values(rows);
      }
    }
    finish_item(layer_, item_, room_);
  }

 private:
  static constexpr int ROWS_AWAKE = 8;

  struct Room {
    alignas(64) Operand query[PREFILL_ROWS * MAX_HEAD_DIM];
    alignas(64) float output[PREFILL_ROWS * MAX_HEAD_DIM];
    alignas(64) float scores[ROWS * CHUNK];
    alignas(64) Operand values[BLOCK * MAX_HEAD_DIM];
    alignas(64) char unused[SIDE * SIDE_BYTES];
    Softmax<PREFILL_ROWS> softmax;
  };
  static Room& thread_room() {
    static thread_local Room room;
    return room;
  }

  void score(const Rows& rows) {
    const Operand* query = room_.query + rows.first * head_dim_;
    for (int j = 0; j < rows.tokens; j += BLOCK)
      for_groups(rows, [&]<int GROUPS>() {
        for_sums<GROUPS>([&]<int I>() { matrices_.template zero<I>(); });
        for (int d = 0; d < head_dim_; d += 2 * SIDE) {
          multiply<GROUPS>(query + d, head_dim_, tile_.keys[j / BLOCK] + d * BLOCK, BLOCK);
          prefetch_some();
        }
        for_sums<GROUPS>(
            [&]<int I>() { matrices_.template store<I>(place<I>(room_.scores + j, CHUNK), CHUNK * sizeof(float)); });
      });
  }

  // Turns the scores of rows into weights, which are narrower than what has been read of a row.
  void weigh(const Rows& rows, int64_t start) {
    for (int row = 0; row < rows.count; ++row) {
      const int r = rows.first + row, query = r / item_.heads;
      const int64_t position = item_.first_position + query, end = item_.ends ? item_.ends[query] : position + 1;
      const int seen = static_cast<int>(std::clamp<int64_t>(end - start, 1, rows.tokens));
      const int columns = static_cast<int>(ceil_div(seen, LANES)) * LANES;
      float* scores = room_.scores + row * CHUNK;
      Operand* weights = reinterpret_cast<Operand*>(scores);
      weigh_row<PowerOfTwo>(layer_.variant, item_.first_head + r - query * item_.heads, position, end, start, columns,
                            rows.tokens, r, room_.softmax, scores,
                            [&](int c, F32 numbers) { store(weights + c, numbers); });
      std::fill(weights + columns, weights + ceil_div(rows.tokens, BLOCK) * BLOCK, Operand(0.0f));
      decay(r);
      if (row % ROWS_AWAKE == ROWS_AWAKE - 1) matrices_.template store<7>(room_.unused, SIDE_BYTES);  // see amx.h
    }
  }

  // Multiplies what a row has summed of values so far.
  void decay(int row) {
    const float factor = room_.softmax.decays[row];
    float* sums = room_.output + row * head_dim_;
    for (int d = 0; factor != 1 && d < head_dim_; d += LANES) store(sums + d, oatmill::load(sums + d) * factor);
  }

  void add_values(const Rows& rows) {
    const Operand* weights = reinterpret_cast<const Operand*>(room_.scores);
    for (int d = 0; d < head_dim_; d += 2 * SIDE) {
      float* sums = room_.output + rows.first * head_dim_ + d;
      for_groups(rows, [&]<int GROUPS>() {
        for_sums<GROUPS>(
            [&]<int I>() { matrices_.template load<I>(place<I>(sums, head_dim_), head_dim_ * sizeof(float)); });
        for (int j = 0; j < rows.tokens; j += BLOCK) {
          multiply<GROUPS>(weights + j, 2 * CHUNK, tile_.values[j / BLOCK] + 2 * d, head_dim_);
          prefetch_some();
        }
        for_sums<GROUPS>(
            [&]<int I>() { matrices_.template store<I>(place<I>(sums, head_dim_), head_dim_ * sizeof(float)); });
      });
    }
  }

  // A block is multiplied as a whole. Weights of tokens that nobody looks at are zero, but what stands there may be no
  // number.
  void load(const Chunk<K, V>& chunk) {
    tile_.load(chunk, head_dim_);
    const int last = chunk.tokens / BLOCK;
    const int numbers = static_cast<int>(ceil_div(chunk.tokens % BLOCK, 2)) * 2 * head_dim_;
    if (numbers == 0) return;
    std::copy_n(tile_.values[last], numbers, room_.values);
    std::fill(room_.values + numbers, room_.values + BLOCK * head_dim_, Operand(0.0f));
    tile_.values[last] = room_.values;
  }

  // Prefetches what is needed later, a part with each step of the products. Of few rows that is what the next chunk
  // reads, as much as a step has read. Of many rows the chunks of a KV head stay in L2, but their queries and outputs
  // are far away.
  void prefetch_some() {
    if (item_.rows() <= ROWS) prefetch_chunk();
    else if (prefetched_rows_ < PREFILL_ROWS) prefetch_row(prefetched_rows_++);
  }

  void prefetch_chunk() {
    constexpr int STEP = BLOCK * SIDE;  // numbers of the keys, and of the values
    if (prefetched_blocks_ >= later_.blocks()) return;
    prefetch<0>(later_.keys[prefetched_blocks_] + prefetched_, STEP);
    prefetch<0>(later_.values[prefetched_blocks_] + prefetched_, STEP);
    prefetched_ += STEP;
    if (prefetched_ == head_dim_ * BLOCK) prefetched_ = 0, ++prefetched_blocks_;
  }

  void prefetch_row(int r) {
    if (r < item_.rows()) prefetch<1>(layer_.output_of(item_.token(r), item_.head(r)), head_dim_);
    if (r < next_.rows()) prefetch<0>(layer_.query_of(next_.token(r), next_.head(r)), head_dim_);
  }

  template <int WRITES, typename Number>
  static void prefetch(const Number* numbers, int count) {
    for (int i = 0; i < count; i += LINE / sizeof(Number)) __builtin_prefetch(numbers + i, WRITES, 2);
  }

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

  const AttentionLayer<Operand>& layer_;
  const AttentionItem &item_, &next_;
  const int head_dim_;
  Room& room_;
  Tiles matrices_;
  Tile<Operand> tile_;
  Chunk<K, V> later_{};
  int prefetched_blocks_ = 0, prefetched_ = 0;  // whole blocks of it, and numbers of another one
  int prefetched_rows_ = 0;
};

}  // namespace oatmill
