// Where a token's key and value stand in a block of the KV cache.
//
// A block of a layer's cache holds BLOCK tokens of each KV head: keys as [head_dim][BLOCK], values as
// [BLOCK][head_dim]. With keys stored that way both products of attention are the same small one, rows times a tile
// whose columns lie side by side in memory: vector registers run along the columns and nothing is ever summed across
// a register. Where the processor multiplies and adds pairs, what is summed stands in pairs: keys as
// [head_dim / 2][BLOCK][2], values as [BLOCK / 2][head_dim][2].

#pragma once

#include <algorithm>
#include <cstdint>

#include "bf16.h"
#include "parallel.h"

namespace oatmill {

constexpr int BLOCK = 32;                // tokens of a KV block
constexpr int64_t WRITTEN_TOGETHER = 8;  // tokens

template <typename T>
constexpr int64_t key_place(int64_t dimension, int64_t token) {
  return (dimension / PAIR<T> * BLOCK + token) * PAIR<T> + dimension % PAIR<T>;
}

template <typename T>
constexpr int64_t value_place(int64_t token, int64_t dimension, int64_t head_dim) {
  return (token / PAIR<T> * head_dim + dimension) * PAIR<T> + token % PAIR<T>;
}

// Writes the value of one head of a token. value: [head_dim]; block: the head's part of the block. The other token of
// a pair becomes zero when the first is written: a weight of zero times what another request left there may be NaN.
// other_follows: that one is being written too.
template <typename T>
void write_value(const T* value, T* block, int64_t token, int64_t head_dim, bool other_follows) {
  T* to = block + value_place<T>(token, 0, head_dim);
  const bool clear = PAIR<T> == 2 && token % 2 == 0 && !other_follows;
  for (int64_t d = 0; d < head_dim; ++d) {
    to[d * PAIR<T>] = value[d];
    if (clear) to[d * PAIR<T> + 1] = T(0.0f);
  }
}

// Calls write(token, head, place, offset) for each KV head of each token: place: where the head's part of its block
// begins, offset: which of the block's tokens it is. slots: [tokens].
template <typename Write>
void for_each_kv(const int64_t* slots, int64_t tokens, int64_t kv_heads, int64_t head_dim, const Write& write) {
  for_each_item(parts(tokens, WRITTEN_TOGETHER) * kv_heads, [&](int64_t item) {
    const int64_t head = item % kv_heads, first = item / kv_heads * WRITTEN_TOGETHER;
    for (int64_t t = first; t < std::min(tokens, first + WRITTEN_TOGETHER); ++t)
      write(t, head, (slots[t] / BLOCK * kv_heads + head) * head_dim * BLOCK, slots[t] % BLOCK);
  });
}

}  // namespace oatmill
