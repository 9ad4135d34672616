// What the kernels of recurrences offer each other; each is described where it is defined.

#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace oatmill {

at::Tensor convolve(const at::Tensor& x, const at::Tensor& taps, const std::optional<at::Tensor>& bias, at::Tensor& states,
                    const at::Tensor& runs, const at::Tensor& saves, bool activate);

}  // namespace oatmill
