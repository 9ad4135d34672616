// State space models: Mamba-2 (Dao and Gu, 2024), with one decay for a head, and Mamba (Gu and Dao, 2023).

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>

#include "recurrent/recurrent.h"
#include "recurrent/runs.h"

namespace oatmill {

namespace {

// The tokens of a tile and a head, in float32: B and C, [TILE_TOKENS, size] each, and of each token its step and decay.
struct Tile {
  std::vector<float> into, out_of, scratch;
  float steps[TILE_TOKENS], decays[TILE_TOKENS];
};

// One token of Mamba-2: state = decay * state + into * x; output = out_of . state. V registers of columns. state:
// [size], `stride` numbers apart.
template <int V>
void advance(float* state, int64_t stride, int64_t size, const float* into, const float* out_of, float decay,
             const F32 (&x)[V], F32 (&outputs)[V]) {
  F32 sums[2][V] = {};
  const F32 d = F32{} + decay;
  const auto step = [&](int64_t i, F32(&sum)[V]) {
    const F32 b = F32{} + into[i], c = F32{} + out_of[i];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      float* place = state + i * stride + v * WIDTH;
      const F32 next = fma(b, x[v], load_f32(place) * d);
      store(place, next);
      sum[v] = fma(next, c, sum[v]);
    }
  };
  int64_t i = 0;
  for (; i + 2 <= size; i += 2) step(i, sums[0]), step(i + 1, sums[1]);
  if (i < size) step(i, sums[0]);
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) outputs[v] = sums[0][v] + sums[1][v];
}

}  // namespace

// x: [tokens, heads, columns]; steps: [tokens, heads], before bias and softplus, both rounded to the dtype of steps,
// and the limits; rates: [heads] float32, negative; into, out_of: [tokens, groups, size]; skip, bias: [heads] float32,
// or none. states: [slots, heads, size, columns] float32. Returns [tokens, heads, columns] float32.
at::Tensor mamba2(const at::Tensor& x, const at::Tensor& steps, const at::Tensor& rates, const at::Tensor& into,
                  const at::Tensor& out_of, const std::optional<at::Tensor>& skip,
                  const std::optional<at::Tensor>& bias, at::Tensor& states, const Runs& runs, bool softplus_steps,
                  double least, double most) {
  const int64_t tokens = x.size(0), heads = x.size(1), columns = x.size(2), size = into.size(2);
  const int64_t shared = heads / into.size(1);
  TORCH_CHECK(states.dim() == 4 && states.size(1) == heads && states.size(2) == size && states.size(3) == columns);
  TORCH_CHECK(into.sizes() == out_of.sizes() && into.size(0) == tokens && heads == shared * into.size(1));
  TORCH_CHECK(steps.size(0) == tokens && steps.size(1) == heads && rates.is_contiguous() && rates.numel() == heads);
  TORCH_CHECK((!skip || (skip->is_contiguous() && skip->numel() == heads)) &&
              (!bias || (bias->is_contiguous() && bias->numel() == heads)));
  at::Tensor output = at::empty({tokens, heads, columns}, x.options().dtype(at::kFloat));
  by_dtype(x, [&]<typename T>(T*) {
    const TokenRows<T> inputs(x), intos(into), outs(out_of), dts(steps);
    const float *rate = rates.const_data_ptr<float>(), *skips = skip ? skip->const_data_ptr<float>() : nullptr;
    const float* biases = bias ? bias->const_data_ptr<float>() : nullptr;
    float* to = output.mutable_data_ptr<float>();
    const auto as_t = [](float number) { return static_cast<float>(static_cast<T>(number)); };
    for_each_tile(runs, states, heads, [&](int64_t head, float* state, int64_t first, int64_t count) {
      thread_local Tile tile;
      tile.into.resize(TILE_TOKENS * size), tile.out_of.resize(TILE_TOKENS * size);
      for (int64_t t = 0; t < count; ++t) {
        const T *b = intos.at(first + t, head / shared), *c = outs.at(first + t, head / shared);
        for (int64_t i = 0; i < size; i += WIDTH) {
          store_some(&tile.into[t * size + i], load_some(b + i, size - i), size - i);
          store_some(&tile.out_of[t * size + i], load_some(c + i, size - i), size - i);
        }
        float step = static_cast<float>(dts.at(first + t)[head]);
        if (biases) step = as_t(step + as_t(biases[head]));
        if (softplus_steps) step = as_t(softplus(step));
        step = std::min(std::max(step, static_cast<float>(least)), static_cast<float>(most));
        tile.steps[t] = step;
        tile.decays[t] = std::exp(rate[head] * step);
      }
      by_columns(state, size, columns, count, tile.scratch,
                 [&]<int V>(float* part, int64_t stride, int64_t column, int64_t of) {
                   for (int64_t t = 0; t < count; ++t) {
                     const T* from = inputs.at(first + t, head) + column;
                     float* row = to + ((first + t) * heads + head) * columns + column;
                     F32 own[V], scaled[V], outputs[V];
                     for (int v = 0; v < V; ++v) {
                       own[v] = v * WIDTH < of ? load_some(from + v * WIDTH, of - v * WIDTH) : F32{};
                       scaled[v] = own[v] * tile.steps[t];
                     }
                     advance<V>(part, stride, size, &tile.into[t * size], &tile.out_of[t * size], tile.decays[t],
                                scaled, outputs);
                     for (int v = 0; v < V && v * WIDTH < of; ++v)
                       store_some(row + v * WIDTH, skips ? outputs[v] + own[v] * skips[head] : outputs[v],
                                  of - v * WIDTH);
                   }
                 });
    });
  });
  return output;
}

