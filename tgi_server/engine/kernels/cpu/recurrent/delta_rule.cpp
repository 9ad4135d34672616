// The gated delta rule (Yang et al., 2024) and Kimi's, whose decay differs from channel to channel.

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>

#include "recurrent/gated_norm.h"
#include "recurrent/mixer.h"
#include "recurrent/recurrent.h"
#include "recurrent/runs.h"

namespace oatmill {

namespace {

// The tokens of a tile and a head, in float32: queries, keys, and keys times the decay of the state, [TILE_TOKENS,
// size] each; decays, [TILE_TOKENS, size] of Kimi's rule, else [TILE_TOKENS]; rates: [TILE_TOKENS].
struct Tile {
  std::vector<float> query, key, decayed_key, decay, outputs, scratch;
  float rates[TILE_TOKENS];
};

// to = from, divided by its norm if wanted, and times `scale`.
template <typename T>
void normalise(const T* from, float* to, int64_t size, bool wanted, float scale) {
  F32 squares{};
  for (int64_t i = 0; i < size; i += WIDTH) {
    const F32 x = load_some(from + i, size - i);
    squares = fma(x, x, squares);
  }
  const float factor = wanted ? scale / std::sqrt(sum(squares) + 1e-6f) : scale;
  for (int64_t i = 0; i < size; i += WIDTH) store_some(to + i, load_some(from + i, size - i) * factor, size - i);
}

// One token: state = decay * state + key * (value - key . decay * state) * rate; output = query . state. V registers of
// columns. state: [size], `stride` numbers apart.
template <int V, bool BY_CHANNEL>
void advance(float* state, int64_t stride, int64_t size, const float* query, const float* key, const float* decayed_key,
             const float* decay, float rate, const F32 (&values)[V], F32 (&outputs)[V]) {
  F32 known[2][V] = {}, added[2][V] = {};
  const auto read = [&](int64_t i, F32(&sums)[V]) {
    const F32 k = F32{} + decayed_key[i];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sums[v] = fma(load_f32(state + i * stride + v * WIDTH), k, sums[v]);
  };
  int64_t i = 0;
  for (; i + 2 <= size; i += 2) read(i, known[0]), read(i + 1, known[1]);
  if (i < size) read(i, known[0]);
  F32 change[V];
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) change[v] = (values[v] - (known[0][v] + known[1][v])) * rate;
  const auto write = [&](int64_t i, F32(&sums)[V]) {
    const F32 k = F32{} + key[i], q = F32{} + query[i], d = F32{} + decay[BY_CHANNEL ? i : 0];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      float* place = state + i * stride + v * WIDTH;
      const F32 next = fma(k, change[v], load_f32(place) * d);
      store(place, next);
      sums[v] = fma(next, q, sums[v]);
    }
  };
  for (i = 0; i + 2 <= size; i += 2) write(i, added[0]), write(i + 1, added[1]);
  if (i < size) write(i, added[0]);
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) outputs[v] = added[0][v] + added[1][v];
}

// The tokens of a pass. queries, keys: of key heads, each of which `shared` heads have. columns: of a value.
template <typename T>
struct Inputs {
  TokenRows<T> queries, keys, values;
  int64_t heads, shared, size, columns;
  bool normalised;
};

// gate(token, head, decay): writes the decay of the state, or of each channel, and returns the rate. finish(token,
// head, row): takes an output, [columns] float32.
template <bool BY_CHANNEL, typename T, typename Gate, typename Finish>
void compute(const Inputs<T>& in, const Runs& runs, at::Tensor& states, const Gate& gate, const Finish& finish) {
  const int64_t size = in.size, columns = in.columns;
  const float scale = 1.0f / std::sqrt(static_cast<float>(size));
  for_each_tile(runs, states, in.heads, [&](int64_t head, float* state, int64_t first, int64_t count) {
    thread_local Tile tile;
    for (auto* each : {&tile.query, &tile.key, &tile.decayed_key, &tile.decay}) each->resize(TILE_TOKENS * size);
    tile.outputs.resize(TILE_TOKENS * columns);
    for (int64_t t = 0; t < count; ++t) {
      float *k = &tile.key[t * size], *decayed = &tile.decayed_key[t * size], *decay = &tile.decay[t * size];
      normalise(in.queries.at(first + t, head / in.shared), &tile.query[t * size], size, in.normalised, scale);
      normalise(in.keys.at(first + t, head / in.shared), k, size, in.normalised, 1.0f);
      tile.rates[t] = gate(first + t, head, decay);
      for (int64_t i = 0; i < size; ++i) decayed[i] = k[i] * decay[BY_CHANNEL ? i : 0];
    }
    by_columns(
        state, size, columns, count, tile.scratch, [&]<int V>(float* part, int64_t stride, int64_t column, int64_t of) {
          for (int64_t t = 0; t < count; ++t) {
            const T* from = in.values.at(first + t, head) + column;
            float* row = &tile.outputs[t * columns + column];
            F32 values[V], outputs[V];
            for (int v = 0; v < V; ++v)
              values[v] = v * WIDTH < of ? load_some(from + v * WIDTH, of - v * WIDTH) : F32{};
            advance<V, BY_CHANNEL>(part, stride, size, &tile.query[t * size], &tile.key[t * size],
                                   &tile.decayed_key[t * size], &tile.decay[t * size], tile.rates[t], values, outputs);
            for (int v = 0; v < V && v * WIDTH < of; ++v) store_some(row + v * WIDTH, outputs[v], of - v * WIDTH);
          }
        });
    for (int64_t t = 0; t < count; ++t) finish(first + t, head, &tile.outputs[t * columns]);
  });
}

