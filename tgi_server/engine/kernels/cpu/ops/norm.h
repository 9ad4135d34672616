// A norm with its weights.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/custom_class.h>

#include <cmath>
#include <cstdint>
#include <optional>
#include <utility>

#include "simd/dtypes.h"
#include "gemm/gemm.h"
#include "simd/simd16.h"
#include "ops/ops.h"
#include "runtime/ranks.h"
#include "runtime/thread_pool.h"

namespace oatmill {

using MaybeTensor = std::optional<at::Tensor>;

// A norm by the root mean square, or a layer norm (centred), whose bias there may be. whole_size: of a norm by the root
// mean square of elements that all ranks have together, with weights in float32; 0: this rank has them all. copies: so
// many ranks have the same of them.
struct Norm : torch::CustomClassHolder {
  at::Tensor weight;
  MaybeTensor bias;
  double eps;
  bool centred;
  int64_t whole_size, copies;

  Norm(at::Tensor weight, MaybeTensor bias, double eps, bool centred, int64_t whole_size, int64_t copies)
      : weight(std::move(weight)), bias(std::move(bias)), eps(eps), centred(centred), whole_size(whole_size),
        copies(copies) {}

  at::Tensor operator()(const at::Tensor& x) const {
    return centred ? layer_norm(x, weight, bias, eps) : rms_norm(x, weight, eps);
  }

  // x: [tokens, 1, size], of this rank.
  at::Tensor over_ranks(const at::Tensor& x, Ranks& ranks) const {
    const int64_t tokens = x.size(0), size = x.size(2), stride = x.stride(0);
    at::Tensor sums = at::empty({tokens}, x.options().dtype(at::kFloat)), y = at::empty({tokens, 1, size}, x.options());
    float* squares = sums.mutable_data_ptr<float>();
    by_dtype(x, [&]<typename T>(T*) {
      const T* from = x.const_data_ptr<T>();
      for_rows(tokens, size, [&](int64_t t, int64_t last) {
        for (; t < last; ++t) {
          float sum = 0;
          for (int64_t i = 0; i < size; ++i) {
            const float value = static_cast<float>(from[t * stride + i]);
            sum += value * value;
          }
          squares[t] = sum / static_cast<float>(copies);
        }
      });
      ranks.all_reduce(sums);
      const float* scale = weight.const_data_ptr<float>();
      T* to = y.mutable_data_ptr<T>();
      for_rows(tokens, size, [&](int64_t t, int64_t last) {
        for (; t < last; ++t) {
          const float factor = 1 / std::sqrt(squares[t] / static_cast<float>(whole_size) + static_cast<float>(eps));
          for (int64_t i = 0; i < size; ++i)
            to[t * size + i] = static_cast<T>(scale[i] * (static_cast<float>(from[t * stride + i]) * factor));
        }
      });
    });
    return y;
  }
};

using NormPtr = c10::intrusive_ptr<Norm>;
using MaybeNorm = std::optional<NormPtr>;

}  // namespace oatmill
