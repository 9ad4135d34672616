// Linear layers with 8-bit weights, on CPUs with AVX-512 VNNI. Weights have one scale for each output; an input row gets
// a scale of its own when it arrives.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "dtypes.h"
#include "int8.h"
#include "linear.h"
#include "ops.h"

namespace oatmill {

namespace {

constexpr int64_t DEPTH = WORD;  // bytes
constexpr int64_t QUANTISED_TOGETHER = 16;  // rows

at::Tensor int8_pack(const at::Tensor& weight) { return pack_weight<int8_t>(weight); }

// Rounds a row to bytes, and returns its scale.
template <typename T>
float quantise_row(const T* from, int64_t size, int64_t padded_size, uint8_t* to) {
  const Bits magnitude = Bits{} + 0x7fffffff;
  Lanes peaks = {};
  int64_t k = 0;
  for (; k + LANES <= size; k += LANES) {
    const Lanes values = load(from + k);
    const Bits bits = reinterpret_cast<const Bits&>(values) & magnitude;
    peaks = larger(peaks, reinterpret_cast<const Lanes&>(bits));
  }
  float peak = largest(peaks);
  for (; k < size; ++k) peak = std::max(peak, std::abs(static_cast<float>(from[k])));
  const float factor = peak > 0 ? 127.0f / peak : 0.0f;
  for (k = 0; k + LANES <= size; k += LANES) {
    const auto bytes = __builtin_convertvector(nearest(load(from + k) * factor) + OFFSET, Bytes);
    std::memcpy(to + k, &bytes, sizeof(bytes));
  }
  for (; k < size; ++k)
    to[k] = static_cast<uint8_t>(static_cast<int32_t>(std::round(static_cast<float>(from[k]) * factor)) + OFFSET);
  std::memset(to + size, OFFSET, padded_size - size);
  return peak / 127.0f;
}

// Rounds rows to bytes: [rows, 4 * depth], and the scale of each.
template <typename T>
void quantise(const T* input, int64_t rows, int64_t size, int64_t depth, uint8_t* bytes, float* scales) {
  for_each_item(parts(rows, QUANTISED_TOGETHER), [&](int64_t item) {
    const int64_t end = std::min(rows, (item + 1) * QUANTISED_TOGETHER);
    for (int64_t r = item * QUANTISED_TOGETHER; r < end; ++r)
      scales[r] = quantise_row(input + r * size, size, depth * DEPTH, bytes + r * depth * DEPTH);
  });
}

bool int8_supported() { return MULTIPLIES_BYTES; }

}  // namespace

// input: [..., inputs] float32 or bfloat16; packed: of int8_pack; scales, corrections, bias: [outputs, padded to a
// tile] float32, corrections being OFFSET times the sum of an output's weights; residual: [..., outputs], added last.
// Returns [..., outputs] in the input's dtype.
at::Tensor int8_linear(const at::Tensor& input, const at::Tensor& packed, int64_t outputs, const at::Tensor& scales,
                       const at::Tensor& corrections, const std::optional<at::Tensor>& bias, bool relu,
                       const std::optional<at::Tensor>& residual) {
  TORCH_CHECK(int8_supported(), "8-bit weights need a CPU with AVX-512 VNNI");
  const at::Tensor x = input.contiguous();
  const int64_t size = x.size(-1), rows = x.numel() / size, depth = packed.size(1);
  TORCH_CHECK(parts(size, DEPTH) == depth, "the input has ", size, " features, the weights ", depth * DEPTH);
  auto shape = x.sizes().vec();
  shape.back() = outputs;
  at::Tensor output = at::empty(shape, x.options());
#if defined(__AVX512VNNI__)
  std::vector<uint8_t> bytes(rows * depth * DEPTH);
  std::vector<float> input_scales(rows);
  const Product product{reinterpret_cast<const char*>(bytes.data()),
                        static_cast<const char*>(packed.const_data_ptr()), rows, depth, outputs};
  const float* weight_scales = scales.const_data_ptr<float>();
  const float* excess = corrections.const_data_ptr<float>();
  const auto number = [&](const char* totals, int64_t row, int64_t n) {
    Ints sums;
    std::memcpy(&sums, totals, sizeof(sums));
    return (__builtin_convertvector(sums, Lanes) - load(excess + n)) * load(weight_scales + n) * input_scales[row];
  };
  by_dtype(x, [&]<typename T>(T*) {
    const at::Tensor added = residual ? residual->contiguous() : at::Tensor();
    quantise(x.const_data_ptr<T>(), rows, size, depth, bytes.data(), input_scales.data());
    run_product<AddBytes>(product,
                          Finish<T>{bias ? bias->const_data_ptr<float>() : nullptr, relu,
                                    residual ? added.const_data_ptr<T>() : nullptr, output.mutable_data_ptr<T>()},
                          number);
  });
#endif
  return output;
}

}  // namespace oatmill

TORCH_LIBRARY_FRAGMENT(oatmill, library) {
  library.def("int8_supported() -> bool", &oatmill::int8_supported);
  library.def("int8_pack(Tensor weight) -> Tensor");
  library.def(
      "int8_linear(Tensor input, Tensor packed, int outputs, Tensor scales, Tensor corrections, Tensor? bias, bool relu, "
      "Tensor? residual) -> Tensor");
}

TORCH_LIBRARY_IMPL(oatmill, CPU, library) {
  library.impl("int8_pack", &oatmill::int8_pack);
  library.impl("int8_linear", &oatmill::int8_linear);
}
