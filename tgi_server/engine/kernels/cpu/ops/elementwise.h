// Sums and products of tensors, element by element, rounded as operations on tensors are.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "simd/dtypes.h"
#include "gemm/gemm.h"
#include "simd/simd16.h"
#include "runtime/thread_pool.h"

namespace oatmill {

// rows *= scale, element by element. scale: [columns] float32.
inline void multiply_columns(at::Tensor& rows, const at::Tensor& scale) {
  const int64_t columns = rows.size(1);
  by_dtype(rows, [&]<typename T>(T*) {
    T* to = rows.mutable_data_ptr<T>();
    const float* factors = scale.const_data_ptr<float>();
    for_rows(rows.size(0), columns, [&](int64_t r, int64_t last) {
      for (; r < last; ++r)
        for (int64_t i = 0; i < columns; ++i)
          to[r * columns + i] = static_cast<T>(static_cast<float>(to[r * columns + i]) * factors[i]);
    });
  });
}

// sums += others, of the same shape, contiguous.
inline void add(at::Tensor& sums, const at::Tensor& others) {
  by_dtype(sums, [&]<typename T>(T*) {
    T* to = sums.mutable_data_ptr<T>();
    const T* from = others.const_data_ptr<T>();
    for_rows(sums.numel(), 1, [&](int64_t i, int64_t last) {
      for (; i + LANES <= last; i += LANES) store(to + i, load(to + i) + load(from + i));
      for (; i < last; ++i) to[i] = static_cast<T>(static_cast<float>(to[i]) + static_cast<float>(from[i]));
    });
  });
}

// numbers *= others, of the same shape, contiguous.
inline void multiply(at::Tensor& numbers, const at::Tensor& others) {
  by_dtype(numbers, [&]<typename T>(T*) {
    T* to = numbers.mutable_data_ptr<T>();
    const T* from = others.const_data_ptr<T>();
    for_rows(numbers.numel(), 1, [&](int64_t i, int64_t last) {
      for (; i < last; ++i) to[i] = static_cast<T>(static_cast<float>(to[i]) * static_cast<float>(from[i]));
    });
  });
}

// x = change(x), rounded as an operation on tensors is.
template <typename Change>
inline void change_each(at::Tensor& numbers, const Change& change) {
  by_dtype(numbers, [&]<typename T>(T*) {
    T* to = numbers.mutable_data_ptr<T>();
    const auto rounded = [](float value) { return static_cast<float>(static_cast<T>(value)); };
    for_rows(numbers.numel(), 1, [&](int64_t i, int64_t last) {
      for (; i < last; ++i) to[i] = static_cast<T>(change(static_cast<float>(to[i]), rounded));
    });
  });
}

// factor: as the dtype of the numbers has it.
inline void multiply(at::Tensor& numbers, double factor) {
  change_each(numbers, [factor = static_cast<float>(factor)](float x, auto) { return x * factor; });
}

}  // namespace oatmill
