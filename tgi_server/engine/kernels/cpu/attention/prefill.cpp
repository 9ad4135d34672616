// Attention of many queries, as prompts have them: bound by what is computed. Rows go chunk by chunk over keys and
// values: a chunk is a few neighbouring blocks of a sequence, of one KV head. The products are made of vector registers,
// or of AMX tiles (amx.h).

#include <algorithm>
#include <array>
#include <cstdint>
#include <type_traits>

#include "attention/attention.h"
#include "attention/microkernel.h"
#include "attention/online_softmax.h"
#include "simd/dtypes.h"
#include "simd/simd16.h"
#include "gemm/amx.h"

namespace oatmill {

namespace {

constexpr int CHUNK_BLOCKS = 4, CHUNK = CHUNK_BLOCKS * BLOCK;

// Blocks of KV cache, of one dtype, from the token `start` on.
struct Chunk {
  at::ScalarType cache;
  const void* keys[CHUNK_BLOCKS];
  const void* values[CHUNK_BLOCKS];
  int64_t start;
  int tokens;

  int blocks() const { return static_cast<int>(ceil_div(tokens, BLOCK)); }
};

// Some rows of an item, of which the last one looks at so many tokens of a chunk.
struct Rows {
  int first, count, tokens;
};

// An item's rows, `most` at a time, without those that look at nothing in a chunk.
struct RowBlocks {
  std::array<Rows, PREFILL_ROWS> blocks;
  int count = 0;

  RowBlocks(const AttentionItem& item, int most, int64_t start, int tokens) {
    for (int first = 0; first < item.rows(); first += most) {
      const int rows = std::min(most, item.rows() - first);
      const int64_t seen = item.position(first + rows - 1) - start + 1;
      if (seen > 0) blocks[count++] = {first, rows, static_cast<int>(std::min<int64_t>(seen, tokens))};
    }
  }
  const Rows* begin() const { return blocks.data(); }
  const Rows* end() const { return blocks.data() + count; }
};

// The blocks of a chunk as numbers of type To, to which the cache's are turned if they are others.
template <typename To>
struct Tile {
  const To* keys[CHUNK_BLOCKS];
  const To* values[CHUNK_BLOCKS];

  template <typename T>
  void load(const Chunk& chunk, int head_dim) {
    by_cache<T>(chunk.cache, [&]<typename C>(C*) {
      for (int b = 0; b < chunk.blocks(); ++b) {
        const C* block_keys = static_cast<const C*>(chunk.keys[b]);
        const C* block_values = static_cast<const C*>(chunk.values[b]);
        if constexpr (std::is_same_v<C, To>) {
          keys[b] = block_keys;
          values[b] = block_values;
        } else {
          constexpr int64_t TOGETHER = std::max(PAIR<C>, PAIR<To>);
          const int64_t tokens = ceil_div(std::min(BLOCK, chunk.tokens - b * BLOCK), TOGETHER) * TOGETHER;
          keys[b] = converted(block_keys, head_dim, BLOCK, room()[0][b]);
          values[b] = converted(block_values, tokens, head_dim, room()[1][b]);
        }
      }
    });
  }

