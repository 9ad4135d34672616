// Where a token's key and value stand in a block of the KV cache.
//
// A block of a layer's cache holds BLOCK tokens of each KV head: keys as [head_dim][BLOCK], values as
// [BLOCK][head_dim]. With keys stored that way both products of attention are the same small one, rows times a tile
// whose columns lie side by side in memory: vector registers run along the columns and nothing is ever summed across
// a register. Of bfloat16 numbers, what is summed stands in pairs, which is what processors multiply and what is easily
// turned into floats: keys as [head_dim / 2][BLOCK][2], values as [BLOCK / 2][head_dim][2].
//
// In all of this T is what the model computes with, and C the type of the cache's numbers, which may be one of 8 bits:
// K that of its keys and V that of its values.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/BFloat16.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "simd/fp8.h"
#include "runtime/thread_pool.h"

namespace oatmill {

constexpr int BLOCK = 32;  // tokens of a KV block
constexpr int MAX_HEAD_DIM = 576;
constexpr int64_t WRITTEN_TOGETHER = 16;  // tokens
constexpr int64_t WANTED_EARLIER = 4;     // tokens

// Numbers that are summed and stand side by side.
template <typename T>
constexpr int PAIR = std::is_same_v<T, c10::BFloat16> ? 2 : 1;

template <typename T>
constexpr int64_t key_place(int64_t dimension, int64_t token) {
  return (dimension / PAIR<T> * BLOCK + token) * PAIR<T> + dimension % PAIR<T>;
}

template <typename T>
constexpr int64_t value_place(int64_t token, int64_t dimension, int64_t head_dim) {
  return (token / PAIR<T> * head_dim + dimension) * PAIR<T> + token % PAIR<T>;
}

// What cached numbers are multiplied by to give a layer's keys and values: those of 8 bits are, the others have ones.
struct CacheScales {
  float keys = 1, values = 1;
};

// Asks for a token's key and value, and for their places in a block, which are about to be written.
template <typename T, typename K, typename V>
void want_token(const T* key, const T* value, const K* keys, const V* values, int64_t token, int64_t head_dim) {
  constexpr int64_t LINE = 64;
  for (int64_t d = 0; d < head_dim; d += LINE / sizeof(T)) {
    __builtin_prefetch(key + d);
    __builtin_prefetch(value + d);
  }
  for (int64_t d = 0; d < head_dim; d += PAIR<K>) __builtin_prefetch(keys + key_place<K>(d, token), 1);
  const V* pair = values + value_place<V>(token - token % PAIR<V>, 0, head_dim);
  for (int64_t d = 0; d < head_dim * PAIR<V>; d += LINE / sizeof(V)) __builtin_prefetch(pair + d, 1);
}

// Returns numbers as the cache has them: themselves, or, written to `room`, their codes.
template <typename C, typename T>
const C* cached(const T* numbers, int64_t count, float scale, C* room) {
  if constexpr (std::is_same_v<C, T>) {
    return numbers;
  } else {
    encode(numbers, count, scale, room);
    return room;
  }
}

// Writes the values of one head of tokens `begin` to `end`. follows(t): whether token t stands right behind the one
// before it, in this call or in another thread's; apart(t): whether the second of its pair is written in this call, but
// not right behind it; at(t): where its value is written; from(t): its value.
//
// Values of a pair are written together. The second one becomes zero when it is still to come: a weight of zero times
// what another request left there may be NaN.
template <typename C, typename Follows, typename Apart, typename At, typename From>
void write_values(const int64_t* slot, int64_t begin, int64_t end, int64_t head_dim, const Follows& follows,
                  const Apart& apart, const At& at, const From& from) {
  for (int64_t t = begin; t < end; ++t) {
    const C* value = from(t);
    C* to = at(t);
    if constexpr (PAIR<C> == 1) {
      std::copy_n(value, head_dim, to);
      continue;
    } else {
      const bool second = slot[t] % 2 == 1, pair_continues = follows(t + 1);
      if (second && t > begin && follows(t)) continue;
      if (second || (pair_continues ? t + 1 == end : apart(t))) {
        for (int64_t d = 0; d < head_dim; ++d) to[d * 2] = value[d];
        continue;
      }
      const C* next = pair_continues ? from(t + 1) : nullptr;
      for (int64_t d = 0; d < head_dim; ++d) {
        to[d * 2] = value[d];
        to[d * 2 + 1] = next ? next[d] : C(0.0f);
      }
    }
  }
}

// Writes tokens into their blocks. finish_key(token, head, from, to): writes what is to be kept of a key, [head_dim].
//
// slots: [tokens], block * BLOCK + offset of each. key, value: [tokens, kv_heads, head_dim].
template <typename T, typename K, typename V, typename FinishKey>
void write_blocks(const at::Tensor& slots, const at::Tensor& key, const at::Tensor& value, at::Tensor& keys,
                  at::Tensor& values, CacheScales scales, const FinishKey& finish_key) {
  const int64_t tokens = slots.size(0), kv_heads = value.size(1), head_dim = value.size(2);
  TORCH_CHECK(head_dim <= MAX_HEAD_DIM, "heads of at most ", MAX_HEAD_DIM, " elements");
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  const T* key_from = key.const_data_ptr<T>();
  const T* value_from = value.const_data_ptr<T>();
  K* key_cache = static_cast<K*>(keys.mutable_data_ptr());
  V* value_cache = static_cast<V*>(values.mutable_data_ptr());
  const auto key_of = [&](int64_t t, int64_t h) { return key_from + t * key.stride(0) + h * key.stride(1); };
  const auto value_of = [&](int64_t t, int64_t h) { return value_from + t * value.stride(0) + h * value.stride(1); };
  const auto block = [&](int64_t t, int64_t h) { return (slot[t] / BLOCK * kv_heads + h) * head_dim * BLOCK; };
  const auto prefetch = [&](int64_t t, int64_t h) {
    want_token(key_of(t, h), value_of(t, h), key_cache + block(t, h), value_cache + block(t, h), slot[t] % BLOCK,
               head_dim);
  };
  // Slots in the second place of a pair that do not follow the first one: such as those of drafted tokens, which stand
  // behind all others of a pass.
  std::vector<int64_t> seconds;
  if (PAIR<V> == 2)
    for (int64_t t = 0; t < tokens; ++t)
      if (slot[t] % 2 == 1 && (t == 0 || slot[t] != slot[t - 1] + 1)) seconds.push_back(slot[t]);
  std::sort(seconds.begin(), seconds.end());
  const int64_t items = ceil_div(tokens, WRITTEN_TOGETHER) * kv_heads;
  parallel_for(items, [&](int64_t item, int64_t next) {
    const int64_t head = item % kv_heads, begin = item / kv_heads * WRITTEN_TOGETHER;
    const int64_t end = std::min(tokens, begin + WRITTEN_TOGETHER), count = end - begin;
    alignas(64) T finished[WRITTEN_TOGETHER * MAX_HEAD_DIM];
    alignas(64) K codes[WRITTEN_TOGETHER * MAX_HEAD_DIM];
    alignas(64) V value_codes[MAX_HEAD_DIM];
    K* places[WRITTEN_TOGETHER];
    for (int64_t t = begin; t < end; ++t) {
      const int64_t later = t + WANTED_EARLIER, of_next = next / kv_heads * WRITTEN_TOGETHER + later - end;
      later < end ? prefetch(later, head) : prefetch(std::clamp<int64_t>(of_next, 0, tokens - 1), next % kv_heads);
      finish_key(t, head, key_of(t, head), finished + (t - begin) * head_dim);
      places[t - begin] = key_cache + block(t, head) + key_place<K>(0, slot[t] % BLOCK);
    }
    const K* kept = cached(finished, count * head_dim, scales.keys, codes);
    // Token by token, a store to one dimension would look like one to the address from which a later one is read.
    for (int64_t d = 0, size = head_dim; d < size; d += PAIR<K>)
      for (int64_t i = 0; i < count; ++i)
        std::memcpy(places[i] + key_place<K>(d, 0), kept + i * size + d, PAIR<K> * sizeof(K));
    write_values<V>(
        slot, begin, end, head_dim, [&](int64_t t) { return t < tokens && slot[t] == slot[t - 1] + 1; },
        [&](int64_t t) { return std::binary_search(seconds.begin(), seconds.end(), slot[t] + 1); },
        [&](int64_t t) { return value_cache + block(t, head) + value_place<V>(slot[t] % BLOCK, 0, head_dim); },
        [&](int64_t t) { return cached(value_of(t, head), head_dim, scales.values, value_codes); });
  });
}

}  // namespace oatmill
