// What attention over prompts and attention of replies have in common: a layer's tensors, and the work on them.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <span>

#include "attention/kv_layout.h"

namespace oatmill {

struct Variant {
  float scaling;
  int64_t window;  // 0: all
  int64_t chunk;   // tokens of a chunk, of which tokens look at those of their own alone; 0: no chunks
  float softcap;   // 0: off
  const float* alibi_slopes;
  bool rounded_alibi;
  const float* sinks;   // of each head a score that belongs to no token, or none
  float score_scaling;  // of products with keys as they are read: the cache's scale is in it
  float value_scale;    // of sums of values as they are read

  // Returns true if scores need no more than scaling, where nothing is masked.
  bool plain() const { return softcap == 0 && !alibi_slopes; }

  // Returns the first token that the query at a position looks at.
  int64_t first_token(int64_t position) const {
    if (chunk) return position / chunk * chunk;
    return window ? std::max<int64_t>(0, position - window + 1) : 0;
  }
};

template <typename T>
struct AttentionLayer {
  const T* query;  // [tokens, heads, head_dim] with these strides
  int64_t query_token_stride, query_head_stride;
  T* output;  // [tokens, heads, head_dim]
  const void* keys;
  const void* values;
  at::ScalarType key_dtype, value_dtype;  // of the cache: T's, or one of 8 bits
  int heads, kv_heads, head_dim;
  Variant variant;

  int group() const { return heads / kv_heads; }
  int64_t head_elements() const { return int64_t(head_dim) * BLOCK; }

  // Returns where a KV head's part of a block begins, among the keys and among the values.
  int64_t place(int32_t block, int kv_head) const { return (int64_t(block) * kv_heads + kv_head) * head_elements(); }

  template <typename C>
  const C* keys_at(int64_t place) const {
    return static_cast<const C*>(keys) + place;
  }
  template <typename C>
  const C* values_at(int64_t place) const {
    return static_cast<const C*>(values) + place;
  }

  const T* query_of(int64_t token, int head) const {
    return query + token * query_token_stride + head * query_head_stride;
  }
  T* output_of(int64_t token, int head) const { return output + (token * heads + head) * head_dim; }
};

// Some queries of one sequence with KV heads and query heads that share them. With several queries that is one KV head
// and the query heads that share it, or as many as an item has rows for; with one query it is several KV heads, which
// stand side by side in memory. Rows are KV heads, queries, query heads, the last ones fastest.
struct AttentionItem {
  const int32_t* table;
  int64_t first_token;     // of the item's queries, among the pass's tokens
  int64_t first_position;  // of the item's first query, in its sequence
  int queries;
  int kv_head, kv_heads;          // the first one, how many
  int first_head, heads;          // the first query head, how many for each KV head
  const int32_t* ends = nullptr;  // of each query: the tokens of its sequence that it may look at; null: up to its own

  int rows() const { return kv_heads * queries * heads; }
  int rows_a_kv_head() const { return queries * heads; }
  int query(int row) const { return row % rows_a_kv_head() / heads; }
  int head(int row) const { return first_head + row / rows_a_kv_head() * heads + row % heads; }
  int64_t token(int row) const { return first_token + query(row); }
  int64_t position(int row) const { return first_position + query(row); }
  // Returns the position behind the last one that a row looks at. No row before it looks further.
  int64_t end(int row) const { return ends ? ends[query(row)] : position(row) + 1; }
  int64_t end() const { return ends ? ends[queries - 1] : first_position + queries; }
};

// Rows of an item of few queries. More are an item of a prompt, of so many rows at most.
constexpr int DECODE_ROWS = 24, PREFILL_ROWS = 96;

// Computes an item. next: the item that this thread will probably do next.
template <typename T>
using Attend = void (*)(const AttentionLayer<T>& layer, const AttentionItem& item, const AttentionItem& next);

template <typename T>
void attend_decode(const AttentionLayer<T>& layer, const AttentionItem& item, const AttentionItem& next);

// A way to compute attention. What prompts and replies give of a query is the same to the last bit.
template <typename T>
struct AttentionKernel {
  bool (*available)();  // on this CPU
  int head_dim;         // of which a head's must be a multiple
  int kv_heads;         // the most of a reply's item
  Attend<T> prompts, replies;
};

// The best of a CPU comes first.
template <typename T>
std::span<const AttentionKernel<T>> attention_kernels();
template <>
std::span<const AttentionKernel<float>> attention_kernels();
template <>
std::span<const AttentionKernel<c10::BFloat16>> attention_kernels();
template <>
std::span<const AttentionKernel<c10::Half>> attention_kernels();

}  // namespace oatmill
