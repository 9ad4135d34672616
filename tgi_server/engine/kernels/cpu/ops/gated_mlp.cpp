// The feed-forward part of a layer, down(silu(gate(x)) * up(x)), in one call.

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include "gemm/linear.h"
#include "runtime/thread_pool.h"
#include "simd/dtypes.h"
#include "simd/simd.h"

namespace oatmill {

namespace {

// gate = silu(gate) * up, rounded as it would be in two tensors.
void gate_in_place(at::Tensor& gate, const at::Tensor& up) {
  by_dtype(gate, [&]<typename T>(T*) {
    T* to = gate.mutable_data_ptr<T>();
    const T* from = up.const_data_ptr<T>();
    const int64_t size = gate.size(-1);
    for_range(gate.numel() / size, std::max<int64_t>(1, worth_a_thread() / size), [&](int64_t row, int64_t end) {
      for (; row < end; ++row)
        for (int64_t i = 0; i < size; i += WIDTH) {
          // Registers are filled up with zeros, so that a number is computed in the same way wherever it stands.
          T gates[WIDTH] = {}, ups[WIDTH] = {};
          const int64_t count = std::min<int64_t>(WIDTH, size - i);
          T* place = to + row * size + i;
          std::copy_n(place, count, gates);
          std::copy_n(from + row * size + i, count, ups);
          const F32 g = load_f32(gates);
          store(gates, g / (exponential(-g) + 1.0f));
          store(gates, load_f32(gates) * load_f32(ups));
          std::copy_n(gates, count, place);
        }
    });
  });
}

struct GatedMlp : torch::CustomClassHolder {
  LinearPtr gate, up, down;

  GatedMlp(LinearPtr gate, LinearPtr up, LinearPtr down)
      : gate(std::move(gate)), up(std::move(up)), down(std::move(down)) {}

  at::Tensor forward(const at::Tensor& x) const {
    at::Tensor gated = (*gate)(x);
    gate_in_place(gated, (*up)(x));
    return (*down)(gated);
  }
};

}  // namespace

}  // namespace oatmill

// This is linked behind model.cpp, which registers Linear.
TORCH_LIBRARY_FRAGMENT(oatmill, library) {
  using oatmill::GatedMlp, oatmill::LinearPtr;
  library.class_<GatedMlp>("GatedMlp").def(torch::init<LinearPtr, LinearPtr, LinearPtr>()).def("forward", &GatedMlp::forward);
}
