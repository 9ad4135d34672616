// All decoder layers of a model in one call: a step of one token has a few hundred kernels, each of which would
// otherwise wait for Python. And a whole model in one call: the weights that went through the caches have left nothing of
// Python there, so that a call from it takes ten times as long as in a loop of its own.

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/tensor.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "simd/dtypes.h"
#include "simd/simd16.h"
#include "gemm/gemm.h"
#include "gemm/linear.h"
#include "gemm/moe.h"
#include "ops/ops.h"
#include "runtime/thread_pool.h"

namespace oatmill {

namespace {

using MaybeTensor = std::optional<at::Tensor>;

// A layer norm, or, without a bias, the root mean square kind.
struct Norm : torch::CustomClassHolder {
  at::Tensor weight;
  MaybeTensor bias;
  double eps;

  Norm(at::Tensor weight, MaybeTensor bias, double eps)
      : weight(std::move(weight)), bias(std::move(bias)), eps(eps) {}

  at::Tensor operator()(const at::Tensor& x) const {
    return bias ? layer_norm(x, weight, *bias, eps) : rms_norm(x, weight, eps);
  }
};

using NormPtr = c10::intrusive_ptr<Norm>;

// qkv: query, key and value side by side. query_norm, key_norm: of each head, or none. up: with the gate before it where
// the feed-forward part is gated; up and down are none where it is a mixture. attended_norm, fed_norm: of what attention
// and the feed-forward part add to the residual, or none. rotation: the number of its rotary tables; -1: it has none.
struct Layer {
  NormPtr attention_norm;
  LinearPtr qkv;
  NormPtr query_norm, key_norm;
  LinearPtr output;
  NormPtr feed_forward_norm;
  LinearPtr up, down;
  MixturePtr mixture;
  NormPtr attended_norm, fed_norm;
  int64_t rotation;
  double scaling;
  int64_t window;
  double softcap;
  MaybeTensor sinks;
};

void add(at::Tensor& sums, const at::Tensor& others) {
  by_dtype(sums, [&]<typename T>(T*) {
    T* to = sums.mutable_data_ptr<T>();
    const T* from = others.const_data_ptr<T>();
    for_rows(sums.numel(), 1, [&](int64_t i, int64_t last) {
      for (; i + LANES <= last; i += LANES) store(to + i, load(to + i) + load(from + i));
      for (; i < last; ++i) to[i] = static_cast<T>(static_cast<float>(to[i]) + static_cast<float>(from[i]));
    });
  });
}

// Rounded as a multiplication of tensors is. factor: as their dtype has it.
void multiply(at::Tensor& numbers, double factor) {
  by_dtype(numbers, [&]<typename T>(T*) {
    T* to = numbers.mutable_data_ptr<T>();
    for_rows(numbers.numel(), 1, [&](int64_t i, int64_t last) {
      for (; i < last; ++i) to[i] = static_cast<T>(static_cast<float>(to[i]) * static_cast<float>(factor));
    });
  });
}

// Where the tokens of a step stand, as attention wants to know it, and which adapter each has.
struct Places {
  at::Tensor slots, tables, kv_lengths, query_starts;
  std::vector<at::Tensor> cos, sin;
  MaybeTensor adapters;
};

// What attention needs to know of a pass when it computes only some tokens: the last ones of each sequence, if any.
// wanted: [rows] int64, their indices, in order.
Places of_last_tokens(const Places& places, const at::Tensor& wanted) {
  const int64_t* index = wanted.const_data_ptr<int64_t>();
  const int32_t* starts = places.query_starts.const_data_ptr<int32_t>();
  std::vector<int64_t> sequences;
  std::vector<int32_t> ends{0};
  int32_t next = 0;
  for (int64_t s = 0; s < places.kv_lengths.size(0); ++s) {
    while (next < wanted.numel() && index[next] < starts[s + 1]) ++next;
    if (next == ends.back()) continue;
    sequences.push_back(s);
    ends.push_back(next);
  }
  const at::Tensor kept = at::tensor(sequences, wanted.options());
  return {places.slots, places.tables.index_select(0, kept), places.kv_lengths.index_select(0, kept),
          at::tensor(ends, places.query_starts.options()), {}, {}, {}};
}

// A layer's KV blocks, and what their numbers are multiplied by.
struct Cache {
  at::Tensor keys, values;
  double key_scale, value_scale;
};

std::vector<Cache> caches_of(const std::vector<at::Tensor>& keys, const std::vector<at::Tensor>& values,
                             const std::vector<double>& key_scales, const std::vector<double>& value_scales) {
  const size_t layers = keys.size();
  TORCH_CHECK(values.size() == layers && key_scales.size() == layers && value_scales.size() == layers);
  std::vector<Cache> caches;
  for (size_t i = 0; i < layers; ++i) caches.push_back({keys[i], values[i], key_scales[i], value_scales[i]});
  return caches;
}

// Pre-norm layers. activation: that of the feed-forward part, "relu", or "silu" or "gelu" (by tanh) of its gate.
class Decoder : public torch::CustomClassHolder {
 public:
  Decoder(int64_t heads, int64_t kv_heads, int64_t head_dim, const std::string& activation)
      : heads_(heads), kv_heads_(kv_heads), head_dim_(head_dim), gated_(activation != "relu"),
        gelu_(activation == "gelu") {
    TORCH_CHECK(!gated_ || gelu_ || activation == "silu", "layers with ", activation, " are not known");
  }

