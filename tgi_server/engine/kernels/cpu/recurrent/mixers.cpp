// Mamba-2 and short convolutions between their projections; each function is described where it is defined.

#include "recurrent/mixer.h"

#include <ATen/ops/mul.h>

#include "recurrent/recurrent.h"

namespace oatmill {

namespace {

using MaybeTensor = std::optional<at::Tensor>;

// Mamba-2 with a norm behind the gate. The projection gives the gate, the input of the convolution (x, B and C), and the
// steps of the heads. group: elements that are normalised together. States: those of the convolution, and [slots, heads,
// size, columns] float32.
struct Mamba2 : Mixer {
  at::Tensor taps;
  MaybeTensor taps_bias;
  at::Tensor rates, skip, steps_bias;
  double least, most;
  at::Tensor weight;
  double eps;
  int64_t group, groups;

  Mamba2(at::Tensor taps, MaybeTensor taps_bias, at::Tensor rates, at::Tensor skip, at::Tensor steps_bias, double least,
         double most, at::Tensor weight, double eps, int64_t group, int64_t groups)
      : taps(std::move(taps)), taps_bias(std::move(taps_bias)), rates(std::move(rates)), skip(std::move(skip)),
        steps_bias(std::move(steps_bias)), least(least), most(most), weight(std::move(weight)), eps(eps), group(group),
        groups(groups) {}

  at::Tensor operator()(const at::Tensor& projected, std::vector<at::Tensor>& states, const Runs& runs) const override {
    TORCH_CHECK(states.size() == 2 && states[1].dim() == 4);
    const int64_t tokens = projected.size(0), heads = states[1].size(1), size = states[1].size(2), columns = states[1].size(3);
    const int64_t inner = heads * columns, mixed = taps.size(1);
    const at::Tensor convolved = convolve(projected.narrow(1, inner, mixed), taps, taps_bias, states[0], runs, true);
    const auto part = [&](int64_t first, int64_t count, int64_t of) {
      return convolved.narrow(1, first, count * of).view({tokens, count, of});
    };
    const at::Tensor y = mamba2(part(0, heads, columns), projected.narrow(1, inner + mixed, heads), rates,
                                part(inner, groups, size), part(inner + groups * size, groups, size), skip, steps_bias,
                                states[1], runs, true, least, most);
    const at::Tensor normed = gated_norm(y.view({tokens, inner}), projected.narrow(1, 0, inner), weight, eps, group, true, false);
    return normed.to(projected.scalar_type());
  }
};

// A convolution between gates (LFM2). The projection gives the gate before it, the one behind it, and its input. States:
// those of the convolution.
struct ShortConvolution : Mixer {
  at::Tensor taps;
  MaybeTensor bias;

  ShortConvolution(at::Tensor taps, MaybeTensor bias) : taps(std::move(taps)), bias(std::move(bias)) {}

  at::Tensor operator()(const at::Tensor& projected, std::vector<at::Tensor>& states, const Runs& runs) const override {
    TORCH_CHECK(states.size() == 1);
    const int64_t size = taps.size(1);
    const at::Tensor gated = at::mul(projected.narrow(1, 0, size), projected.narrow(1, 2 * size, size));
    return at::mul(projected.narrow(1, size, size), convolve(gated, taps, bias, states[0], runs, false));
  }
};

}  // namespace

MixerPtr mamba2_mixer(at::Tensor taps, MaybeTensor taps_bias, at::Tensor rates, at::Tensor skip, at::Tensor steps_bias,
                      double least, double most, at::Tensor weight, double eps, int64_t group, int64_t groups) {
  return c10::make_intrusive<Mamba2>(std::move(taps), std::move(taps_bias), std::move(rates), std::move(skip),
                                     std::move(steps_bias), least, most, std::move(weight), eps, group, groups);
}

MixerPtr short_convolution(at::Tensor taps, MaybeTensor bias) {
  return c10::make_intrusive<ShortConvolution>(std::move(taps), std::move(bias));
}

}  // namespace oatmill
