// Linear layers with quantized weights of 4, 6 or 8 bits, and the packing of these.

#include "gemm/quantized_gemm.h"

#include <bit>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "gemm/block_amx.h"
#include "gemm/block_gemm.h"
#include "gemm/wna8.h"
#include "gemm/wna16.h"
#include "simd/dtypes.h"
#include "gemm/group_gemm.h"
#include "gemm/linear.h"
#include "gemm/microkernel.h"

namespace oatmill {

namespace {

constexpr int64_t BITS_OF_WORD = 32;

// The word of neighbouring codes, those of 4 bits in pairs, the first in the low bits.
template <int BITS>
uint32_t word_of(const uint8_t* codes) {
  uint32_t in_order;
  std::memcpy(&in_order, codes, sizeof(in_order));
  const auto every_second = [](uint32_t word) {  // side by side, in the lower half
    if constexpr (BITS == 8) return (word & 0xFF) | (word >> 8 & 0xFF00);
    word &= 0x0F0F0F0F;
    word = (word | word >> 4) & 0x00FF00FF;
    return (word | word >> 8) & 0xFFFF;
  };
  return every_second(in_order) | every_second(in_order >> BITS) << 16;
}

// The word of the codes of these inputs, -1 for none.
template <int BITS>
uint32_t gathered_word(const uint8_t* codes, const int32_t* inputs) {
  constexpr int OF_WORD = BITS_OF_WORD / BITS, OF_BYTE = 8 / BITS;
  uint32_t word = 0;
  for (int step = 0; step < OF_WORD; ++step)
    if (const int32_t k = inputs[step]; k >= 0) {
      const uint32_t code = codes[k / OF_BYTE] >> (k % OF_BYTE * BITS) & ((1u << BITS) - 1);
      word |= code << (place_in_word(step, OF_WORD) * BITS);
    }
  return word;
}

// A unit of packed codes: OF_UNIT of an output, in WORDS words that stand COLUMNS apart.
template <int BITS>
struct Unit {
  static constexpr int OF_UNIT = BITS_OF_WORD / BITS, OF_BYTE = 8 / BITS, WORDS = 1;

  static void pack(const uint8_t* codes, int32_t* to) { *to = static_cast<int32_t>(word_of<BITS>(codes)); }
  static void pack(const uint8_t* codes, const int32_t* inputs, int32_t* to) {
    *to = static_cast<int32_t>(gathered_word<BITS>(codes, inputs));
  }
  static uint8_t code(const int32_t* words, int64_t step) {
    const int place = place_in_word(static_cast<int>(step), OF_UNIT);
    return static_cast<uint32_t>(*words) >> (place * BITS) & ((1u << BITS) - 1);
  }
};

// See SixBits. Codes are numbers of 8 bits.
template <>
struct Unit<6> {
  static constexpr int OF_UNIT = Int6::DEPTH, OF_BYTE = 1, WORDS = Int6::PLANES;

