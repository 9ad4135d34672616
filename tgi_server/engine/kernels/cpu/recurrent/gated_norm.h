// A norm by the root mean square with a gate, of one row.

#pragma once

#include <cmath>

#include "recurrent/runs.h"

namespace oatmill {

inline F32 sigmoid_of(F32 x) { return F32{} + 1.0f / (exponential(-x) + 1.0f); }

// first: the gate is applied before the norm. sigmoid: it is that of the gate, and not SiLU.
template <typename T, typename G>
void normalise_gated(const T* x, const G* gate, const float* weight, T* to, int64_t size, float eps, bool first,
                     bool sigmoid) {
  const auto gate_at = [&](int64_t i) {
    const F32 g = load_some(gate + i, size - i);
    return sigmoid ? sigmoid_of(g) : silu(g);
  };
  F32 squares{};
  for (int64_t i = 0; i < size; i += WIDTH) {
    F32 value = load_some(x + i, size - i);
    if (first) value *= gate_at(i);
    squares = fma(value, value, squares);
  }
  const float factor = 1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + eps);
  for (int64_t i = 0; i < size; i += WIDTH)
    store_some(to + i, load_some(x + i, size - i) * gate_at(i) * factor * load_some(weight + i, size - i), size - i);
}

}  // namespace oatmill