template <typename T>
void write_row(T* to, const float* row, int64_t size) {
  for (int64_t i = 0; i < size; i += WIDTH) store_some(to + i, load_some(row + i, size - i), size - i);
}

}  // namespace

// query, key: [tokens, key_heads, size]; value: [tokens, heads, value_size]; gates: [tokens, heads] float32, logarithms
// of decays, or [tokens, heads, size]; rates: [tokens, heads] float32. states: [slots, heads, size, value_size]
// float32. normalised: queries and keys are divided by their norms. Returns [tokens, heads, value_size].
at::Tensor delta_rule(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& gates,
                      const at::Tensor& rates, at::Tensor& states, const at::Tensor& runs, const at::Tensor& saves,
                      bool normalised) {
  const int64_t tokens = value.size(0), heads = value.size(1), columns = value.size(2), size = key.size(2);
  const int64_t shared = heads / key.size(1);
  const Runs all = read_runs(runs, saves, states.size(0), tokens);
  const bool by_channel = gates.dim() == 3;
  TORCH_CHECK(states.dim() == 4 && states.size(1) == heads && states.size(2) == size && states.size(3) == columns);
  TORCH_CHECK(query.sizes() == key.sizes() && key.size(0) == tokens && heads == shared * key.size(1));
  TORCH_CHECK(gates.is_contiguous() && rates.is_contiguous() && rates.numel() == tokens * heads);
  TORCH_CHECK(gates.numel() == tokens * heads * (by_channel ? size : 1));
  at::Tensor output = at::empty({tokens, heads, columns}, value.options());
  by_dtype(value, [&]<typename T>(T*) {
    const Inputs<T> in{TokenRows<T>(query), TokenRows<T>(key), TokenRows<T>(value), heads, shared, size, columns,
                       normalised};
    const float *logarithms = gates.const_data_ptr<float>(), *rate = rates.const_data_ptr<float>();
    T* to = output.mutable_data_ptr<T>();
    const auto finish = [&](int64_t token, int64_t head, const float* row) {
      write_row(to + (token * heads + head) * columns, row, columns);
    };
    if (by_channel)
      compute<true>(
          in, all, states,
          [&](int64_t token, int64_t head, float* decay) {
            const int64_t place = token * heads + head;
            for (int64_t i = 0; i < size; i += WIDTH)
              store_some(decay + i, exponential(load_some(logarithms + place * size + i, size - i)), size - i);
            return rate[place];
          },
          finish);
    else
      compute<false>(
          in, all, states,
          [&](int64_t token, int64_t head, float* decay) {
            *decay = std::exp(logarithms[token * heads + head]);
            return rate[token * heads + head];
          },
          finish);
  });
  return output;
}

namespace {

// A layer between its projections: convolution, gates, delta rule, norm with a gate. These give query, key and value,
// the gate, [tokens, heads, value_size], rates and decays, [tokens, heads] before sigmoid and softplus; `grouped`:
// query, key, value and gate of each key head side by side, and behind all of these its rates and decays. taps: [width,
// 2 * key_heads * size + heads * value_size] float32. bases: [heads] float32, negative, and bias: [heads] float32, of
// decays; rate_scale: of rates. weight: [value_size] float32, of the norm. States: those of the convolution, [slots,
// width - 1, ...], and [slots, heads, size, value_size] float32.
struct GatedDeltaNet : Mixer {
  int64_t key_heads;
  bool grouped;
  at::Tensor taps, bases, bias;
  double rate_scale;
  at::Tensor weight;
  double eps;