  // The parts of a layer, in their order; head_norms: of queries and keys, or none. feed_forward: up and down, or none.
  // added_norms: attended_norm and fed_norm, or none.
  void add_layer(NormPtr attention_norm, LinearPtr qkv, std::vector<NormPtr> head_norms, LinearPtr output,
                 NormPtr feed_forward_norm, std::vector<LinearPtr> feed_forward, std::optional<MixturePtr> mixture,
                 std::vector<NormPtr> added_norms, int64_t rotation, double scaling, int64_t window, double softcap,
                 MaybeTensor sinks) {
    TORCH_CHECK(head_norms.empty() || head_norms.size() == 2);
    TORCH_CHECK(added_norms.empty() || (added_norms.size() == 2 && !mixture));
    TORCH_CHECK(feed_forward.size() == (mixture ? 0 : 2));
    Layer layer{std::move(attention_norm), std::move(qkv), {}, {}, std::move(output), std::move(feed_forward_norm)};
    if (!head_norms.empty()) layer.query_norm = head_norms[0], layer.key_norm = head_norms[1];
    if (mixture) layer.mixture = *mixture;
    else layer.up = feed_forward[0], layer.down = feed_forward[1];
    if (!added_norms.empty()) layer.attended_norm = added_norms[0], layer.fed_norm = added_norms[1];
    layer.rotation = rotation, layer.scaling = scaling, layer.window = window, layer.softcap = softcap;
    layer.sinks = std::move(sinks);
    layers_.push_back(std::move(layer));
  }

  // hidden: [tokens, hidden_size]. keys, values: the cache of each layer, with its scales. cos, sin: rotary tables, of each
  // kind [tokens, rotated]. adapters: as Linear::adapted takes them. wanted: [rows] int64, the tokens of which the
  // output is wanted, as of_last_tokens takes them, of a pass without adapters; none: all. The others as in
  // paged_attention and write_kv. Returns [rows, hidden_size].
  at::Tensor forward(const at::Tensor& hidden, std::vector<at::Tensor> keys, std::vector<at::Tensor> values,
                     std::vector<double> key_scales, std::vector<double> value_scales, const at::Tensor& slots,
                     const at::Tensor& tables, const at::Tensor& kv_lengths, const at::Tensor& query_starts,
                     std::vector<at::Tensor> cos, std::vector<at::Tensor> sin, const MaybeTensor& adapters,
                     const MaybeTensor& wanted) const {
    return run(hidden, caches_of(keys, values, key_scales, value_scales),
               {slots, tables, kv_lengths, query_starts, std::move(cos), std::move(sin), adapters}, wanted);
  }

  // Of the tokens that are not wanted, the last layer leaves keys and values in the cache, and no more.
  at::Tensor run(const at::Tensor& hidden, const std::vector<Cache>& caches, const Places& places,
                 const MaybeTensor& wanted = {}) const {
    TORCH_CHECK(caches.size() == layers_.size(), "each layer needs its cache");
    TORCH_CHECK(!wanted || !places.adapters, "with adapters all tokens are wanted");
    own_threads = true;
    at::Tensor residual = hidden;
    for (size_t i = 0; i < layers_.size(); ++i) {
      const Layer& layer = layers_[i];
      const MaybeTensor chosen = i + 1 == layers_.size() ? wanted : MaybeTensor{};
      const at::Tensor attended = attend(layer, (*layer.attention_norm)(residual), places, caches[i], chosen);
      if (chosen) residual = residual.index_select(0, *chosen);
      residual = added(*layer.output, attended, places, residual, layer.attended_norm);
      const at::Tensor normed = (*layer.feed_forward_norm)(residual);
      residual = feed_forward(layer, normed, places, residual);
    }
    return residual;
  }

