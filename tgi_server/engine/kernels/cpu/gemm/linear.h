// A linear layer, y = x W^T + b.

#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "gemm/lora.h"

namespace oatmill {

struct Linear;

// What comes after the products, as in Epilogue; residual and adapted: or null.
struct Finish {
  const at::Tensor* residual = nullptr;
  const bool* adapted = nullptr;
};

// A kernel (variant) for a kind of weights.
struct LinearKernel {
  const char* name;
  bool (*available)();  // on this CPU
  int64_t depth;        // words, of which a weight must have a multiple
  // tiles: those of which outputs are computed, or null for all.
  void (*run)(const Linear& layer, const at::Tensor& x, const Finish& finish, const std::vector<int64_t>* tiles,
              at::Tensor& output);
};

// What belongs to quantized weights of 4, 6 or 8 bits beside the words that quantized_pack makes of them;
// quantized_gemm.h says how they are multiplied. kind: "int4", "codebook", "int6", "int8" or "fp8". starts: [groups +
// 1] int32, in words, or for 6 bits in units of 16 weights. scales, and one of offsets and zeros or none: [tiles,
// groups, COLUMNS]; scales are float32, bfloat16 or float16, offsets float32, zeros int8. codebook: [16] float32, of
// that kind only. order: as given to quantized_pack; none where it changes nothing. scale_factors, offset_factors:
// int8, [tiles, groups, COLUMNS]; then scales and offsets are float16, [tiles, blocks, COLUMNS], for blocks of 2^n
// groups, and are multiplied by the factors. zero: the zero point of all groups.
struct QuantizedWeights : torch::CustomClassHolder {
  std::string kind;
  at::Tensor starts, scales;
  std::optional<at::Tensor> offsets, zeros, codebook, order, scale_factors, offset_factors;
  int64_t zero = 0;

  // Raises an error if shapes or dtypes are not as they should be.
  void check() const;
};

using QuantizedWeightsPtr = c10::intrusive_ptr<QuantizedWeights>;

std::span<const LinearKernel> quantized_kernels_of(const std::string& kind);

// packed: the weights as linear_pack arranges them, whose dtype says of which kind they are. bias, and of 8-bit weights
// scales and compensation: [outputs, padded to a tile] float32; compensation is INPUT_ZERO_POINT times the sum of an
// output's weights. codes: for weights of quantized_pack. kernels: their names, each with the fewest rows from which on
// it is taken, from_rows, ascending.
struct Linear : torch::CustomClassHolder {
  at::Tensor packed;
  int64_t inputs, outputs;
  std::optional<at::Tensor> bias, scales, compensation;
  QuantizedWeightsPtr codes;
  AdaptersPtr adapters;  // or none

  Linear(at::Tensor packed, int64_t inputs, int64_t outputs, std::optional<at::Tensor> bias,
         std::optional<at::Tensor> scales, std::optional<at::Tensor> compensation, std::vector<std::string> kernels,
         std::vector<int64_t> from_rows, std::optional<QuantizedWeightsPtr> codes);

  // Layers with the same input and different kinds of weights, whose outputs stand side by side.
  explicit Linear(std::vector<c10::intrusive_ptr<Linear>> parts);

  // x: [..., inputs] float32, bfloat16 or float16; residual: [..., outputs], added last. Returns [..., outputs]. Both
  // have the dtype of x.
  at::Tensor operator()(const at::Tensor& x, const std::optional<at::Tensor>& residual = {}) const;

  // The same, with each row changed by its adapter; those of other rows are to the last bit what the call above gives.
  // numbers: as Adapters::apply takes them; none: no row has one.
  at::Tensor adapted(const at::Tensor& x, const std::optional<at::Tensor>& numbers,
                     const std::optional<at::Tensor>& residual = {}) const;

  void adapt(AdaptersPtr these) { adapters = std::move(these); }

  // Writes the outputs of some tiles to output, [..., outputs], to the last bit what the call above gives. Both tensors
  // are contiguous.
  void write_tiles(const at::Tensor& x, const std::vector<int64_t>& tiles, at::Tensor& output) const;

  // The same with some outputs. weight: the layer's, [outputs, inputs].
  void write_outputs(const at::Tensor& x, const std::vector<int64_t>& chosen, const at::Tensor& weight,
                     at::Tensor& output) const;

  // Returns the weights of some outputs, [rows, inputs], of a layer with quantized weights. indices: [rows] int64.
  at::Tensor rows(const at::Tensor& indices, at::ScalarType dtype) const;

  // See argmax_prefilter.cpp.
  at::Tensor top_logits(const at::Tensor& input, int64_t count, const at::Tensor& prefilter, const at::Tensor& scales,
                        const at::Tensor& compensation, const at::Tensor& error_norm, const at::Tensor& weight_norm,
                        const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& masks,
                        std::vector<int64_t> masked_rows) const;

 private:
  const LinearKernel& kernel_for(int64_t rows) const;
  at::Tensor run(const at::Tensor& x, const std::optional<at::Tensor>& residual, const bool* adapted) const;

  std::vector<const LinearKernel*> variants_;
  std::vector<int64_t> from_rows_;
  std::vector<c10::intrusive_ptr<Linear>> parts_;  // whose outputs stand side by side; none for other layers
};

using LinearPtr = c10::intrusive_ptr<Linear>;

}  // namespace oatmill