  static void pack(const uint8_t* codes, int32_t* to) {
    uint32_t low[2] = {}, high = 0;
    for (int step = 0; step < 4; ++step) {
      const uint32_t raised = (word_of<8>(codes + 4 * step) & 0x3f3f3f3f) ^ 0x20202020;  // by ZERO_POINT
      low[step / 2] |= (raised & 0x0f0f0f0f) << (4 * (step % 2));
      high |= (raised >> 4 & 0x03030303) << (2 * step);
    }
    to[0] = static_cast<int32_t>(low[0]), to[COLUMNS] = static_cast<int32_t>(low[1]);
    to[2 * COLUMNS] = static_cast<int32_t>(high);
  }
  static void pack(const uint8_t* codes, const int32_t* inputs, int32_t* to) {
    uint8_t in_order[OF_UNIT];
    for (int step = 0; step < OF_UNIT; ++step) in_order[step] = inputs[step] >= 0 ? codes[inputs[step]] : 0;
    pack(in_order, to);
  }
  static uint8_t code(const int32_t* words, int64_t step) {
    const int64_t four = step / 4, byte = 8 * place_in_word(static_cast<int>(step % 4), 4);
    const auto low = static_cast<uint32_t>(words[four / 2 * COLUMNS]), high = static_cast<uint32_t>(words[2 * COLUMNS]);
    const uint32_t raised = (low >> (byte + 4 * (four % 2)) & 15) | (high >> (byte + 2 * four) & 3) << 4;
    return static_cast<uint8_t>(raised - Int6::ZERO_POINT);
  }
};

// Calls work with a Unit of so many bits.
template <typename Work>
void by_bits(int64_t bits, const Work& work) {
  if (bits == 4) work(Unit<4>{});
  else if (bits == 6) work(Unit<6>{});
  else work(Unit<8>{});
}

template <typename Packed>
void pack_quantized(const at::Tensor& codes, const at::Tensor& order, at::Tensor& packed) {
  constexpr int OF_UNIT = Packed::OF_UNIT, WORDS = Packed::WORDS;
  const int64_t outputs = codes.size(0), row = codes.size(1), depth = packed.size(1) / WORDS;
  const uint8_t* from = codes.const_data_ptr<uint8_t>();
  const int32_t* inputs = order.const_data_ptr<int32_t>();
  int32_t* to = packed.mutable_data_ptr<int32_t>();
  std::vector<int64_t> whole(depth, -1);  // where the codes of a unit stand as they are given; -1: not side by side
  for (int64_t unit = 0; unit < depth; ++unit) {
    const int32_t* own = inputs + unit * OF_UNIT;
    bool follow = own[0] >= 0 && own[0] % Packed::OF_BYTE == 0;
    for (int step = 1; step < OF_UNIT; ++step) follow = follow && own[step] == own[0] + step;
    if (follow) whole[unit] = own[0] / Packed::OF_BYTE;
  }
  constexpr int64_t TOGETHER = 16;  // units of an output: a line of the cache, or some
  parallel_for(packed.size(0), [&, places = whole.data()](int64_t tile) {
    const int64_t count = std::min<int64_t>(COLUMNS, outputs - tile * COLUMNS);
    for (int64_t first = 0; first < depth; first += TOGETHER)
      for (int64_t n = 0; n < count; ++n) {
        const uint8_t* own = from + (tile * COLUMNS + n) * row;
        int32_t* column = to + tile * depth * WORDS * COLUMNS + n;
        for (int64_t unit = first; unit < std::min(first + TOGETHER, depth); ++unit) {
          const int64_t place = places[unit];
          int32_t* words = column + unit * WORDS * COLUMNS;
          if (place >= 0) Packed::pack(own + place, words);
          else Packed::pack(own, inputs + unit * OF_UNIT, words);
        }
      }
  });
}

// codes: of so many bits, [outputs, inputs] uint8, or [outputs, inputs / 2] of 4 bits, in pairs, the first in the low
// bits; of 6 bits, numbers from -32 to 31. order: the input that stands at each place, or -1 for none.
// Returns words, [outputs / COLUMNS, places * bits / 32, COLUMNS] int32.
at::Tensor quantized_pack(const at::Tensor& codes, const at::Tensor& order, int64_t bits) {
  const int64_t outputs = codes.size(0), places = order.size(0);
  at::Tensor packed;
  by_bits(bits, [&]<typename Packed>(Packed) {
    TORCH_CHECK(codes.scalar_type() == at::kByte && order.scalar_type() == at::kInt && places % Packed::OF_UNIT == 0);
    packed = zeros_in_huge_pages({ceil_div(outputs, COLUMNS), places / Packed::OF_UNIT * Packed::WORDS, COLUMNS},
                                 codes.options().dtype(at::kInt));
    pack_quantized<Packed>(codes.contiguous(), order, packed);
  });
  return packed;
}

// Returns what quantized_pack was given, each code in a byte of its own.
at::Tensor quantized_unpack(const at::Tensor& packed, const at::Tensor& order, int64_t outputs, int64_t inputs,
                            int64_t bits) {
  const int64_t depth = packed.size(1);
  at::Tensor codes = at::empty({outputs, inputs}, packed.options().dtype(at::kByte));
  const int32_t* from = packed.const_data_ptr<int32_t>();
  const int32_t* input = order.const_data_ptr<int32_t>();
  uint8_t* to = codes.mutable_data_ptr<uint8_t>();
  by_bits(bits, [&]<typename Packed>(Packed) {
    parallel_for(outputs, [&](int64_t n) {
      const int32_t* column = from + n / COLUMNS * depth * COLUMNS + n % COLUMNS;
      for (int64_t place = 0; place < order.size(0); ++place)
        if (input[place] >= 0)
          to[n * inputs + input[place]] =
              Packed::code(column + place / Packed::OF_UNIT * Packed::WORDS * COLUMNS, place % Packed::OF_UNIT);
    });
  });
  return codes;
}

// Rows with their inputs in the order of the weights, and zeros where these have none.
template <typename T>
std::vector<T> ordered_rows(const T* from, int64_t rows, int64_t inputs, const at::Tensor& order) {
  const int64_t places = order.size(0);
  const int32_t* input = order.const_data_ptr<int32_t>();
  std::vector<T> to(rows * places);
  for_rows(rows, places, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r)
      for (int64_t k = 0; k < places; ++k)
        if (input[k] >= 0) to[r * places + k] = from[r * inputs + input[k]];
  });
  return to;
}

