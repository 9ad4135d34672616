// The small products of LoRA adapters. Rows are grouped by adapter; its matrices are read once for all rows of a group.

#include "gemm/lora.h"

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "simd/dtypes.h"
#include "simd/simd16.h"
#include "runtime/thread_pool.h"

namespace oatmill {

namespace {

constexpr int SIDE_BY_SIDE = 4;          // rows that are computed together
constexpr int RANKS_AT_ONCE = 2;         // with so many rows of a: the sums stay in registers
constexpr int64_t ROWS_OF_ITEM = 64;     // rows of a work item
constexpr int64_t RANKS_OF_ITEM = 16;    // its ranks, of a, or a multiple
constexpr int64_t OUTPUTS_OF_ITEM = 256; // its outputs, of b, or a multiple
constexpr int64_t WORK_OF_ITEM = 1 << 16; // products; other threads would take longer to begin with fewer
constexpr int LANE_REGISTERS = LANES / WIDTH;

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
  bool relu;
  int64_t outputs;

  // Up to LANES outputs of a row.
  void operator()(const LoraDelta& delta, int64_t row, int64_t first, int64_t count, F32x16 added) const {
    const int64_t place = row * outputs + first;
    F32x16 value = read(y + place, count);
    if (delta.dora_scale) value *= read(delta.dora_scale->const_data_ptr<float>() + first, count);
    value += added;
    if (delta.bias_delta) value += read(delta.bias_delta->const_data_ptr<float>() + first, count);
    if (relu) value = vmax(value, F32x16{});
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
    case 1: return work(std::integral_constant<int, 1>());
    case 2: return work(std::integral_constant<int, 2>());
    case 3: return work(std::integral_constant<int, 3>());
    default: return work(std::integral_constant<int, SIDE_BY_SIDE>());
  }
}

// sums[r * stride + j] = x[r] . row j of a.
template <int ROWS, int RANKS, typename T>
void shrink_rows(const T* const* x, const T* a, int64_t inputs, float* sums, int64_t stride) {
  F32 acc[ROWS][RANKS] = {};
  int64_t k = 0;
  for (; k + WIDTH <= inputs; k += WIDTH) {
    F32 weights[RANKS];
    for (int j = 0; j < RANKS; ++j) weights[j] = load_f32(a + j * inputs + k);
    for (int r = 0; r < ROWS; ++r) {
      const F32 given = load_f32(x[r] + k);
      for (int j = 0; j < RANKS; ++j) acc[r][j] = fma(given, weights[j], acc[r][j]);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int j = 0; j < RANKS; ++j) {
      float total = sum(acc[r][j]);
      for (int64_t i = k; i < inputs; ++i) total += static_cast<float>(x[r][i]) * static_cast<float>(a[j * inputs + i]);
      sums[r * stride + j] = total;
    }
}

// The products of some rows with ranks first .. last - 1 of a.
template <typename T>
void shrink(const T* x, const int64_t* rows, int64_t count, const at::Tensor& a, int64_t first, int64_t last,
            float* sums) {
  const int64_t inputs = a.size(1), ranks = a.size(0);
  const T* weights = a.const_data_ptr<T>();
  for (int64_t row = 0; row < count; row += SIDE_BY_SIDE) {
    const int64_t together = std::min<int64_t>(SIDE_BY_SIDE, count - row);
    const T* given[SIDE_BY_SIDE];
    for (int64_t r = 0; r < together; ++r) given[r] = x + rows[row + r] * inputs;
    with_count(together, [&](auto number) {
      int64_t j = first;
      for (; j + RANKS_AT_ONCE <= last; j += RANKS_AT_ONCE)
        shrink_rows<decltype(number)::value, RANKS_AT_ONCE>(given, weights + j * inputs, inputs, sums + row * ranks + j, ranks);
      for (; j < last; ++j) shrink_rows<decltype(number)::value, 1>(given, weights + j * inputs, inputs, sums + row * ranks + j, ranks);
    });
  }
}

// Adds b^T sums to outputs first .. last - 1 of a part, for ROWS rows. sums: of the first row, `stride` before the next.
template <int ROWS, typename T>
void expand_rows(const float* sums, int64_t stride, const LoraDelta& delta, const LoraPart& part, int64_t first, int64_t last,
                const int64_t* rows, const LoraEpilogue<T>& epilogue) {
  const T* b = part.ranks ? part.b.const_data_ptr<T>() : nullptr;
  int64_t n = first;
  for (; n + LANES <= last; n += LANES) {
    F32 acc[ROWS][LANE_REGISTERS] = {};
    for (int64_t j = 0; j < part.ranks; ++j)
      for (int i = 0; i < LANE_REGISTERS; ++i) {
        const F32 weights = load_f32(b + j * part.outputs + n + i * WIDTH);
        for (int r = 0; r < ROWS; ++r)
          acc[r][i] = fma(F32{} + sums[r * stride + j], weights, acc[r][i]);
      }
    for (int r = 0; r < ROWS; ++r)
      epilogue(delta, rows[r], part.first + n, LANES, by_registers<F32x16>([&](int i) { return acc[r][i]; }));
  }
  if (n == last) return;
  for (int r = 0; r < ROWS; ++r) {
    float edge[LANES] = {};
    for (int64_t j = 0; j < part.ranks; ++j)
      for (int64_t i = 0; i < last - n; ++i)
        edge[i] += sums[r * stride + j] * static_cast<float>(b[j * part.outputs + n + i]);
    epilogue(delta, rows[r], part.first + n, last - n, load(edge));
  }
}

// Calls work(group, first row, rows, begin, end) for blocks of rows of each group, and of the indices below `size`: a
// multiple of `step` of them. products: of a row and an index.
template <typename Size, typename Products, typename Work>
void for_each_block(const std::vector<Group>& groups, int64_t step, const Size& size, const Products& products,
                    const Work& work) {
  const auto step_of = [&](const Group& group) {
    const int64_t rows = std::min<int64_t>(ROWS_OF_ITEM, static_cast<int64_t>(group.rows.size()));
    return ceil_div(WORK_OF_ITEM, std::max<int64_t>(1, step * rows * products(group))) * step;
  };
  struct Item {
    const Group* group;
    int64_t row, begin;
  };
  std::vector<Item> items;
  for (const Group& group : groups)
    for (int64_t begin = 0; begin < size(group); begin += step_of(group))
      for (int64_t row = 0; row < static_cast<int64_t>(group.rows.size()); row += ROWS_OF_ITEM)
        items.push_back({&group, row, begin});
  parallel_for(static_cast<int64_t>(items.size()), [&](int64_t i) {
    const auto& [group, row, begin] = items[i];
    const int64_t rows = std::min<int64_t>(ROWS_OF_ITEM, static_cast<int64_t>(group->rows.size()) - row);
    work(*group, row, rows, begin, std::min(begin + step_of(*group), size(*group)));
  });
}

int64_t ranks_of(const Group& group) { return group.delta.a.size(0); }

template <typename T>
void run(const std::vector<Group>& groups, int64_t sums_needed, const T* x, int64_t inputs,
         const LoraEpilogue<T>& epilogue) {
  std::vector<float> sums(sums_needed);
  for_each_block(groups, RANKS_OF_ITEM, ranks_of, [&](const Group&) { return inputs; },
                 [&](const Group& group, int64_t row, int64_t rows, int64_t begin, int64_t end) {
                   shrink(x, group.rows.data() + row, rows, group.delta.a, begin, end,
                          sums.data() + group.first_sum + row * ranks_of(group));
                 });
  for_each_block(
      groups, OUTPUTS_OF_ITEM, [&](const Group&) { return epilogue.outputs; },
      [](const Group& group) { return 1 + ranks_of(group); },
      [&](const Group& group, int64_t row, int64_t rows, int64_t begin, int64_t end) {
        const int64_t ranks = ranks_of(group);
        for (const LoraPart& part : group.delta.parts) {
          const int64_t first = std::max(begin, part.first), last = std::min(end, part.first + part.outputs);
          if (first >= last) continue;
          for (int64_t r = row; r < row + rows; r += SIDE_BY_SIDE)
            with_count(std::min<int64_t>(SIDE_BY_SIDE, row + rows - r), [&](auto number) {
              expand_rows<decltype(number)::value>(sums.data() + group.first_sum + r * ranks + part.first_rank, ranks, group.delta,
                                 part, first - part.first, last - part.first, group.rows.data() + r, epilogue);
            });
        }
      });
}

}  // namespace

void Adapters::put(int64_t number, at::Tensor a, std::vector<at::Tensor> b, std::vector<int64_t> firsts,
                   std::optional<at::Tensor> dora_scale, std::optional<at::Tensor> bias_delta) {
  TORCH_CHECK(number > 0 && a.is_contiguous() && b.size() == firsts.size(), "an adapter's delta is not of its form");
  LoraDelta delta{std::move(a), {}, std::move(dora_scale), std::move(bias_delta)};
  int64_t output = 0, rank = 0;
  const auto skip_to = [&](int64_t next) {
    TORCH_CHECK(output <= next && next <= outputs_, "the outputs that an adapter changes overlap");
    if (output < next) delta.parts.push_back({output, next - output, 0, 0, {}});
    output = next;
  };
  for (size_t i = 0; i < b.size(); ++i) {
    skip_to(firsts[i]);
    TORCH_CHECK(b[i].is_contiguous() && b[i].scalar_type() == delta.a.scalar_type());
    delta.parts.push_back({output, b[i].size(1), rank, b[i].size(0), b[i]});
    rank += b[i].size(0);
    output += b[i].size(1);
  }
  skip_to(outputs_);
  TORCH_CHECK(rank == delta.a.size(0), "an adapter has ", delta.a.size(0), " ranks, and its parts ", rank);
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

at::Tensor Adapters::apply(const at::Tensor& x, at::Tensor y, const LoraRows& rows, bool relu,
                           const std::optional<at::Tensor>& residual) const {
  const at::Tensor dense = x.contiguous(), added = residual ? residual->contiguous() : at::Tensor();
  const int64_t inputs = x.size(-1);
  TORCH_CHECK(y.is_contiguous() && y.size(-1) == outputs_ && x.numel() / inputs == y.numel() / outputs_);
  TORCH_CHECK(!residual || (added.numel() == y.numel() && added.scalar_type() == y.scalar_type()));
  std::vector<Group> groups;
  int64_t sums = 0;
  for (const LoraRows::Group& group : rows.groups()) {
    TORCH_CHECK(group.delta->a.size(1) == inputs && group.delta->a.scalar_type() == x.scalar_type(),
                "an adapter's tiles are not for this input");
    groups.push_back({*group.delta, group.rows, sums});
    sums += static_cast<int64_t>(group.rows.size()) * group.delta->a.size(0);
  }
  by_dtype(x, [&]<typename T>(T*) {
    const LoraEpilogue<T> epilogue{y.mutable_data_ptr<T>(), residual ? added.const_data_ptr<T>() : nullptr, relu, outputs_};
    run<T>(groups, sums, dense.const_data_ptr<T>(), inputs, epilogue);
  });
  return y;
}

}  // namespace oatmill
