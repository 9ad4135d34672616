// Linear layers with weights of 32, 16 or 8 bits; accumulators are float32, or int32 and exact. The layer has a table
// of kernels, each from a number of rows on.

#include "gemm/gemm.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "simd/dtypes.h"
#include "gemm/linear.h"
#include "gemm/mmla.h"
#include "gemm/microkernel.h"
#include "gemm/amx.h"
#include "gemm/dequant_gemm.h"

namespace oatmill {

namespace {

bool always() { return true; }

template <typename Kernel>
void run_dense(const Linear& layer, const at::Tensor& x, const Finish& finish, const std::vector<int64_t>* tiles,
               at::Tensor& output) {
  const int64_t rows = x.numel() / layer.inputs, depth = layer.packed.size(1);
  by_dtype(x, [&]<typename T>(T*) {
    const Input input = Kernel::prepare(x.const_data_ptr<T>(), rows, layer.inputs, depth);
    const GemmArgs product{input.data,
                           input.row_bytes,
                           static_cast<const char*>(layer.packed.const_data_ptr()),
                           rows,
                           depth,
                           layer.outputs,
                           input.tail,
                           input.tail_row_bytes};
    const Epilogue<T> epilogue{layer.bias ? layer.bias->const_data_ptr<float>() : nullptr,
                               finish.residual ? finish.residual->const_data_ptr<T>() : nullptr,
                               output.mutable_data_ptr<T>(), finish.adapted};
    if constexpr (std::is_same_v<typename Kernel::Weights, Int8Weights>) {
      const float* scales = layer.scales->const_data_ptr<float>();
      const float* compensation = layer.compensation->const_data_ptr<float>();
      run_gemm<Kernel>(product, epilogue, tiles, [&](const char* acc, int64_t row, int64_t n) {
        F32 sums = __builtin_convertvector(load_as<I32>(acc), F32);
        if (Kernel::OFFSET != 0) sums -= load_f32(compensation + n);
        return sums * load_f32(scales + n) * input.scales[row];
      });
    } else {
      run_gemm<Kernel>(product, epilogue, tiles, [](const char* acc, int64_t, int64_t) { return load_as<F32>(acc); });
    }
  });
}

template <typename Kernel>
constexpr LinearKernel kernel(const char* name, bool (*available)() = always, int64_t depth = 1) {
  return {name, available, depth, run_dense<Kernel>};
}

// The default is the first.
constexpr std::array FLOAT_KERNELS{kernel<Gemm<FmaDot<FloatWeights>>>("fma")};
constexpr std::array HALF_KERNELS{kernel<Gemm<FmaDot<HalfWeights>>>("fma"),
                                  kernel<Dequant16Gemm<HalfWeights>>("fma_dequant")};
constexpr std::array BF16_KERNELS{
#if OATMILL_BF16
    kernel<Gemm<Bf16Dot>>("bf16"),
#endif
    kernel<Gemm<FmaDot<Bf16Weights>>>("fma"),
    kernel<Dequant16Gemm<Bf16Weights>>("fma_dequant"),
#if OATMILL_MMLA
    kernel<MmlaGemm<Bf16Mmla>>("bf16_mmla", always, 2),
#endif
#if OATMILL_AMX
    kernel<AmxGemm<AmxTiles<Bf16Weights>>>("amx", amx_permitted, SIDE),
#endif
#if defined(OATMILL_EMULATED_TILES)
    kernel<AmxGemm<EmulatedTiles<Bf16Weights>>>("amx_emulated", always, SIDE),
#endif
};
constexpr std::array INT8_KERNELS{
#if OATMILL_INT8
    kernel<Gemm<Int8Dot>>("int8"),
#endif
    kernel<Gemm<Int16Dot>>("int16"),
#if OATMILL_MMLA
    kernel<MmlaGemm<Int8Mmla>>("int8_mmla", always, 2),
#endif
#if OATMILL_AMX
    kernel<AmxGemm<AmxTiles<Int8Weights>>>("amx", amx_permitted, SIDE),
#endif
#if defined(OATMILL_EMULATED_TILES)
    kernel<AmxGemm<EmulatedTiles<Int8Weights>>>("amx_emulated", always, SIDE),
#endif
};

// Calls work with a null pointer of the kind of weights that have this dtype, and its kernels.
template <typename Work>
auto by_weights(at::ScalarType dtype, const Work& work) {
  switch (dtype) {
    case at::kFloat:
      return work(static_cast<FloatWeights*>(nullptr), std::span<const LinearKernel>(FLOAT_KERNELS));
    case at::kHalf:
      return work(static_cast<HalfWeights*>(nullptr), std::span<const LinearKernel>(HALF_KERNELS));
    case at::kBFloat16:
      return work(static_cast<Bf16Weights*>(nullptr), std::span<const LinearKernel>(BF16_KERNELS));
    case at::kChar:
      return work(static_cast<Int8Weights*>(nullptr), std::span<const LinearKernel>(INT8_KERNELS));
    default:
      TORCH_CHECK(false, "weights are float32, bfloat16, float16 or int8, and not ", dtype);
  }
}

bool serves(const LinearKernel& kernel, const at::Tensor& packed) {
  return kernel.available() && packed.size(1) % kernel.depth == 0;
}

// Returns zeros into which linear_pack_into packs this number of outputs.
at::Tensor linear_room(const at::Tensor& weight, int64_t outputs) {
  return by_weights(weight.scalar_type(), [&]<typename Weights>(Weights*, std::span<const LinearKernel>) {
    return room_for<Weights>(weight, outputs);
  });
}

// Packs some outputs of a weight into the first tiles.
void linear_pack_into(const at::Tensor& weight, at::Tensor packed) {
  by_weights(weight.scalar_type(),
             [&]<typename Weights>(Weights*, std::span<const LinearKernel>) { pack_weight<Weights>(weight, packed); });
}

at::Tensor linear_pack(const at::Tensor& weight) {
  at::Tensor packed = linear_room(weight, weight.size(0));
  linear_pack_into(weight, packed);
  return packed;
}

// Returns the same packed weight in huge pages of its own.
at::Tensor linear_copy(const at::Tensor& packed) {
  return zeros_in_huge_pages(packed.sizes(), packed.options()).copy_(packed);
}

// Returns some outputs of a weight, [outputs, inputs], as linear_pack would arrange them, and anything behind the last.
template <typename Weights>
at::Tensor packed_rows(const at::Tensor& weight, const std::vector<int64_t>& chosen) {
  using Number = typename Weights::Number;
  constexpr int64_t DEPTH = Weights::DEPTH;
  const int64_t inputs = weight.size(1), depth = ceil_div(inputs, DEPTH), count = static_cast<int64_t>(chosen.size());
  at::Tensor packed = at::empty({ceil_div(count, COLUMNS), depth, COLUMNS * DEPTH}, weight.options());
  const Number* from = weight.const_data_ptr<Number>();
  Number* to = packed.mutable_data_ptr<Number>();
  constexpr int64_t TOGETHER = LINE / WORD;  // threads write no line in common
  parallel_for(ceil_div(count, TOGETHER), [&](int64_t part) {
    for (int64_t i = part * TOGETHER; i < std::min(count, (part + 1) * TOGETHER); ++i) {
      const Number* row = from + chosen[i] * inputs;
      for (int64_t k = 0; k < inputs; k += DEPTH)
        for (int64_t step = 0; step < DEPTH; ++step)
          to[(i / COLUMNS * depth + k / DEPTH) * COLUMNS * DEPTH + Weights::place(i % COLUMNS, step)] = row[k + step];
    }
  });
  return packed;
}

at::Tensor linear_unpack(const at::Tensor& packed, int64_t outputs, int64_t inputs) {
  return by_weights(packed.scalar_type(), [&]<typename Weights>(Weights*, std::span<const LinearKernel>) {
    return unpack_weight<Weights>(packed, outputs, inputs);
  });
}

// Returns the name of the instruction set that the kernels were compiled for: the newest part of it that they use.
std::string isa() {
#if OATMILL_AMX
  if (amx_permitted()) return "amx";
#endif
#if defined(__AVX512BF16__)
  return "avx512_bf16";
#elif defined(__AVX512VNNI__)
  return "avx512_vnni";
#elif defined(__AVX512BW__)
  return "avx512";
#elif defined(__AVXVNNI__)
  return "avx_vnni";
#elif defined(__AVX2__)
  return "avx2";
#elif OATMILL_MMLA
  return "neon_i8mm";
#elif defined(__ARM_FEATURE_DOTPROD)
  return "neon_dotprod";
#elif defined(__aarch64__)
  return "neon";
#else
  return "generic";
#endif
}

// Returns the names of the kernels for these weights on this CPU, the default first.
std::vector<std::string> linear_kernels(const at::Tensor& packed) {
  return by_weights(packed.scalar_type(), [&]<typename Weights>(Weights*, std::span<const LinearKernel> variants) {
    std::vector<std::string> names;
    for (const LinearKernel& kernel : variants)
      if (serves(kernel, packed)) names.emplace_back(kernel.name);
    return names;
  });
}

}  // namespace

Linear::Linear(at::Tensor packed, int64_t inputs, int64_t outputs, std::optional<at::Tensor> bias,
               std::optional<at::Tensor> scales, std::optional<at::Tensor> compensation,
               std::vector<std::string> kernels, std::vector<int64_t> from_rows,
               std::optional<QuantizedWeightsPtr> codes)
    : packed(std::move(packed)), inputs(inputs), outputs(outputs), bias(std::move(bias)), scales(std::move(scales)),
      compensation(std::move(compensation)), codes(codes ? *codes : QuantizedWeightsPtr()),
      from_rows_(std::move(from_rows)) {
  TORCH_CHECK(!kernels.empty() && kernels.size() == from_rows_.size(), "each kernel needs its number of rows");
  const auto choose = [&](std::span<const LinearKernel> variants) {
    for (const std::string& name : kernels) {
      const auto found = std::find_if(variants.begin(), variants.end(), [&](const LinearKernel& kernel) {
        return kernel.name == name && serves(kernel, this->packed);
      });
      // A kernel that cannot take this layer's depth is replaced by the default.
      variants_.push_back(found != variants.end() ? &*found : &variants[0]);
    }
  };
  if (this->codes) {
    this->codes->check();
    choose(quantized_kernels_of(this->codes->kind));
    return;
  }
  by_weights(this->packed.scalar_type(), [&]<typename Weights>(Weights*, std::span<const LinearKernel> variants) {
    TORCH_CHECK(ceil_div(inputs, Weights::DEPTH) == this->packed.size(1), "weights of ", inputs,
                " inputs are expected");
    choose(variants);
  });
}

Linear::Linear(std::vector<LinearPtr> parts) : inputs(parts.at(0)->inputs), outputs(0), parts_(std::move(parts)) {
  for (const LinearPtr& part : parts_) {
    TORCH_CHECK(part->inputs == inputs, "layers side by side have the same inputs");
    outputs += part->outputs;
  }
}

at::Tensor Linear::run(const at::Tensor& x, const std::optional<at::Tensor>& residual, const bool* adapted) const {
  if (!parts_.empty()) {
    std::vector<at::Tensor> made;
    for (const LinearPtr& part : parts_) made.push_back(part->run(x, {}, adapted));
    at::Tensor joined = at::cat(made, -1);
    return residual ? joined.add_(*residual) : joined;
  }
  TORCH_CHECK(x.size(-1) == inputs, "the input has ", x.size(-1), " features, the weights ", inputs);
  const at::Tensor dense = x.contiguous(), added = residual ? residual->contiguous() : at::Tensor();
  auto shape = x.sizes().vec();
  shape.back() = outputs;
  at::Tensor output = at::empty(shape, x.options());
  TORCH_CHECK(!residual || (added.numel() == output.numel() && added.scalar_type() == x.scalar_type()));
  const int64_t rows = x.numel() / inputs;
  if (rows > 0) kernel_for(rows).run(*this, dense, {residual ? &added : nullptr, adapted}, nullptr, output);
  return output;
}

at::Tensor Linear::operator()(const at::Tensor& x, const std::optional<at::Tensor>& residual) const {
  return run(x, residual, nullptr);
}

at::Tensor Linear::adapted(const at::Tensor& x, const std::optional<at::Tensor>& numbers,
                           const std::optional<at::Tensor>& residual) const {
  if (!numbers || !adapters) return run(x, residual, nullptr);
  const LoraRows rows(*adapters, *numbers);
  if (!rows.any()) return run(x, residual, nullptr);
  return adapters->apply(x, run(x, residual, rows.adapted()), rows, residual);
}

void Linear::write_tiles(const at::Tensor& x, const std::vector<int64_t>& tiles, at::Tensor& output) const {
  if (!tiles.empty()) kernel_for(x.numel() / inputs).run(*this, x, {}, &tiles, output);
}

void Linear::write_outputs(const at::Tensor& x, const std::vector<int64_t>& chosen, const at::Tensor& weight,
                           at::Tensor& output) const {
  if (chosen.empty()) return;
  Linear part(*this);
  part.outputs = static_cast<int64_t>(chosen.size());
  part.packed = by_weights(packed.scalar_type(), [&]<typename Weights>(Weights*, std::span<const LinearKernel>) {
    return packed_rows<Weights>(weight, chosen);
  });
  const at::Tensor computed = part(x);
  by_dtype(output, [&]<typename T>(T*) {
    const T* from = computed.const_data_ptr<T>();
    T* to = output.mutable_data_ptr<T>();
    for (int64_t begin = 0; begin < output.numel(); begin += outputs)
      for (const int64_t n : chosen) to[begin + n] = *from++;
  });
}

const LinearKernel& Linear::kernel_for(int64_t rows) const {
  size_t chosen = variants_.size() - 1;
  while (chosen > 0 && rows < from_rows_[chosen]) --chosen;
  return *variants_[chosen];
}

}  // namespace oatmill

TORCH_LIBRARY_FRAGMENT(oatmill, library) {
  library.def("linear_pack(Tensor weight) -> Tensor");
  library.def("linear_room(Tensor weight, int outputs) -> Tensor");
  library.def("linear_pack_into(Tensor weight, Tensor(a!) packed) -> ()");
  library.def("linear_copy(Tensor packed) -> Tensor");
  library.def("linear_unpack(Tensor packed, int outputs, int inputs) -> Tensor");
  library.def("linear_kernels(Tensor packed) -> str[]");
  library.def("isa() -> str", &oatmill::isa);
}

TORCH_LIBRARY_IMPL(oatmill, CPU, library) {
  library.impl("linear_pack", &oatmill::linear_pack);
  library.impl("linear_room", &oatmill::linear_room);
  library.impl("linear_pack_into", &oatmill::linear_pack_into);
  library.impl("linear_copy", &oatmill::linear_copy);
  library.impl("linear_unpack", &oatmill::linear_unpack);
  library.impl("linear_kernels", &oatmill::linear_kernels);
}