  GatedDeltaNet(int64_t key_heads, bool grouped, at::Tensor taps, at::Tensor bases, at::Tensor bias, double rate_scale,
                at::Tensor weight, double eps)
      : key_heads(key_heads), grouped(grouped), taps(std::move(taps)), bases(std::move(bases)), bias(std::move(bias)),
        rate_scale(rate_scale), weight(std::move(weight)), eps(eps) {}

  at::Tensor operator()(const at::Tensor& projected, std::vector<at::Tensor>& states, const Runs& runs,
                        const std::optional<at::Tensor>&) const override {
    const int64_t tokens = projected.size(0);
    TORCH_CHECK(states.size() == 2 && states[1].dim() == 4);
    const int64_t heads = states[1].size(1), size = states[1].size(2), columns = states[1].size(3);
    const int64_t keys = key_heads * size, values = heads * columns, shared = heads / key_heads;
    TORCH_CHECK(heads == shared * key_heads && projected.size(1) == 2 * keys + 2 * values + 2 * heads);
    TORCH_CHECK(bases.is_contiguous() && bias.is_contiguous() && bases.numel() == heads && bias.numel() == heads);
    TORCH_CHECK(weight.is_contiguous() && weight.numel() == columns);
    const std::vector<at::Tensor> parts = split(projected, {keys, keys, values, values, heads, heads});
    const at::Tensor mixed =
        grouped ? at::cat({parts[0], parts[1], parts[2]}, 1) : projected.narrow(1, 0, 2 * keys + values);
    const at::Tensor convolved = convolve(mixed, taps, {}, states[0], runs, true);
    const auto heads_at = [&](int64_t first, int64_t count, int64_t size) {
      return convolved.narrow(1, first, count * size).view({tokens, count, size});
    };
    at::Tensor output = at::empty({tokens, values}, projected.options());
    by_dtype(projected, [&]<typename T>(T*) {
      const Inputs<T> in{TokenRows<T>(heads_at(0, key_heads, size)),
                         TokenRows<T>(heads_at(keys, key_heads, size)),
                         TokenRows<T>(heads_at(2 * keys, heads, columns)),
                         heads,
                         shared,
                         size,
                         columns,
                         true};
      const TokenRows<T> gates(parts[3]), rate_rows(parts[4]), decay_rows(parts[5]);
      const float *base = bases.const_data_ptr<float>(), *shift = bias.const_data_ptr<float>();
      const float* scale = weight.const_data_ptr<float>();
      T* to = output.mutable_data_ptr<T>();
      compute<false>(
          in, runs, states[1],
          [&](int64_t token, int64_t head, float* decay) {
            *decay = std::exp(base[head] * softplus(static_cast<float>(decay_rows.at(token)[head]) + shift[head]));
            const float rate = 1.0f / (1.0f + std::exp(-static_cast<float>(rate_rows.at(token)[head])));
            return static_cast<float>(static_cast<T>(rate)) * static_cast<float>(rate_scale);
          },
          [&](int64_t token, int64_t head, const float* row) {
            T* place = to + (token * heads + head) * columns;
            write_row(place, row, columns);
            normalise_gated(place, gates.at(token) + head * columns, scale, place, columns, static_cast<float>(eps),
                            false, false);
          });
    });
    return output;
  }

 private:
  // sizes: of query, key, value, gate, rates and decays.
  std::vector<at::Tensor> split(const at::Tensor& projected, const std::vector<int64_t>& sizes) const {
    std::vector<at::Tensor> parts;
    int64_t first = 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (!grouped) {
        parts.push_back(projected.narrow(1, first, sizes[i]));
      } else {
        // The first four are of one projection, the others of a second one.
        const int64_t begin = i < 4 ? 0 : sizes[0] + sizes[1] + sizes[2] + sizes[3];
        const int64_t end = i < 4 ? sizes[0] + sizes[1] + sizes[2] + sizes[3] : projected.size(1);
        const at::Tensor whole = projected.narrow(1, begin, end - begin).unflatten(1, {key_heads, -1});
        parts.push_back(whole.narrow(2, (first - begin) / key_heads, sizes[i] / key_heads).reshape({-1, sizes[i]}));
      }
      first += sizes[i];
    }
    return parts;
  }
};

// Kimi's delta attention (Kimi Linear, 2025): a gated delta net with a decay for each element of a key. The projections
// give query, key and value, [tokens, heads, size] each, what `decays` and `gate` take, and rates before their sigmoid,
// [tokens, heads]. bases: [heads] float32, negative, and bias: [heads * size] float32, of decays. weight: [size]
// float32, of the norm. States: as those of a gated delta net.
struct KimiDeltaAttention : Mixer {
  at::Tensor taps;
  LinearPtr decays, gate;
  at::Tensor bases, bias, weight;
  double eps;

