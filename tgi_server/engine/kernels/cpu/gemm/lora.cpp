// The small products of LoRA adapters. Rows are grouped by adapter; its matrices are read once for all rows of a group.

#include "gemm/lora.h"

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "simd/dtypes.h"
#include "simd/simd16.h"
#include "runtime/huge_pages.h"
#include "runtime/thread_pool.h"

namespace oatmill {

namespace {

constexpr int SIDE_BY_SIDE = REGISTERS == 32 ? 4 : 2;  // rows that are computed together
constexpr int64_t RANKS = 4;           // ranks of a block of a, which are computed together: the sums stay in registers
constexpr int64_t CHUNK = 32;          // inputs of a block of a
constexpr int64_t PAIR = 2;            // ranks of b that lie together
constexpr int64_t AHEAD = 2048;        // numbers of a that are prefetched
constexpr int64_t ROWS_OF_ITEM = 64;   // rows of a work item
constexpr int64_t RANKS_OF_ITEM = 16;  // its ranks, of a, or a multiple
constexpr int64_t BLOCKS_OF_ITEM = 16;     // its blocks of LANES outputs, of b, or a multiple
constexpr int64_t WORK_OF_ITEM = 1 << 14;  // products; other threads would take longer to begin with fewer
constexpr int LANE_REGISTERS = LANES / WIDTH;

// The dot products. An operand has NUMBERS of x, of a or of b, and a pair of ranks is multiplied in STEPS; place says
// where number n of rank q lies in a block of b with LANES outputs. Sum: the products with a, as b is multiplied by
// them.
template <typename T>
struct LoraDot {
  using Sum = float;
  static constexpr int64_t NUMBERS = WIDTH;
  static constexpr int STEPS = 2;
  static constexpr int64_t place(int64_t n, int64_t q) { return q * LANES + n; }

  static F32 operand(const T* from) { return load_f32(from); }
  static F32 of_all_lanes(const float* sums, int step) { return F32{} + sums[step]; }
  static void add(F32 a, F32 b, F32& acc) { acc = fma(a, b, acc); }
};

#if defined(__AVX512BF16__)
template <>
struct LoraDot<c10::BFloat16> {
  using Sum = c10::BFloat16;  // as `peft` rounds them
  static constexpr int64_t NUMBERS = 2 * WIDTH;
  static constexpr int STEPS = 1;
  static constexpr int64_t place(int64_t n, int64_t q) { return n * PAIR + q; }

  static U32 operand(const c10::BFloat16* from) { return load_as<U32>(from); }
  static U32 of_all_lanes(const c10::BFloat16* sums, int) { return U32{} + load_as<uint32_t>(sums); }
  static void add(U32 a, U32 b, F32& acc) {
    acc = reinterpret_cast<F32>(
        _mm512_dpbf16_ps(reinterpret_cast<__m512>(acc), reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b)));
  }
};
#endif

// The rows of one adapter.
struct Group {
  const LoraDelta& delta;
  const std::vector<int64_t>& rows;
  int64_t first_sum;  // where the products of its rows with a begin
};

// What is added to y, and what comes after it.
template <typename T>
struct LoraEpilogue {
  T* y;
  const T* residual;  // or null
  int64_t outputs;

  // Up to LANES outputs of a row.
  void operator()(const LoraDelta& delta, int64_t row, int64_t first, int64_t count, F32x16 added) const {
    const int64_t place = row * outputs + first;
    F32x16 value = read(y + place, count);
    if (delta.dora_scale) value *= read(delta.dora_scale->const_data_ptr<float>() + first, count);
    value += added;
    if (delta.bias_delta) value += read(delta.bias_delta->const_data_ptr<float>() + first, count);
    if (residual) value += read(residual + place, count);
    if (count == LANES) return store(y + place, value);
    T edge[LANES];
    store(edge, value);
    std::copy_n(edge, count, y + place);
  }

