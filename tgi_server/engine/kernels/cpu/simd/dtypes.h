// The dtypes that the kernels take.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "simd/fp8.h"

namespace oatmill {

// Calls run with a null pointer of the tensor's number type.
template <typename F>
void by_dtype(const at::Tensor& like, const F& run) {
  switch (like.scalar_type()) {
    case at::kBFloat16:
      return run(static_cast<c10::BFloat16*>(nullptr));
    case at::kHalf:
      return run(static_cast<c10::Half*>(nullptr));
    case at::kFloat:
      return run(static_cast<float*>(nullptr));
    default:
      TORCH_CHECK(false, "tensors are float32, bfloat16 or float16 here, and not ", like.scalar_type());
  }
}

// Calls run with a null pointer of the type of a KV cache's numbers: T, or one of 8 bits.
template <typename T, typename F>
void by_cache(at::ScalarType dtype, const F& run) {
  switch (dtype) {
    case at::kFloat8_e4m3fn:
      return run(static_cast<E4m3*>(nullptr));
    case at::kFloat8_e5m2:
      return run(static_cast<E5m2*>(nullptr));
    default:
      TORCH_CHECK(dtype == c10::CppTypeToScalarType<T>::value, "a KV cache of ", dtype, " beside other numbers");
      return run(static_cast<T*>(nullptr));
  }
}

}  // namespace oatmill