 private:
  at::Tensor feed_forward(const Layer& layer, const at::Tensor& x, const Places& places, const at::Tensor& residual) const {
    if (layer.mixture) return (*layer.mixture)(x, residual);
    const at::Tensor up = layer.up->adapted(x, places.adapters, !gated_);
    return added(*layer.down, gated_ ? gate_mul(up, gelu_) : up, places, residual, layer.fed_norm);
  }

  // The residual and a layer's output, normalised first where there is a norm.
  static at::Tensor added(const Linear& linear, const at::Tensor& x, const Places& places, const at::Tensor& residual,
                          const NormPtr& norm) {
    if (!norm) return linear.adapted(x, places.adapters, false, residual);
    at::Tensor sum = (*norm)(linear.adapted(x, places.adapters));
    add(sum, residual);
    return sum;
  }

  at::Tensor attend(const Layer& layer, const at::Tensor& x, const Places& places, Cache cache,
                    const MaybeTensor& wanted) const {
    const at::Tensor joined = layer.qkv->adapted(x, places.adapters).view({x.size(0), heads_ + 2 * kv_heads_, head_dim_});
    at::Tensor query = joined.narrow(1, 0, heads_), key = joined.narrow(1, heads_, kv_heads_);
    const at::Tensor value = joined.narrow(1, heads_ + kv_heads_, kv_heads_);
    if (layer.query_norm) query = (*layer.query_norm)(query), key = (*layer.key_norm)(key);
    if (layer.rotation >= 0)
      rotate_and_write(query, key, value, places.cos.at(layer.rotation), places.sin.at(layer.rotation), cache.keys,
                       cache.values, places.slots, cache.key_scale, cache.value_scale);
    else
      write_kv(key, value, cache.keys, cache.values, places.slots, cache.key_scale, cache.value_scale);
    if (wanted) query = query.index_select(0, *wanted);
    const Places attending = wanted ? of_last_tokens(places, *wanted) : places;
    return paged_attention(query, cache.keys, cache.values, attending.tables, attending.kv_lengths,
                           attending.query_starts, layer.scaling, layer.window, layer.softcap, {}, false, layer.sinks,
                           cache.key_scale, cache.value_scale)
        .view({query.size(0), heads_ * head_dim_});
  }

  int64_t heads_, kv_heads_, head_dim_;
  bool gated_, gelu_;
  std::vector<Layer> layers_;
};

using DecoderPtr = c10::intrusive_ptr<Decoder>;

// A whole model: from tokens to logits.
class CausalLM : public torch::CustomClassHolder {
 public:
  // embedding: [vocab_size, hidden_size], multiplied by embedding_scale once it is looked up; position_embedding: of
  // models that learn it, [positions, hidden_size]. screen: as Linear::screened takes it, for at most so many rows;
  // empty: all logits are computed.
  CausalLM(DecoderPtr decoder, at::Tensor embedding, double embedding_scale, MaybeTensor position_embedding,
           std::optional<NormPtr> norm, LinearPtr head, std::vector<at::Tensor> screen, int64_t screened_rows)
      : decoder_(std::move(decoder)), embedding_(std::move(embedding)), embedding_scale_(embedding_scale),
        position_embedding_(std::move(position_embedding)), norm_(std::move(norm)),
        head_(std::move(head)), screen_(std::move(screen)), screened_rows_(screened_rows) {}

  // Takes what passes read and write. tokens, positions: [most] int64, tables: [most, blocks] int32, of all rows that
  // decode. keys .. value_scales: as in Decoder::forward.
  void attach(at::Tensor tokens, at::Tensor positions, at::Tensor tables, int64_t block_size,
              std::vector<at::Tensor> keys, std::vector<at::Tensor> values, std::vector<double> key_scales,
              std::vector<double> value_scales) {
    starts_ = at::arange(tokens.size(0) + 1, tables.options());
    tokens_ = std::move(tokens), positions_ = std::move(positions), tables_ = std::move(tables);
    block_size_ = block_size;
    caches_ = caches_of(keys, values, key_scales, value_scales);
  }