  template <typename Number>
  static F32x16 read(const Number* from, int64_t count) {
    if (count == LANES) return load(from);
    Number edge[LANES] = {};
    std::copy_n(from, count, edge);
    return load(edge);
  }
};

// Calls work with the number of rows, below SIDE_BY_SIDE or that, as a constant.
template <typename Work>
void with_count(int64_t rows, const Work& work) {
  switch (rows) {
    case 1:
      return work(std::integral_constant<int, 1>());
    case 2:
      return work(std::integral_constant<int, 2>());
    case 3:
      return work(std::integral_constant<int, 3>());
    default:
      return work(std::integral_constant<int, SIDE_BY_SIDE>());
  }
}

// sums[r * stride + j] = x[r] . row j of a, a block of it.
template <int ROWS, typename T>
void shrink_rows(const T* const* x, const T* a, int64_t inputs, typename LoraDot<T>::Sum* sums, int64_t stride) {
  using Dot = LoraDot<T>;
  F32 acc[ROWS][RANKS] = {};
  T edges[ROWS][CHUNK] = {};
  const T* from[ROWS];
  for (int64_t k = 0; k < inputs; k += CHUNK, a += RANKS * CHUNK) {
    for (int r = 0; r < ROWS; ++r) {
      from[r] = x[r] + k;
      if (k + CHUNK <= inputs) continue;
      std::copy(from[r], x[r] + inputs, edges[r]);
      from[r] = edges[r];
    }
#pragma GCC unroll 4
    for (int64_t j = 0; j < RANKS; ++j) __builtin_prefetch(a + AHEAD + j * CHUNK);
#pragma GCC unroll 8
    for (int64_t i = 0; i < CHUNK; i += Dot::NUMBERS) {
      decltype(Dot::operand(a)) weights[RANKS];
      for (int j = 0; j < RANKS; ++j) weights[j] = Dot::operand(a + j * CHUNK + i);
      for (int r = 0; r < ROWS; ++r) {
        const auto given = Dot::operand(from[r] + i);
        for (int j = 0; j < RANKS; ++j) Dot::add(given, weights[j], acc[r][j]);
      }
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int j = 0; j < RANKS; ++j) sums[r * stride + j] = static_cast<typename Dot::Sum>(sum(acc[r][j]));
}

// The products of some rows with ranks first .. last - 1 of a, which are whole blocks.
template <typename T>
void shrink(const T* x, const int64_t* rows, int64_t count, const LoraDelta& delta, int64_t first, int64_t last,
            typename LoraDot<T>::Sum* sums) {
  const T* a = delta.a.const_data_ptr<T>();
  for (int64_t j = first; j < last; j += RANKS)
    for (int64_t row = 0; row < count; row += SIDE_BY_SIDE) {
      const int64_t together = std::min<int64_t>(SIDE_BY_SIDE, count - row);
      const T* given[SIDE_BY_SIDE];
      for (int64_t r = 0; r < together; ++r) given[r] = x + rows[row + r] * delta.inputs;
      with_count(together, [&](auto number) {
        shrink_rows<decltype(number)::value>(given, a + j * ceil_div(delta.inputs, CHUNK) * CHUNK, delta.inputs,
                                             sums + row * delta.ranks + j, delta.ranks);
      });
    }
}

// Adds b^T sums to the outputs in blocks first .. last - 1 of a part, for ROWS rows. sums: of the first row and the
// part's first rank, `stride` before those of the next row.
template <int ROWS, typename T>
void expand_rows(const typename LoraDot<T>::Sum* sums, int64_t stride, const LoraDelta& delta, const LoraPart& part,
                 int64_t first, int64_t last, const int64_t* rows, const LoraEpilogue<T>& epilogue) {
  using Dot = LoraDot<T>;
  const T* b = part.ranks ? part.b.const_data_ptr<T>() + first * part.ranks * LANES : nullptr;
  for (int64_t n = first * LANES; n < std::min(last * LANES, part.outputs); n += LANES) {
    F32 acc[ROWS][LANE_REGISTERS] = {};
    for (int64_t j = 0; j < part.ranks; j += PAIR, b += PAIR * LANES)
#pragma GCC unroll 2
      for (int step = 0; step < Dot::STEPS; ++step)
#pragma GCC unroll 4
        for (int i = 0; i < LANE_REGISTERS; ++i) {
          const auto weights = Dot::operand(b + (step * LANE_REGISTERS + i) * Dot::NUMBERS);
          for (int r = 0; r < ROWS; ++r) Dot::add(Dot::of_all_lanes(sums + r * stride + j, step), weights, acc[r][i]);
        }
    for (int r = 0; r < ROWS; ++r)
      epilogue(delta, rows[r], part.first + n, std::min<int64_t>(LANES, part.outputs - n),
               by_registers<F32x16>([&](int i) { return acc[r][i]; }));
  }
}

// Some rows of a group, and some of the ranks of a, or of the blocks of outputs of a part.
struct Item {
  const Group* group;
  const LoraPart* part;
  int64_t row, rows, begin, end;
};

// Appends items of `step` indices below `size`, or of a multiple of that. products: of a row and an index.
void append_items(std::vector<Item>& items, const Group& group, const LoraPart* part, int64_t size, int64_t step,
                  int64_t products) {
  const int64_t count = static_cast<int64_t>(group.rows.size()), rows = std::min(ROWS_OF_ITEM, count);
  step *= ceil_div(WORK_OF_ITEM, step * rows * products);
  for (int64_t begin = 0; begin < size; begin += step)
    for (int64_t row = 0; row < count; row += ROWS_OF_ITEM)
      items.push_back({&group, part, row, std::min(ROWS_OF_ITEM, count - row), begin, std::min(begin + step, size)});
}

template <typename T>
void run(const std::vector<Group>& groups, int64_t sums_needed, const T* x, const LoraEpilogue<T>& epilogue) {
  std::vector<typename LoraDot<T>::Sum> sums(sums_needed);
  std::vector<Item> shrinking, expanding;
  for (const Group& group : groups) {
    const LoraDelta& delta = group.delta;
    append_items(shrinking, group, nullptr, delta.ranks, RANKS_OF_ITEM, delta.inputs);
    for (const LoraPart& part : delta.parts)
      if (part.ranks || delta.dora_scale || delta.bias_delta || epilogue.residual)
        append_items(expanding, group, &part, ceil_div(part.outputs, LANES), BLOCKS_OF_ITEM, LANES * (1 + part.ranks));
  }
  const auto sums_of = [&](const Item& item) {
    return sums.data() + item.group->first_sum + item.row * item.group->delta.ranks;
  };
  parallel_for(static_cast<int64_t>(shrinking.size()), [&](int64_t i) {
    const Item& item = shrinking[i];
    shrink(x, item.group->rows.data() + item.row, item.rows, item.group->delta, item.begin, item.end, sums_of(item));
  });
  parallel_for(static_cast<int64_t>(expanding.size()), [&](int64_t i) {
    const Item& item = expanding[i];
    const LoraDelta& delta = item.group->delta;
    for (int64_t r = 0; r < item.rows; r += SIDE_BY_SIDE)
      with_count(std::min<int64_t>(SIDE_BY_SIDE, item.rows - r), [&](auto number) {
        expand_rows<decltype(number)::value>(sums_of(item) + r * delta.ranks + item.part->first_rank, delta.ranks,
                                             delta, *item.part, item.begin, item.end,
                                             item.group->rows.data() + item.row + r, epilogue);
      });
  });
}

// Packs a, [ranks, inputs], in blocks of RANKS ranks: [blocks, chunks, RANKS, CHUNK]. parts: their ranks in a, one part
// after the other, are those of the packed one but for zeros that fill up each part's.
template <typename T>
at::Tensor packed_a(const at::Tensor& a, const std::vector<LoraPart>& parts, const std::vector<int64_t>& ranks,
                    int64_t room) {
  const int64_t inputs = a.size(1), chunks = ceil_div(inputs, CHUNK);
  at::Tensor packed = zeros_in_huge_pages({room / RANKS, chunks, RANKS, CHUNK}, a.options());
  const T* from = a.const_data_ptr<T>();
  T* to = packed.mutable_data_ptr<T>();
  for (size_t p = 0; p < parts.size(); ++p)
    for (int64_t j = 0; j < ranks[p]; ++j, from += inputs) {
      const int64_t rank = parts[p].first_rank + j;
      for (int64_t k = 0; k < inputs; k += CHUNK)
        std::copy_n(from + k, std::min(CHUNK, inputs - k),
                    to + ((rank / RANKS * chunks + k / CHUNK) * RANKS + rank % RANKS) * CHUNK);
    }
  return packed;
}

// Packs b, [ranks, outputs], in blocks of LANES outputs: [blocks, pairs of ranks, PAIR * LANES].
template <typename T>
at::Tensor packed_b(const at::Tensor& b) {
  const int64_t ranks = b.size(0), outputs = b.size(1), pairs = ceil_div(ranks, PAIR);
  at::Tensor packed = zeros_in_huge_pages({ceil_div(outputs, LANES), pairs, PAIR * LANES}, b.options());
  const T* from = b.const_data_ptr<T>();
  for (int64_t n = 0; n < outputs; n += LANES)
    for (int64_t j = 0; j < ranks; ++j) {
      T* to = packed.mutable_data_ptr<T>() + (n / LANES * pairs + j / PAIR) * PAIR * LANES;
      for (int64_t i = 0; i < std::min<int64_t>(LANES, outputs - n); ++i)
        to[LoraDot<T>::place(i, j % PAIR)] = from[j * outputs + n + i];
    }
  return packed;
}

}  // namespace

void Adapters::put(int64_t number, const at::Tensor& a, std::vector<at::Tensor> b, std::vector<int64_t> firsts,
                   std::optional<at::Tensor> dora_scale, std::optional<at::Tensor> bias_delta) {
  TORCH_CHECK(number > 0 && a.is_contiguous() && b.size() == firsts.size(), "an adapter's delta is not of its form");
  LoraDelta delta{{}, a.size(1), 0, {}, std::move(dora_scale), std::move(bias_delta)};
  std::vector<int64_t> ranks;
  int64_t output = 0;
  const auto skip_to = [&](int64_t next) {
    TORCH_CHECK(output <= next && next <= outputs_, "the outputs that an adapter changes overlap");
    if (output < next) delta.parts.push_back({output, next - output, delta.ranks, 0, {}}), ranks.push_back(0);
    output = next;
  };
  by_dtype(a, [&]<typename T>(T*) {
    for (size_t i = 0; i < b.size(); ++i) {
      skip_to(firsts[i]);
      TORCH_CHECK(b[i].is_contiguous() && b[i].scalar_type() == a.scalar_type());
      const int64_t own = b[i].size(0), room = ceil_div(own, PAIR) * PAIR;
      delta.parts.push_back({output, b[i].size(1), delta.ranks, room, packed_b<T>(b[i])}), ranks.push_back(own);
      delta.ranks += room;
      output += b[i].size(1);
    }
    skip_to(outputs_);
    const int64_t given = std::accumulate(ranks.begin(), ranks.end(), int64_t{0});
    TORCH_CHECK(given == a.size(0), "an adapter has ", a.size(0), " ranks, and its parts ", given);
    delta.ranks = ceil_div(delta.ranks, RANKS) * RANKS;
    delta.a = packed_a<T>(a, delta.parts, ranks, delta.ranks);
  });
  deltas_.insert_or_assign(number, std::move(delta));
}

LoraRows::LoraRows(const Adapters& adapters, const at::Tensor& numbers) : adapted_(new bool[numbers.numel()]) {
  std::unordered_map<const LoraDelta*, size_t> places;
  const int32_t* number = numbers.const_data_ptr<int32_t>();
  for (int64_t row = 0; row < numbers.numel(); ++row) {
    const LoraDelta* delta = number[row] == 0 ? nullptr : adapters.find(number[row]);
    adapted_[row] = delta;
    if (!delta) continue;
    const auto [place, is_new] = places.try_emplace(delta, groups_.size());
    if (is_new) groups_.push_back({delta, {}});
    groups_[place->second].rows.push_back(row);
  }
}

at::Tensor Adapters::apply(const at::Tensor& x, at::Tensor y, const LoraRows& rows,
                           const std::optional<at::Tensor>& residual) const {
  const at::Tensor dense = x.contiguous(), added = residual ? residual->contiguous() : at::Tensor();
  const int64_t inputs = x.size(-1);
  TORCH_CHECK(y.is_contiguous() && y.size(-1) == outputs_ && x.numel() / inputs == y.numel() / outputs_);
  TORCH_CHECK(!residual || (added.numel() == y.numel() && added.scalar_type() == y.scalar_type()));
  std::vector<Group> groups;
  int64_t sums = 0;
  for (const LoraRows::Group& group : rows.groups()) {
    TORCH_CHECK(group.delta->inputs == inputs && group.delta->a.scalar_type() == x.scalar_type(),
                "an adapter's delta is not for this input");
    groups.push_back({*group.delta, group.rows, sums});
    sums += static_cast<int64_t>(group.rows.size()) * group.delta->ranks;
  }
  by_dtype(x, [&]<typename T>(T*) {
    const LoraEpilogue<T> epilogue{y.mutable_data_ptr<T>(), residual ? added.const_data_ptr<T>() : nullptr, outputs_};
    run<T>(groups, sums, dense.const_data_ptr<T>(), epilogue);
  });
  return y;
}

}  // namespace oatmill
