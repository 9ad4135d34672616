// A whole model in one call, whatever a step brings. A step of one token has a few hundred kernels, each of which would
// otherwise wait for Python; and the weights that went through the caches have left nothing of Python there, so that a
// call from it takes ten times as long as in a loop of its own.

#include <ATen/core/Tensor.h>
#include <ATen/core/Dict.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/tensor.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "simd/dtypes.h"
#include "altup.h"
#include "gemm/gemm.h"
#include "gemm/linear.h"
#include "gemm/moe.h"
#include "ops/elementwise.h"
#include "ops/norm.h"
#include "ops/ops.h"
#include "recurrent/mixer.h"
#include "runtime/part_times.h"
#include "runtime/ranks.h"
#include "runtime/thread_pool.h"

namespace oatmill {

namespace {

// Multi-head latent attention (DeepSeek-V2, 2024): of a token the cache has what all heads share, once: `rotated`
// elements that are turned, and a latent, the rank elements behind them. query: makes queries of what the layer's first
// projection gives; none: that gives them. A head's query has as many turned elements in the end; keys makes of its
// others the rank elements that it has for latents. values: makes a head's output of the latents that it attends to.
struct Latents : torch::CustomClassHolder {
  int64_t rank, rotated;
  LinearPtr query;
  std::vector<LinearPtr> keys, values;  // of each head

  Latents(int64_t rank, int64_t rotated, std::optional<LinearPtr> query, std::vector<LinearPtr> keys,
          std::vector<LinearPtr> values)
      : rank(rank), rotated(rotated), query(query.value_or(nullptr)), keys(std::move(keys)), values(std::move(values)) {
  }
};

using LatentsPtr = c10::intrusive_ptr<Latents>;

// How a layer attends.
struct Attention : torch::CustomClassHolder {
  int64_t heads = 0, kv_heads = 0, head_dim = 0;  // of this rank
  int64_t value_dim = 0;   // elements of a value, of which a head's output has as many; the cache has zeros behind them
  double value_scale = 1;  // of values
  LatentsPtr latents;      // or none
  // As in paged_attention.
  double scaling = 1, softcap = 0;
  int64_t window = 0, chunk = 0;
  MaybeTensor sinks, alibi_slopes;
  bool rounded_alibi = false;
  int64_t rotation = -1;  // the number of its rotary tables; -1: it has none
  bool gated = false;     // beside each head's query stands what, by its sigmoid, is a gate of the head's output
  // Query, key and value do not stand side by side; for each KV head there are its query heads, its key and its value.
  bool grouped = false;
  double clip = 0;      // no element of query, key and value is further from 0; 0: nothing is clipped
  int64_t keys_of = 0;  // the layer whose keys and values are attended to, where kv_heads is 0
  // The query at position p is multiplied by 1 + tuning[1] * log(1 + floor((p + 1) / tuning[0])) (Nakanishi 2025); or
  // empty.
  std::vector<double> tuning;
};

using AttentionPtr = c10::intrusive_ptr<Attention>;

// A linear layer, whose outputs are multiplied by scale, [outputs] float32; or none.
struct Projection {
  LinearPtr linear;
  MaybeTensor scale;
  const char* name;  // in Layer

