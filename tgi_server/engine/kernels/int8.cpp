// Linear layers with 8-bit weights, on CPUs with AVX-512 VNNI.
//
// Weights have one scale for each output; an input row gets a scale of its own when it arrives. The instruction
// multiplies unsigned by signed bytes, so inputs are stored 128 higher than they are, and 128 times the sum of an
// output's weights is taken off again at the end.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/BFloat16.h>
#include <immintrin.h>
#include <torch/library.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "lanes.h"

namespace {

using namespace oatmill;
using Bytes = uint8_t __attribute__((vector_size(LANES)));

constexpr int64_t DEPTH = 4;                   // bytes that one instruction multiplies and adds for each output
constexpr int64_t VECTORS = 4;                 // registers of outputs that are computed together
constexpr int64_t COLUMNS = VECTORS * LANES;   // outputs of a tile
constexpr int ROWS = 6;                        // rows that share a pass over a tile's weights
constexpr int OFFSET = 128;

int64_t padded(int64_t size, int64_t step) { return (size + step - 1) / step * step; }

// weight: [outputs, inputs] int8. Returns [outputs / 64, inputs / 4, 64, 4], padded with zeros.
at::Tensor int8_pack(const at::Tensor& weight) {
  const int64_t outputs = weight.size(0), inputs = weight.size(1);
  const int64_t tiles = padded(outputs, COLUMNS) / COLUMNS, depth = padded(inputs, DEPTH) / DEPTH;
  at::Tensor packed = at::zeros({tiles, depth, COLUMNS, DEPTH}, weight.options());
  const at::Tensor dense = weight.contiguous();
  const int8_t* from = dense.const_data_ptr<int8_t>();
  int8_t* to = packed.mutable_data_ptr<int8_t>();
  at::parallel_for(0, tiles, 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin * COLUMNS; n < std::min(end * COLUMNS, outputs); ++n)
      for (int64_t k = 0; k < inputs; ++k)
        to[((n / COLUMNS * depth + k / DEPTH) * COLUMNS + n % COLUMNS) * DEPTH + k % DEPTH] = from[n * inputs + k];
  });
  return packed;
}

struct Problem {
  const uint8_t* input;       // [rows, 4 * depth], offset
  const float* input_scales;  // [rows]
  const int8_t* weights;
  const float* weight_scales;  // [outputs], as are the next two
  const float* corrections;    // OFFSET times the sum of each output's weights
  const float* bias;           // or null
  int64_t rows, depth, outputs;
  bool relu;
};

#if defined(__AVX512VNNI__)

// total += row * column, four bytes at a time. As an instruction rather than by its intrinsic, around which compilers
// copy the totals to and fro until they no longer fit the registers.
inline void add_products(__m512i& total, __m512i row, __m512i column) {
  asm("vpdpbusd %2, %1, %0" : "+v"(total) : "v"(row), "v"(column));
}

// The tile's outputs of R rows, as floats: [R, COLUMNS].
template <int R>
void multiply(const Problem& problem, int64_t first_row, int64_t tile, float* sums) {
  __m512i totals[R][VECTORS];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < VECTORS; ++v) totals[r][v] = _mm512_setzero_si512();
  const int8_t* weights = problem.weights + tile * problem.depth * COLUMNS * DEPTH;
  const uint8_t* input = problem.input + first_row * problem.depth * DEPTH;
  for (int64_t k = 0; k < problem.depth; ++k) {
    __m512i columns[VECTORS];
    for (int v = 0; v < VECTORS; ++v)
      columns[v] = _mm512_loadu_si512(weights + k * COLUMNS * DEPTH + v * LANES * DEPTH);
    for (int r = 0; r < R; ++r) {
      int32_t four;
      std::memcpy(&four, input + (r * problem.depth + k) * DEPTH, sizeof(four));
      const __m512i row = _mm512_set1_epi32(four);
      for (int v = 0; v < VECTORS; ++v) add_products(totals[r][v], row, columns[v]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < VECTORS; ++v)
      _mm512_storeu_ps(sums + r * COLUMNS + v * LANES, _mm512_cvtepi32_ps(totals[r][v]));
}

using Multiply = void (*)(const Problem&, int64_t, int64_t, float*);
constexpr Multiply MULTIPLY[ROWS] = {multiply<1>, multiply<2>, multiply<3>, multiply<4>, multiply<5>, multiply<6>};

// One row of a tile on its way out: sums become numbers again. Scalar and Lanes alike.
template <typename N>
N restored(N sum, N correction, N weight_scale, float input_scale) {
  return (sum - correction) * weight_scale * input_scale;
}

template <typename T>
void finish_row(const Problem& problem, const float* sums, int64_t row, int64_t first, const T* residual, T* output) {
  const int64_t count = std::min(COLUMNS, problem.outputs - first), place = row * problem.outputs + first;
  const float scale = problem.input_scales[row], floor = problem.relu ? 0.0f : -std::numeric_limits<float>::infinity();
  int64_t n = 0;
  for (; n + LANES <= count; n += LANES) {
    Lanes value = restored(load(sums + n), load(problem.corrections + first + n),
                           load(problem.weight_scales + first + n), scale);
    if (problem.bias) value += load(problem.bias + first + n);
    value = larger(value, Lanes{} + floor);
    if (residual) value += load(residual + place + n);
    store(output + place + n, value);
  }
  for (; n < count; ++n) {
    float value =
        restored(sums[n], problem.corrections[first + n], problem.weight_scales[first + n], scale);
    if (problem.bias) value += problem.bias[first + n];
    value = std::max(value, floor);
    if (residual) value += static_cast<float>(residual[place + n]);
    output[place + n] = static_cast<T>(value);
  }
}

template <typename T>
void run_tile(const Problem& problem, int64_t tile, const T* residual, T* output) {
  float sums[ROWS * COLUMNS];
  for (int64_t row = 0; row < problem.rows; row += ROWS) {
    const int64_t rows = std::min<int64_t>(ROWS, problem.rows - row);
    MULTIPLY[rows - 1](problem, row, tile, sums);
    for (int64_t r = 0; r < rows; ++r)
      finish_row(problem, sums + r * COLUMNS, row + r, tile * COLUMNS, residual, output);
  }
}

#endif

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
  at::parallel_for(0, rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      scales[r] = quantise_row(input + r * size, size, depth * DEPTH, bytes + r * depth * DEPTH);
  });
}

