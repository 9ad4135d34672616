// All decoder layers of a model in one call: a step of one token has a few hundred kernels, each of which would
// otherwise wait for Python.

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "linear_layer.h"
#include "ops.h"
#include "parallel.h"

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

// qkv: query, key and value side by side. up: with the gate before it where the feed-forward part is gated.
struct Layer {
  NormPtr attention_norm;
  LinearPtr qkv, output;
  NormPtr feed_forward_norm;
  LinearPtr up, down;
  double scaling;
  int64_t window;
  double softcap;
};

// Where the tokens of a step stand, as attention wants to know it, and which adapter each has.
struct Places {
  at::Tensor slots, tables, kv_lengths, query_starts;
  MaybeTensor cos, sin, adapters;
};

// A layer's KV blocks, and what their numbers are multiplied by.
struct Cache {
  at::Tensor keys, values;
  double key_scale, value_scale;
};

// Pre-norm layers, with a SiLU-gated feed-forward part (gated) or one with ReLU.
class Decoder : public torch::CustomClassHolder {
 public:
  Decoder(int64_t heads, int64_t kv_heads, int64_t head_dim, bool gated)
      : heads_(heads), kv_heads_(kv_heads), head_dim_(head_dim), gated_(gated) {}

  void add_layer(NormPtr attention_norm, LinearPtr qkv, LinearPtr output, NormPtr feed_forward_norm, LinearPtr up,
                 LinearPtr down, double scaling, int64_t window, double softcap) {
    layers_.push_back({std::move(attention_norm), std::move(qkv), std::move(output), std::move(feed_forward_norm),
                       std::move(up), std::move(down), scaling, window, softcap});
  }

  // hidden: [tokens, hidden_size], as is the result. keys, values: the cache of each layer, with its scales. cos, sin:
  // [tokens, rotated] where positions are rotary. adapters: as Linear::adapted takes them. The others as in
  // paged_attention and write_kv.
  at::Tensor forward(const at::Tensor& hidden, std::vector<at::Tensor> keys, std::vector<at::Tensor> values,
                     std::vector<double> key_scales, std::vector<double> value_scales, const at::Tensor& slots,
                     const at::Tensor& tables, const at::Tensor& kv_lengths, const at::Tensor& query_starts,
                     const MaybeTensor& cos, const MaybeTensor& sin, const MaybeTensor& adapters) const {
    TORCH_CHECK(keys.size() == layers_.size() && values.size() == layers_.size(), "each layer needs its cache");
    TORCH_CHECK(key_scales.size() == layers_.size() && value_scales.size() == layers_.size(), "and its scales");
    own_threads = true;
    const Places places{slots, tables, kv_lengths, query_starts, cos, sin, adapters};
    at::Tensor residual = hidden;
    for (size_t i = 0; i < layers_.size(); ++i) {
      const Layer& layer = layers_[i];
      Cache cache{keys[i], values[i], key_scales[i], value_scales[i]};
      const at::Tensor attended = attend(layer, (*layer.attention_norm)(residual), places, cache);
      residual = layer.output->adapted(attended, adapters, false, residual);
      const at::Tensor normed = (*layer.feed_forward_norm)(residual);
      const at::Tensor up = layer.up->adapted(normed, adapters, !gated_);
      residual = layer.down->adapted(gated_ ? silu_mul(up) : up, adapters, false, residual);
    }
    return residual;
  }

 private:
  at::Tensor attend(const Layer& layer, const at::Tensor& x, const Places& places, Cache& cache) const {
    const at::Tensor joined = layer.qkv->adapted(x, places.adapters).view({x.size(0), heads_ + 2 * kv_heads_, head_dim_});
    at::Tensor query = joined.narrow(1, 0, heads_);
    const at::Tensor key = joined.narrow(1, heads_, kv_heads_);
    const at::Tensor value = joined.narrow(1, heads_ + kv_heads_, kv_heads_);
    if (places.cos)
      rotate_and_write(query, key, value, *places.cos, *places.sin, cache.keys, cache.values, places.slots,
                       cache.key_scale, cache.value_scale);
    else
      write_kv(key, value, cache.keys, cache.values, places.slots, cache.key_scale, cache.value_scale);
    return paged_attention(query, cache.keys, cache.values, places.tables, places.kv_lengths, places.query_starts,
                           layer.scaling, layer.window, layer.softcap, {}, false, cache.key_scale, cache.value_scale)
        .view({x.size(0), heads_ * head_dim_});
  }

  int64_t heads_, kv_heads_, head_dim_;
  bool gated_;
  std::vector<Layer> layers_;
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
  library.class_<Decoder>("Decoder")
      .def(torch::init<int64_t, int64_t, int64_t, bool>())
      .def("add_layer", &Decoder::add_layer)
      .def("forward", &Decoder::forward);
}