 private:
  // A thread's, for keys and values.
  using Room = To[2][CHUNK_BLOCKS][BLOCK * MAX_HEAD_DIM];
  static Room& room() {
    alignas(64) static thread_local Room room;
    return room;
  }
};

// Registers of columns that are computed together.
constexpr int VECTORS = WIDTH == 4 && REGISTERS == 32 ? 4 : 2;

// scores[r][j] = sum over d of query[r][d] * keys[d][j], for the columns of one block that rows look at
template <typename Dot, int R, typename Number>
void score_rows(const char* query, const Number* keys, int head_dim, int columns, float* scores) {
  constexpr int V = VECTORS;
  const int64_t row_bytes = int64_t(head_dim) * sizeof(typename Dot::Operand);
  for (int j = 0; j < columns; j += V * WIDTH) {
    typename Dot::Accumulator sums[R][V] = {};
    const TileProduct product{query, row_bytes, reinterpret_cast<const char*>(keys + j * PAIR<Number>),
                              BLOCK * PAIR<Number> * sizeof(Number), head_dim / PAIR<Number>};
    add_products<Dot, R, V, 1>(product, nullptr, sums);
    store_block(reinterpret_cast<char*>(scores + j), CHUNK * sizeof(float), sums);
  }
}

// output[r][d] = output[r][d] * decays[r] + sum over j of weights[r][j] * values[j][d], for V registers of columns
template <typename Dot, int R, int V, typename Number>
void value_rows(const char* weights, const float* decays, const Number* const* values, int64_t first, int tokens,
                int head_dim, float* output) {
  typename Dot::Accumulator sums[R][V];
  load_decayed(output, head_dim, decays, sums);
  for (int j = 0; j < tokens; j += BLOCK) {
    const TileProduct product{weights + j * sizeof(typename Dot::Operand), CHUNK * sizeof(typename Dot::Operand),
                              reinterpret_cast<const char*>(values[j / BLOCK] + first * PAIR<Number>),
                              int64_t(head_dim) * PAIR<Number> * static_cast<int64_t>(sizeof(Number)),
                              static_cast<int>(ceil_div(std::min(BLOCK, tokens - j), PAIR<Number>))};
    add_products<Dot, R, V, 1>(product, nullptr, sums);
  }
  store_block(reinterpret_cast<char*>(output), head_dim * sizeof(float), sums);
}

// Products in vector registers. Numbers of 16 bits are turned into floats once for all rows, where floats are multiplied.
template <typename T>
class VectorTiles {
  static constexpr bool WIDENED = sizeof(T) == 2 && std::is_same_v<typename Columns<T>::Operand, float>;
  using Number = std::conditional_t<WIDENED, float, T>;
  using Dot = Columns<Number>;

 public:
  using Operand = typename Dot::Operand;
  static constexpr int ROWS = Dot::ROWS;

  void load(const Chunk& chunk, int head_dim) { tile_.template load<T>(chunk, head_dim); }

  void score(const RowBlocks& blocks, const Operand* query, int head_dim, float* scores) {
    for (int b = 0; b < CHUNK_BLOCKS; ++b)
      for (const Rows& rows : blocks)
        if (rows.tokens > b * BLOCK)
          SCORES[rows.count - 1](reinterpret_cast<const char*>(query + rows.first * head_dim), tile_.keys[b], head_dim,
                                 std::min(BLOCK, rows.tokens - b * BLOCK), scores + rows.first * CHUNK + b * BLOCK);
  }

  void add_values(const RowBlocks& blocks, const Operand* weights, const float* decays, int head_dim, float* output) {
    int d = 0;
    for (; d + VECTORS * WIDTH <= head_dim; d += VECTORS * WIDTH)
      add_columns(VALUES<VECTORS>, blocks, weights, decays, head_dim, d, output);
    for (; d < head_dim; d += WIDTH) add_columns(VALUES<1>, blocks, weights, decays, head_dim, d, output);
  }

 private:
  template <typename Functions>
  void add_columns(const Functions& functions, const RowBlocks& blocks, const Operand* weights, const float* decays,
                   int head_dim, int d, float* output) {
    for (const Rows& rows : blocks)
      functions[rows.count - 1](reinterpret_cast<const char*>(weights + rows.first * CHUNK), decays + rows.first,
                                tile_.values, d, rows.tokens, head_dim, output + rows.first * head_dim + d);
  }

  static constexpr auto SCORES = by_rows<ROWS>([]<int R>() { return &score_rows<Dot, R, Number>; });
  template <int V>
  static constexpr auto VALUES = by_rows<ROWS>([]<int R>() { return &value_rows<Dot, R, V, Number>; });

  Tile<Number> tile_;
};

// Products by matrices of SIDE rows, SIDE words and SIDE columns. The sums of two by two of them stay in registers.
template <typename Tiles>
class MatrixTiles {
 public:
  using Operand = c10::BFloat16;
  static constexpr int ROWS = 2 * SIDE;
  static_assert(BLOCK == 2 * SIDE && PREFILL_ROWS % ROWS == 0);

  // A block is multiplied as a whole. Weights of tokens that nobody looks at are zero, but what stands there may be no
  // number.
  void load(const Chunk& chunk, int head_dim) {
    tile_.template load<Operand>(chunk, head_dim);
    alignas(64) static thread_local Operand padded[BLOCK * MAX_HEAD_DIM];
    const int last = chunk.tokens / BLOCK, numbers = static_cast<int>(ceil_div(chunk.tokens % BLOCK, 2)) * 2 * head_dim;
    if (numbers == 0) return;
    std::copy_n(tile_.values[last], numbers, padded);
    std::fill(padded + numbers, padded + BLOCK * head_dim, Operand(0.0f));
    tile_.values[last] = padded;
  }

