// What the kernels offer each other; each is described where it is defined.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

namespace oatmill {

at::Tensor rms_norm(const at::Tensor& input, const at::Tensor& weight, double eps);

at::Tensor layer_norm(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                      double eps);

enum class Activation { relu, relu2, gelu, gelu_tanh, silu };

Activation activation_named(const std::string& name);

at::Tensor activate(const at::Tensor& x, Activation activation, bool gated);

void multiply_by_sigmoid(at::Tensor& x, const at::Tensor& gate);

at::Tensor rows_of(const at::Tensor& table, const at::Tensor& indices);

void rotate(at::Tensor& query, const at::Tensor& cos, const at::Tensor& sin, bool interleaved);

void rotate_and_write(at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& cos,
                      const at::Tensor& sin, at::Tensor& keys, at::Tensor& values, const at::Tensor& slots,
                      double key_scale, double value_scale, bool interleaved = false);

void write_kv(const at::Tensor& key, const at::Tensor& value, at::Tensor& keys, at::Tensor& values,
              const at::Tensor& slots, double key_scale, double value_scale);

at::Tensor paged_attention(const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values,
                           const at::Tensor& tables, const at::Tensor& kv_lengths, const at::Tensor& query_starts,
                           double scaling, int64_t window, double softcap,
                           const std::optional<at::Tensor>& alibi_slopes, bool rounded_alibi,
                           const std::optional<at::Tensor>& sinks, double key_scale, double value_scale,
                           int64_t chunk = 0, const std::optional<at::Tensor>& ends = {});

std::tuple<at::Tensor, at::Tensor> decode_places(const at::Tensor& positions, const at::Tensor& tables,
                                                 int64_t block_size);

at::Tensor argmax(const at::Tensor& scores, const std::optional<at::Tensor>& masks, at::IntArrayRef masked_rows);

}  // namespace oatmill
