// The element-wise parts of a decoder layer, each as one pass over its tokens. Arithmetic is in float; values are
// rounded to the tensors' dtype where transformers' own modules round them, so that results agree to the last bit or
// nearly so.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/BFloat16.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>

#include "simd/dtypes.h"
#include "attention/kv_layout.h"
#include "simd/simd16.h"
#include "gemm/gemm.h"
#include "ops/ops.h"
#include "runtime/thread_pool.h"

namespace oatmill {

namespace {

int64_t tokens_a_thread(int64_t elements_a_token) { return std::max<int64_t>(1, worth_a_thread() / elements_a_token); }

// How a row is read: a register at a time, and one by one what is left at its end.
struct Many {
  template <typename T>
  F32 operator()(const T* from) const {
    return load_f32(from);
  }
  // A value as it would be after having been written to a tensor of T.
  template <typename T>
  static F32 rounded(const T*, F32 value) {
    T kept[WIDTH];
    store(kept, value);
    return load_f32(kept);
  }
};

struct One {
  template <typename T>
  float operator()(const T* from) const {
    return static_cast<float>(*from);
  }
  template <typename T>
  static float rounded(const T*, float value) {
    return static_cast<float>(static_cast<T>(value));
  }
};

// The sum of value(i, at) for all i below size; `at` reads at a pointer.
template <typename Value>
float total(int64_t size, const Value& value) {
  constexpr int SUMS = LANES / WIDTH;
  F32 sums[SUMS] = {};
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES)
#pragma GCC unroll 4
    for (int s = 0; s < SUMS; ++s) sums[s] += value(i + s * WIDTH, Many{});
  for (int s = 1; s < SUMS; ++s) sums[0] += sums[s];
  float all = sum(sums[0]);
  for (; i < size; ++i) all += value(i, One{});
  return all;
}

// to[i] = value(i, at) for all i below size.
template <typename T, typename Value>
void write(T* to, int64_t size, const Value& value) {
  int64_t i = 0;
  for (; i + WIDTH <= size; i += WIDTH) store(to + i, value(i, Many{}));
  for (; i < size; ++i) to[i] = static_cast<T>(value(i, One{}));
}

inline F32 sigmoid(F32 x) { return F32{} + 1.0f / (exponential(-x) + 1.0f); }
inline float sigmoid(float x) { return 1.0f / (std::exp(-x) + 1.0f); }

// Heads of tokens, [tokens, heads, size], as a part of a wider tensor has them.
bool are_heads(const at::Tensor& x) { return x.dim() == 3 && x.stride(2) == 1; }

// Calls work(from, to, size) for each row of two tensors of one shape, [..., size]. input is contiguous, or are_heads;
// output is contiguous.
template <typename T, typename Work>
void for_each_row(const at::Tensor& input, at::Tensor& output, const Work& work) {
  const int64_t size = input.size(-1), rows = input.numel() / size;
  const int64_t heads = are_heads(input) ? input.size(1) : 1;
  const int64_t step = are_heads(input) ? input.stride(0) : size, head_step = are_heads(input) ? input.stride(1) : 0;
  const T* from = input.const_data_ptr<T>();
  T* to = output.mutable_data_ptr<T>();
  for_range(rows, tokens_a_thread(size), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) work(from + r / heads * step + r % heads * head_step, to + r * size, size);
  });
}

// Rotary position embedding of one head (Su et al. 2021), halves apart: element i turns with element i + half.
// from and to may be the same. cos, sin: the same in both halves.
template <typename T>
void rotate_halves(const T* from, T* to, const T* cos, const T* sin, int64_t rotated, int64_t head_dim) {
  const int64_t half = rotated / 2;
  int64_t i = 0;
  for (; i + WIDTH <= half; i += WIDTH) {
    const F32 low = load_f32(from + i), high = load_f32(from + i + half);
    store(to + i, low * load_f32(cos + i) - high * load_f32(sin + i));
    store(to + i + half, high * load_f32(cos + i + half) + low * load_f32(sin + i + half));
  }
  for (; i < half; ++i) {
    const float low = static_cast<float>(from[i]), high = static_cast<float>(from[i + half]);
    to[i] = static_cast<T>(low * static_cast<float>(cos[i]) - high * static_cast<float>(sin[i]));
    to[i + half] = static_cast<T>(high * static_cast<float>(cos[i + half]) + low * static_cast<float>(sin[i + half]));
  }
  if (from != to) std::copy(from + rotated, from + head_dim, to + rotated);
}