bool int8_supported() {
#if defined(__AVX512VNNI__)
  return true;
#else
  return false;
#endif
}

// input: [..., inputs] float32 or bfloat16; packed: of int8_pack; scales, corrections, bias: [outputs] float32;
// residual: [..., outputs], added last. Returns [..., outputs] in the input's dtype.
at::Tensor int8_linear(const at::Tensor& input, const at::Tensor& packed, const at::Tensor& scales,
                       const at::Tensor& corrections, const std::optional<at::Tensor>& bias, bool relu,
                       const std::optional<at::Tensor>& residual) {
  TORCH_CHECK(int8_supported(), "8-bit weights need a CPU with AVX-512 VNNI");
  const at::Tensor x = input.contiguous();
  const int64_t size = x.size(-1), rows = x.numel() / size, depth = packed.size(1), outputs = scales.size(0);
  TORCH_CHECK(padded(size, DEPTH) == depth * DEPTH, "the input has ", size, " features, the weights ", depth * DEPTH);
  auto shape = x.sizes().vec();
  shape.back() = outputs;
  at::Tensor output = at::empty(shape, x.options());
  std::vector<uint8_t> bytes(rows * depth * DEPTH);
  std::vector<float> input_scales(rows);
  const Problem problem{bytes.data(), input_scales.data(), packed.const_data_ptr<int8_t>(),
                        scales.const_data_ptr<float>(), corrections.const_data_ptr<float>(),
                        bias ? bias->const_data_ptr<float>() : nullptr, rows, depth, outputs, relu};
  const auto run = [&]<typename T>(T*) {
    const at::Tensor added = residual ? residual->contiguous() : at::Tensor();
    const T* extra = residual ? added.const_data_ptr<T>() : nullptr;
    T* to = output.mutable_data_ptr<T>();
    quantise(x.const_data_ptr<T>(), rows, size, depth, bytes.data(), input_scales.data());
#if defined(__AVX512VNNI__)
    at::parallel_for(0, packed.size(0), 1, [&](int64_t begin, int64_t end) {
      for (int64_t tile = begin; tile < end; ++tile) run_tile<T>(problem, tile, extra, to);
    });
#endif
  };
  if (x.scalar_type() == at::kBFloat16)
    run(static_cast<c10::BFloat16*>(nullptr));
  else
    run(static_cast<float*>(nullptr));
  return output;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(oatmill, library) {
  library.def("int8_supported() -> bool", &int8_supported);
  library.def("int8_pack(Tensor weight) -> Tensor");
  library.def(
      "int8_linear(Tensor input, Tensor packed, Tensor scales, Tensor corrections, Tensor? bias, bool relu, "
      "Tensor? residual) -> Tensor");
}

TORCH_LIBRARY_IMPL(oatmill, CPU, library) {
  library.impl("int8_pack", &int8_pack);
  library.impl("int8_linear", &int8_linear);
}