template <typename T>
float sum_of(const T* from, int64_t count) {
  F32x16 sums = {};
  int64_t k = 0;
  for (; k + LANES <= count; k += LANES) sums += load(from + k);
  float all = sum(sums);
  for (; k < count; ++k) all += static_cast<float>(from[k]);
  return all;
}

// Returns the sums of the inputs of each part, [rows, parts].
template <typename Kind, int64_t MOST, typename T>
std::vector<float> part_input_sums(const T* from, int64_t rows, int64_t inputs, const int32_t* starts, int64_t groups) {
  const int64_t parts = count_parts<MOST>(starts, groups);
  std::vector<float> sums(rows * parts);
  for_rows(rows, inputs, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r)
      for_each_part<MOST>(starts, groups, [&](const Part& part) {
        const int64_t begin = part.first * Kind::DEPTH, end = std::min(part.last * Kind::DEPTH, inputs);
        sums[r * parts + part.index] = sum_of(from + r * inputs + begin, end - begin);
      });
  });
  return sums;
}

Scales scales_of(const QuantizedWeights& codes) {
  const auto bytes = [](const std::optional<at::Tensor>& given) {
    return given ? given->const_data_ptr<int8_t>() : nullptr;
  };
  Scales scales{codes.scales.scalar_type(), codes.scales.const_data_ptr(),
                codes.offsets ? codes.offsets->const_data_ptr() : nullptr, bytes(codes.zeros)};
  if (codes.scale_factors) {
    scales.factors = bytes(codes.scale_factors);
    scales.offset_factors = bytes(codes.offset_factors);
    scales.groups_shift = std::countr_zero(static_cast<uint64_t>(codes.scale_factors->size(1) / codes.scales.size(1)));
    scales.zero = codes.zero;
  }
  return scales;
}

template <typename Kernel, typename T, typename Task>
void finish_gemm(const Task& product, const Linear& layer, const Finish& finish, const std::vector<int64_t>* tiles,
                 at::Tensor& output) {
  const Epilogue<T> epilogue{layer.bias ? layer.bias->const_data_ptr<float>() : nullptr,
                             finish.residual ? finish.residual->const_data_ptr<T>() : nullptr,
                             output.mutable_data_ptr<T>(), finish.adapted};
  run_gemm<Kernel>(product, epilogue, tiles, [](const char* acc, int64_t, int64_t) { return load_as<F32>(acc); });
}

template <typename Kind, typename Kernel>
void run_quantized(const Linear& layer, const at::Tensor& x, const Finish& finish, const std::vector<int64_t>* tiles,
                   at::Tensor& output) {
  const QuantizedWeights& codes = *layer.codes;
  const int64_t rows = x.numel() / layer.inputs, groups = codes.starts.size(0) - 1;
  const int64_t words = layer.packed.size(1), depth = words / planes_of<Kind>();
  const int32_t* starts = codes.starts.const_data_ptr<int32_t>();
  by_dtype(x, [&]<typename T>(T*) {
    const T* from = x.const_data_ptr<T>();
    int64_t inputs = layer.inputs;
    std::vector<T> ordered;
    if (codes.order) {
      ordered = ordered_rows(from, rows, inputs, *codes.order);
      from = ordered.data();
      inputs = codes.order->size(0);
    }
    const Scales scales = scales_of(codes);
    std::vector<float> sums;
    if (Kernel::needs_sums(scales)) sums = part_input_sums<Kind, Kernel::MOST>(from, rows, inputs, starts, groups);
    const Input input = Kernel::prepare(from, rows, inputs, depth, starts, groups);
    const QuantizedGemmArgs product{
        {input.data, input.row_bytes, static_cast<const char*>(layer.packed.const_data_ptr()), rows, depth,
         layer.outputs},
        scales,
        starts,
        groups,
        count_parts<Kernel::MOST>(starts, groups),
        codes.codebook ? codes.codebook->const_data_ptr<float>() : nullptr,
        sums.data(),
        input.scales.data(),
        words * TILE_WORD};
    finish_gemm<Kernel, T>(product, layer, finish, tiles, output);
  });
}