// The same, but element 2 i turns with element 2 i + 1.
template <typename T>
void rotate_pairs(const T* from, T* to, const T* cos, const T* sin, int64_t rotated, int64_t head_dim) {
  for (int64_t i = 0; i < rotated / 2; ++i) {
    const float even = static_cast<float>(from[2 * i]), odd = static_cast<float>(from[2 * i + 1]);
    const float c = static_cast<float>(cos[i]), s = static_cast<float>(sin[i]);
    to[2 * i] = static_cast<T>(even * c - odd * s);
    to[2 * i + 1] = static_cast<T>(odd * c + even * s);
  }
  if (from != to) std::copy(from + rotated, from + head_dim, to + rotated);
}

}  // namespace

// input: [..., size]; weight: [size], of the dtype of input; or in float32, and the product with it is rounded once.
at::Tensor rms_norm(const at::Tensor& input, const at::Tensor& weight, double eps) {
  const at::Tensor x = are_heads(input) ? input : input.contiguous();
  at::Tensor output = at::empty(x.sizes(), x.options());
  by_dtype(x, [&]<typename T>(T*) {
    const T* scale = weight.scalar_type() == x.scalar_type() ? weight.const_data_ptr<T>() : nullptr;
    const float* wide = scale ? nullptr : weight.const_data_ptr<float>();
    for_each_row<T>(x, output, [&](const T* from, T* to, int64_t size) {
      const float squares = total(size, [&](int64_t i, auto at) { return at(from + i) * at(from + i); });
      const float factor = 1.0f / std::sqrt(squares / static_cast<float>(size) + static_cast<float>(eps));
      if (scale)
        write(to, size, [&](int64_t i, auto at) { return at.rounded(to, at(from + i) * factor) * at(scale + i); });
      else write(to, size, [&](int64_t i, auto at) { return at(from + i) * factor * at(wide + i); });
    });
  });
  return output;
}

// input: [..., size]; weight: [size], or [heads, size] of input's [tokens, heads, size]; bias: [size], or none.
at::Tensor layer_norm(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                      double eps) {
  const at::Tensor x = are_heads(input) ? input : input.contiguous();
  at::Tensor output = at::empty(x.sizes(), x.options());
  TORCH_CHECK(weight.is_contiguous() && weight.size(-1) == x.size(-1) &&
              (weight.dim() == 1 || weight.size(0) == x.size(1)));
  by_dtype(x, [&]<typename T>(T*) {
    const T* scales = weight.const_data_ptr<T>();
    const T* shift = bias ? bias->const_data_ptr<T>() : nullptr;
    const T* first = output.const_data_ptr<T>();
    const int64_t heads = weight.dim() == 2 ? weight.size(0) : 1;
    for_each_row<T>(x, output, [&](const T* from, T* to, int64_t size) {
      const T* scale = scales + (to - first) / size % heads * size;
      const float mean = total(size, [&](int64_t i, auto at) { return at(from + i); }) / static_cast<float>(size);
      const float squares =
          total(size, [&](int64_t i, auto at) { return (at(from + i) - mean) * (at(from + i) - mean); });
      const float factor = 1.0f / std::sqrt(squares / static_cast<float>(size) + static_cast<float>(eps));
      if (shift)
        write(to, size,
              [&](int64_t i, auto at) { return (at(from + i) - mean) * factor * at(scale + i) + at(shift + i); });
      else write(to, size, [&](int64_t i, auto at) { return (at(from + i) - mean) * factor * at(scale + i); });
    });
  });
  return output;
}

// The error function, to 2e-7 (Abramowitz and Stegun 1964, 7.1.26).
inline F32 error_function(F32 x) {
  const F32 size = x < 0.0f ? -x : x, t = F32{} + 1.0f / (0.3275911f * size + 1.0f);
  F32 series = fma(t, F32{} + 1.061405429f, F32{} - 1.453152027f);
  series = fma(series, t, F32{} + 1.421413741f);
  series = fma(series, t, F32{} - 0.284496736f);
  series = fma(series, t, F32{} + 0.254829592f);
  const F32 value = 1.0f - series * t * exponential(-size * size);
  return x < 0.0f ? -value : value;
}

