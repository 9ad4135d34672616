// Attention over the paged KV cache on a CPU (kv_layout.h says how it is stored), and writing into it. Caches may be
// float, bfloat16, float16 or, whatever queries are, FP8, the values or both; sums are in float.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "attention/attention.h"
#include "simd/dtypes.h"
#include "attention/kv_layout.h"
#include "simd/simd16.h"
#include "ops/ops.h"
#include "runtime/thread_pool.h"

namespace oatmill {

namespace {

struct Plan {
  std::vector<AttentionItem> prompts, replies;
};

// The rows of a prompt's item: as many as there may be, where all threads have several items nevertheless.
int prompt_rows(int64_t all) {
  constexpr int ITEMS_A_THREAD = 4;
  return all < int64_t(ITEMS_A_THREAD) * PREFILL_ROWS * loop_threads() ? PREFILL_ROWS / 2 : PREFILL_ROWS;
}

template <typename T>
void plan_prompt(const AttentionLayer<T>& layer, const int32_t* table, const int32_t* ends, int first, int count,
                 int length, int rows, std::vector<AttentionItem>& items) {
  const int group = layer.group(), item_heads = std::min(group, rows), item_queries = rows / item_heads;
  for (int head = 0; head < layer.kv_heads; ++head)
    for (int h = 0; h < group; h += item_heads)
      for (int q = 0; q < count; q += item_queries)
        items.push_back({table, first + q, length - count + q, std::min(item_queries, count - q), head, 1,
                         head * group + h, std::min(item_heads, group - h), ends ? ends + first + q : nullptr});
}

// The KV heads of a reply's item, at most so many, in a pass of so many sequences: several, which lie side by side in
// memory, as long as there are items for all threads.
int heads_together(int kv_heads, int item_heads, int64_t sequences, int most) {
  const int for_threads = static_cast<int>(kv_heads * sequences / loop_threads());
  return std::clamp(for_threads, 1, std::max(1, std::min({DECODE_ROWS / item_heads, (kv_heads + 1) / 2, most})));
}

// Of one query, or of so few that their rows of a KV head are no more than DECODE_ROWS. sequences: of the pass.
// kv_heads: the most of an item.
template <typename T>
void plan_reply(const AttentionLayer<T>& layer, const int32_t* table, const int32_t* ends, int first, int count,
                int length, int64_t sequences, int kv_heads, std::vector<AttentionItem>& items) {
  const int group = layer.group(), item_heads = std::min(group, DECODE_ROWS);
  const int together = count > 1 ? 1 : heads_together(layer.kv_heads, item_heads, sequences, kv_heads);
  for (int head = 0; head < layer.kv_heads; head += together)
    for (int h = 0; h < group; h += item_heads)
      items.push_back({table, first, length - count, count, head, std::min(together, layer.kv_heads - head),
                       head * group + h, std::min(item_heads, group - h), ends ? ends + first : nullptr});
}

template <typename T>
Plan plan(const AttentionLayer<T>& layer, const at::Tensor& tables, const at::Tensor& kv_lengths,
          const at::Tensor& query_starts, const std::optional<at::Tensor>& seen, int kv_heads) {
  Plan plan;
  const int32_t* lengths = kv_lengths.const_data_ptr<int32_t>();
  const int32_t* starts = query_starts.const_data_ptr<int32_t>();
  const int32_t* ends = seen ? seen->const_data_ptr<int32_t>() : nullptr;
  const int rows = prompt_rows(int64_t(starts[kv_lengths.size(0)]) * layer.heads);
  for (int64_t s = 0; s < kv_lengths.size(0); ++s) {
    const int count = starts[s + 1] - starts[s];
    const int32_t* table = tables.const_data_ptr<int32_t>() + s * tables.stride(0);
    if (count == 1 || count * layer.group() <= DECODE_ROWS)
      plan_reply(layer, table, ends, starts[s], count, lengths[s], kv_lengths.size(0), kv_heads, plan.replies);
    else plan_prompt(layer, table, ends, starts[s], count, lengths[s], rows, plan.prompts);
  }
  return plan;
}

template <typename T>
void attend(const AttentionLayer<T>& layer, const Plan& plan, const AttentionKernel<T>& kernel) {
  const int64_t prompts = static_cast<int64_t>(plan.prompts.size()),
                replies = static_cast<int64_t>(plan.replies.size());
  parallel_for(prompts + replies, [&](int64_t i, int64_t next) {
    const auto item = [&](int64_t at) -> const AttentionItem& {
      return at < prompts ? plan.prompts[at] : plan.replies[at - prompts];
    };
    (i < prompts ? kernel.prompts : kernel.replies)(layer, item(i), item(next));
  });
}

// Returns the best kernel that this CPU has, and that takes heads of this size.
template <typename T>
const AttentionKernel<T>& kernel_for(int64_t head_dim) {
  const auto kernels = attention_kernels<T>();
  return *std::find_if(kernels.begin(), kernels.end(), [&](const AttentionKernel<T>& kernel) {
    return kernel.available() && head_dim % kernel.head_dim == 0;
  });
}

}  // namespace

// alibi_slopes, sinks: [heads] float32, or none. key_scale, value_scale: of the cache. ends: [tokens] int32, the tokens
// of its sequence that each query may look at, in ascending order in a sequence; none: up to its own.
at::Tensor paged_attention(const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values,
                           const at::Tensor& tables, const at::Tensor& kv_lengths, const at::Tensor& query_starts,
                           double scaling, int64_t window, double softcap,
                           const std::optional<at::Tensor>& alibi_slopes, bool rounded_alibi,
                           const std::optional<at::Tensor>& sinks, double key_scale, double value_scale, int64_t chunk,
                           const std::optional<at::Tensor>& ends) {
  const int64_t heads = query.size(1), kv_heads = keys.size(1), head_dim = query.size(2);
  TORCH_CHECK(head_dim % LANES == 0 && head_dim <= MAX_HEAD_DIM, "head_dim must be a multiple of 16 up to ",
              MAX_HEAD_DIM);
  TORCH_CHECK(heads % kv_heads == 0, "each KV head must serve the same number of query heads");
  TORCH_CHECK(query.stride(2) == 1 && tables.stride(1) == 1);
  TORCH_CHECK(!ends || (ends->numel() == query.size(0) && ends->is_contiguous()), "each query has one end");
  TORCH_CHECK(!sinks || (sinks->numel() == heads && sinks->is_contiguous()), "each head has one sink");
  at::Tensor output = at::empty(query.sizes(), query.options());
  Variant variant{static_cast<float>(scaling),
                  window,
                  chunk,
                  static_cast<float>(softcap),
                  alibi_slopes ? alibi_slopes->const_data_ptr<float>() : nullptr,
                  rounded_alibi,
                  sinks ? sinks->const_data_ptr<float>() : nullptr,
                  static_cast<float>(scaling * key_scale),
                  static_cast<float>(value_scale)};
  by_dtype(query, [&]<typename T>(T*) {
    by_cache<T>(keys.scalar_type(), values.scalar_type(), [&]<typename K, typename V>(K*, V*) {
      if constexpr (Fp8<K>) variant.score_scaling *= K::UNIT;
      if constexpr (Fp8<V>) variant.value_scale *= V::UNIT;
    });
    const AttentionLayer<T> layer{query.const_data_ptr<T>(),
                                  query.stride(0),
                                  query.stride(1),
                                  output.mutable_data_ptr<T>(),
                                  keys.const_data_ptr(),
                                  values.const_data_ptr(),
                                  keys.scalar_type(),
                                  values.scalar_type(),
                                  static_cast<int>(heads),
                                  static_cast<int>(kv_heads),
                                  static_cast<int>(head_dim),
                                  variant};
    const AttentionKernel<T>& kernel = kernel_for<T>(head_dim);
    attend(layer, plan(layer, tables, kv_lengths, query_starts, ends, kernel.kv_heads), kernel);
  });
  return output;
}

// key, value: [tokens, kv_heads, head_dim]; slots: [tokens], block * BLOCK + offset of each. key_scale, value_scale: of
// the cache.
void write_kv(const at::Tensor& key, const at::Tensor& value, at::Tensor& keys, at::Tensor& values,
              const at::Tensor& slots, double key_scale, double value_scale) {
  TORCH_CHECK(key.stride(2) == 1 && value.stride(2) == 1);
  const int64_t head_dim = key.size(2);
  by_dtype(key, [&]<typename T>(T*) {
    by_cache<T>(keys.scalar_type(), values.scalar_type(), [&]<typename K, typename V>(K*, V*) {
      write_blocks<T, K, V>(slots, key, value, keys, values,
                            {static_cast<float>(key_scale), static_cast<float>(value_scale)},
                            [&](int64_t, int64_t, const T* from, T* to) { std::copy_n(from, head_dim, to); });
    });
  });
}

// Where the next token of each row stands. positions: [rows] int64; tables: [rows, blocks] int32, of blocks of so many
// tokens. Returns slots, block * block_size + offset, [rows] int64, and the tokens of each row, [rows] int32.
std::tuple<at::Tensor, at::Tensor> decode_places(const at::Tensor& positions, const at::Tensor& tables,
                                                 int64_t block_size) {
  TORCH_CHECK(positions.is_contiguous() && tables.size(0) == positions.size(0) && tables.stride(1) == 1);
  at::Tensor slots = at::empty_like(positions), lengths = at::empty_like(positions, at::kInt);
  const int64_t* position = positions.const_data_ptr<int64_t>();
  for (int64_t r = 0; r < positions.size(0); ++r) {
    const int64_t block = position[r] / block_size;
    TORCH_CHECK(block < tables.size(1), "position ", position[r], " lies behind the table");
    slots.mutable_data_ptr<int64_t>()[r] =
        tables.const_data_ptr<int32_t>()[r * tables.stride(0) + block] * block_size + position[r] % block_size;
    lengths.mutable_data_ptr<int32_t>()[r] = static_cast<int32_t>(position[r] + 1);
  }
  return {slots, lengths};
}

}  // namespace oatmill

TORCH_LIBRARY_FRAGMENT(oatmill, library) {
  library.def(
      "paged_attention(Tensor query, Tensor keys, Tensor values, Tensor tables, Tensor kv_lengths, "
      "Tensor query_starts, float scaling, int window, float softcap, Tensor? alibi_slopes, bool rounded_alibi, "
      "Tensor? sinks, float key_scale=1.0, float value_scale=1.0, int chunk=0, Tensor? ends=None) -> Tensor");
  library.def(
      "write_kv(Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values, Tensor slots, float key_scale=1.0, "
      "float value_scale=1.0) -> ()");
}

TORCH_LIBRARY_IMPL(oatmill, CPU, library) {
  library.impl("paged_attention", &oatmill::paged_attention);
  library.impl("write_kv", &oatmill::write_kv);
}
