// Linear layers with weights of 32, 16 or 8 bits; sums are in float, or exact. Which kernel computes how many rows is
// what the layer is told.

#include "gemm/gemm.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <array>
#include <cstdint>
#include <span>
#include <string_view>

#include "simd/dtypes.h"
#include "gemm/linear.h"
#include "gemm/mmla.h"
#include "gemm/microkernel.h"
#include "gemm/amx.h"
#include "gemm/bf16_dequant_gemm.h"

namespace oatmill {

namespace {

bool always() { return true; }

template <typename Kernel>
void run_way(const Linear& layer, const at::Tensor& x, bool relu, const at::Tensor* residual,
             const std::vector<int64_t>* tiles, at::Tensor& output) {
  const int64_t rows = x.numel() / layer.inputs, depth = layer.packed.size(1);
  by_dtype(x, [&]<typename T>(T*) {
    const Input input = Kernel::prepare(x.const_data_ptr<T>(), rows, layer.inputs, depth);
    const Product product{input.data, input.row_bytes, static_cast<const char*>(layer.packed.const_data_ptr()), rows,
                          depth, layer.outputs};
    const Finish<T> finish{layer.bias ? layer.bias->const_data_ptr<float>() : nullptr, relu,
                           residual ? residual->const_data_ptr<T>() : nullptr, output.mutable_data_ptr<T>()};
    if constexpr (std::is_same_v<typename Kernel::Weights, Int8Weights>) {
      const float* scales = layer.scales->const_data_ptr<float>();
      const float* corrections = layer.corrections->const_data_ptr<float>();
      run_product<Kernel>(product, finish, tiles, [&](const char* totals, int64_t row, int64_t n) {
        Floats sums = __builtin_convertvector(load_as<Whole>(totals), Floats);
        if (Kernel::OFFSET != 0) sums -= widened(corrections + n);
        return sums * widened(scales + n) * input.scales[row];
      });
    } else {
      run_product<Kernel>(product, finish, tiles,
                          [](const char* totals, int64_t, int64_t) { return load_as<Floats>(totals); });
    }
  });
}

template <typename Kernel>
constexpr Way way(const char* name, bool (*available)() = always, int64_t depth = 1) {
  return {name, available, depth, run_way<Kernel>};
}

// The best to begin with is the first: it is taken when nobody has measured. The last of bfloat16 and of 8 bits stands
// in for AMX in tests; it is slow.
constexpr std::array FLOAT_WAYS{way<Products<FloatProducts<FloatWeights>>>("fma")};
constexpr std::array HALF_WAYS{way<Products<FloatProducts<HalfWeights>>>("fma"),
                               way<WidenedProducts<HalfWeights>>("fma_widened")};
constexpr std::array BF16_WAYS{
#if OATMILL_BF16
    way<Products<PairProducts>>(PairProducts::NAME),
#endif
    way<Products<FloatProducts<Bf16Weights>>>("fma"),
    way<WidenedProducts<Bf16Weights>>("fma_widened"),
#if OATMILL_MMLA
    way<PairedRowProducts<Bf16Matrices>>("neon_bf16_mmla", always, 2),
#endif
#if OATMILL_AMX
    way<TileProducts<AmxMatrices<Bf16Weights>>>("amx", amx_permitted, SIDE),
#endif
    way<TileProducts<PlainMatrices<Bf16Weights>>>("amx_emulated", always, SIDE)};
constexpr std::array INT8_WAYS{
#if OATMILL_INT8
    way<Products<ByteProducts>>(ByteProducts::NAME),
#endif
    way<Products<ShortProducts>>("int16"),
#if OATMILL_MMLA
    way<PairedRowProducts<Int8Matrices>>("neon_i8mm", always, 2),
#endif
#if OATMILL_AMX
    way<TileProducts<AmxMatrices<Int8Weights>>>("amx", amx_permitted, SIDE),
#endif
    way<TileProducts<PlainMatrices<Int8Weights>>>("amx_emulated", always, SIDE)};

// Calls work with a null pointer of the kind of weights that have this dtype, and the ways to multiply them.
template <typename Work>
auto by_weights(at::ScalarType dtype, const Work& work) {
  switch (dtype) {
    case at::kFloat:
      return work(static_cast<FloatWeights*>(nullptr), std::span<const Way>(FLOAT_WAYS));
    case at::kHalf:
      return work(static_cast<HalfWeights*>(nullptr), std::span<const Way>(HALF_WAYS));
    case at::kBFloat16:
      return work(static_cast<Bf16Weights*>(nullptr), std::span<const Way>(BF16_WAYS));
    case at::kChar:
      return work(static_cast<Int8Weights*>(nullptr), std::span<const Way>(INT8_WAYS));
    default:
      TORCH_CHECK(false, "weights are float32, bfloat16, float16 or int8, and not ", dtype);
  }
}

bool serves(const Way& way, const at::Tensor& packed) { return way.available() && packed.size(1) % way.depth == 0; }

// Returns room in which linear_pack_into arranges so many outputs like those of a weight.
at::Tensor linear_room(const at::Tensor& weight, int64_t outputs) {
  return by_weights(weight.scalar_type(),
                    [&]<typename Weights>(Weights*, std::span<const Way>) { return room_for<Weights>(weight, outputs); });
}

// Arranges some outputs of a weight in the first tiles of such room.
void linear_pack_into(const at::Tensor& weight, at::Tensor packed) {
  by_weights(weight.scalar_type(),
             [&]<typename Weights>(Weights*, std::span<const Way>) { pack_weight<Weights>(weight, packed); });
}

at::Tensor linear_pack(const at::Tensor& weight) {
  at::Tensor packed = linear_room(weight, weight.size(0));
  linear_pack_into(weight, packed);
  return packed;
}

at::Tensor linear_unpack(const at::Tensor& packed, int64_t outputs, int64_t inputs) {
  return by_weights(packed.scalar_type(), [&]<typename Weights>(Weights*, std::span<const Way>) {
    return unpack_weight<Weights>(packed, outputs, inputs);
  });
}

// Returns the names of the kernels that multiply these weights on this CPU, the one to begin with first.
std::vector<std::string> linear_kernels(const at::Tensor& packed) {
  return by_weights(packed.scalar_type(), [&]<typename Weights>(Weights*, std::span<const Way> ways) {
    std::vector<std::string> names;
    for (const Way& way : ways)
      if (serves(way, packed)) names.emplace_back(way.name);
    return names;
  });
}

}  // namespace

Linear::Linear(at::Tensor packed, int64_t inputs, int64_t outputs, std::optional<at::Tensor> bias,
               std::optional<at::Tensor> scales, std::optional<at::Tensor> corrections,
               std::vector<std::string> kernels, std::vector<int64_t> from_rows, std::optional<CodesPtr> codes)
    : packed(std::move(packed)), inputs(inputs), outputs(outputs), bias(std::move(bias)), scales(std::move(scales)),
      corrections(std::move(corrections)), codes(codes ? *codes : CodesPtr()), from_rows_(std::move(from_rows)) {
  TORCH_CHECK(!kernels.empty() && kernels.size() == from_rows_.size(), "each kernel needs its number of rows");
  const auto choose = [&](std::span<const Way> ways) {
    for (const std::string& name : kernels) {
      const auto found = std::find_if(ways.begin(), ways.end(), [&](const Way& way) {
        return way.name == name && serves(way, this->packed);
      });
      // A kernel that has no use for this one layer's depth leaves it to the one that every CPU has.
      ways_.push_back(found != ways.end() ? &*found : &ways[0]);
    }
  };
  if (this->codes) {
    choose(code_ways(this->codes->kind));
    return;
  }
  by_weights(this->packed.scalar_type(), [&]<typename Weights>(Weights*, std::span<const Way> ways) {
    TORCH_CHECK(parts(inputs, Weights::DEPTH) == this->packed.size(1), "weights of ", inputs, " inputs are expected");
    choose(ways);
  });
}

at::Tensor Linear::operator()(const at::Tensor& x, bool relu, const std::optional<at::Tensor>& residual) const {
  TORCH_CHECK(x.size(-1) == inputs, "the input has ", x.size(-1), " features, the weights ", inputs);
  const at::Tensor dense = x.contiguous(), added = residual ? residual->contiguous() : at::Tensor();
  auto shape = x.sizes().vec();
  shape.back() = outputs;
  at::Tensor output = at::empty(shape, x.options());
  TORCH_CHECK(!residual || (added.numel() == output.numel() && added.scalar_type() == x.scalar_type()));
  const int64_t rows = x.numel() / inputs;
  if (rows > 0) way(rows).run(*this, dense, relu, residual ? &added : nullptr, nullptr, output);
  return output;
}

at::Tensor Linear::adapted(const at::Tensor& x, const std::optional<at::Tensor>& numbers, bool relu,
                           const std::optional<at::Tensor>& residual) const {
  if (!numbers || !adapters || adapters->empty()) return (*this)(x, relu, residual);
  return adapters->apply(x, (*this)(x), *numbers, relu, residual);
}

void Linear::write_tiles(const at::Tensor& x, const std::vector<int64_t>& tiles, at::Tensor& output) const {
  if (!tiles.empty()) way(x.numel() / inputs).run(*this, x, false, nullptr, &tiles, output);
}

const Way& Linear::way(int64_t rows) const {
  size_t chosen = ways_.size() - 1;
  while (chosen > 0 && rows < from_rows_[chosen]) --chosen;
  return *ways_[chosen];
}

}  // namespace oatmill

TORCH_LIBRARY_FRAGMENT(oatmill, library) {
  library.def("linear_pack(Tensor weight) -> Tensor");
  library.def("linear_room(Tensor weight, int outputs) -> Tensor");
  library.def("linear_pack_into(Tensor weight, Tensor(a!) packed) -> ()");
  library.def("linear_unpack(Tensor packed, int outputs, int inputs) -> Tensor");
  library.def("linear_kernels(Tensor packed) -> str[]");
}

TORCH_LIBRARY_IMPL(oatmill, CPU, library) {
  library.impl("linear_pack", &oatmill::linear_pack);
  library.impl("linear_room", &oatmill::linear_room);
  library.impl("linear_pack_into", &oatmill::linear_pack_into);
  library.impl("linear_unpack", &oatmill::linear_unpack);
  library.impl("linear_kernels", &oatmill::linear_kernels);
}
