// Alternating updates (Baykal et al. 2023), as Gemma 3n has them: a token has several streams of hidden states. A layer
// computes with the first one; by a few numbers of each token it predicts all of them before that, and corrects them
// then. Streams stand one after the other, [streams, tokens, hidden_size].

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "gemm/gemm.h"
#include "gemm/linear.h"
#include "ops/elementwise.h"
#include "ops/norm.h"
#include "simd/dtypes.h"

namespace oatmill {

// What a layer has for it. router: makes the numbers of a token of what norm gives. prediction, correction: make
// coefficients of these. scale: of the first stream, before the layer's further input is made of it, [hidden_size]; or
// none. left, right, laurel_norm: a residual of low rank beside attention (LAuReL: Menghani et al. 2024).
struct AltUp : torch::CustomClassHolder {
  NormPtr norm, laurel_norm;
  LinearPtr router, prediction, correction, left, right;
  MaybeTensor scale;

  AltUp(NormPtr norm, LinearPtr router, LinearPtr prediction, LinearPtr correction, MaybeTensor scale, LinearPtr left,
        LinearPtr right, NormPtr laurel_norm)
      : norm(std::move(norm)), laurel_norm(std::move(laurel_norm)), router(std::move(router)),
        prediction(std::move(prediction)), correction(std::move(correction)), left(std::move(left)),
        right(std::move(right)), scale(std::move(scale)) {}

  // adapters: of the tokens, as Linear::adapted takes them.
  at::Tensor predicted(const at::Tensor& streams, const MaybeTensor& adapters) const {
    const int64_t count = streams.size(0);
    const at::Tensor coefficients = prediction->adapted(numbers(streams.select(0, 0), adapters), adapters);
    at::Tensor output = at::empty_like(streams);
    by_dtype(streams, [&]<typename T>(T*) {
      const T* own = coefficients.const_data_ptr<T>();
      const T* from = streams.const_data_ptr<T>();
      T* to = output.mutable_data_ptr<T>();
      const int64_t tokens = streams.size(1), size = streams.size(2), stream = tokens * size;
      for_rows(tokens, count * count * size, [&](int64_t t, int64_t last) {
        for (; t < last; ++t)
          for (int64_t i = 0; i < count; ++i)
            for (int64_t h = t * size; h < (t + 1) * size; ++h) {
              float sum = 0;
              for (int64_t j = 0; j < count; ++j)
                sum += static_cast<float>(from[j * stream + h]) * static_cast<float>(own[(t * count + i) * count + j]);
              const float rounded = static_cast<float>(static_cast<T>(sum));
              to[i * stream + h] = static_cast<T>(rounded + static_cast<float>(from[i * stream + h]));
            }
      });
    });
    return output;
  }

  // streams: as predicted. output: what the layer made of the first one, [tokens, hidden_size].
  at::Tensor corrected(const at::Tensor& streams, const at::Tensor& output, const MaybeTensor& adapters) const {
    at::Tensor coefficients = correction->adapted(numbers(output, adapters), adapters), sums = streams.clone();
    change_each(coefficients, [](float x, auto) { return x + 1; });
    by_dtype(streams, [&]<typename T>(T*) {
      const T* own = coefficients.const_data_ptr<T>();
      const T* made = output.const_data_ptr<T>();
      const T* from = streams.const_data_ptr<T>();
      T* to = sums.mutable_data_ptr<T>();
      const int64_t count = streams.size(0), tokens = streams.size(1), size = streams.size(2), stream = tokens * size;
      const auto rounded = [](float value) { return static_cast<float>(static_cast<T>(value)); };
      for_rows(tokens, count * size, [&](int64_t t, int64_t last) {
        for (; t < last; ++t)
          for (int64_t h = t * size; h < (t + 1) * size; ++h) {
            const float change = rounded(static_cast<float>(made[h]) - static_cast<float>(from[h]));
            for (int64_t i = 0; i < count; ++i)
              to[i * stream + h] = static_cast<T>(rounded(change * static_cast<float>(own[t * count + i])) +
                                                  static_cast<float>(from[i * stream + h]));
          }
      });
    });
    return sums;
  }

