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

// Calls run with null pointers of the types of a KV cache's keys and values: T, or one of 8 bits for the values or for
// both.
template <typename T, typename F>
void by_cache(at::ScalarType keys, at::ScalarType values, const F& run) {
  constexpr at::ScalarType OWN = c10::CppTypeToScalarType<T>::value;
  const auto with_values = [&]<typename V>(V* value) {
    if (keys == OWN) return run(static_cast<T*>(nullptr), value);
    TORCH_CHECK(keys == values, "a KV cache has keys in ", keys, " and values in ", values);
    run(value, value);
  };
  switch (values) {
    case at::kFloat8_e4m3fn:
      return with_values(static_cast<E4m3*>(nullptr));
    case at::kFloat8_e5m2:
      return with_values(static_cast<E5m2*>(nullptr));
    default:
      TORCH_CHECK(values == OWN, "a KV cache of ", values, " beside other numbers");
      return with_values(static_cast<T*>(nullptr));
  }
}

}  // namespace oatmill
