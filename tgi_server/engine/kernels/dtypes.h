// The dtypes that the kernels take.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/BFloat16.h>

namespace oatmill {

// Calls run with a null pointer of the tensor's number type.
template <typename F>
void by_dtype(const at::Tensor& like, const F& run) {
  TORCH_CHECK(like.scalar_type() == at::kBFloat16 || like.scalar_type() == at::kFloat, "float32 or bfloat16 only");
  if (like.scalar_type() == at::kBFloat16)
    run(static_cast<c10::BFloat16*>(nullptr));
  else
    run(static_cast<float*>(nullptr));
}

}  // namespace oatmill
