// Norms by the root mean square with a gate, which follow recurrences.

#include <ATen/ops/empty.h>

#include <cmath>

#include "recurrent/gated_norm.h"
#include "recurrent/recurrent.h"

namespace oatmill {

// x: [rows, size], float32 or of the dtype of gate. gate: [rows, size]. weight: [size] float32. group: the elements
// that are normalised together. first: the gate is applied before the norm, and not behind it. sigmoid: it is that of
// the gate, and not SiLU. Returns a tensor like x.
at::Tensor gated_norm(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& weight, double eps, int64_t group,
                      bool first, bool sigmoid) {
  const int64_t rows = x.size(0), size = x.size(1);
  TORCH_CHECK(gate.sizes() == x.sizes() && weight.is_contiguous() && weight.numel() == size && size % group == 0);
  at::Tensor output = at::empty({rows, size}, x.options());
  by_dtype(x, [&]<typename T>(T*) {
    by_dtype(gate, [&]<typename G>(G*) {
      const TokenRows<T> inputs(x);
      const TokenRows<G> gates(gate);
      const float* scale = weight.const_data_ptr<float>();
      T* to = output.mutable_data_ptr<T>();
      for_range(rows, std::max<int64_t>(1, worth_a_thread() / size), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r)
          for (int64_t g = 0; g < size; g += group)
            normalise_gated(inputs.at(r) + g, gates.at(r) + g, scale + g, to + r * size + g, group,
                            static_cast<float>(eps), first, sigmoid);
      });
    });
  });
  return output;
}

}  // namespace oatmill