// x, steps, gate: [tokens, channels], steps as they are multiplied by the rates; gate or none. rates: [size, channels]
// float32, negative; into, out_of: [tokens, size]; skip: [channels] float32, or none. states: [slots, parts, size,
// channels / parts] float32. Returns [tokens, channels].
at::Tensor mamba(const at::Tensor& x, const at::Tensor& steps, const at::Tensor& rates, const at::Tensor& into,
                 const at::Tensor& out_of, const std::optional<at::Tensor>& skip, const std::optional<at::Tensor>& gate,
                 at::Tensor& states, const Runs& runs) {
  const int64_t tokens = x.size(0), channels = x.size(1), size = into.size(1), parts = states.size(1),
                columns = states.size(3);
  TORCH_CHECK(states.dim() == 4 && states.size(2) == size && parts * columns == channels);
  TORCH_CHECK(into.sizes() == out_of.sizes() && into.size(0) == tokens && steps.sizes() == x.sizes());
  TORCH_CHECK(rates.is_contiguous() && rates.size(0) == size && rates.size(1) == channels);
  TORCH_CHECK((!skip || (skip->is_contiguous() && skip->numel() == channels)) && (!gate || gate->sizes() == x.sizes()));
  at::Tensor output = at::empty({tokens, channels}, x.options());
  by_dtype(x, [&]<typename T>(T*) {
    const TokenRows<T> inputs(x), dts(steps), intos(into), outs(out_of), gates(gate ? *gate : x);
    const float *rate = rates.const_data_ptr<float>(), *skips = skip ? skip->const_data_ptr<float>() : nullptr;
    T* to = output.mutable_data_ptr<T>();
    for_each_tile(runs, states, parts, [&](int64_t part, float* state, int64_t first, int64_t count) {
      for (int64_t t = first; t < first + count; ++t)
        for (int64_t c = 0; c < columns; c += WIDTH) {
          const int64_t place = part * columns + c, of = columns - c;
          const F32 own = load_some(inputs.at(t) + place, of), step = load_some(dts.at(t) + place, of);
          const F32 scaled = own * step;
          F32 sum{};
          for (int64_t i = 0; i < size; ++i) {
            float* number = state + i * columns + c;
            const F32 decay = exponential(step * load_some(rate + i * channels + place, of));
            const F32 next = fma(F32{} + static_cast<float>(intos.at(t)[i]), scaled, load_some(number, of) * decay);
            store_some(number, next, of);
            sum = fma(next, F32{} + static_cast<float>(outs.at(t)[i]), sum);
          }
          if (skips) sum += own * load_some(skips + place, of);
          if (gate) sum *= as_stored<T>(silu(load_some(gates.at(t) + place, of)));
          store_some(to + t * channels + place, sum, of);
        }
    });
  });
  return output;
}

namespace {

at::Tensor mamba2_op(const at::Tensor& x, const at::Tensor& steps, const at::Tensor& rates, const at::Tensor& into,
                     const at::Tensor& out_of, const std::optional<at::Tensor>& skip,
                     const std::optional<at::Tensor>& bias, at::Tensor& states, const at::Tensor& runs,
                     const at::Tensor& saves, bool softplus_steps, double least, double most) {
  return mamba2(x, steps, rates, into, out_of, skip, bias, states, read_runs(runs, saves, states.size(0), x.size(0)),
                softplus_steps, least, most);
}

at::Tensor mamba_op(const at::Tensor& x, const at::Tensor& steps, const at::Tensor& rates, const at::Tensor& into,
                    const at::Tensor& out_of, const std::optional<at::Tensor>& skip,
                    const std::optional<at::Tensor>& gate, at::Tensor& states, const at::Tensor& runs,
                    const at::Tensor& saves) {
  return mamba(x, steps, rates, into, out_of, skip, gate, states, read_runs(runs, saves, states.size(0), x.size(0)));
}

}  // namespace

}  // namespace oatmill

TORCH_LIBRARY_FRAGMENT(oatmill, library) {
  library.def(
      "mamba2(Tensor x, Tensor steps, Tensor rates, Tensor into, Tensor out_of, Tensor? skip, Tensor? bias,"
      " Tensor(a!) states, Tensor runs, Tensor saves, bool softplus, float least, float most) -> Tensor");
  library.def(
      "mamba(Tensor x, Tensor steps, Tensor rates, Tensor into, Tensor out_of, Tensor? skip, Tensor? gate,"
      " Tensor(a!) states, Tensor runs, Tensor saves) -> Tensor");
}

TORCH_LIBRARY_IMPL(oatmill, CPU, library) {
  library.impl("mamba2", &oatmill::mamba2_op);
  library.impl("mamba", &oatmill::mamba_op);
}
