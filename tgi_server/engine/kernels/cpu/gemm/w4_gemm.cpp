// Linear layers with weights of 4 or 8 bits and sums in float.

#include "gemm/w4_gemm.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "gemm/w4a8.h"
#include "gemm/w4a16.h"
#include "simd/dtypes.h"
#include "gemm/w4_dequant_gemm.h"
#include "gemm/group_gemm.h"
#include "gemm/linear.h"
#include "gemm/mmla.h"
#include "gemm/microkernel.h"
#include "gemm/amx.h"

namespace oatmill {

namespace {

constexpr int64_t BITS_OF_WORD = 32;

// The word of codes that follow each other, those of 4 bits in pairs, the first in the low bits.
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

template <int BITS>
void pack_codes(const at::Tensor& codes, const at::Tensor& order, at::Tensor& packed) {
  constexpr int OF_WORD = BITS_OF_WORD / BITS, OF_BYTE = 8 / BITS;
  const int64_t outputs = codes.size(0), row = codes.size(1), depth = packed.size(1);
  const uint8_t* from = codes.const_data_ptr<uint8_t>();
  const int32_t* inputs = order.const_data_ptr<int32_t>();
  int32_t* to = packed.mutable_data_ptr<int32_t>();
  std::vector<int64_t> whole(depth, -1);  // where the codes of a word stand as they are given; -1: not side by side
  for (int64_t word = 0; word < depth; ++word) {
    const int32_t* own = inputs + word * OF_WORD;
    bool follow = own[0] >= 0 && own[0] % OF_BYTE == 0;
    for (int step = 1; step < OF_WORD; ++step) follow = follow && own[step] == own[0] + step;
    if (follow) whole[word] = own[0] / OF_BYTE;
  }
  constexpr int64_t TOGETHER = 16;  // words of an output: a line of the cache
  for_each_item(packed.size(0), [&, places = whole.data()](int64_t tile) {
    const int64_t count = std::min<int64_t>(COLUMNS, outputs - tile * COLUMNS);
    for (int64_t first = 0; first < depth; first += TOGETHER)
      for (int64_t n = 0; n < count; ++n) {
        const uint8_t* own = from + (tile * COLUMNS + n) * row;
        int32_t* column = to + tile * depth * COLUMNS + n;
        for (int64_t word = first; word < std::min(first + TOGETHER, depth); ++word) {
          const int64_t place = places[word];
          column[word * COLUMNS] = static_cast<int32_t>(
              place >= 0 ? word_of<BITS>(own + place) : gathered_word<BITS>(own, inputs + word * OF_WORD));
        }
      }
  });
}

// codes: of so many bits, [outputs, inputs] uint8, or [outputs, inputs / 2] of 4 bits, in pairs, the first in the low
// bits. order: the input that stands at each place, or -1 for none.
// Returns words, [outputs / COLUMNS, places * bits / 32, COLUMNS] int32.
at::Tensor codes_pack(const at::Tensor& codes, const at::Tensor& order, int64_t bits) {
  const int64_t outputs = codes.size(0), places = order.size(0), of_word = BITS_OF_WORD / bits;
  TORCH_CHECK(codes.scalar_type() == at::kByte && order.scalar_type() == at::kInt && places % of_word == 0);
  at::Tensor packed = zeros_in_large_pages({parts(outputs, COLUMNS), places / of_word, COLUMNS},
                                           codes.options().dtype(at::kInt));
  bits == 4 ? pack_codes<4>(codes.contiguous(), order, packed) : pack_codes<8>(codes.contiguous(), order, packed);
  return packed;
}

// The codes that codes_pack was given, each in a byte of its own.
at::Tensor codes_unpack(const at::Tensor& packed, const at::Tensor& order, int64_t outputs, int64_t inputs,
                        int64_t bits) {
  const int64_t depth = packed.size(1), of_word = BITS_OF_WORD / bits;
  at::Tensor codes = at::empty({outputs, inputs}, packed.options().dtype(at::kByte));
  const int32_t* from = packed.const_data_ptr<int32_t>();
  const int32_t* input = order.const_data_ptr<int32_t>();
  uint8_t* to = codes.mutable_data_ptr<uint8_t>();
  for_each_item(outputs, [&](int64_t n) {
    for (int64_t place = 0; place < depth * of_word; ++place) {
      if (input[place] < 0) continue;
      const auto word =
          static_cast<uint32_t>(from[(n / COLUMNS * depth + place / of_word) * COLUMNS + n % COLUMNS]);
      to[n * inputs + input[place]] = word >> (place_in_word(place % of_word, of_word) * bits) & ((1u << bits) - 1);
    }
  });
  return codes;
}

// Rows with their numbers in the order in which the weights have them, and zeros where they have none.
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
  Lanes sums = {};
  int64_t k = 0;
  for (; k + LANES <= count; k += LANES) sums += load(from + k);
  float all = sum(sums);
  for (; k < count; ++k) all += static_cast<float>(from[k]);
  return all;
}

// The sums of the inputs of each group: [rows, groups].
template <typename Kind, typename T>
std::vector<float> group_sums(const T* from, int64_t rows, int64_t inputs, const int32_t* starts, int64_t groups) {
  std::vector<float> sums(rows * groups);
  for_rows(rows, inputs, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r)
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t begin = starts[g] * Kind::DEPTH, end = std::min(starts[g + 1] * Kind::DEPTH, inputs);
        sums[r * groups + g] = sum_of(from + r * inputs + begin, end - begin);
      }
  });
  return sums;
}

