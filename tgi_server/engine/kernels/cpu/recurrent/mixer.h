// Layers without keys, such as a gated delta net or Mamba-2, between their projections.

#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <optional>
#include <vector>

#include "gemm/linear.h"
#include "recurrent/runs.h"

namespace oatmill {

struct Mixer : torch::CustomClassHolder {
  // projected: [tokens, size], what the first projections give side by side. states: of all slots, each [slots, ...];
  // they are updated in place. adapters: as Linear::adapted takes them, for linear layers in between. Returns what the
  // last projection takes, [tokens, its inputs].
  virtual at::Tensor operator()(const at::Tensor& projected, std::vector<at::Tensor>& states, const Runs& runs,
                                const std::optional<at::Tensor>& adapters) const = 0;
};

using MixerPtr = c10::intrusive_ptr<Mixer>;

// Each is described where it is defined.
MixerPtr gated_delta_net(int64_t key_heads, bool grouped, at::Tensor taps, at::Tensor bases, at::Tensor bias,
                         double rate_scale, at::Tensor weight, double eps);

MixerPtr kimi_delta_attention(at::Tensor taps, LinearPtr decays, LinearPtr gate, at::Tensor bases, at::Tensor bias,
                              at::Tensor weight, double eps);

MixerPtr mamba2_mixer(at::Tensor taps, std::optional<at::Tensor> taps_bias, at::Tensor rates, at::Tensor skip,
                      at::Tensor steps_bias, double least, double most, std::optional<at::Tensor> weight, double eps,
                      int64_t group, bool gate_first, int64_t groups);

MixerPtr mamba_mixer(at::Tensor taps, std::optional<at::Tensor> taps_bias, LinearPtr inner,
                     std::vector<std::optional<at::Tensor>> norms, double eps, LinearPtr steps, at::Tensor steps_bias,
                     at::Tensor rates, at::Tensor skip);

MixerPtr short_convolution(at::Tensor taps, std::optional<at::Tensor> bias);

}  // namespace oatmill