  // x: what attention takes, [tokens, hidden_size].
  at::Tensor residual(const at::Tensor& x, const MaybeTensor& adapters) const {
    at::Tensor sum = (*laurel_norm)(right->adapted(left->adapted(x, adapters), adapters));
    add(sum, x);
    return sum;
  }

  at::Tensor scaled(const at::Tensor& x) const {
    at::Tensor output = x.clone();
    if (scale) multiply_columns(output, *scale);
    return output;
  }

 private:
  // The numbers of each token, [tokens, streams]. x: a stream.
  at::Tensor numbers(const at::Tensor& x, const MaybeTensor& adapters) const {
    at::Tensor normed = (*norm)(x);
    multiply(normed, 1.0 / static_cast<double>(x.size(1)));
    at::Tensor output = router->adapted(normed, adapters);
    change_each(output, [](float value, auto) { return std::tanh(value); });
    return output;
  }
};

using AltUpPtr = c10::intrusive_ptr<AltUp>;

// What a model has for it. projections: make the streams after the first one of that. back: take them back, so that the
// last hidden states are the mean of all streams. Both leave each token's magnitude as it is in the first stream.
struct Streams : torch::CustomClassHolder {
  std::vector<LinearPtr> projections, back;

  Streams(std::vector<LinearPtr> projections, std::vector<LinearPtr> back)
      : projections(std::move(projections)), back(std::move(back)) {}

  // hidden: [tokens, hidden_size].
  at::Tensor of(const at::Tensor& hidden, const MaybeTensor& adapters) const {
    const int64_t count = static_cast<int64_t>(projections.size()) + 1;
    at::Tensor streams = at::empty({count, hidden.size(0), hidden.size(1)}, hidden.options());
    streams.select(0, 0).copy_(hidden);
    for (int64_t i = 1; i < count; ++i)
      streams.select(0, i).copy_(of_magnitude(projections[i - 1]->adapted(hidden, adapters), hidden));
    return streams;
  }

  at::Tensor merged(const at::Tensor& streams, const MaybeTensor& adapters) const {
    const at::Tensor first = streams.select(0, 0);
    at::Tensor sum = first.to(at::kFloat, false, true);
    for (int64_t i = 1; i < streams.size(0); ++i)
      add(sum, of_magnitude(back[i - 1]->adapted(streams.select(0, i), adapters), first).to(at::kFloat));
    multiply(sum, 1.0 / static_cast<double>(streams.size(0)));
    return sum.to(first.scalar_type());
  }

 private:
  // x, multiplied so that each row's mean of squares is that of `like`. Both are [tokens, hidden_size].
  static at::Tensor of_magnitude(at::Tensor x, const at::Tensor& like) {
    by_dtype(x, [&]<typename T>(T*) {
      T* to = x.mutable_data_ptr<T>();
      const T* other = like.const_data_ptr<T>();
      const int64_t size = x.size(1);
      const auto mean = [&](const T* row) {
        float sum = 0;
        for (int64_t i = 0; i < size; ++i) sum += static_cast<float>(row[i]) * static_cast<float>(row[i]);
        return sum / static_cast<float>(size);
      };
      for_rows(x.size(0), size, [&](int64_t t, int64_t last) {
        for (; t < last; ++t) {
          const float factor = std::sqrt(mean(other + t * size) / std::max(mean(to + t * size), 1e-5f));
          for (int64_t i = t * size; i < (t + 1) * size; ++i)
            to[i] = static_cast<T>(static_cast<float>(to[i]) * factor);
        }
      });
    });
    return x;
  }
};

using StreamsPtr = c10::intrusive_ptr<Streams>;

}  // namespace oatmill