template <typename Kind, typename Kernel>
void run_codes(const Linear& layer, const at::Tensor& x, bool relu, const at::Tensor* residual,
               const std::vector<int64_t>* tiles, at::Tensor& output) {
  const Codes& codes = *layer.codes;
  const int64_t rows = x.numel() / layer.inputs, depth = layer.packed.size(1), groups = codes.starts.size(0) - 1;
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
    const Scales scales{codes.scales.scalar_type(), codes.scales.const_data_ptr(),
                        codes.offsets ? codes.offsets->const_data_ptr<float>() : nullptr,
                        codes.zeros ? codes.zeros->const_data_ptr<int8_t>() : nullptr};
    std::vector<float> sums;
    if (Kernel::needs_sums(scales)) sums = group_sums<Kind>(from, rows, inputs, starts, groups);
    const Input input = Kernel::prepare(from, rows, inputs, depth, starts, groups);
    const CodedProduct product{
        {input.data, input.row_bytes, static_cast<const char*>(layer.packed.const_data_ptr()), rows, depth,
         layer.outputs},
        scales,
        starts,
        groups,
        codes.codebook ? codes.codebook->const_data_ptr<float>() : nullptr,
        sums.data(),
        input.scales.data()};
    const Finish<T> finish{layer.bias ? layer.bias->const_data_ptr<float>() : nullptr, relu,
                           residual ? residual->const_data_ptr<T>() : nullptr, output.mutable_data_ptr<T>()};
    run_product<Kernel>(product, finish, tiles,
                        [](const char* totals, int64_t, int64_t) { return load_as<Floats>(totals); });
  });
}

bool always() { return true; }

template <typename Kind, typename Kernel>
constexpr Way way(const char* name, bool (*available)() = always) {
  return {name, available, 1, run_codes<Kind, Kernel>};
}

// The best to begin with is the first. The last one stands in for AMX in tests; it is slow.
template <typename Kind>
constexpr std::array WAYS{
    way<Kind, GroupedProducts<CodeProducts<Kind>>>("codes"),
    way<Kind, ExpandedProducts<Kind, Products<FloatProducts<FloatWeights>>>>("expanded"),
#if defined(__AVX512BF16__)
    way<Kind, ExpandedProducts<Kind, Products<PairProducts>>>("expanded_avx512_bf16"),
#elif OATMILL_BF16
    way<Kind, ExpandedProducts<Kind, Products<PairProducts>>>("expanded_neon_bf16"),
#endif
#if OATMILL_MMLA
    way<Kind, ExpandedProducts<Kind, PairedRowProducts<Bf16Matrices>>>("expanded_neon_bf16_mmla"),
#endif
#if OATMILL_AMX
    way<Kind, ExpandedProducts<Kind, TileProducts<AmxMatrices<Bf16Weights>>>>("expanded_amx", amx_permitted),
#endif
    way<Kind, ExpandedProducts<Kind, TileProducts<PlainMatrices<Bf16Weights>>>>("expanded_amx_emulated")};

