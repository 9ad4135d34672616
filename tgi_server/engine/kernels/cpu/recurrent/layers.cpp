// Whole layers with states, from projection to projection; each function between is described where it is defined.

#include <ATen/core/Tensor.h>
#include <ATen/ops/mul.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include "gemm/linear.h"
#include "recurrent/recurrent.h"

namespace oatmill {

namespace {

using MaybeTensor = std::optional<at::Tensor>;

// Mamba-2 with a norm behind the gate. The first projection gives the gate, the input of the convolution (x, B and C), and
// the steps of the heads. group: elements that are normalised together.
struct Mamba2Layer : torch::CustomClassHolder {
  LinearPtr input, output;
  at::Tensor taps;
  MaybeTensor taps_bias;
  at::Tensor rates, skip, steps_bias;
  double least, most;
  at::Tensor weight;
  double eps;
  int64_t group, groups;

  Mamba2Layer(LinearPtr input, LinearPtr output, at::Tensor taps, MaybeTensor taps_bias, at::Tensor rates, at::Tensor skip,
              at::Tensor steps_bias, double least, double most, at::Tensor weight, double eps, int64_t group, int64_t groups)
      : input(std::move(input)), output(std::move(output)), taps(std::move(taps)), taps_bias(std::move(taps_bias)),
        rates(std::move(rates)), skip(std::move(skip)), steps_bias(std::move(steps_bias)), least(least), most(most),
        weight(std::move(weight)), eps(eps), group(group), groups(groups) {}

  // x: [tokens, hidden_size]. inputs: states of the convolution; states: [slots, heads, size, columns].
  at::Tensor forward(const at::Tensor& x, at::Tensor inputs, at::Tensor states, const at::Tensor& runs,
                     const at::Tensor& saves) const {
    const int64_t tokens = x.size(0), heads = states.size(1), size = states.size(2), columns = states.size(3);
    const int64_t inner = heads * columns, mixed = taps.size(1);
    const at::Tensor projected = (*input)(x);
    const at::Tensor convolved = convolve(projected.narrow(1, inner, mixed), taps, taps_bias, inputs, runs, saves, true);
    const auto part = [&](int64_t first, int64_t count, int64_t of) {
      return convolved.narrow(1, first, count * of).view({tokens, count, of});
    };
    const at::Tensor y = mamba2(part(0, heads, columns), projected.narrow(1, inner + mixed, heads), rates,
                                part(inner, groups, size), part(inner + groups * size, groups, size), skip, steps_bias, states,
                                runs, saves, true, least, most);
    const at::Tensor normed = gated_norm(y.view({tokens, inner}), projected.narrow(1, 0, inner), weight, eps, group, true, false);
    return (*output)(normed.to(x.scalar_type()));
  }
};

// A convolution between gates (LFM2). The first projection gives the gate before it, the one behind it, and its input.
struct ShortConvolution : torch::CustomClassHolder {
  LinearPtr input, output;
  at::Tensor taps;
  MaybeTensor bias;

  ShortConvolution(LinearPtr input, LinearPtr output, at::Tensor taps, MaybeTensor bias)
      : input(std::move(input)), output(std::move(output)), taps(std::move(taps)), bias(std::move(bias)) {}

  // x: [tokens, hidden_size]. inputs: states of the convolution.
  at::Tensor forward(const at::Tensor& x, at::Tensor inputs, const at::Tensor& runs, const at::Tensor& saves) const {
    const at::Tensor projected = (*input)(x);
    const int64_t size = taps.size(1);
    const at::Tensor gated = at::mul(projected.narrow(1, 0, size), projected.narrow(1, 2 * size, size));
    return (*output)(at::mul(projected.narrow(1, size, size), convolve(gated, taps, bias, inputs, runs, saves, false)));
  }
};

}  // namespace

}  // namespace oatmill

// This is linked behind model.cpp, which registers Linear.
TORCH_LIBRARY_FRAGMENT(oatmill, library) {
  using oatmill::LinearPtr, oatmill::Mamba2Layer, oatmill::MaybeTensor, oatmill::ShortConvolution;
  library.class_<Mamba2Layer>("Mamba2Layer")
      .def(torch::init<LinearPtr, LinearPtr, at::Tensor, MaybeTensor, at::Tensor, at::Tensor, at::Tensor, double, double,
                       at::Tensor, double, int64_t, int64_t>())
      .def("forward", &Mamba2Layer::forward);
  library.class_<ShortConvolution>("ShortConvolution")
      .def(torch::init<LinearPtr, LinearPtr, at::Tensor, MaybeTensor>())
      .def("forward", &ShortConvolution::forward);
}
