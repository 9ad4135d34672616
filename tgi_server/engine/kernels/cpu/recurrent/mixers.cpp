// Mamba, Mamba-2 and short convolutions between their projections; each function is described where it is defined.

#include "recurrent/mixer.h"

#include <ATen/ops/mul.h>
#include <ATen/ops/silu.h>

#include "ops/ops.h"
#include "recurrent/recurrent.h"
#include "simd/dtypes.h"

namespace oatmill {

namespace {

using MaybeTensor = std::optional<at::Tensor>;

// Mamba-2 with a gate and a norm, or with a gate alone. The projection gives the gate, the input of the convolution (x,
// B and C), and the steps of the heads. weight: of the norm, or none. group: elements that are normalised together.
// gate_first: the norm is behind the gate. States: those of the convolution, and [slots, heads, size, columns] float32.
struct Mamba2 : Mixer {
  at::Tensor taps;
  MaybeTensor taps_bias;
  at::Tensor rates, skip, steps_bias;
  double least, most;
  MaybeTensor weight;
  double eps;
  int64_t group;
  bool gate_first;
  int64_t groups;

  Mamba2(at::Tensor taps, MaybeTensor taps_bias, at::Tensor rates, at::Tensor skip, at::Tensor steps_bias, double least,
         double most, MaybeTensor weight, double eps, int64_t group, bool gate_first, int64_t groups)
      : taps(std::move(taps)), taps_bias(std::move(taps_bias)), rates(std::move(rates)), skip(std::move(skip)),
        steps_bias(std::move(steps_bias)), least(least), most(most), weight(std::move(weight)), eps(eps), group(group),
        gate_first(gate_first), groups(groups) {}

  at::Tensor operator()(const at::Tensor& projected, std::vector<at::Tensor>& states, const Runs& runs,
                        const std::optional<at::Tensor>&) const override {
    TORCH_CHECK(states.size() == 2 && states[1].dim() == 4);
    const int64_t tokens = projected.size(0), heads = states[1].size(1), size = states[1].size(2),
                  columns = states[1].size(3);
    const int64_t inner = heads * columns, mixed = taps.size(1);
    const at::Tensor convolved = convolve(projected.narrow(1, inner, mixed), taps, taps_bias, states[0], runs, true);
    const auto part = [&](int64_t first, int64_t count, int64_t of) {
      return convolved.narrow(1, first, count * of).view({tokens, count, of});
    };
    const at::Tensor y =
        mamba2(part(0, heads, columns), projected.narrow(1, inner + mixed, heads), rates, part(inner, groups, size),
               part(inner + groups * size, groups, size), skip, steps_bias, states[1], runs, true, least, most);
    const at::Tensor gate = projected.narrow(1, 0, inner), rows = y.view({tokens, inner});
    const at::Tensor gated =
        weight ? gated_norm(rows, gate, *weight, eps, group, gate_first, false) : at::mul(rows, at::silu(gate));
    return gated.to(projected.scalar_type());
  }
};

// steps = softplus(steps + bias), where the sum is rounded to the dtype of steps; bias: [channels] of that dtype.
void soft_steps(at::Tensor& steps, const at::Tensor& bias) {
  by_dtype(steps, [&]<typename T>(T*) {
    const int64_t channels = steps.size(1);
    T* to = steps.mutable_data_ptr<T>();
    const T* added = bias.const_data_ptr<T>();
    for_range(steps.size(0), std::max<int64_t>(1, worth_a_thread() / channels), [&](int64_t row, int64_t end) {
      for (; row < end; ++row)
        for (int64_t c = 0; c < channels; ++c) {
          T& step = to[row * channels + c];
          step = static_cast<T>(static_cast<float>(step) + static_cast<float>(added[c]));
          step = static_cast<T>(softplus(static_cast<float>(step)));
        }
    });
  });
}

// Mamba, as Jamba has it. The projection gives the input of the convolution and the gate. `inner` gives of what is
// convolved the input of `steps`, B and C, each with a norm by its root mean square, or none. steps_bias: [channels],
// of the dtype of the model. rates: [size, channels] float32, negative; skip: [channels] float32. States: those of the
// convolution, and [slots, parts, size, channels / parts] float32.
struct Mamba : Mixer {
  at::Tensor taps;
  MaybeTensor taps_bias;
  LinearPtr inner;
  std::vector<MaybeTensor> norms;
  double eps;
  LinearPtr steps;
  at::Tensor steps_bias, rates, skip;