// Calls work with a function of F32.
template <typename Work>
void by_activation(Activation activation, const Work& work) {
  constexpr float ROOT = 0.7978845608028654f, CUBE = 0.044715f, HALF_ROOT = 0.70710678118654752f;  // the root of 2 / pi
  switch (activation) {
    case Activation::relu:
      return work([](F32 x) { return vmax(x, F32{}); });
    case Activation::relu2:
      return work([](F32 x) { return vmax(x, F32{}) * vmax(x, F32{}); });
    case Activation::gelu:
      return work([](F32 x) { return x * 0.5f * (error_function(x * HALF_ROOT) + 1.0f); });
    case Activation::gelu_tanh:
      return work([](F32 x) { return x / (exponential(-2.0f * ROOT * (x + CUBE * x * x * x)) + 1.0f); });
    case Activation::silu:
      return work([](F32 x) { return x / (exponential(-x) + 1.0f); });
  }
}

Activation activation_named(const std::string& name) {
  const std::string names[] = {"relu", "relu2", "gelu", "gelu_tanh", "silu"};
  const auto found = std::find(std::begin(names), std::end(names), name);
  TORCH_CHECK(found != std::end(names), "the activation ", name, " is not known");
  return static_cast<Activation>(found - std::begin(names));
}

// x: [..., size]; or, where it is gated, [..., 2 * size], the gate first. Returns activation(x), or activation(gate) *
// up,
// [..., size].
at::Tensor activate(const at::Tensor& input, Activation activation, bool gated) {
  const at::Tensor x = input.contiguous();
  const int64_t width = x.size(-1), size = gated ? width / 2 : width, tokens = x.numel() / width;
  auto shape = x.sizes().vec();
  shape.back() = size;
  at::Tensor output = at::empty(shape, x.options());
  by_dtype(x, [&]<typename T>(T*) {
    by_activation(activation, [&](const auto& activated) {
      const auto compute = [&](const T* from, T* to, int64_t up) {
        const F32 value = activated(load_f32(from));
        store(to, gated ? Many::rounded(to, value) * load_f32(from + up) : value);
      };
      for_range(tokens, tokens_a_thread(size), [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
          const T* from = x.const_data_ptr<T>() + t * width;
          T* to = output.mutable_data_ptr<T>() + t * size;
          int64_t i = 0;
          for (; i + WIDTH <= size; i += WIDTH) compute(from + i, to + i, size);
          if (i == size) continue;
          T ins[2 * WIDTH] = {}, outs[WIDTH];
          std::copy(from + i, from + size, ins);
          if (gated) std::copy(from + size + i, from + width, ins + WIDTH);
          compute(ins, outs, WIDTH);
          std::copy_n(outs, size - i, to + i);
        }
      });
    });
  });
  return output;
}

// x = x * sigmoid(gate). x, gate: [tokens, heads, size], x contiguous, gate with a dense last dimension.
void multiply_by_sigmoid(at::Tensor& x, const at::Tensor& gate) {
  if (x.numel() == 0) return;
  TORCH_CHECK(x.is_contiguous() && are_heads(gate) && x.sizes() == gate.sizes());
  by_dtype(x, [&]<typename T>(T*) {
    for_each_row<T>(gate, x, [&](const T* from, T* to, int64_t size) {
      write(to, size, [&](int64_t i, auto at) { return at(to + i) * at.rounded(to, sigmoid(at(from + i))); });
    });
  });
}

// Rows of a table, [rows, size]: those at the indices, [count] int64.
at::Tensor rows_of(const at::Tensor& table, const at::Tensor& indices) {
  TORCH_CHECK(table.is_contiguous() && indices.is_contiguous());
  const int64_t count = indices.numel(), bytes = table.size(1) * table.element_size();
  at::Tensor rows = at::empty({count, table.size(1)}, table.options());
  const int64_t* index = indices.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < count; ++i)
    TORCH_CHECK_INDEX(0 <= index[i] && index[i] < table.size(0), "there is no row ", index[i], " of ", table.size(0));
  char* to = static_cast<char*>(rows.mutable_data_ptr());
  const char* from = static_cast<const char*>(table.const_data_ptr());
  for_rows(count, table.size(1), [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) std::memcpy(to + i * bytes, from + index[i] * bytes, bytes);
  });
  return rows;
}