  void score(const RowBlocks& blocks, const Operand* query, int head_dim, float* scores) {
    for (const Rows& rows : blocks)
      for (int j = 0; j < rows.tokens; j += BLOCK)
        for_groups(rows, [&]<int GROUPS>() {
          for_sums<GROUPS>([&]<int I>() { matrices_.template zero<I>(); });
          for (int d = 0; d < head_dim; d += 2 * SIDE)
            multiply<GROUPS>(query + rows.first * head_dim + d, head_dim, tile_.keys[j / BLOCK] + d * BLOCK, BLOCK);
          for_sums<GROUPS>([&]<int I>() {
            matrices_.template store<I>(place<I>(scores + rows.first * CHUNK + j, CHUNK), CHUNK * sizeof(float));
          });
        });
  }

  void add_values(const RowBlocks& blocks, const Operand* weights, const float* decays, int head_dim, float* output) {
    for (const Rows& rows : blocks) {
      for (int r = rows.first; r < rows.first + rows.count; ++r)
        if (decays[r] != 1)
          for (int d = 0; d < head_dim; d += LANES)
            store(output + r * head_dim + d, oatmill::load(output + r * head_dim + d) * decays[r]);
      for (int d = 0; d < head_dim; d += 2 * SIDE) {
        float* sums = output + rows.first * head_dim + d;
        for_groups(rows, [&]<int GROUPS>() {
          for_sums<GROUPS>(
              [&]<int I>() { matrices_.template load<I>(place<I>(sums, head_dim), head_dim * sizeof(float)); });
          for (int j = 0; j < rows.tokens; j += BLOCK)
            multiply<GROUPS>(weights + rows.first * CHUNK + j, CHUNK, tile_.values[j / BLOCK] + 2 * d, head_dim);
          for_sums<GROUPS>(
              [&]<int I>() { matrices_.template store<I>(place<I>(sums, head_dim), head_dim * sizeof(float)); });
        });
      }
    }
  }

 private:
  // Adds the products of GROUPS times SIDE rows with two matrices that stand side by side in a tile of `columns`.
  template <int GROUPS>
  void multiply(const Operand* rows, int64_t row_numbers, const Operand* tile, int64_t columns) {
    const int64_t row_bytes = row_numbers * sizeof(Operand), word_bytes = columns * WORD;
    matrices_.template load<6>(rows, row_bytes);
    matrices_.template load<7>(tile, word_bytes);
    matrices_.template add<0>();
    matrices_.template load<7>(tile + 2 * SIDE, word_bytes);
    matrices_.template add<1>();
    if constexpr (GROUPS == 2) {  // the second matrix of the tile is in its register already
      matrices_.template load<6>(rows + SIDE * row_numbers, row_bytes);
      matrices_.template add<3>();
      matrices_.template load<7>(tile, word_bytes);
      matrices_.template add<2>();
    }
  }

  // Where sum I stands in rows of so many numbers.
  template <int I>
  static float* place(float* sums, int64_t row_numbers) {
    return sums + I / 2 * SIDE * row_numbers + I % 2 * SIDE;
  }

  template <typename Work>
  static void for_groups(const Rows& rows, const Work& work) {
    rows.count > SIDE ? work.template operator()<2>() : work.template operator()<1>();
  }

  template <int GROUPS, typename Work>
  static void for_sums(const Work& work) {
    [&]<int... I>(std::integer_sequence<int, I...>) { (work.template operator()<I>(), ...); }
    (std::make_integer_sequence<int, 2 * GROUPS>());
  }

