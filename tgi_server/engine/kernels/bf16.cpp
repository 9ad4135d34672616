// Linear layers with bfloat16 weights, on CPUs with AVX-512 BF16. Sums are in float.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "bf16.h"
#include "linear.h"
#include "ops.h"

namespace oatmill {

namespace {

using T = c10::BFloat16;

constexpr int64_t DEPTH = WORD / sizeof(T);

bool bf16_supported() { return MULTIPLIES_PAIRS; }

at::Tensor bf16_pack(const at::Tensor& weight) { return pack_weight<T>(weight); }

}  // namespace

// input: [..., inputs], an even number of them; packed: of bf16_pack; bias: [outputs, padded to a tile] float32;
// residual: [..., outputs], added last. Returns [..., outputs]. All but the bias is bfloat16.
at::Tensor bf16_linear(const at::Tensor& input, const at::Tensor& packed, int64_t outputs,
                       const std::optional<at::Tensor>& bias, bool relu, const std::optional<at::Tensor>& residual) {
  TORCH_CHECK(bf16_supported(), "these weights need a CPU with AVX-512 BF16");
  const at::Tensor x = input.contiguous();
  const int64_t inputs = x.size(-1), rows = x.numel() / inputs, depth = packed.size(1);
  TORCH_CHECK(inputs == depth * DEPTH, "the input has ", inputs, " features, the weights ", depth * DEPTH);
  auto shape = x.sizes().vec();
  shape.back() = outputs;
  at::Tensor output = at::empty(shape, x.options());
#if defined(__AVX512BF16__)
  const at::Tensor added = residual ? residual->contiguous() : at::Tensor();
  const Product product{static_cast<const char*>(x.const_data_ptr()), static_cast<const char*>(packed.const_data_ptr()),
                        rows, depth, outputs};
  const Finish<T> finish{bias ? bias->const_data_ptr<float>() : nullptr, relu,
                         residual ? added.const_data_ptr<T>() : nullptr, output.mutable_data_ptr<T>()};
  run_product<AddPairs>(product, finish, [](const char* totals, int64_t, int64_t) {
    return load(reinterpret_cast<const float*>(totals));
  });
#endif
  return output;
}

}  // namespace oatmill

TORCH_LIBRARY_FRAGMENT(oatmill, library) {
  library.def("bf16_supported() -> bool", &oatmill::bf16_supported);
  library.def("bf16_pack(Tensor weight) -> Tensor");
  library.def(
      "bf16_linear(Tensor input, Tensor packed, int outputs, Tensor? bias, bool relu, Tensor? residual) -> Tensor");
}

TORCH_LIBRARY_IMPL(oatmill, CPU, library) {
  library.impl("bf16_pack", &oatmill::bf16_pack);
  library.impl("bf16_linear", &oatmill::bf16_linear);
}