#if OATMILL_WNA8

// By Blocks where they take the weights, else by Kernel: which one does not depend on the rows.
template <typename Kind, typename Kernel, typename Blocks>
void run_blocks(const Linear& layer, const at::Tensor& x, const Finish& finish, const std::vector<int64_t>* tiles,
                at::Tensor& output) {
  const QuantizedWeights& codes = *layer.codes;
  const int64_t rows = x.numel() / layer.inputs, groups = codes.starts.size(0) - 1;
  const int64_t words = layer.packed.size(1), depth = words / planes_of<Kind>();
  const Scales scales = scales_of(codes);
  const BlockLayout layout =
      Blocks::layout(scales, codes.starts.const_data_ptr<int32_t>(), groups, codes.scales.size(1), depth);
  if (layout.blocks == 0 || codes.order || layer.inputs != depth * Kind::DEPTH)
    return run_quantized<Kind, Kernel>(layer, x, finish, tiles, output);
#if OATMILL_BLOCK_AMX
  using Tiles = BlockAmx<Kind, typename Blocks::Codes>;
  const bool tiled = Tiles::takes(rows, layout);
#else
  using Tiles = Blocks;
  const bool tiled = false;
#endif
  by_dtype(x, [&]<typename T>(T*) {
    const BlockInput input = Blocks::prepare(x.const_data_ptr<T>(), rows, layer.inputs, layout, tiled);
    const BlockGemmArgs product{{static_cast<const char*>(input.bytes.get()), layout.block_words() * Kind::DEPTH,
                                 static_cast<const char*>(layer.packed.const_data_ptr()), rows, depth, layer.outputs},
                                scales,
                                layout,
                                &input,
                                words * TILE_WORD};
    if (tiled) return finish_gemm<Tiles, T>(product, layer, finish, tiles, output);
    finish_gemm<Blocks, T>(product, layer, finish, tiles, output);
  });
}

#endif

// Writes the weights of some outputs, [rows, inputs], in the dtype of the result. number: of a code.
template <typename Packed, typename Number>
void dequantize_rows(const Linear& layer, const at::Tensor& indices, at::Tensor& found, const Number& number) {
  constexpr int64_t OF_UNIT = Packed::OF_UNIT;
  const QuantizedWeights& weights = *layer.codes;
  const int64_t depth = layer.packed.size(1), groups = weights.starts.size(0) - 1;
  const int64_t blocks = weights.scales.size(1), of_block = groups / blocks;
  const int32_t* words = layer.packed.const_data_ptr<int32_t>();
  const int32_t* starts = weights.starts.const_data_ptr<int32_t>();
  const int32_t* order = weights.order ? weights.order->const_data_ptr<int32_t>() : nullptr;
  const int64_t* index = indices.const_data_ptr<int64_t>();
  const auto factor = [](const std::optional<at::Tensor>& factors, int64_t place) {
    return factors ? static_cast<float>(factors->const_data_ptr<int8_t>()[place]) : 1.0f;
  };
  by_dtype(found, [&]<typename T>(T*) {
    by_dtype(weights.scales, [&]<typename S>(S*) {
      const S* scales = weights.scales.const_data_ptr<S>();
      T* to = found.mutable_data_ptr<T>();
      for_rows(indices.numel(), layer.inputs, [&](int64_t row, int64_t last) {
        for (; row < last; ++row) {
          const int64_t n = index[row], tile = n / COLUMNS, column = n % COLUMNS;
          for (int64_t g = 0; g < groups; ++g) {
            const int64_t place = (tile * groups + g) * COLUMNS + column;
            const int64_t block = (tile * blocks + g / of_block) * COLUMNS + column;
            const float scale = static_cast<float>(scales[block]) * factor(weights.scale_factors, place);
            float zero = static_cast<float>(weights.zero), offset = 0;
            if (weights.zeros) zero += factor(weights.zeros, place);
            if (weights.offset_factors)
              offset = static_cast<float>(weights.offsets->const_data_ptr<c10::Half>()[block]) *
                       factor(weights.offset_factors, place);
            else if (weights.offsets) offset = weights.offsets->const_data_ptr<float>()[place];
            for (int64_t unit = starts[g]; unit < starts[g + 1]; ++unit) {
              const int32_t* own = words + (tile * depth + unit * Packed::WORDS) * COLUMNS + column;
              for (int64_t step = 0; step < OF_UNIT; ++step) {
                const int64_t k = order ? order[unit * OF_UNIT + step] : unit * OF_UNIT + step;
                if (k < 0 || k >= layer.inputs) continue;
                const uint8_t code = Packed::code(own, step);
                // The product is exact in double, and rounded before the offset is added, as in dequantization.
                const auto product = static_cast<float>(static_cast<double>(number(code) - zero) * scale);
                to[row * layer.inputs + k] = static_cast<T>(product + offset);
              }
            }
          }
        }
      });
    });
  });
}