// Those that round their inputs: to 16 bits where the model has no more, to 8 bits by name only. None where this CPU has
// no instructions for them.
using None = std::array<Way, 0>;

template <typename Kind>
constexpr auto TO_BF16 =
#if defined(__AVX512BF16__)
    std::array{way<Kind, GroupedProducts<Bf16DigitProducts<Kind>>>("codes_avx512_bf16")};
#else
    None{};
#endif

template <typename Kind, typename Set>
constexpr std::array TO_16_BITS{way<Kind, GroupedProducts<Set>>("codes_int16")};

constexpr auto BOOK_TO_16_BITS =
#if OATMILL_LOOK_UP
    TO_16_BITS<Book, ShortDigitProducts<Book, BookNumbers>>;
#else
    None{};
#endif

template <typename Kind, typename Digits>
constexpr auto TO_8_BITS =
#if OATMILL_CODES_INT8
    std::array{way<Kind, GroupedProducts<DigitProducts<Kind, Digits>>>("codes_int8")};
#else
    None{};
#endif

template <size_t... N>
constexpr auto joined(const std::array<Way, N>&... ways) {
  std::array<Way, (N + ...)> all{};
  auto end = all.begin();
  ((end = std::copy(ways.begin(), ways.end(), end)), ...);
  return all;
}

constexpr auto SMALL_FLOAT_WAYS = joined(WAYS<SmallFloats>, TO_BF16<SmallFloats>);
constexpr auto BYTE_WAYS = joined(WAYS<Bytes>, TO_16_BITS<Bytes, ShortDigitProducts<Bytes, WholeNumbers<Bytes>>>);
constexpr auto NIBBLE_WAYS =
    joined(WAYS<Nibbles>, TO_BF16<Nibbles>, TO_16_BITS<Nibbles, NibbleShorts>, TO_8_BITS<Nibbles, NibbleDigits>);
constexpr auto BOOK_WAYS = joined(WAYS<Book>, TO_BF16<Book>, BOOK_TO_16_BITS, TO_8_BITS<Book, BookDigits>);

std::vector<std::string> codes_kernels(const std::string& kind) {
  std::vector<std::string> names;
  for (const Way& way : code_ways(kind))
    if (way.available()) names.emplace_back(way.name);
  return names;
}

}  // namespace

Codes::Codes(std::string kind, at::Tensor starts, at::Tensor scales, std::optional<at::Tensor> offsets,
             std::optional<at::Tensor> zeros, std::optional<at::Tensor> codebook, std::optional<at::Tensor> order)
    : kind(std::move(kind)), starts(std::move(starts)), scales(std::move(scales)), offsets(std::move(offsets)),
      zeros(std::move(zeros)), codebook(std::move(codebook)), order(std::move(order)) {
  TORCH_CHECK(this->starts.scalar_type() == at::kInt && (!this->offsets || !this->zeros));
  TORCH_CHECK(this->scales.dim() == 3 && this->scales.size(1) == this->starts.size(0) - 1 &&
              this->scales.size(2) == COLUMNS && this->scales.is_contiguous());
  for (const auto& shift : {this->offsets, this->zeros})
    TORCH_CHECK(!shift || (shift->sizes() == this->scales.sizes() && shift->is_contiguous()));
  by_dtype(this->scales, [](auto*) {});
}

std::span<const Way> code_ways(const std::string& kind) {
  if (kind == "int4") return NIBBLE_WAYS;
  if (kind == "codebook") return BOOK_WAYS;
  if (kind == "int8") return BYTE_WAYS;
  if (kind == "fp8") return SMALL_FLOAT_WAYS;
  TORCH_CHECK(false, "codes are int4, codebook, int8 or fp8, and not ", kind);
}

}  // namespace oatmill

TORCH_LIBRARY_FRAGMENT(oatmill, library) {
  library.def("codes_pack(Tensor codes, Tensor order, int bits) -> Tensor");
  library.def("codes_unpack(Tensor packed, Tensor order, int outputs, int inputs, int bits) -> Tensor");
  library.def("codes_kernels(str kind) -> str[]", &oatmill::codes_kernels);
}

TORCH_LIBRARY_IMPL(oatmill, CPU, library) {
  library.impl("codes_pack", &oatmill::codes_pack);
  library.impl("codes_unpack", &oatmill::codes_unpack);
}