  Mamba(at::Tensor taps, MaybeTensor taps_bias, LinearPtr inner, std::vector<MaybeTensor> norms, double eps,
        LinearPtr steps, at::Tensor steps_bias, at::Tensor rates, at::Tensor skip)
      : taps(std::move(taps)), taps_bias(std::move(taps_bias)), inner(std::move(inner)), norms(std::move(norms)),
        eps(eps), steps(std::move(steps)), steps_bias(std::move(steps_bias)), rates(std::move(rates)),
        skip(std::move(skip)) {
    TORCH_CHECK(this->norms.size() == 3);
  }

  at::Tensor operator()(const at::Tensor& projected, std::vector<at::Tensor>& states, const Runs& runs,
                        const std::optional<at::Tensor>& adapters) const override {
    TORCH_CHECK(states.size() == 2 && states[1].dim() == 4);
    const int64_t channels = taps.size(1), size = rates.size(0), rank = inner->outputs - 2 * size;
    const at::Tensor x = convolve(projected.narrow(1, 0, channels), taps, taps_bias, states[0], runs, true);
    const at::Tensor chosen = inner->adapted(x, adapters);
    const auto part = [&](int64_t i, int64_t first, int64_t count) {
      const at::Tensor own = chosen.narrow(1, first, count).unsqueeze(1);
      return (norms[i] ? rms_norm(own, *norms[i], eps) : own).squeeze(1);
    };
    at::Tensor step = (*steps)(part(0, 0, rank).contiguous());
    soft_steps(step, steps_bias);
    return mamba(x, step, rates, part(1, rank, size), part(2, rank + size, size), skip,
                 projected.narrow(1, channels, channels), states[1], runs);
  }
};

// A convolution between gates (LFM2). The projection gives the gate before it, the one behind it, and its input.
// States: those of the convolution.
struct ShortConvolution : Mixer {
  at::Tensor taps;
  MaybeTensor bias;

  ShortConvolution(at::Tensor taps, MaybeTensor bias) : taps(std::move(taps)), bias(std::move(bias)) {}

  at::Tensor operator()(const at::Tensor& projected, std::vector<at::Tensor>& states, const Runs& runs,
                        const std::optional<at::Tensor>&) const override {
    TORCH_CHECK(states.size() == 1);
    const int64_t size = taps.size(1);
    const at::Tensor gated = at::mul(projected.narrow(1, 0, size), projected.narrow(1, 2 * size, size));
    return at::mul(projected.narrow(1, size, size), convolve(gated, taps, bias, states[0], runs, false));
  }
};

}  // namespace

MixerPtr mamba2_mixer(at::Tensor taps, MaybeTensor taps_bias, at::Tensor rates, at::Tensor skip, at::Tensor steps_bias,
                      double least, double most, MaybeTensor weight, double eps, int64_t group, bool gate_first,
                      int64_t groups) {
  return c10::make_intrusive<Mamba2>(std::move(taps), std::move(taps_bias), std::move(rates), std::move(skip),
                                     std::move(steps_bias), least, most, std::move(weight), eps, group, gate_first,
                                     groups);
}

MixerPtr mamba_mixer(at::Tensor taps, MaybeTensor taps_bias, LinearPtr inner, std::vector<MaybeTensor> norms,
                     double eps, LinearPtr steps, at::Tensor steps_bias, at::Tensor rates, at::Tensor skip) {
  return c10::make_intrusive<Mamba>(std::move(taps), std::move(taps_bias), std::move(inner), std::move(norms), eps,
                                    std::move(steps), std::move(steps_bias), std::move(rates), std::move(skip));
}

MixerPtr short_convolution(at::Tensor taps, MaybeTensor bias) {
  return c10::make_intrusive<ShortConvolution>(std::move(taps), std::move(bias));
}

}  // namespace oatmill