  at::Tensor operator()(const at::Tensor& x, const MaybeTensor& adapters) const {
    const TimedPart part(name);
    at::Tensor y = linear->adapted(x, adapters);
    if (scale) multiply_columns(y, *scale);
    return y;
  }
};

// Norms are none where a layer has none of the kind. attention, with the projections of query, key and value, and of
// its output; mixer, between its own; a layer may have either, both or none. query_norm, key_norm, value_norm: of each
// head, or of all heads together; or of what makes queries, and of latents. up: with the gate before it where the
// feed-forward part is gated; up and down are none where it is a mixture without a shared expert, or where there is no
// such part; shared_gate: its sigmoid multiplies the shared expert's output, or none. attended_norm, fed_norm: of what
// attention and the feed-forward part add to the residual. mixture_norm, router_norm: of the residual, which experts
// and router then read in place of what up does. mixed_norm, shared_norm: of the outputs of mixture and shared expert.
// input_gate, input_projection, input_norm: of the layer's further input (Gemma 3n), or none. scale: of the layer's
// output. altup: or none; then the further input changes all streams but the first. deviations: what the gate gives
// becomes its excess over its mean and so many standard deviations, or 0 (Gemma 3n); none: it stays. whole: each rank
// has all of the feed-forward part.
struct Layer {
  MaybeNorm attention_norm, query_norm, key_norm, value_norm, attended_norm, feed_forward_norm, fed_norm;
  MaybeNorm mixture_norm, router_norm, mixed_norm, shared_norm, input_norm;
  AttentionPtr attention;
  Projection qkv, output;
  MixerPtr mixer;
  Projection mixer_in, mixer_out;
  Projection up, down;
  LinearPtr shared_gate, input_gate, input_projection;
  MixturePtr mixture;
  AltUpPtr altup;
  double scale;
  std::optional<double> deviations;
  bool whole;
};

// Each number of the first half of x becomes its excess over the half's mean and so many standard deviations, or 0. x:
// [tokens, 2 * size], contiguous.
void keep_largest(at::Tensor& x, double deviations) {
  const int64_t size = x.size(1) / 2;
  by_dtype(x, [&]<typename T>(T*) {
    T* rows = x.mutable_data_ptr<T>();
    const auto rounded = [](float value) { return static_cast<float>(static_cast<T>(value)); };
    for_rows(x.size(0), size, [&](int64_t t, int64_t last) {
      for (; t < last; ++t) {
        T* row = rows + t * 2 * size;
        float sum = 0, squares = 0;
        for (int64_t i = 0; i < size; ++i) sum += static_cast<float>(row[i]);
        const float mean = sum / static_cast<float>(size);
        for (int64_t i = 0; i < size; ++i)
          squares += (static_cast<float>(row[i]) - mean) * (static_cast<float>(row[i]) - mean);
        const float deviation = rounded(std::sqrt(squares / static_cast<float>(size)));
        const float least = rounded(rounded(mean) + rounded(deviation * rounded(static_cast<float>(deviations))));
        for (int64_t i = 0; i < size; ++i) row[i] = static_cast<T>(std::max(static_cast<float>(row[i]) - least, 0.0f));
      }
    });
  });
}

// output[:, h] = x[:, h] times the weights of head h, for all heads. x: [tokens, heads, inputs]; output: [tokens,
// heads, outputs].
void multiply_heads(const std::vector<LinearPtr>& linears, const at::Tensor& x, at::Tensor output) {
  const int64_t tokens = x.size(0);
  if (tokens == 0) return;
  by_dtype(x, [&]<typename T>(T*) {
    const T* from = x.const_data_ptr<T>();
    T* to = output.mutable_data_ptr<T>();
    parallel_for(static_cast<int64_t>(linears.size()), [&](int64_t h) {
      const Linear& linear = *linears[h];
      at::Tensor rows = at::empty({tokens, linear.inputs}, x.options());
      at::Tensor products = at::empty({tokens, linear.outputs}, x.options());
      for (int64_t t = 0; t < tokens; ++t)
        std::copy_n(from + t * x.stride(0) + h * x.stride(1), linear.inputs,
                    rows.mutable_data_ptr<T>() + t * linear.inputs);
      std::vector<int64_t> tiles(ceil_div(linear.outputs, COLUMNS));
      std::iota(tiles.begin(), tiles.end(), 0);
      linear.write_tiles(rows, tiles, products);
      for (int64_t t = 0; t < tokens; ++t)
        std::copy_n(products.const_data_ptr<T>() + t * linear.outputs, linear.outputs,
                    to + t * output.stride(0) + h * output.stride(1));
    });
  });
}

MaybeTensor chosen_rows(const MaybeTensor& rows, const at::Tensor& chosen) {
  return rows ? rows->index_select(0, chosen) : rows;
}

// The tokens of a pass: where they stand and how far they look, as attention wants to know it, which adapter each has,
// and what layers with states know of them. positions: [tokens] int64. ends_in_windows: `ends` holds for layers with a
// window alone. inputs: of all layers, [tokens, layers * size], where they have further ones.
struct Pass {
  at::Tensor slots, tables, kv_lengths, query_starts;
  std::vector<at::Tensor> cos, sin;
  MaybeTensor adapters, ends;
  Runs runs;
  at::Tensor positions, inputs;
  bool ends_in_windows = false;
};

// Of each layer the states of all slots; none of a layer with attention.
using States = std::vector<std::vector<at::Tensor>>;

// The tokens of a pass in whose places there is what the model makes of images. rows: [tokens] int64, their indices.
// embeddings: [tokens, hidden_size]. added: the same for each of the first layers, to whose output it is added.
struct ImageRows {
  at::Tensor rows, embeddings;
  std::vector<at::Tensor> added;
};

// What attention needs to know of a pass when it computes only some tokens: the last ones of each sequence, if any.
// wanted: [rows] int64, their indices, in order.
Pass of_last_tokens(const Pass& pass, const at::Tensor& wanted) {
  const int64_t* index = wanted.const_data_ptr<int64_t>();
  const int32_t* starts = pass.query_starts.const_data_ptr<int32_t>();
  std::vector<int64_t> sequences;
  std::vector<int32_t> ends{0};
  int32_t next = 0;
  for (int64_t s = 0; s < pass.kv_lengths.size(0); ++s) {
    while (next < wanted.numel() && index[next] < starts[s + 1]) ++next;
    if (next == ends.back()) continue;
    sequences.push_back(s);
    ends.push_back(next);
  }
  const at::Tensor kept = at::tensor(sequences, wanted.options());
  return {pass.slots,
          pass.tables.index_select(0, kept),
          pass.kv_lengths.index_select(0, kept),
          at::tensor(ends, pass.query_starts.options()),
          {},
          {},
          chosen_rows(pass.adapters, wanted),
          chosen_rows(pass.ends, wanted),
          {},
          {},
          {},
          pass.ends_in_windows};
}

// In passes that are padded to a fixed size, the tokens that fill up what is wanted are in no order.
bool ascending(const at::Tensor& indices) {
  const int64_t* index = indices.const_data_ptr<int64_t>();
  return std::adjacent_find(index, index + indices.numel(), std::greater_equal<>()) == index + indices.numel();
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

// A layer as it is handed over. norms, linears: those of Layer that there are, by their names. scales: of the outputs
// of linears. The others are as in Layer.
struct LayerModules : torch::CustomClassHolder {
  c10::Dict<std::string, NormPtr> norms;
  c10::Dict<std::string, LinearPtr> linears;
  c10::Dict<std::string, at::Tensor> scales;
  std::optional<AttentionPtr> attention;
  std::optional<MixerPtr> mixer;
  std::optional<MixturePtr> mixture;
  std::optional<AltUpPtr> altup;
  double scale = 1;
  std::optional<double> deviations;
  bool whole = false;
};

using LayerModulesPtr = c10::intrusive_ptr<LayerModules>;

// The layers of a model. activation: that of the feed-forward part, or of its gate where it is gated. parallel: the
// feed-forward part has the input of attention, or the layer's own input, normalised by feed_forward_norm.
// residual_scale: what is added to the residual is multiplied by it. interleaved: rotary embeddings turn neighbouring
// elements of a head, and not those half of it apart.
class Decoder : public torch::CustomClassHolder {
 public:
  // streams: of hidden states; or none.
  Decoder(const std::string& activation, bool gated, bool parallel, double residual_scale, bool interleaved,
          std::optional<StreamsPtr> streams)
      : activation_(activation_named(activation)), gated_(gated), parallel_(parallel), residual_scale_(residual_scale),
        interleaved_(interleaved), streams_(streams.value_or(nullptr)) {}

  void add_layer(const LayerModulesPtr& modules) {
    const auto& norms = modules->norms;
    const auto& linears = modules->linears;
    const auto& scales = modules->scales;
    const auto norm = [&](const char* name) { return norms.contains(name) ? MaybeNorm(norms.at(name)) : MaybeNorm(); };
    const auto linear = [&](const char* name) { return linears.contains(name) ? linears.at(name) : LinearPtr(); };
    const auto projection = [&](const char* name) {
      return Projection{linear(name), scales.contains(name) ? MaybeTensor(scales.at(name)) : MaybeTensor(), name};
    };
    layers_.push_back({norm("attention_norm"),
                       norm("query_norm"),
                       norm("key_norm"),
                       norm("value_norm"),
                       norm("attended_norm"),
                       norm("feed_forward_norm"),
                       norm("fed_norm"),
                       norm("mixture_norm"),
                       norm("router_norm"),
                       norm("mixed_norm"),
                       norm("shared_norm"),
                       norm("input_norm"),
                       modules->attention.value_or(nullptr),
                       projection("qkv"),
                       projection("output"),
                       modules->mixer.value_or(nullptr),
                       projection("mixer_in"),
                       projection("mixer_out"),
                       projection("up"),
                       projection("down"),
                       linear("shared_gate"),
                       linear("input_gate"),
                       linear("input_projection"),
                       modules->mixture.value_or(nullptr),
                       modules->altup.value_or(nullptr),
                       modules->scale,
                       modules->deviations,
                       modules->whole});
    const Layer& layer = layers_.back();
    TORCH_CHECK(!layer.attention || (layer.qkv.linear && layer.output.linear));
    TORCH_CHECK(!layer.mixer || (layer.mixer_in.linear && layer.mixer_out.linear));
    TORCH_CHECK(!layer.up.linear || layer.down.linear);
  }

  // From now on the layers are this rank's part of them: each computes some heads, and some features between up and
  // down, and what they add to the residual is summed over all ranks.
  void split(RanksPtr ranks) { ranks_ = std::move(ranks); }

  // hidden: [tokens, hidden_size]. wanted: [rows] int64, the tokens of which the output is wanted, each sequence's last
  // ones; none: all. Of the others the last layer leaves keys and values in the cache, and no more. images: in the
  // pass; if something is added to the last layer's output, all are wanted. tapped: indices of layers, in order, whose
  // inputs are appended to taps; the last one may be that behind all layers, then all are wanted, too. projected: gets
  // what the mixers of all layers take, or null. Returns [rows, hidden_size].
  at::Tensor run(const at::Tensor& hidden, const std::vector<Cache>& caches, States& states, const Pass& pass,
                 const MaybeTensor& wanted, const ImageRows& images, const std::vector<int64_t>& tapped,
                 std::vector<at::Tensor>& taps, std::vector<at::Tensor>* projected) const {
    at::Tensor residual = hidden, streams;
    if (streams_) streams = streams_->of(hidden, pass.adapters);
    MaybeTensor adapters = pass.adapters;
    auto tap = tapped.begin();
    for (size_t i = 0; i < layers_.size(); ++i) {
      const Layer& layer = layers_[i];
      if (tap != tapped.end() && *tap == static_cast<int64_t>(i)) taps.push_back(residual), ++tap;
      const MaybeTensor chosen = i + 1 == layers_.size() ? wanted : MaybeTensor{};
      at::Tensor normed, attended, mixed;
      if (layer.altup) streams = layer.altup->predicted(streams, pass.adapters), residual = streams.select(0, 0);
      if (layer.attention || layer.mixer) normed = normalised(layer.attention_norm, residual);
      if (layer.attention) {
        const size_t own = layer.attention->kv_heads == 0 ? static_cast<size_t>(layer.attention->keys_of) : i;
        TORCH_CHECK(own < caches.size(), "each layer with attention needs its cache");
        attended = attend(layer, layer.qkv(normed, pass.adapters), pass, caches[own], chosen);
      }
      if (layer.mixer) {
        TORCH_CHECK(i < states.size(), "each layer with a mixer needs its states");
        const at::Tensor input = layer.mixer_in(normed, pass.adapters);
        if (projected) projected->push_back(input);
        mixed = timed("mixer", [&] { return (*layer.mixer)(input, states[i], pass.runs, pass.adapters); });
        if (chosen) mixed = mixed.index_select(0, *chosen);
      }
      if (chosen) adapters = chosen_rows(pass.adapters, *chosen), residual = residual.index_select(0, *chosen);
      if (parallel_ && layer.feed_forward_norm) normed = normalised(layer.feed_forward_norm, residual);
      else if (parallel_ && chosen) normed = normed.index_select(0, *chosen);
      if (layer.attention) residual = added(layer.output, attended, adapters, residual, layer.attended_norm);
      if (layer.altup) {
        add(residual, layer.altup->residual(chosen ? normed.index_select(0, *chosen) : normed, adapters));
        change_each(residual, [root = std::sqrt(2.0f)](float x, auto) { return x / root; });
      }
      if (layer.mixer) residual = added(layer.mixer_out, mixed, adapters, residual, layer.attended_norm);
      if (layer.up.linear || layer.mixture) {
        if (!parallel_) normed = normalised(layer.feed_forward_norm, residual);
        residual = feed_forward(layer, normed, adapters, residual);
      }
      if (layer.altup) {
        streams = layer.altup->corrected(chosen ? streams.index_select(1, *chosen) : streams, residual, adapters);
        residual = streams.select(0, 0);
        const at::Tensor change = normalised(
            layer.input_norm, of_input(layer, layer.altup->scaled(residual), pass.inputs, i, chosen, adapters));
        for (int64_t s = 1; s < streams.size(0); ++s) {
          at::Tensor other = streams.select(0, s);
          add(other, change);
        }
      } else if (layer.input_gate) {
        residual =
            with_residual(of_input(layer, residual, pass.inputs, i, chosen, adapters), residual, layer.input_norm);
      }
      if (layer.scale != 1) multiply(residual, layer.scale);
      if (i < images.added.size()) residual.index_add_(0, images.rows, images.added[i]);
    }
    if (streams_) residual = streams_->merged(streams, adapters);
    if (tap != tapped.end()) taps.push_back(residual);
    return residual;
  }

  // Moves the states of a slot on by some tokens of a pass, of which `run` gave what is `projected`. adapters: of the
  // pass.
  void advance(const std::vector<at::Tensor>& projected, States& states, int64_t slot, int64_t first, int64_t tokens,
               const MaybeTensor& adapters) const {
    const MaybeTensor own = adapters ? MaybeTensor(adapters->narrow(0, first, tokens)) : MaybeTensor();
    auto input = projected.begin();
    for (size_t i = 0; i < layers_.size(); ++i)
      if (layers_[i].mixer)
        (*layers_[i].mixer)((input++)->narrow(0, first, tokens), states.at(i), {{0, tokens, slot, true, {}}}, own);
  }

  size_t layers() const { return layers_.size(); }

 private:
  static at::Tensor normalised(const MaybeNorm& norm, const at::Tensor& x) {
    return norm ? timed("norms", [&] { return (**norm)(x); }) : x;
  }

  at::Tensor feed_forward(const Layer& layer, const at::Tensor& x, const MaybeTensor& adapters,
                          const at::Tensor& residual) const {
    at::Tensor inner;
    if (layer.up.linear) {
      inner = layer.up(x, adapters);
      if (layer.deviations) keep_largest(inner, *layer.deviations);
      inner = timed("activation", [&] { return activate(inner, activation_, gated_); });
    }
    if (layer.whole) return with_residual(layer.down(inner, adapters), residual, layer.fed_norm);
    if (!layer.mixture) return added(layer.down, inner, adapters, residual, layer.fed_norm);
    at::Tensor sum = timed("experts", [&] {
      return (*layer.mixture)(layer.mixture_norm ? normalised(layer.mixture_norm, residual) : x,
                              layer.router_norm ? normalised(layer.router_norm, residual) : x,
                              as_it_is(layer.fed_norm) ? own_residual(residual) : MaybeTensor(), adapters);
    });
    if (layer.mixed_norm) {
      sum = normalised(layer.mixed_norm, summed(sum));
      add(sum, normalised(layer.shared_norm, summed(layer.down(inner, adapters))));
      return with_residual(sum, residual, layer.fed_norm);
    }
    if (layer.up.linear) {
      at::Tensor shared = layer.down(inner, adapters);
      if (layer.shared_gate) {
        const at::Tensor gate = layer.shared_gate->adapted(x, adapters);
        at::Tensor rows = shared.unsqueeze(1);
        multiply_by_sigmoid(rows, gate.unsqueeze(1).expand(rows.sizes()).contiguous());
      }
      add(sum, shared);
    }
    return as_it_is(layer.fed_norm) ? summed(sum) : with_residual(summed(sum), residual, layer.fed_norm);
  }

  // What a layer makes of x and of its further input. inputs: of all layers. chosen: as in `run`.
  at::Tensor of_input(const Layer& layer, const at::Tensor& x, const at::Tensor& inputs, size_t index,
                      const MaybeTensor& chosen, const MaybeTensor& adapters) const {
    const int64_t size = layer.input_gate->outputs;
    at::Tensor gate = activate(layer.input_gate->adapted(x, adapters), activation_, false);
    const at::Tensor own = inputs.narrow(1, static_cast<int64_t>(index) * size, size);
    multiply(gate, (chosen ? own.index_select(0, *chosen) : own).contiguous());
    return layer.input_projection->adapted(gate, adapters);
  }

  // Returns true if what a layer computes is added to the residual without more ado.
  bool as_it_is(const MaybeNorm& norm) const { return !norm && residual_scale_ == 1; }

  // The residual and a layer's output, normalised first where there is a norm.
  at::Tensor added(const Projection& last, const at::Tensor& x, const MaybeTensor& adapters, const at::Tensor& residual,
                   const MaybeNorm& norm) const {
    if (as_it_is(norm) && !last.scale)
      return summed(timed(last.name, [&] { return last.linear->adapted(x, adapters, own_residual(residual)); }));
    return with_residual(summed(last(x, adapters)), residual, norm);
  }

  at::Tensor with_residual(const at::Tensor& output, const at::Tensor& residual, const MaybeNorm& norm) const {
    at::Tensor sum = normalised(norm, output);
    if (residual_scale_ != 1) multiply(sum, residual_scale_);
    add(sum, residual);
    return sum;
  }

  // The residual for the rank that adds it.
  MaybeTensor own_residual(const at::Tensor& residual) const {
    return !ranks_ || ranks_->rank() == 0 ? MaybeTensor(residual) : MaybeTensor();
  }

  at::Tensor summed(at::Tensor part) const {
    if (ranks_) ranks_->all_reduce(part);
    return part;
  }

  // qkv: [tokens, of all heads].
  at::Tensor attend(const Layer& layer, at::Tensor qkv, const Pass& pass, const Cache& cache,
                    const MaybeTensor& wanted) const {
    const Attention& own = *layer.attention;
    if (own.latents) return attend_to_latents(layer, qkv, pass, cache, wanted);
    const int64_t heads = own.heads, kv_heads = own.kv_heads, head_dim = own.head_dim;
    const int64_t tokens = qkv.size(0), queries = own.gated ? 2 * heads : heads;
    if (own.clip != 0)
      change_each(qkv, [clip = static_cast<float>(own.clip)](float x, auto) { return std::clamp(x, -clip, clip); });
    at::Tensor query, gate, key, value;
    if (own.grouped) {
      const int64_t group = heads / kv_heads;
      const at::Tensor groups = qkv.view({tokens, kv_heads, group + 2, head_dim});
      query = groups.narrow(2, 0, group).reshape({tokens, heads, head_dim});
      key = groups.select(2, group), value = groups.select(2, group + 1);
    } else {
      const int64_t keys = queries * head_dim, values = keys + kv_heads * head_dim;
      query = qkv.narrow(1, 0, keys).unflatten(1, {queries, head_dim});
      key = qkv.narrow(1, keys, values - keys).view({tokens, kv_heads, head_dim});
      value = qkv.narrow(1, values, kv_heads * own.value_dim).view({tokens, kv_heads, own.value_dim});
    }
    if (own.value_dim < head_dim) value = at::constant_pad_nd(value, {0, head_dim - own.value_dim});
    if (own.gated) {
      const at::Tensor pairs = query.unflatten(1, {heads, 2});
      query = pairs.select(2, 0), gate = pairs.select(2, 1);
    }
    query = of_heads(layer.query_norm, query), key = of_heads(layer.key_norm, key);
    value = of_heads(layer.value_norm, value);
    if (!own.tuning.empty()) query = tuned(query, pass.positions, own.tuning);
    at::Tensor attended = with_cache(own, query, key, value, pass, cache, wanted);
    if (own.gated) multiply_by_sigmoid(attended, wanted ? gate.index_select(0, *wanted) : gate);
    if (own.value_dim < head_dim) attended = attended.narrow(2, 0, own.value_dim).contiguous();
    return attended.view({attended.size(0), heads * own.value_dim});
  }

  // projected: [tokens, of queries or what becomes these, a latent and the turned elements of a key].
  at::Tensor attend_to_latents(const Layer& layer, const at::Tensor& projected, const Pass& pass, const Cache& cache,
                               const MaybeTensor& wanted) const {
    const Attention& own = *layer.attention;
    const Latents& latents = *own.latents;
    const int64_t tokens = projected.size(0), rank = latents.rank, rotated = latents.rotated;
    const int64_t of_query = projected.size(1) - rank - rotated;
    at::Tensor made = projected.narrow(1, 0, of_query);
    if (latents.query) made = latents.query->adapted(normalised(layer.query_norm, made).contiguous(), pass.adapters);
    made = made.unflatten(1, {own.heads, made.size(1) / own.heads});
    const int64_t plain = made.size(2) - rotated;
    at::Tensor query = at::empty({tokens, own.heads, rotated + rank}, projected.options());
    at::Tensor key = at::empty({tokens, 1, rotated + rank}, projected.options());
    query.narrow(2, 0, rotated).copy_(made.narrow(2, plain, rotated));
    multiply_heads(latents.keys, made.narrow(2, 0, plain), query.narrow(2, rotated, rank));
    key.select(1, 0).narrow(1, 0, rotated).copy_(projected.narrow(1, of_query + rank, rotated));
    key.select(1, 0).narrow(1, rotated, rank).copy_(normalised(layer.key_norm, projected.narrow(1, of_query, rank)));
    const at::Tensor attended = with_cache(own, query, key, key, pass, cache, wanted).narrow(2, rotated, rank);
    at::Tensor output = at::empty({attended.size(0), own.heads, latents.values[0]->outputs}, projected.options());
    multiply_heads(latents.values, attended, output);
    return output.flatten(1);
  }

  // Turns queries and keys, and writes keys and values. Returns what the wanted queries attend to, [rows, heads,
  // head_dim].
  at::Tensor with_cache(const Attention& own, at::Tensor query, const at::Tensor& key, const at::Tensor& value,
                        const Pass& pass, Cache cache, const MaybeTensor& wanted) const {
    {
      const TimedPart part("rotary positions, writing the cache");
      if (key.size(1) == 0 && own.rotation >= 0)
        rotate(query, pass.cos.at(own.rotation), pass.sin.at(own.rotation), interleaved_);
      else if (own.rotation >= 0)
        rotate_and_write(query, key, value, pass.cos.at(own.rotation), pass.sin.at(own.rotation), cache.keys,
                         cache.values, pass.slots, cache.key_scale, cache.value_scale, interleaved_);
      else if (key.size(1) != 0)
        write_kv(key, value, cache.keys, cache.values, pass.slots, cache.key_scale, cache.value_scale);
    }
    if (wanted) query = query.index_select(0, *wanted);
    const Pass attending = wanted ? of_last_tokens(pass, *wanted) : pass;
    const TimedPart part("attention");
    return paged_attention(query, cache.keys, cache.values, attending.tables, attending.kv_lengths,
                           attending.query_starts, own.scaling, own.window, own.softcap, own.alibi_slopes,
                           own.rounded_alibi, own.sinks, cache.key_scale, cache.value_scale * own.value_scale,
                           own.chunk, pass.ends_in_windows && own.window == 0 ? MaybeTensor() : attending.ends);
  }

  // query: [tokens, heads, head_dim]. positions: [tokens] int64.
  static at::Tensor tuned(const at::Tensor& query, const at::Tensor& positions, const std::vector<double>& tuning) {
    at::Tensor output = query.contiguous();
    if (output.is_same(query)) output = query.clone();
    const int64_t size = query.size(1) * query.size(2);
    const int64_t* position = positions.const_data_ptr<int64_t>();
    const auto floor = static_cast<float>(tuning.at(0)), scale = static_cast<float>(tuning.at(1));
    by_dtype(output, [&]<typename T>(T*) {
      T* to = output.mutable_data_ptr<T>();
      for_rows(query.size(0), size, [&](int64_t t, int64_t last) {
        for (; t < last; ++t) {
          const float factor = std::log1p(std::floor((static_cast<float>(position[t]) + 1) / floor)) * scale + 1;
          for (int64_t i = t * size; i < (t + 1) * size; ++i)
            to[i] = static_cast<T>(static_cast<float>(to[i]) * factor);
        }
      });
    });
    return output;
  }

  // x: [tokens, heads, head_dim]. The norm is of each head, or of all heads of a token together.
  at::Tensor of_heads(const MaybeNorm& norm, const at::Tensor& x) const {
    if (!norm || x.size(1) == 0) return x;
    const bool whole = (*norm)->whole_size != 0;
    if (!whole && ((*norm)->weight.numel() == x.size(2) || (*norm)->weight.dim() == 2)) return (**norm)(x);
    const at::Tensor together = x.as_strided({x.size(0), 1, x.size(1) * x.size(2)}, {x.stride(0), x.stride(0), 1});
    return (whole ? (*norm)->over_ranks(together, *ranks_) : (**norm)(together)).view(x.sizes());
  }

  Activation activation_;
  bool gated_, parallel_;
  double residual_scale_;
  bool interleaved_;
  StreamsPtr streams_;  // or none
  RanksPtr ranks_;      // or none
  std::vector<Layer> layers_;
};

using DecoderPtr = c10::intrusive_ptr<Decoder>;

// Embeddings of tokens, multiplied by scale once they are looked up. weight: [tokens, size], of this rank; or empty, of
// the dtype, where a layer has them as its weights, quantised.
struct Embedding : torch::CustomClassHolder {
  at::Tensor weight;
  LinearPtr layer;  // or none
  double scale;

  Embedding(at::Tensor weight, std::optional<LinearPtr> layer, double scale)
      : weight(std::move(weight)), layer(layer.value_or(nullptr)), scale(scale) {}

  // tokens: [tokens] int64. ranks: those that have the others, an equal number each; or none. Returns [tokens, size].
  at::Tensor operator()(const at::Tensor& tokens, const RanksPtr& ranks) const {
    at::Tensor rows = ranks ? of_ranks(tokens, *ranks) : look_up(tokens);
    if (scale != 1) multiply(rows, scale);
    return rows;
  }

 private:
  at::Tensor look_up(const at::Tensor& ids) const {
    return layer ? layer->rows(ids, weight.scalar_type()) : rows_of(weight, ids);
  }

  at::Tensor of_ranks(const at::Tensor& tokens, Ranks& ranks) const {
    const int64_t own = layer ? layer->outputs : weight.size(0), first = ranks.rank() * own;
    at::Tensor local = at::empty_like(tokens);
    const int64_t* token = tokens.const_data_ptr<int64_t>();
    int64_t* to = local.mutable_data_ptr<int64_t>();
    const auto elsewhere = [&](int64_t i) { return token[i] < first || first + own <= token[i]; };
    for (int64_t i = 0; i < tokens.numel(); ++i) to[i] = elsewhere(i) ? 0 : token[i] - first;
    at::Tensor rows = look_up(local);
    for (int64_t i = 0; i < tokens.numel(); ++i)
      if (elsewhere(i)) rows.select(0, i).zero_();
    ranks.all_reduce(rows);
    return rows;
  }
};

using EmbeddingPtr = c10::intrusive_ptr<Embedding>;

// Makes the further inputs of all layers (Gemma 3n): of a token, by an embedding of its own, and of the first layer's
// input. tokens: that the embedding has; it takes others for the first one. norm: of each layer's part of what
// projection gives. scale: of the sum.
struct LayerInputs : torch::CustomClassHolder {
  EmbeddingPtr embedding;
  int64_t tokens;
  LinearPtr projection;
  NormPtr norm;
  double projection_scale, scale;

  LayerInputs(EmbeddingPtr embedding, int64_t tokens, LinearPtr projection, NormPtr norm, double projection_scale,
              double scale)
      : embedding(std::move(embedding)), tokens(tokens), projection(std::move(projection)), norm(std::move(norm)),
        projection_scale(projection_scale), scale(scale) {}

  // ids: [tokens] int64. hidden: [tokens, hidden_size]. Returns [tokens, layers * size].
  at::Tensor operator()(const at::Tensor& ids, const at::Tensor& hidden, const MaybeTensor& adapters,
                        const RanksPtr& ranks) const {
    at::Tensor projected = projection->adapted(hidden, adapters), known = ids.clone();
    multiply(projected, projection_scale);
    for (int64_t& id : std::span(known.mutable_data_ptr<int64_t>(), static_cast<size_t>(known.numel())))
      if (id >= tokens) id = 0;
    at::Tensor inputs = (*norm)(projected.view({-1, norm->weight.size(0)})).view(projected.sizes());
    add(inputs, (*embedding)(known, ranks));
    multiply(inputs, scale);
    return inputs;
  }
};

using LayerInputsPtr = c10::intrusive_ptr<LayerInputs>;

// Any pass: its tokens, and what comes with them.
struct PassInput : torch::CustomClassHolder {
  at::Tensor tokens, positions;                        // [tokens] int64, the latter of rotary tables
  at::Tensor slots, tables, kv_lengths, query_starts;  // as in paged_attention and write_kv
  std::vector<at::Tensor> cos, sin;                    // rotary tables, of each kind [positions, rotated]
  MaybeTensor wanted;                                  // as in Decoder::run
  MaybeTensor adapters;  // [tokens] int32, as Linear::adapted takes them; none: no token has one
  int64_t top = 0;       // so many of each row's largest logits are needed; 0: all
  bool head = true;      // false: the head's input is returned in place of logits, so that `logits` may be called later
  MaybeTensor image_rows, image_embeddings;  // members of ImageRows; none: the pass has no images
  std::vector<at::Tensor> images_added;
  MaybeTensor ends;              // as in paged_attention
  bool ends_in_windows = false;  // `ends` holds for layers with a window alone
  MaybeTensor runs, saves;       // as in read_runs; none: no layer has states
  bool drafted = false;          // `advance` may be called for some of the tokens
};

using PassInputPtr = c10::intrusive_ptr<PassInput>;

// Returns the calls and the seconds of each part of the passes since the last call, and measures from now on, or stops.
c10::Dict<std::string, std::vector<double>> measure_parts(bool on) {
  c10::Dict<std::string, std::vector<double>> found;
  if (part_times)
    for (const auto& [name, part] : *part_times)
      found.insert(name, std::vector<double>{static_cast<double>(part.calls), part.seconds});
  delete part_times;
  part_times = on ? new std::unordered_map<std::string, PartTime> : nullptr;
  return found;
}

// The int8 pre-filter of a head, as Linear::top_logits takes it. weight: of the head, where the embedding has it, too.
// rows: the most for which it pays.
struct Prefilter : torch::CustomClassHolder {
  at::Tensor packed, scales, compensation, error_norm, weight_norm;
  MaybeTensor weight;
  int64_t rows = 0;
};

using PrefilterPtr = c10::intrusive_ptr<Prefilter>;

// What a model is made of. positions: of models that learn their embeddings, [positions, hidden_size]. embedding_norm:
// of the sum of both; or none. inputs: makes those of each layer; or none. logits_divisor, logits_softcap: what is done
// with the head's outputs; 1 and 0: nothing. prefilter: none: all logits are computed.
struct ModelModules : torch::CustomClassHolder {
  DecoderPtr decoder;
  EmbeddingPtr embedding;
  MaybeTensor positions;
  MaybeNorm embedding_norm;
  std::optional<LayerInputsPtr> inputs;
  MaybeNorm norm;
  LinearPtr head;
  double logits_divisor = 1, logits_softcap = 0;
  std::optional<PrefilterPtr> prefilter;
};

using ModelModulesPtr = c10::intrusive_ptr<ModelModules>;

// A whole model: from tokens to logits. Whatever a step brings, it is computed here: adapters, masks of rows, and
// hidden states that somebody wants to read.
class CausalLM : public torch::CustomClassHolder {
 public:
  explicit CausalLM(const ModelModulesPtr& modules)
      : decoder_(modules->decoder), embedding_(modules->embedding), position_embedding_(modules->positions),
        embedding_norm_(modules->embedding_norm), inputs_(modules->inputs.value_or(nullptr)), norm_(modules->norm),
        head_(modules->head), logits_divisor_(modules->logits_divisor), logits_softcap_(modules->logits_softcap),
        prefilter_(modules->prefilter.value_or(nullptr)) {
    TORCH_CHECK(decoder_ && embedding_ && head_, "a model has a decoder, an embedding and a head");
  }

  // Takes the KV blocks of all layers, with what their numbers are multiplied by.
  void attach_cache(std::vector<at::Tensor> keys, std::vector<at::Tensor> values, std::vector<double> key_scales,
                    std::vector<double> value_scales) {
    caches_ = caches_of(keys, values, key_scales, value_scales);
  }

  // Takes the states of all slots, of each layer those that its mixer has.
  void attach_states(States states) { states_ = std::move(states), projected_.clear(); }

  // Moves the states of a slot on by the first of the tokens that the last pass had drafted for it. first: the index of
  // the first one in the pass.
  void advance(int64_t slot, int64_t first, int64_t tokens) {
    decoder_->advance(projected_, states_, slot, first, tokens, drafting_adapters_);
  }

  // Takes what `decode` reads and writes, of all rows. tokens, positions: [most] int64, tables: [most, blocks] int32,
  // adapters: [most] int32. rope_deltas: [most] int64, rotary positions less positions. state_slots: [most] int64.
  void attach_rows(at::Tensor tokens, at::Tensor positions, at::Tensor tables, at::Tensor adapters,
                   at::Tensor rope_deltas, at::Tensor state_slots, int64_t block_size) {
    starts_ = at::arange(tokens.size(0) + 1, tables.options());
    tokens_ = std::move(tokens), positions_ = std::move(positions), tables_ = std::move(tables);
    adapters_ = std::move(adapters), rope_deltas_ = std::move(rope_deltas), block_size_ = block_size;
    state_slots_ = std::move(state_slots);
  }

  // From now on the embedding and the head are this rank's part of them, an equal number of tokens of each rank.
  // vocab_size: tokens of all ranks, without those that fill up the last one's.
  void split(RanksPtr ranks, int64_t vocab_size) {
    decoder_->split(ranks);
    ranks_ = std::move(ranks), vocab_size_ = vocab_size;
  }

  // From now on passes return the input of the head, and those of these layers, in order, as well.
  void tap(std::vector<int64_t> layers) { tapped_ = std::move(layers), taps_head_ = true; }

  // A step in which the first rows decode: from each row's last token to its next one. It moves their positions on.
  // cos, sin: rotary tables, of each kind [positions, rotated]. adapted: a row has an adapter. top, head: as in
  // forward. Returns what forward does, and in between, if top is 1, the argmax of each row, [rows] int64, which then
  // are the rows' next inputs, too.
  std::tuple<at::Tensor, MaybeTensor, std::vector<at::Tensor>> decode(int64_t rows, std::vector<at::Tensor> cos,
                                                                      std::vector<at::Tensor> sin, bool adapted,
                                                                      int64_t top, bool head) {
    const TimedPart part("pass");
    at::Tensor tokens = tokens_.narrow(0, 0, rows), positions = positions_.narrow(0, 0, rows);
    const at::Tensor tables = tables_.narrow(0, 0, rows);
    const MaybeTensor adapters = adapted ? MaybeTensor(adapters_.narrow(0, 0, rows)) : MaybeTensor();
    const auto [slots, lengths] = decode_places(positions, tables, block_size_);
    at::Tensor rotary = at::empty_like(positions);
    for (int64_t r = 0; r < rows; ++r)
      rotary.mutable_data_ptr<int64_t>()[r] =
          positions.const_data_ptr<int64_t>()[r] + rope_deltas_.const_data_ptr<int64_t>()[r];
    Runs runs;
    if (const int64_t count = state_slots())
      for (int64_t r = 0; r < rows; ++r) {
        runs.push_back({r, 1, state_slots_.const_data_ptr<int64_t>()[r], true, {}});
        TORCH_CHECK(0 <= runs.back().slot && runs.back().slot < count);
      }
    auto [logits, taps] = run(tokens, rotary,
                              {slots,
                               tables,
                               lengths,
                               starts_.narrow(0, 0, rows + 1),
                               std::move(cos),
                               std::move(sin),
                               adapters,
                               {},
                               std::move(runs)},
                              {}, top, head, {}, false);
    for (int64_t r = 0; r < rows; ++r) ++positions.mutable_data_ptr<int64_t>()[r];
    if (top != 1 || !head) return {std::move(logits), {}, std::move(taps)};
    const at::Tensor argmax_ids = timed("argmax", [&] { return argmax(logits, {}, {}); });
    std::copy_n(argmax_ids.const_data_ptr<int64_t>(), rows, tokens.mutable_data_ptr<int64_t>());
    return {std::move(logits), argmax_ids, std::move(taps)};
  }

  // Computes any pass. Returns the logits of the wanted tokens, [rows, vocab_size], and what is tapped.
  std::tuple<at::Tensor, std::vector<at::Tensor>> forward(const PassInputPtr& input) {
    const TimedPart part("pass");
    Pass pass{.slots = input->slots,
              .tables = input->tables,
              .kv_lengths = input->kv_lengths,
              .query_starts = input->query_starts,
              .cos = input->cos,
              .sin = input->sin,
              .adapters = input->adapters,
              .ends = input->ends,
              .ends_in_windows = input->ends_in_windows};
    if (input->runs && input->saves)
      pass.runs = read_runs(*input->runs, *input->saves, state_slots(), input->tokens.size(0));
    ImageRows images;
    if (input->image_rows && input->image_embeddings)
      images = {*input->image_rows, *input->image_embeddings, input->images_added};
    return run(input->tokens, input->positions, std::move(pass), input->wanted, input->top, input->head, images,
               input->drafted);
  }

  // hidden: the head's input, [rows, hidden_size]. adapters: of its rows. top: as in forward. masks, masked_rows: as in
  // argmax; the largest logits of such a row are of those that the mask allows.
  at::Tensor logits(const at::Tensor& hidden, const MaybeTensor& adapters, int64_t top, const MaybeTensor& masks,
                    std::vector<int64_t> masked_rows) const {
    const TimedPart part("head");
    const bool changed = adapters && head_->adapters && !head_->adapters->empty();
    if (top > 0 && !changed && !ranks_ && prefilter_ && hidden.size(0) <= prefilter_->rows && logits_softcap_ == 0) {
      const Prefilter& filter = *prefilter_;
      return divided(head_->top_logits(hidden, top, filter.packed, filter.scales, filter.compensation,
                                       filter.error_norm, filter.weight_norm, filter.weight, masks,
                                       std::move(masked_rows)));
    }
    at::Tensor all = head_->adapted(hidden, adapters);
    if (ranks_) all = ranks_->all_gather(all).narrow(1, 0, vocab_size_).contiguous();
    all = divided(all);
    if (logits_softcap_ != 0)
      change_each(all, [cap = static_cast<float>(logits_softcap_)](float x, auto rounded) {
        return rounded(std::tanh(rounded(x / cap))) * cap;
      });
    return all;
  }

 private:
  std::tuple<at::Tensor, std::vector<at::Tensor>> run(const at::Tensor& tokens, const at::Tensor& positions, Pass pass,
                                                      const MaybeTensor& wanted, int64_t top, bool head,
                                                      const ImageRows& images, bool drafted) {
    own_threads = at::get_num_threads();
    at::Tensor hidden = timed("embedding", [&] { return (*embedding_)(tokens, ranks_); });
    if (images.rows.defined()) hidden.index_copy_(0, images.rows, images.embeddings);
    if (position_embedding_) add(hidden, rows_of(*position_embedding_, positions));
    if (embedding_norm_) hidden = (**embedding_norm_)(hidden);
    pass.positions = positions;
    if (inputs_) pass.inputs = (*inputs_)(tokens, hidden, pass.adapters, ranks_);
    for (std::vector<at::Tensor>* kinds : {&pass.cos, &pass.sin})
      for (at::Tensor& table : *kinds) table = rows_of(table, positions);
    const int64_t layers = static_cast<int64_t>(decoder_->layers()), added = static_cast<int64_t>(images.added.size());
    const bool reads_all = !tapped_.empty() && tapped_.back() == layers;
    const bool in_order = !wanted || (ascending(*wanted) && added < layers && !reads_all);
    std::vector<at::Tensor> taps;
    projected_.clear(), drafting_adapters_ = drafted ? pass.adapters : MaybeTensor();
    hidden = decoder_->run(hidden, caches_, states_, pass, in_order ? wanted : MaybeTensor{}, images, tapped_, taps,
                           drafted ? &projected_ : nullptr);
    if (!in_order) hidden = hidden.index_select(0, *wanted);
    if (norm_) hidden = timed("norms", [&] { return (**norm_)(hidden); });
    if (taps_head_) taps.insert(taps.begin(), hidden);
    if (!head) return {hidden, std::move(taps)};
    return {logits(hidden, wanted ? chosen_rows(pass.adapters, *wanted) : pass.adapters, top, {}, {}), std::move(taps)};
  }

  // The number of slots of states; 0: no layer has any.
  int64_t state_slots() const {
    for (const auto& each : states_)
      if (!each.empty()) return each[0].size(0);
    return 0;
  }

  at::Tensor divided(at::Tensor logits) const {
    if (logits_divisor_ != 1)
      change_each(logits, [divisor = static_cast<float>(logits_divisor_)](float x, auto) { return x / divisor; });
    return logits;
  }

  DecoderPtr decoder_;
  EmbeddingPtr embedding_;
  MaybeTensor position_embedding_;
  MaybeNorm embedding_norm_;
  LayerInputsPtr inputs_;  // or none
  MaybeNorm norm_;
  LinearPtr head_;
  double logits_divisor_, logits_softcap_;
  PrefilterPtr prefilter_;  // or none
  RanksPtr ranks_;          // or none
  int64_t vocab_size_ = 0;
  std::vector<int64_t> tapped_;
  bool taps_head_ = false;
  at::Tensor tokens_, positions_, tables_, adapters_, rope_deltas_, state_slots_;
  at::Tensor starts_;  // of queries; each row has one
  int64_t block_size_ = 0;
  std::vector<Cache> caches_;
  States states_;
  // What mixers got in the last pass, and its adapters, if it had drafted tokens.
  std::vector<at::Tensor> projected_;
  MaybeTensor drafting_adapters_;
};

}  // namespace

}  // namespace oatmill

TORCH_LIBRARY_FRAGMENT(oatmill, library) {
  using namespace oatmill;
  library.def("measure_parts(bool on) -> Dict(str, float[])", &measure_parts);
  // each before those whose methods take it
  library.class_<QuantizedWeights>("QuantizedWeights")
      .def(torch::init<>())
      .def_readwrite("kind", &QuantizedWeights::kind)
      .def_readwrite("starts", &QuantizedWeights::starts)
      .def_readwrite("scales", &QuantizedWeights::scales)
      .def_readwrite("offsets", &QuantizedWeights::offsets)
      .def_readwrite("zeros", &QuantizedWeights::zeros)
      .def_readwrite("codebook", &QuantizedWeights::codebook)
      .def_readwrite("order", &QuantizedWeights::order)
      .def_readwrite("scale_factors", &QuantizedWeights::scale_factors)
      .def_readwrite("offset_factors", &QuantizedWeights::offset_factors)
      .def_readwrite("zero", &QuantizedWeights::zero);
  library.class_<Adapters>("Adapters")
      .def(torch::init<int64_t>())
      .def("put", &Adapters::put)
      .def("drop", &Adapters::drop)
      .def("apply", [](const AdaptersPtr& self, const at::Tensor& x, at::Tensor y, const at::Tensor& numbers) {
        return self->apply(x, std::move(y), LoraRows(*self, numbers), {});
      });
  library.class_<Linear>("Linear")
      .def(torch::init<at::Tensor, int64_t, int64_t, std::optional<at::Tensor>, std::optional<at::Tensor>,
                       std::optional<at::Tensor>, std::vector<std::string>, std::vector<int64_t>,
                       std::optional<QuantizedWeightsPtr>>())
      .def("forward", &Linear::operator())
      .def("adapt", &Linear::adapt)
      .def("adapted", &Linear::adapted)
      .def("top_logits", &Linear::top_logits)
      .def("rows", &Linear::rows)
      .def_static("side_by_side",
                  [](std::vector<LinearPtr> parts) { return c10::make_intrusive<Linear>(std::move(parts)); });
  library.class_<Ranks>("Ranks")
      .def(torch::init<at::Tensor, int64_t, std::vector<int64_t>, int64_t, double>())
      .def_static("of_group",
                  [](std::string group, int64_t rank, int64_t world_size) {
                    return c10::make_intrusive<Ranks>(std::move(group), rank, world_size);
                  })
      .def("all_reduce", [](const RanksPtr& self, const at::Tensor& x) { self->all_reduce(x); })
      .def("all_gather", &Ranks::all_gather);
  library.class_<Norm>("Norm").def(torch::init<at::Tensor, MaybeTensor, double, bool, int64_t, int64_t>());
  library.class_<Experts>("Experts")
      .def(torch::init<std::string, bool, double, double>())
      .def("add", &Experts::add)
      .def("forward", &Experts::forward);
  library.class_<Routing>("Routing")
      .def(torch::init<>())
      .def_readwrite("chosen", &Routing::chosen)
      .def_readwrite("sigmoid", &Routing::sigmoid)
      .def_readwrite("bias", &Routing::bias)
      .def_readwrite("groups", &Routing::groups)
      .def_readwrite("chosen_groups", &Routing::chosen_groups)
      .def_readwrite("group_scores", &Routing::group_scores)
      .def_readwrite("normalised", &Routing::normalised)
      .def_readwrite("factor", &Routing::factor)
      .def_readwrite("wide", &Routing::wide)
      .def_readwrite("factors", &Routing::factors)
      .def_readwrite("share_inputs", &Routing::share_inputs);
  library.class_<Mixture>("Mixture")
      .def(torch::init<LinearPtr, ExpertsPtr, RoutingPtr>())
      .def("forward", [](const MixturePtr& self, const at::Tensor& x, const MaybeTensor& residual) {
        return (*self)(x, x, residual, {});
      });
  library.class_<Mixer>("Mixer")
      .def_static("gated_delta_net", &gated_delta_net)
      .def_static("kimi_delta_attention", &kimi_delta_attention)
      .def_static("mamba2", &mamba2_mixer)
      .def_static("mamba", &mamba_mixer)
      .def_static("short_convolution", &short_convolution);
  library.class_<Latents>("Latents").def(
      torch::init<int64_t, int64_t, std::optional<LinearPtr>, std::vector<LinearPtr>, std::vector<LinearPtr>>());
  library.class_<Attention>("Attention")
      .def(torch::init<>())
      .def_readwrite("heads", &Attention::heads)
      .def_readwrite("kv_heads", &Attention::kv_heads)
      .def_readwrite("head_dim", &Attention::head_dim)
      .def_readwrite("value_dim", &Attention::value_dim)
      .def_readwrite("value_scale", &Attention::value_scale)
      .def_readwrite("latents", &Attention::latents)
      .def_readwrite("scaling", &Attention::scaling)
      .def_readwrite("softcap", &Attention::softcap)
      .def_readwrite("window", &Attention::window)
      .def_readwrite("chunk", &Attention::chunk)
      .def_readwrite("sinks", &Attention::sinks)
      .def_readwrite("alibi_slopes", &Attention::alibi_slopes)
      .def_readwrite("rounded_alibi", &Attention::rounded_alibi)
      .def_readwrite("rotation", &Attention::rotation)
      .def_readwrite("gated", &Attention::gated)
      .def_readwrite("grouped", &Attention::grouped)
      .def_readwrite("clip", &Attention::clip)
      .def_readwrite("keys_of", &Attention::keys_of)
      .def_readwrite("tuning", &Attention::tuning);
  library.class_<AltUp>("AltUp").def(
      torch::init<NormPtr, LinearPtr, LinearPtr, LinearPtr, MaybeTensor, LinearPtr, LinearPtr, NormPtr>());
  library.class_<Streams>("Streams").def(torch::init<std::vector<LinearPtr>, std::vector<LinearPtr>>());
  library.class_<LayerModules>("LayerModules")
      .def(torch::init<>())
      .def_readwrite("norms", &LayerModules::norms)
      .def_readwrite("linears", &LayerModules::linears)
      .def_readwrite("scales", &LayerModules::scales)
      .def_readwrite("attention", &LayerModules::attention)
      .def_readwrite("mixer", &LayerModules::mixer)
      .def_readwrite("mixture", &LayerModules::mixture)
      .def_readwrite("altup", &LayerModules::altup)
      .def_readwrite("scale", &LayerModules::scale)
      .def_readwrite("deviations", &LayerModules::deviations)
      .def_readwrite("whole", &LayerModules::whole);
  library.class_<Decoder>("Decoder")
      .def(torch::init<std::string, bool, bool, double, bool, std::optional<StreamsPtr>>())
      .def("add_layer", &Decoder::add_layer);
  library.class_<Embedding>("Embedding").def(torch::init<at::Tensor, std::optional<LinearPtr>, double>());
  library.class_<LayerInputs>("LayerInputs")
      .def(torch::init<EmbeddingPtr, int64_t, LinearPtr, NormPtr, double, double>());
  library.class_<PassInput>("PassInput")
      .def(torch::init<>())
      .def_readwrite("tokens", &PassInput::tokens)
      .def_readwrite("positions", &PassInput::positions)
      .def_readwrite("slots", &PassInput::slots)
      .def_readwrite("tables", &PassInput::tables)
      .def_readwrite("kv_lengths", &PassInput::kv_lengths)
      .def_readwrite("query_starts", &PassInput::query_starts)
      .def_readwrite("cos", &PassInput::cos)
      .def_readwrite("sin", &PassInput::sin)
      .def_readwrite("wanted", &PassInput::wanted)
      .def_readwrite("adapters", &PassInput::adapters)
      .def_readwrite("top", &PassInput::top)
      .def_readwrite("head", &PassInput::head)
      .def_readwrite("image_rows", &PassInput::image_rows)
      .def_readwrite("image_embeddings", &PassInput::image_embeddings)
      .def_readwrite("images_added", &PassInput::images_added)
      .def_readwrite("ends", &PassInput::ends)
      .def_readwrite("ends_in_windows", &PassInput::ends_in_windows)
      .def_readwrite("runs", &PassInput::runs)
      .def_readwrite("saves", &PassInput::saves)
      .def_readwrite("drafted", &PassInput::drafted);
  library.class_<Prefilter>("Prefilter")
      .def(torch::init<>())
      .def_readwrite("packed", &Prefilter::packed)
      .def_readwrite("scales", &Prefilter::scales)
      .def_readwrite("compensation", &Prefilter::compensation)
      .def_readwrite("error_norm", &Prefilter::error_norm)
      .def_readwrite("weight_norm", &Prefilter::weight_norm)
      .def_readwrite("weight", &Prefilter::weight)
      .def_readwrite("rows", &Prefilter::rows);
  library.class_<ModelModules>("ModelModules")
      .def(torch::init<>())
      .def_readwrite("decoder", &ModelModules::decoder)
      .def_readwrite("embedding", &ModelModules::embedding)
      .def_readwrite("positions", &ModelModules::positions)
      .def_readwrite("embedding_norm", &ModelModules::embedding_norm)
      .def_readwrite("inputs", &ModelModules::inputs)
      .def_readwrite("norm", &ModelModules::norm)
      .def_readwrite("head", &ModelModules::head)
      .def_readwrite("logits_divisor", &ModelModules::logits_divisor)
      .def_readwrite("logits_softcap", &ModelModules::logits_softcap)
      .def_readwrite("prefilter", &ModelModules::prefilter);
  library.class_<CausalLM>("CausalLM")
      .def(torch::init<ModelModulesPtr>())
      .def("attach_cache", &CausalLM::attach_cache)
      .def("attach_rows", &CausalLM::attach_rows)
      .def("attach_states", &CausalLM::attach_states)
      .def("advance", &CausalLM::advance)
      .def("split", &CausalLM::split)
      .def("tap", &CausalLM::tap)
      .def("decode", &CausalLM::decode)
      .def("forward", &CausalLM::forward)
      .def("logits", &CausalLM::logits);
}