  // A step in which the first rows decode: from each row's last token to its next one. It moves their positions on.
  // cos, sin: rotary tables, of each kind [positions, rotated]. greedy: no more is needed than each row's largest
  // logit. Returns logits, [rows, vocab_size], and if greedy their likeliest tokens, [rows] int64, which then are the
  // rows' next inputs, too.
  std::tuple<at::Tensor, MaybeTensor> decode(int64_t rows, std::vector<at::Tensor> cos, std::vector<at::Tensor> sin,
                                             bool greedy) const {
    at::Tensor tokens = tokens_.narrow(0, 0, rows), positions = positions_.narrow(0, 0, rows);
    const at::Tensor tables = tables_.narrow(0, 0, rows);
    const auto [slots, lengths] = decode_places(positions, tables, block_size_);
    const at::Tensor logits =
        forward(tokens, positions, slots, tables, lengths, starts_.narrow(0, 0, rows + 1), std::move(cos),
                std::move(sin), {}, greedy);
    for (int64_t r = 0; r < rows; ++r) ++positions.mutable_data_ptr<int64_t>()[r];
    if (!greedy) return {logits, {}};
    const at::Tensor likeliest = argmax(logits, {}, {});
    std::copy_n(likeliest.const_data_ptr<int64_t>(), rows, tokens.mutable_data_ptr<int64_t>());
    return {logits, likeliest};
  }

  // Any pass without adapters. tokens, positions: [tokens] int64. slots .. wanted: as in Decoder::forward; cos, sin,
  // greedy: as in decode. Returns the logits of the wanted tokens, [rows, vocab_size].
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& positions, const at::Tensor& slots,
                     const at::Tensor& tables, const at::Tensor& kv_lengths, const at::Tensor& query_starts,
                     std::vector<at::Tensor> cos, std::vector<at::Tensor> sin, const MaybeTensor& wanted,
                     bool greedy) const {
    own_threads = true;
    at::Tensor hidden = rows_of(embedding_, tokens);
    if (embedding_scale_ != 1) multiply(hidden, embedding_scale_);
    if (position_embedding_) add(hidden, rows_of(*position_embedding_, positions));
    for (std::vector<at::Tensor>* kinds : {&cos, &sin})
      for (at::Tensor& table : *kinds) table = rows_of(table, positions);
    hidden = decoder_->run(hidden, caches_,
                           {slots, tables, kv_lengths, query_starts, std::move(cos), std::move(sin), {}}, wanted);
    if (norm_) hidden = (**norm_)(hidden);
    if (!greedy || screen_.empty() || hidden.size(0) > screened_rows_) return (*head_)(hidden);
    return head_->screened(hidden, screen_[0], screen_[1], screen_[2], screen_[3], screen_[4], {}, {}, {});
  }

 private:
  DecoderPtr decoder_;
  at::Tensor embedding_;
  double embedding_scale_;
  MaybeTensor position_embedding_;
  std::optional<NormPtr> norm_;
  LinearPtr head_;
  std::vector<at::Tensor> screen_;
  int64_t screened_rows_;
  at::Tensor tokens_, positions_, tables_, starts_;  // starts: of queries; each row has one
  int64_t block_size_ = 0;
  std::vector<Cache> caches_;
};

}  // namespace

}  // namespace oatmill

TORCH_LIBRARY_FRAGMENT(oatmill, library) {
  using namespace oatmill;
  // each before those whose methods take it
  library.class_<Codes>("Codes").def(
      torch::init<std::string, at::Tensor, at::Tensor, MaybeTensor, MaybeTensor, MaybeTensor, MaybeTensor>());
  library.class_<Adapters>("Adapters")
      .def(torch::init<int64_t>())
      .def("put", &Adapters::put)
      .def("drop", &Adapters::drop)
      .def("apply", &Adapters::apply);
  library.class_<Linear>("Linear")
      .def(torch::init<at::Tensor, int64_t, int64_t, std::optional<at::Tensor>, std::optional<at::Tensor>,
                       std::optional<at::Tensor>, std::vector<std::string>, std::vector<int64_t>,
                       std::optional<CodesPtr>>())
      .def("forward", &Linear::operator())
      .def("adapt", &Linear::adapt)
      .def("screened", &Linear::screened);
  library.class_<Norm>("Norm").def(torch::init<at::Tensor, MaybeTensor, double>());
  library.class_<Experts>("Experts")
      .def(torch::init<double, double>())
      .def("add", &Experts::add)
      .def("forward", &Experts::forward);
  library.class_<Mixture>("Mixture")
      .def(torch::init<LinearPtr, ExpertsPtr, int64_t, bool>())
      .def("forward", &Mixture::operator());
  library.class_<Decoder>("Decoder")
      .def(torch::init<int64_t, int64_t, int64_t, std::string>())
      .def("add_layer", &Decoder::add_layer)
      .def("forward", &Decoder::forward);
  library.class_<CausalLM>("CausalLM")
      .def(torch::init<DecoderPtr, at::Tensor, double, MaybeTensor, std::optional<NormPtr>, LinearPtr,
                       std::vector<at::Tensor>, int64_t>())
      .def("attach", &CausalLM::attach)
      .def("decode", &CausalLM::decode)
      .def("forward", &CausalLM::forward);
}