bool always() { return true; }

template <typename Kind, typename Kernel>
constexpr LinearKernel kernel(const char* name, bool (*available)() = always) {
  return {name, available, 1, run_quantized<Kind, Kernel>};
}

// The default is the first.
template <typename Kind>
constexpr std::array KERNELS{kernel<Kind, GroupGemm<FmaGroupDot<Kind>>>("fma")};

// Kernels that quantize their inputs: to 16 bits where the model has no more, to 8 bits if they are named only. None
// where this CPU has no instructions for them.
using None = std::array<LinearKernel, 0>;

template <typename Kind>
constexpr auto BF16_VARIANTS =
#if defined(__AVX512BF16__)
    std::array{kernel<Kind, GroupGemm<Bf16GroupDot<Kind>>>("bf16")};
#else
    None{};
#endif

template <typename Kind, typename Dot>
constexpr std::array A16_VARIANTS{kernel<Kind, GroupGemm<Dot>>(Kind::DEPTH == 8    ? "w4a16"
                                                               : Kind::DEPTH == 16 ? "w6a16"
                                                                                   : "w8a16")};

constexpr auto CODEBOOK_A16 =
#if OATMILL_LUT
    A16_VARIANTS<Codebook, WnA16Dot<Codebook, CodebookI16>>;
#else
    None{};
#endif

template <typename Kind, typename Digits>
constexpr auto A8_VARIANTS =
#if OATMILL_WNA8
    std::array{kernel<Kind, GroupGemm<WnA8Dot<Kind, Digits>>>(Kind::DEPTH == 8 ? "w4a8" : "w8a8")};
#else
    None{};
#endif

// The same where scales may be factors of blocks.
template <typename Kind, typename Digits>
constexpr auto BLOCK_A8_VARIANTS =
#if OATMILL_WNA8
    std::array{LinearKernel{Kind::DEPTH == 8 ? "w4a8" : "w6a8", always, 1,
                            run_blocks<Kind, GroupGemm<WnA8Dot<Kind, Digits>>, BlockGemm<Kind, Digits>>}};
#else
    None{};
#endif

template <size_t... N>
constexpr auto joined(const std::array<LinearKernel, N>&... variants) {
  std::array<LinearKernel, (N + ...)> all{};
  auto end = all.begin();
  ((end = std::copy(variants.begin(), variants.end(), end)), ...);
  return all;
}

constexpr auto FP8_KERNELS = joined(KERNELS<Fp8Weights>, BF16_VARIANTS<Fp8Weights>);
constexpr auto INT8_KERNELS =
    joined(KERNELS<Int8>, A16_VARIANTS<Int8, WnA16Dot<Int8, IntegerI16<Int8>>>, A8_VARIANTS<Int8, Int8Bytes>);
constexpr auto INT6_KERNELS =
    joined(KERNELS<Int6>, A16_VARIANTS<Int6, WnA16Dot<Int6, SixBitI16>>, BLOCK_A8_VARIANTS<Int6, SixBitBytes>);
constexpr auto INT4_KERNELS =
    joined(KERNELS<Int4>, BF16_VARIANTS<Int4>, A16_VARIANTS<Int4, Int4W4A16Dot>, BLOCK_A8_VARIANTS<Int4, Int4Bytes>);
