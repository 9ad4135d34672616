// The short causal convolution in front of a recurrence, or in its place (LFM2): of each channel by itself.

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "recurrent/recurrent.h"
#include "recurrent/runs.h"

namespace oatmill {

// x: [tokens, channels]. taps: [width, channels] float32, the last one for the own token. bias: [channels] float32, or
// none. states: [slots, width - 1, channels], the last inputs, of the dtype of x. silu: applied to the rounded sums.
// Returns [tokens, channels].
at::Tensor convolve(const at::Tensor& x, const at::Tensor& taps, const std::optional<at::Tensor>& bias,
                    at::Tensor& states, const Runs& runs, bool activate) {
  const int64_t tokens = x.size(0), channels = x.size(1), before = taps.size(0) - 1;
  TORCH_CHECK(states.is_contiguous() && taps.is_contiguous() && taps.size(1) == channels && before >= 1 && before < 16);
  TORCH_CHECK(states.dim() == 3 && states.size(1) == before && states.size(2) == channels);
  TORCH_CHECK(states.scalar_type() == x.scalar_type() && (!bias || bias->is_contiguous()));
  at::Tensor output = at::empty({tokens, channels}, x.options());
  by_dtype(x, [&]<typename T>(T*) {
    const TokenRows<T> rows(x);
    const float* weight = taps.const_data_ptr<float>();
    const float* shift = bias ? bias->const_data_ptr<float>() : nullptr;
    T* slots = states.mutable_data_ptr<T>();
    T* to = output.mutable_data_ptr<T>();
    const int64_t part = 256, parts = ceil_div(channels, part);
    parallel_for(static_cast<int64_t>(runs.size()) * parts, [&](int64_t item) {
      const Run& run = runs[item / parts];
      const int64_t first = item % parts * part, last = std::min(channels, first + part);
      T* state = slots + run.slot * before * channels;
      // The input of a token; of those before the run, what the state has.
      const auto input = [&](int64_t t) { return t < 0 ? state + (before + t) * channels : rows.at(run.first + t); };
      for (int64_t t = 0; t < run.tokens; ++t) {
        const T* inputs[16];
        for (int64_t j = 0; j <= before; ++j) inputs[j] = input(t - before + j);
        T* row = to + (run.first + t) * channels;
        for (int64_t c = first; c < last; c += WIDTH) {
          const int64_t count = last - c;
          F32 sum = load_some(inputs[0] + c, count) * load_some(weight + c, count);
          for (int64_t j = 1; j <= before; ++j)
            sum = fma(load_some(inputs[j] + c, count), load_some(weight + j * channels + c, count), sum);
          if (shift) sum += load_some(shift + c, count);
          store_some(row + c, activate ? silu(as_stored<T>(sum)) : sum, count);
        }
      }
      // From the oldest one on, so that what is still needed of a state that is changed is read before.
      const auto keep = [&](int64_t slot, int64_t tokens) {
        for (int64_t j = 0; j < before; ++j)
          std::copy(input(tokens - before + j) + first, input(tokens - before + j) + last,
                    slots + (slot * before + j) * channels + first);
      };
      for (const Run::Save& save : run.saves) keep(save.slot, save.tokens);
      if (run.written) keep(run.slot, run.tokens);
    });
  });
  return output;
}

namespace {

at::Tensor convolve_op(const at::Tensor& x, const at::Tensor& taps, const std::optional<at::Tensor>& bias,
                       at::Tensor& states, const at::Tensor& runs, const at::Tensor& saves, bool activate) {
  return convolve(x, taps, bias, states, read_runs(runs, saves, states.size(0), x.size(0)), activate);
}

}  // namespace

}  // namespace oatmill

TORCH_LIBRARY_FRAGMENT(oatmill, library) {
  library.def(
      "convolve(Tensor x, Tensor taps, Tensor? bias, Tensor(a!) states, Tensor runs, Tensor saves, bool silu) -> "
      "Tensor");
}

TORCH_LIBRARY_IMPL(oatmill, CPU, library) { library.impl("convolve", &oatmill::convolve_op); }