  KimiDeltaAttention(at::Tensor taps, LinearPtr decays, LinearPtr gate, at::Tensor bases, at::Tensor bias,
                     at::Tensor weight, double eps)
      : taps(std::move(taps)), decays(std::move(decays)), gate(std::move(gate)), bases(std::move(bases)),
        bias(std::move(bias)), weight(std::move(weight)), eps(eps) {}

  at::Tensor operator()(const at::Tensor& projected, std::vector<at::Tensor>& states, const Runs& runs,
                        const std::optional<at::Tensor>& adapters) const override {
    TORCH_CHECK(states.size() == 2 && states[1].dim() == 4 && states[1].size(2) == states[1].size(3));
    const int64_t tokens = projected.size(0), heads = states[1].size(1), size = states[1].size(2), all = heads * size;
    const int64_t of_gate = 3 * all + decays->inputs, of_rates = of_gate + gate->inputs;
    TORCH_CHECK(projected.size(1) == of_rates + heads && decays->outputs == all && gate->outputs == all);
    TORCH_CHECK(bases.is_contiguous() && bias.is_contiguous() && bases.numel() == heads && bias.numel() == all);
    TORCH_CHECK(weight.is_contiguous() && weight.numel() == size);
    const at::Tensor convolved = convolve(projected.narrow(1, 0, 3 * all), taps, {}, states[0], runs, true);
    const auto made = [&](const Linear& linear, int64_t first) {
      return linear.adapted(projected.narrow(1, first, linear.inputs).contiguous(), adapters);
    };
    const at::Tensor decay_rows = made(*decays, 3 * all), gates = made(*gate, of_gate);
    const auto part = [&](int64_t i) { return convolved.narrow(1, i * all, all).view({tokens, heads, size}); };
    at::Tensor output = at::empty({tokens, all}, projected.options());
    by_dtype(projected, [&]<typename T>(T*) {
      const Inputs<T> in{
          TokenRows<T>(part(0)), TokenRows<T>(part(1)), TokenRows<T>(part(2)), heads, 1, size, size, true};
      const TokenRows<T> rate_rows(projected.narrow(1, of_rates, heads));
      const float *base = bases.const_data_ptr<float>(), *shift = bias.const_data_ptr<float>();
      const T *before = decay_rows.const_data_ptr<T>(), *gate_rows = gates.const_data_ptr<T>();
      T* to = output.mutable_data_ptr<T>();
      compute<true>(
          in, runs, states[1],
          [&](int64_t token, int64_t head, float* decay) {
            for (int64_t i = 0; i < size; ++i) {
              const float x = static_cast<float>(before[token * all + head * size + i]) + shift[head * size + i];
              decay[i] = std::exp(base[head] * softplus(x));
            }
            const float rate = 1.0f / (1.0f + std::exp(-static_cast<float>(rate_rows.at(token)[head])));
            return static_cast<float>(static_cast<T>(rate));
          },
          [&](int64_t token, int64_t head, const float* row) {
            const int64_t place = token * all + head * size;
            write_row(to + place, row, size);
            normalise_gated(to + place, gate_rows + place, weight.const_data_ptr<float>(), to + place, size,
                            static_cast<float>(eps), false, true);
          });
    });
    return output;
  }
};

}  // namespace

MixerPtr kimi_delta_attention(at::Tensor taps, LinearPtr decays, LinearPtr gate, at::Tensor bases, at::Tensor bias,
                              at::Tensor weight, double eps) {
  return c10::make_intrusive<KimiDeltaAttention>(std::move(taps), std::move(decays), std::move(gate), std::move(bases),
                                                 std::move(bias), std::move(weight), eps);
}

MixerPtr gated_delta_net(int64_t key_heads, bool grouped, at::Tensor taps, at::Tensor bases, at::Tensor bias,
                         double rate_scale, at::Tensor weight, double eps) {
  return c10::make_intrusive<GatedDeltaNet>(key_heads, grouped, std::move(taps), std::move(bases), std::move(bias),
                                            rate_scale, std::move(weight), eps);
}

}  // namespace oatmill

TORCH_LIBRARY_FRAGMENT(oatmill, library) {
  library.def(
      "delta_rule(Tensor query, Tensor key, Tensor value, Tensor gates, Tensor rates, Tensor(a!) states, Tensor runs,"
      " Tensor saves, bool normalised) -> Tensor");
}

TORCH_LIBRARY_IMPL(oatmill, CPU, library) { library.impl("delta_rule", &oatmill::delta_rule); }
