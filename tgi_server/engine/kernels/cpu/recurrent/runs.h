// The tokens of a pass as layers with states see them, and the loop over them.
//
// A token is computed after the one before it, by the same operations in the same order, whatever else is in the pass
// and however a text is cut into chunks; so its result and the state never differ by a bit.

#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "runtime/thread_pool.h"
#include "simd/dtypes.h"
#include "simd/simd.h"

namespace oatmill {

// Neighbouring tokens of one text. first: the first one's index in the pass. written: the state behind them takes the
// place of the one before; it does not for drafted tokens. saves: slots that get a copy of the state on the way.
struct Run {
  struct Save {
    int64_t tokens, slot;
  };
  int64_t first, tokens, slot;
  bool written;
  std::vector<Save> saves;
};

using Runs = std::vector<Run>;

// runs: [runs, 4] int64: first token, number of tokens, slot, 1 if the state is written. saves: [saves, 3] int64: the
// run, how many of its tokens come before, the slot; in ascending order. slots: that there are. tokens: of the pass.
inline Runs read_runs(const at::Tensor& runs, const at::Tensor& saves, int64_t slots, int64_t tokens) {
  TORCH_CHECK(runs.is_contiguous() && saves.is_contiguous() && runs.size(1) == 4 && saves.size(1) == 3);
  const int64_t *run = runs.const_data_ptr<int64_t>(), *save = saves.const_data_ptr<int64_t>();
  Runs made;
  for (int64_t i = 0; i < runs.size(0); ++i, run += 4) {
    TORCH_CHECK(0 <= run[0] && 0 < run[1] && run[0] + run[1] <= tokens && 0 <= run[2] && run[2] < slots);
    made.push_back({run[0], run[1], run[2], run[3] != 0, {}});
  }
  for (int64_t i = 0; i < saves.size(0); ++i, save += 3) {
    TORCH_CHECK(0 <= save[0] && save[0] < runs.size(0) && 0 <= save[2] && save[2] < slots);
    Run& saved = made[save[0]];
    TORCH_CHECK(0 < save[1] && save[1] <= saved.tokens &&
                (saved.saves.empty() || saved.saves.back().tokens <= save[1]));
    saved.saves.push_back({save[1], save[2]});
  }
  return made;
}

// TokenRows of a tensor whose last dimension is dense: [tokens, size], or [tokens, heads, size].
template <typename T>
struct TokenRows {
  const T* data;
  int64_t stride, head_stride;

  explicit TokenRows(const at::Tensor& x)
      : data(x.const_data_ptr<T>()), stride(x.stride(0)), head_stride(x.dim() == 3 ? x.stride(1) : 0) {
    TORCH_CHECK(x.stride(-1) == 1 || x.size(-1) == 1);
  }
  const T* at(int64_t token, int64_t head = 0) const { return data + token * stride + head * head_stride; }
};

// The first `count` numbers of a register, zeros behind them.
template <typename T>
F32 load_some(const T* from, int64_t count) {
  if (count >= WIDTH) return load_f32(from);
  T part[WIDTH] = {};
  std::copy(from, from + count, part);
  return load_f32(part);
}

template <typename T>
void store_some(T* to, F32 numbers, int64_t count) {
  if (count >= WIDTH) return store(to, numbers);
  T part[WIDTH];
  store(part, numbers);
  std::copy(part, part + count, to);
}

// A register as it is after having been written to a tensor of T.
template <typename T>
F32 as_stored(F32 numbers) {
  T part[WIDTH];
  store(part, numbers);
  return load_f32(part);
}

// log(1 + e^x); from 20 on that is x, as in torch.
inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

inline F32 silu(F32 x) { return x / (exponential(-x) + 1.0f); }

// Tokens for which rows of a state stay in the L1 cache, and the columns of the state that do: each column is computed
// by itself.
constexpr int64_t TILE_TOKENS = 32, TILE_COLUMNS = 32;
// The most registers of columns of a state that is read where it is.
constexpr int WIDEST = REGISTERS == 32 ? 8 : 4;

// Calls step.template operator()<V>(state, stride, column, count) for V registers of columns at a time: state: [rows],
// `stride` numbers apart. count: of the columns that there are.
template <typename Step>
void by_columns(float* state, int64_t rows, int64_t columns, int64_t tokens, std::vector<float>& scratch,
                const Step& step) {
  int64_t column = 0;
  const auto in_place = [&]<int V>() {
    for (; column + V * WIDTH <= columns; column += V * WIDTH)
      step.template operator()<V>(state + column, columns, column, static_cast<int64_t>(V) * WIDTH);
  };
  if (tokens == 1) {  // it would be copied as often as it is read
    if constexpr (WIDEST > 4) {
      in_place.template operator()<WIDEST>();
      in_place.template operator()<6>();
    }
    in_place.template operator()<4>();
    in_place.template operator()<2>();
    in_place.template operator()<1>();
  }
  for (; column < columns; column += TILE_COLUMNS) {
    const int64_t count = std::min(TILE_COLUMNS, columns - column);
    scratch.assign(rows * TILE_COLUMNS, 0.0f);
    for (int64_t i = 0; i < rows; ++i) std::copy_n(state + i * columns + column, count, &scratch[i * TILE_COLUMNS]);
    step.template operator()<TILE_COLUMNS / WIDTH>(scratch.data(), TILE_COLUMNS, column, count);
    for (int64_t i = 0; i < rows; ++i) std::copy_n(&scratch[i * TILE_COLUMNS], count, state + i * columns + column);
  }
}

// Computes the runs of a pass. states: [slots, parts, size]; each part of a state is computed by itself. work(part,
// state, first, tokens) computes a tile of tokens and moves the state on.
template <typename Work>
void for_each_tile(const Runs& runs, at::Tensor& states, int64_t parts, const Work& work) {
  TORCH_CHECK(states.is_contiguous());
  float* slots = states.mutable_data_ptr<float>();
  const int64_t slot_size = states.numel() / states.size(0), size = slot_size / parts;
  parallel_for(static_cast<int64_t>(runs.size()) * parts, [&](int64_t item) {
    const Run& run = runs[item / parts];
    const int64_t part = item % parts;
    const auto place = [&](int64_t slot) { return slots + slot * slot_size + part * size; };
    thread_local std::vector<float> copy;
    float* state = place(run.slot);
    if (!run.written) {
      copy.assign(state, state + size);
      state = copy.data();
    }
    auto save = run.saves.begin();
    for (int64_t done = 0; done < run.tokens;) {
      const int64_t end = save == run.saves.end() ? run.tokens : save->tokens;
      const int64_t tokens = std::min(TILE_TOKENS, end - done);
      work(part, state, run.first + done, tokens);
      done += tokens;
      for (; save != run.saves.end() && save->tokens == done; ++save) std::copy_n(state, size, place(save->slot));
    }
  });
}

}  // namespace oatmill
