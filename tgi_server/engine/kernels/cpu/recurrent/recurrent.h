// What the kernels of recurrences offer each other; each is described where it is defined.

#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "recurrent/runs.h"

namespace oatmill {

at::Tensor convolve(const at::Tensor& x, const at::Tensor& taps, const std::optional<at::Tensor>& bias,
                    at::Tensor& states, const Runs& runs, bool activate);

at::Tensor mamba2(const at::Tensor& x, const at::Tensor& steps, const at::Tensor& rates, const at::Tensor& into,
                  const at::Tensor& out_of, const std::optional<at::Tensor>& skip,
                  const std::optional<at::Tensor>& bias, at::Tensor& states, const Runs& runs, bool softplus_steps,
                  double least, double most);

at::Tensor mamba(const at::Tensor& x, const at::Tensor& steps, const at::Tensor& rates, const at::Tensor& into,
                 const at::Tensor& out_of, const std::optional<at::Tensor>& skip, const std::optional<at::Tensor>& gate,
                 at::Tensor& states, const Runs& runs);

at::Tensor gated_norm(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& weight, double eps, int64_t group,
                      bool first, bool sigmoid);

}  // namespace oatmill