  Tiles matrices_;
  Tile<Operand> tile_;
};

template <typename Operand>
struct Scratch {
  alignas(64) Operand query[PREFILL_ROWS * MAX_HEAD_DIM];
  alignas(64) Operand weights[PREFILL_ROWS * CHUNK];
  alignas(64) float output[PREFILL_ROWS * MAX_HEAD_DIM];
  alignas(64) float scores[PREFILL_ROWS * CHUNK];
  Softmax<PREFILL_ROWS> softmax;
};

// The part of a chunk at `start` that an item looks at. Chunks begin at multiples of CHUNK, whatever item looks at them.
template <typename T>
Chunk chunk_at(const AttentionLayer<T>& layer, const AttentionItem& item, int64_t start) {
  const int64_t end = std::min(start / CHUNK * CHUNK + CHUNK, item.end());
  Chunk chunk{layer.cache, {}, {}, start, static_cast<int>(end - start)};
  by_cache<T>(layer.cache, [&]<typename C>(C*) {
    for (int b = 0; b < chunk.blocks(); ++b) {
      const int64_t place = layer.place(item.table[start / BLOCK + b], item.kv_head);
      chunk.keys[b] = layer.template keys_at<C>(place);
      chunk.values[b] = layer.template values_at<C>(place);
    }
  });
  return chunk;
}

// Returns the rows' weights.
template <typename T, typename Operand>
const Operand* weigh(const AttentionLayer<T>& layer, const AttentionItem& item, const RowBlocks& blocks,
                     const Chunk& chunk, Scratch<Operand>& scratch) {
  const Operand* weights = nullptr;
  for (const Rows& rows : blocks) {
    for (int r = rows.first; r < rows.first + rows.count; ++r) {
      float* scores = scratch.scores + r * CHUNK;
      const int64_t position = item.position(r);
      const int seen = static_cast<int>(std::clamp<int64_t>(position - chunk.start + 1, 1, rows.tokens));
      const int columns = static_cast<int>(ceil_div(seen, LANES)) * LANES;
      weigh_row(layer.variant, item.head(r), position, chunk.start, columns, rows.tokens, r, scratch.softmax,
                scores);
      std::fill(scores + columns, scores + CHUNK, 0.0f);
    }
    weights = as_operands(scratch.scores, rows.first * CHUNK, rows.count * CHUNK, scratch.weights);
  }
  return weights;
}

template <typename T, typename Tiles>
void attend_prefill(const AttentionLayer<T>& layer, const AttentionItem& item) {
  static thread_local Scratch<typename Tiles::Operand> scratch;
  Tiles tiles;
  const int head_dim = layer.head_dim, rows = item.rows();
  scratch.softmax.begin(layer.variant, item);
  std::fill_n(scratch.output, rows * head_dim, 0.0f);
  for (int r = 0; r < rows; ++r)
    std::copy_n(layer.query_of(item.token(r), item.head(r)), head_dim, scratch.query + r * head_dim);
  int64_t start = layer.variant.first_token(item.first_position) / BLOCK * BLOCK;
  while (start < item.end()) {
    const Chunk chunk = chunk_at(layer, item, start);
    const RowBlocks blocks(item, Tiles::ROWS, start, chunk.tokens);
    tiles.load(chunk, head_dim);
    tiles.score(blocks, scratch.query, head_dim, scratch.scores);
    const auto* weights = weigh(layer, item, blocks, chunk, scratch);
    tiles.add_values(blocks, weights, scratch.softmax.decays, head_dim, scratch.output);
    start += chunk.tokens;
  }
  for (int r = 0; r < rows; ++r) {
    T* to = layer.output_of(item.token(r), item.head(r));
    const float scale = layer.variant.value_scale / scratch.softmax.total(r);
    for (int d = 0; d < head_dim; d += LANES) store(to + d, load(scratch.output + r * head_dim + d) * scale);
  }
}

bool always() { return true; }

template <typename T>
constexpr PrefillKernel<T> BY_VECTORS{always, 1, attend_prefill<T, VectorTiles<T>>};

template <typename Tiles>
constexpr PrefillKernel<c10::BFloat16> tiles(bool (*available)()) {
  return {available, 2 * SIDE, attend_prefill<c10::BFloat16, MatrixTiles<Tiles>>};
}

// The best is the first.
constexpr std::array FLOAT_KERNELS{BY_VECTORS<float>};
constexpr std::array HALF_KERNELS{BY_VECTORS<c10::Half>};
constexpr std::array BF16_KERNELS{
#if defined(OATMILL_EMULATED_TILES)
    tiles<EmulatedTiles<Bf16Weights>>(always),
#elif OATMILL_AMX
    tiles<AmxTiles<Bf16Weights>>(amx_permitted),
#endif
    BY_VECTORS<c10::BFloat16>,
};

}  // namespace

template <>
std::span<const PrefillKernel<float>> prefill_kernels() {
  return FLOAT_KERNELS;
}
template <>
std::span<const PrefillKernel<c10::Half>> prefill_kernels() {
  return HALF_KERNELS;
}
template <>
std::span<const PrefillKernel<c10::BFloat16>> prefill_kernels() {
  return BF16_KERNELS;
}

}  // namespace oatmill