constexpr auto CODEBOOK_KERNELS =
    joined(KERNELS<Codebook>, BF16_VARIANTS<Codebook>, CODEBOOK_A16, A8_VARIANTS<Codebook, CodebookI8>);

std::vector<std::string> quantized_kernels(const std::string& kind) {
  std::vector<std::string> names;
  for (const LinearKernel& kernel : quantized_kernels_of(kind))
    if (kernel.available()) names.emplace_back(kernel.name);
  return names;
}

}  // namespace

void QuantizedWeights::check() const {
  TORCH_CHECK(starts.scalar_type() == at::kInt && (!offsets || !zeros));
  const at::Tensor& by_group = scale_factors ? *scale_factors : scales;
  TORCH_CHECK(by_group.dim() == 3 && by_group.size(1) == starts.size(0) - 1 && by_group.size(2) == COLUMNS &&
              by_group.is_contiguous() && scales.dim() == 3 && scales.is_contiguous());
  for (const auto& shift : {offsets, zeros})
    TORCH_CHECK(!shift || (shift->sizes() == scales.sizes() && shift->is_contiguous()));
  if (scale_factors) {
    const int64_t groups = by_group.size(1), blocks = scales.size(1);
    TORCH_CHECK(blocks > 0 && groups % blocks == 0 && std::has_single_bit(static_cast<uint64_t>(groups / blocks)));
    TORCH_CHECK(by_group.scalar_type() == at::kChar && scales.scalar_type() == at::kHalf && !zeros);
    TORCH_CHECK(!offsets == !offset_factors);
    if (offsets)
      TORCH_CHECK(offsets->scalar_type() == at::kHalf && offset_factors->scalar_type() == at::kChar &&
                  offset_factors->sizes() == by_group.sizes() && offset_factors->is_contiguous());
  } else {
    TORCH_CHECK(!offset_factors && zero == 0 && (!offsets || offsets->scalar_type() == at::kFloat));
  }
  by_dtype(scales, [](auto*) {});
}

at::Tensor Linear::rows(const at::Tensor& indices, at::ScalarType dtype) const {
  TORCH_CHECK(codes && indices.scalar_type() == at::kLong && indices.dim() == 1, "rows are those of quantized weights");
  const int64_t* index = indices.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < indices.numel(); ++i)
    TORCH_CHECK(0 <= index[i] && index[i] < outputs, "there is no row ", index[i], " of ", outputs);
  at::Tensor found = at::empty({indices.numel(), inputs}, packed.options().dtype(dtype));
  const auto number = [](uint8_t code) { return static_cast<float>(static_cast<int8_t>(code)); };
  if (codes->kind == "int4") dequantize_rows<Unit<4>>(*this, indices, found, [](int code) { return code - 8.0f; });
  else if (codes->kind == "int6") dequantize_rows<Unit<6>>(*this, indices, found, number);
  else if (codes->kind == "int8") dequantize_rows<Unit<8>>(*this, indices, found, number);
  else if (codes->kind == "codebook")
    dequantize_rows<Unit<4>>(*this, indices, found,
                             [book = codes->codebook->const_data_ptr<float>()](int code) { return book[code]; });
  else TORCH_CHECK(false, "rows of ", codes->kind, " weights are not read");
  return found;
}

std::span<const LinearKernel> quantized_kernels_of(const std::string& kind) {
  if (kind == "int4") return INT4_KERNELS;
  if (kind == "codebook") return CODEBOOK_KERNELS;
  if (kind == "int6") return INT6_KERNELS;
  if (kind == "int8") return INT8_KERNELS;
  if (kind == "fp8") return FP8_KERNELS;
  TORCH_CHECK(false, "codes are int4, codebook, int6, int8 or fp8, and not ", kind);
}

}  // namespace oatmill

TORCH_LIBRARY_FRAGMENT(oatmill, library) {
  library.def("quantized_pack(Tensor codes, Tensor order, int bits) -> Tensor");
  library.def("quantized_unpack(Tensor packed, Tensor order, int outputs, int inputs, int bits) -> Tensor");
  library.def("quantized_kernels(str kind) -> str[]", &oatmill::quantized_kernels);
}

TORCH_LIBRARY_IMPL(oatmill, CPU, library) {
  library.impl("quantized_pack", &oatmill::quantized_pack);
  library.impl("quantized_unpack", &oatmill::quantized_unpack);
}