// Rotates query, [tokens, heads, head_dim] with a dense last dimension, in place. The others as below.
void rotate(at::Tensor& query, const at::Tensor& cos, const at::Tensor& sin, bool interleaved) {
  const int64_t heads = query.size(1), head_dim = query.size(2), rotated = cos.size(-1);
  TORCH_CHECK(query.stride(2) == 1 && cos.is_contiguous() && sin.is_contiguous() &&
              cos.scalar_type() == query.scalar_type());
  by_dtype(query, [&]<typename T>(T*) {
    T* q = query.mutable_data_ptr<T>();
    const T* c = cos.const_data_ptr<T>();
    const T* s = sin.const_data_ptr<T>();
    for_rows(query.size(0), heads * head_dim, [&](int64_t t, int64_t last) {
      for (; t < last; ++t)
        for (int64_t h = 0; h < heads; ++h) {
          T* head = q + t * query.stride(0) + h * query.stride(1);
          (interleaved ? rotate_pairs<T> : rotate_halves<T>)(head, head, c + t * rotated, s + t * rotated, rotated,
                                                             head_dim);
        }
    });
  });
}

// Rotates query in place and key on its way into the cache, and puts value beside it.
// query: [tokens, heads, head_dim]; key, value: [tokens, kv_heads, head_dim], all with a dense last dimension and
// possibly views of one tensor; cos, sin: [tokens, rotated]; keys, values: the layer's cache (kv_layout.h), with its
// scales. interleaved: neighbouring elements turn together, and not those half of `rotated` apart.
void rotate_and_write(at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& cos,
                      const at::Tensor& sin, at::Tensor& keys, at::Tensor& values, const at::Tensor& slots,
                      double key_scale, double value_scale, bool interleaved) {
  const int64_t heads = query.size(1), kv_heads = key.size(1), head_dim = query.size(2), rotated = cos.size(-1);
  TORCH_CHECK(query.stride(2) == 1 && key.stride(2) == 1 && value.stride(2) == 1);
  TORCH_CHECK(cos.is_contiguous() && sin.is_contiguous() && cos.scalar_type() == query.scalar_type());
  by_dtype(query, [&]<typename T>(T*) {
    T* q = query.mutable_data_ptr<T>();
    const T* c = cos.const_data_ptr<T>();
    const T* s = sin.const_data_ptr<T>();
    const int64_t group = heads / kv_heads;
    const auto rotate = interleaved ? rotate_pairs<T> : rotate_halves<T>;
    const auto turn = [&](int64_t t, int64_t h, const T* from, T* to) {
      for (int64_t i = h * group; i < (h + 1) * group; ++i) {
        T* head = q + t * query.stride(0) + i * query.stride(1);
        rotate(head, head, c + t * rotated, s + t * rotated, rotated, head_dim);
      }
      rotate(from, to, c + t * rotated, s + t * rotated, rotated, head_dim);
    };
    by_cache<T>(keys.scalar_type(), values.scalar_type(), [&]<typename K, typename V>(K*, V*) {
      write_blocks<T, K, V>(slots, key, value, keys, values,
                            {static_cast<float>(key_scale), static_cast<float>(value_scale)}, turn);
    });
  });
}

}  // namespace oatmill

TORCH_LIBRARY_FRAGMENT(oatmill, library) {
  library.def("rms_norm(Tensor input, Tensor weight, float eps) -> Tensor");
  library.def("layer_norm(Tensor input, Tensor weight, Tensor? bias, float eps) -> Tensor");
  library.def("activate(Tensor x, str activation, bool gated) -> Tensor");
  library.def(
      "rotate_and_write(Tensor(a!) query, Tensor key, Tensor value, Tensor cos, Tensor sin, Tensor(b!) keys, "
      "Tensor(c!) values, Tensor slots, float key_scale=1.0, float value_scale=1.0, bool interleaved=False) -> ()");
}

TORCH_LIBRARY_IMPL(oatmill, CPU, library) {
  library.impl("rms_norm", &oatmill::rms_norm);
  library.impl("layer_norm", &oatmill::layer_norm);
  library.impl("activate", [](const at::Tensor& x, const std::string& activation, bool gated) {
    return oatmill::activate(x, oatmill::activation_named(activation), gated);
  });
  library.impl("rotate_and_write", &oatmill::rotate_and_write);
}
