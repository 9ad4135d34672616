// Chooses the next token of every row of a batch: logits processors, warpers, draws and log-probabilities, a row at a
// time.
//
// The rules are those of engine/sampling/{processors,warpers,random}.py, and choose the same tokens to the last bit:
// probabilities are whole numbers, and nothing else is added up.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ops/token_masks.h"
#include "runtime/thread_pool.h"
#include "sampling/select.h"
#include "simd/dtypes.h"
#include "simd/simd.h"

namespace oatmill {

namespace {

constexpr int64_t PART = 64;          // tokens of which the likeliest is looked for
constexpr int64_t BLOCK = 512;        // tokens whose weights are added up together
constexpr float WEIGHTLESS = -28.0f;  // its exponential weighs nothing, nor does that of all below
constexpr float HIGHEST = std::numeric_limits<float>::max();
constexpr double ONE = 1099511627776.0;  // 2^40, the weight of the likeliest token
constexpr int64_t TIES = 16;             // reported beside a row's top tokens

// Keeps the compiler from adding to a product without rounding it first.
template <typename Number>
Number rounded(Number product) {
#if defined(__x86_64__)
  asm("" : "+x"(product));
#elif defined(__aarch64__)
  asm("" : "+w"(product));
#endif
  return product;
}
#if defined(__AVX512BW__)
inline F32 rounded(F32 product) {
  asm("" : "+v"(product));
  return product;
}
#endif

// 2^40 e^x of x between -28 and 0, in the steps of `scaled_exponential` in random.py.
F32 scaled_exponential(F32 x) {
  constexpr float ROUNDS = 12582952.0f;  // 1.5 * 2^23 + 40
  const F32 powers = rounded(x * 1.44269504f);
  const F32 whole = powers + ROUNDS;
  const F32 fraction = powers - (whole - ROUNDS);
  F32 series = rounded(fraction * 0.00132647273f) + 0.00967151299f;
  series = rounded(series * fraction) + 0.0555073358f;
  series = rounded(series * fraction) + 0.240222424f;
  series = rounded(series * fraction) + 0.693147004f;
  series = rounded(series * fraction) + 1.0f;
  return as_floats(reinterpret_cast<const U32&>(series) + (reinterpret_cast<const U32&>(whole) << 23));
}

uint64_t mix(uint64_t bits) {  // SplitMix64's finaliser
  bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9;
  bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB;
  return bits ^ (bits >> 31);
}

double uniform(int64_t seed, int64_t step) {
  constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15;
  return static_cast<double>(mix(mix(static_cast<uint64_t>(seed) + GOLDEN) + static_cast<uint64_t>(step) * GOLDEN) >>
                             11) *
         0x1p-53;
}

// A token of a row's text: how often it occurs, and how often among the generated tokens.
struct Seen {
  int64_t token;
  int32_t count, generated;
};

// What a request asks for, and how far it is. Most names are those of SamplingParameters in contract.py, whose defaults
// change nothing.
struct SamplingParameters : torch::CustomClassHolder {
  bool do_sample = false, watermark = false;
  double temperature = 1, top_p = 1, typical_p = 1, min_p = 0;
  double repetition_penalty = 1, frequency_penalty = 0, presence_penalty = 0, count_penalty = 0;
  int64_t top_k = 0, seed = 0, min_tokens = 0;
  int64_t top_n = 0;                         // likeliest tokens to report
  int64_t prompt_length = 0;                 // in tokens
  int64_t steps = 0, previous = 0;           // tokens generated, and the last one of the text
  std::vector<int64_t> biased, late_tokens;  // tokens with a bias; tokens that are banned before min_tokens
  std::vector<double> biases;                // of each of these
};

using SamplingParametersPtr = c10::intrusive_ptr<SamplingParameters>;

// The state of a row. The names are those of SamplingParameters.
struct Row {
  bool do_sample = false, watermark = false;
  float temperature = 1, min_p = 0, repetition_penalty = 1, frequency_penalty = 0, presence_penalty = 0,
        count_penalty = 0;
  double top_p = 1, typical_p = 1;
  int64_t top_k = 0, seed = 0, min_tokens = 0, top_n = 0, prompt_length = 0;
  std::vector<std::pair<int64_t, float>> bias;
  std::vector<int64_t> late_tokens;
  int64_t steps = 0, previous = 0;  // tokens generated, and the last one
  std::vector<Seen> seen;           // of rows with a penalty
  std::unordered_map<int64_t, int64_t> place;

  Row() = default;
  explicit Row(const SamplingParameters& p)
      : do_sample(p.do_sample), watermark(p.watermark), temperature(static_cast<float>(p.temperature)),
        min_p(static_cast<float>(p.min_p)), repetition_penalty(static_cast<float>(p.repetition_penalty)),
        frequency_penalty(static_cast<float>(p.frequency_penalty)),
        presence_penalty(static_cast<float>(p.presence_penalty)), count_penalty(static_cast<float>(p.count_penalty)),
        top_p(p.top_p), typical_p(p.typical_p), top_k(p.top_k), seed(p.seed), min_tokens(p.min_tokens), top_n(p.top_n),
        prompt_length(p.prompt_length), late_tokens(p.late_tokens), steps(p.steps), previous(p.previous) {
    for (size_t i = 0; i < p.biased.size(); ++i) bias.emplace_back(p.biased[i], static_cast<float>(p.biases.at(i)));
  }

  bool counts() const {
    return repetition_penalty != 1 || frequency_penalty != 0 || presence_penalty != 0 || count_penalty != 0;
  }

  // True if something is done to scores before the warpers.
  bool processes() const { return watermark || !seen.empty() || !bias.empty() || steps < min_tokens; }

  void count(int64_t token, bool generated) {
    const auto [at, is_new] = place.try_emplace(token, static_cast<int64_t>(seen.size()));
    if (is_new) seen.push_back({token, 0, 0});
    ++seen[at->second].count;
    seen[at->second].generated += generated;
  }
};

struct WatermarkRule {
  uint64_t key;
  uint32_t limit;
  float delta;
};

// What a thread needs for a row: scores and weights of `size` tokens, with minus infinity behind them up to a multiple
// of BLOCK, and the weight of each block. compact: tokens have been dropped, and `ids` are of those that are left.
struct Scratch {
  int64_t size = 0, padded = 0;
  std::vector<float> scores, weights, distances;
  std::vector<int64_t> blocks, ids;
  bool compact = false;
  Selector selector;

  void resize(int64_t tokens) {
    size = tokens, padded = round_up(tokens, BLOCK);
    scores.resize(padded), weights.resize(padded), blocks.resize(padded / BLOCK);
    std::fill(scores.begin() + size, scores.end(), LOWEST);
  }

  int64_t token(int64_t place) const { return compact ? ids[place] : place; }

  int64_t total() const { return std::accumulate(blocks.begin(), blocks.end(), int64_t{0}); }

  // Takes the logits of a vocabulary, of which those from `end` on are forbidden. Returns the highest score.
  template <typename T, typename Filter>
  float load(const T* logits, int64_t vocab, int64_t end, const Filter& filter) {
    resize(vocab), compact = false;
    F32 peaks[4];
    std::fill_n(peaks, 4, F32{} + LOWEST);
    int64_t i = 0;
    for (; i + 4 * WIDTH <= end; i += 4 * WIDTH)
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        const int64_t at = i + v * WIDTH;
        const F32 x = bounded(filter.filtered(load_f32(logits + at), at));
        store(&scores[at], x);
        peaks[v] = vmax(x, peaks[v]);
      }
    float peak = reduce_max(vmax(vmax(peaks[0], peaks[1]), vmax(peaks[2], peaks[3])));
    for (; i < end; ++i) {
      scores[i] = bounded(F32{} + (filter.allows(i) ? static_cast<float>(logits[i]) : LOWEST))[0];
      peak = std::max(peak, scores[i]);
    }
    std::fill(scores.begin() + end, scores.begin() + size, LOWEST);
    return peak;
  }

  // Scores with minus infinity in place of NaN, and the highest number in place of infinity.
  static F32 bounded(F32 x) { return vmin(vmax(x, F32{} + LOWEST), F32{} + HIGHEST); }

  // Applies what comes before the warpers. Returns the highest score.
  float process(const Row& row, const WatermarkRule& rule) {
    if (row.watermark) {
      const uint64_t context = mix(static_cast<uint64_t>(row.previous) + (rule.key << 32));
      for (int64_t i = 0; i < size; ++i)
        scores[i] += static_cast<uint32_t>(mix(context ^ static_cast<uint64_t>(i))) < rule.limit ? rule.delta : 0.0f;
    }
    const float length = static_cast<float>(std::max<int64_t>(row.prompt_length + row.steps, 1));
    for (const Seen& each : row.seen) {
      float& x = scores[each.token];
      if (row.repetition_penalty != 1) x = x < 0 ? x * row.repetition_penalty : x / row.repetition_penalty;
      x -= rounded(static_cast<float>(each.count) / length * row.frequency_penalty);
      if (each.generated > 0) x -= row.presence_penalty;
      x -= rounded(static_cast<float>(each.generated) * row.count_penalty);
    }
    for (const auto& [token, bias] : row.bias) scores[token] += bias;
    if (row.steps < row.min_tokens)
      for (const int64_t token : row.late_tokens) scores[token] = LOWEST;
    return bound();
  }

  // Makes all scores `bounded`. Returns the highest one.
  float bound() {
    F32 peaks[4];
    std::fill_n(peaks, 4, F32{} + LOWEST);
    for (int64_t i = 0; i < padded; i += 4 * WIDTH)
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        float* at = &scores[i + v * WIDTH];
        const F32 x = bounded(load_f32(at));
        store(at, x);
        peaks[v] = vmax(x, peaks[v]);
      }
    return reduce_max(vmax(vmax(peaks[0], peaks[1]), vmax(peaks[2], peaks[3])));
  }

  // Divides the scores by the temperature. peak: the highest one; returns the one after.
  float scale(float peak, float temperature) {
    for (int64_t i = 0; i < padded; i += WIDTH)
      store(&scores[i], vmin(load_f32(&scores[i]) / temperature, F32{} + HIGHEST));
    return std::min(peak / temperature, HIGHEST);
  }

  // Divides the scores by the temperature, and weighs them. peak: the highest one; returns the one after.
  float weigh(float peak, float temperature) {
    peak = std::min(peak / temperature, HIGHEST);
    const float base = std::max(peak, -HIGHEST);
    for (int64_t block = 0; block < padded; block += BLOCK) {
      for (int64_t i = block; i < block + BLOCK; i += WIDTH) {
        F32 x = load_f32(&scores[i]);
        if (temperature != 1) store(&scores[i], x = vmin(x / temperature, F32{} + HIGHEST));
        store(&weights[i], round_down(scaled_exponential(vmax(x - base, F32{} + WEIGHTLESS))));
      }
      blocks[block / BLOCK] = whole_sum<BLOCK>(&weights[block]);
    }
    return peak;
  }

  // Excludes tokens where `excluded` is set: called with a token, its score and its weight, WIDTH at a time.
  template <typename Rule>
  void exclude(const Rule& excluded) {
    for (int64_t block = 0; block < padded; block += BLOCK) {
      for (int64_t i = block; i < block + BLOCK; i += WIDTH) {
        const F32 x = load_f32(&scores[i]), weight = load_f32(&weights[i]);
        const I32 out = excluded(i, x, weight);
        store(&scores[i], select(out, F32{} + LOWEST, x));
        store(&weights[i], select(out, F32{}, weight));
      }
      blocks[block / BLOCK] = whole_sum<BLOCK>(&weights[block]);
    }
  }

  int64_t share(double mass) const {
    const int64_t all = total();
    return std::min(std::max<int64_t>(static_cast<int64_t>(std::ceil(static_cast<double>(all) * mass)), 1), all);
  }

  // Drops the tokens whose score is below the limit.
  void drop(float limit) {
    ids.resize(std::max<int64_t>(ids.size(), padded));
    int64_t kept = 0;
    for (int64_t i = 0; i < padded; i += WIDTH) {
      const F32 x = load_f32(&scores[i]);
      const I32 hit = x >= limit;
      if (!any(hit)) continue;
      for (int lane = 0; lane < WIDTH; ++lane)
        if (hit[lane]) ids[kept] = token(i + lane), scores[kept++] = x[lane];
    }
    compact = true;
    resize(kept);
  }

  // Drops all but the k best tokens and those that are equal to the last of them once they are divided by the
  // temperature. peak: the highest score, above minus infinity; returns the one after.
  float top_k(int64_t k, float peak, float temperature) {
    // There are k tokens that are not below the k-th highest peak of some parts.
    std::vector<float> peaks;
    if (k <= padded / PART / 2) {
      for (int64_t part = 0; part < padded; part += PART) {
        F32 x = load_f32(&scores[part]);
        for (int64_t i = WIDTH; i < PART; i += WIDTH) x = vmax(x, load_f32(&scores[part + i]));
        peaks.push_back(reduce_max(x));
      }
      std::nth_element(peaks.begin(), peaks.begin() + (k - 1), peaks.end(), std::greater<>());
      const float limit = peaks[k - 1];  // as far below it as the division may round two scores to one
      if (limit > LOWEST) drop(limit - std::abs(limit) * 0x1p-20f - std::numeric_limits<float>::min());
    }
    peak = scale(peak, temperature);
    const int64_t possible = size - std::count(scores.begin(), scores.begin() + size, LOWEST);
    if (k < possible) drop(selector(scores.data(), nullptr, padded, k, possible).value);
    return peak;
  }

  // Of equally likely tokens at the end it keeps as many as needed, the last ones.
  void top_p(double mass, float peak) {
    const int64_t target = share(mass);
    // all tokens of less weight together do not reach what is left out; half of it, for exponentials are not quite
    // monotonic
    const float least = static_cast<float>(total() - target) / static_cast<float>(2 * size);
    const Threshold worst =
        selector(scores.data(), weights.data(), padded, target, total(), least, std::pair{peak + WEIGHTLESS, peak});
    const int64_t of_one = std::max<int64_t>(worst.at / std::max<int64_t>(worst.ties, 1), 1);
    int64_t ties_out = worst.ties - (target - worst.above + of_one - 1) / of_one;
    exclude([&](int64_t, F32 x, F32) {
      I32 out = x < worst.value;
      const I32 tied = x == worst.value;
      if (ties_out > 0 && any(tied))
        for (int lane = 0; lane < WIDTH; ++lane)
          if (tied[lane] && ties_out > 0) out[lane] = -1, --ties_out;
      return out;
    });
  }

  // Keeps the tokens whose surprise is nearest to the expected one. peak: the highest score; returns the new one.
  float typical_p(double mass, float peak) {
    const float base = std::max(peak, -HIGHEST);
    distances.resize(padded);
    for (int64_t i = 0; i < padded; i += WIDTH) {
      const F32 surprise = base - load_f32(&scores[i]);
      const F32 expected = scaled_exponential(vmax(-surprise, F32{} + WEIGHTLESS)) * surprise;
      store(&distances[i], select(load_f32(&weights[i]) > 0, expected, F32{}));
    }
    int64_t expected = 0;
    for (const float each : distances) expected += static_cast<int64_t>(each);
    const float mean =
        static_cast<float>(static_cast<double>(expected) / static_cast<double>(std::max<int64_t>(total(), 1)));
    for (int64_t i = 0; i < padded; ++i) distances[i] = -std::abs((base - scores[i]) - mean);
    const float farthest = selector(distances.data(), weights.data(), padded, share(mass), total()).value;
    exclude([&](int64_t i, F32, F32) { return load_f32(&distances[i]) < farthest; });
    return weigh(bound(), 1);
  }

  void min_p(float share, float peak) {
    const float base = std::max(peak, -HIGHEST), least = share * static_cast<float>(ONE);
    exclude([&](int64_t, F32 x, F32) { return scaled_exponential(vmax(x - base, F32{} + WEIGHTLESS)) < least; });
  }

  // The place of the first token at which the running sum of weights exceeds number * sum.
  int64_t draw(double number) const {
    const int64_t aim = static_cast<int64_t>(number * static_cast<double>(total()));
    int64_t running = 0, place = 0;
    for (const int64_t block : blocks) {
      if (running + block > aim) break;
      running += block, place += BLOCK;
    }
    for (; place < size; ++place)
      if ((running += static_cast<int64_t>(weights[place])) > aim) return place;
    return size - 1;
  }

  int64_t first_of(float peak) const {
    const int64_t place = std::find(scores.begin(), scores.begin() + size, peak) - scores.begin();
    return place < size ? place : 0;
  }

  // Returns the places of the n likeliest tokens and of those that are equal to the last of them, in all n + TIES at
  // most, best first.
  std::vector<int64_t> top(int64_t n) {
    const int64_t possible = size - std::count(scores.begin(), scores.begin() + size, LOWEST);
    std::vector<int64_t> places;
    if (possible == 0) return places;
    const float worst = selector(scores.data(), nullptr, padded, std::min(n, possible), possible).value;
    for (int64_t i = 0; i < padded; i += WIDTH) {
      const I32 hit = load_f32(&scores[i]) >= worst;
      if (!any(hit)) continue;
      for (int lane = 0; lane < WIDTH; ++lane)
        if (hit[lane]) places.push_back(i + lane);
    }
    std::sort(places.begin(), places.end(),
              [&](int64_t a, int64_t b) { return scores[a] != scores[b] ? scores[a] > scores[b] : a < b; });
    if (static_cast<int64_t>(places.size()) > n + TIES) places.resize(n + TIES);
    return places;
  }
};

// One step's results for a row.
struct Chosen {
  int64_t token;
  float logprob;
  std::vector<std::pair<int64_t, float>> top;
};

// The scores are loaded. peak: the highest one. reported: the log-probability is wanted.
Chosen choose(Scratch& scratch, float peak, const Row& row, const WatermarkRule& rule, bool reported) {
  if (row.processes()) peak = scratch.process(row, rule);
  const bool possible = peak > LOWEST;
  if (row.do_sample && possible) {
    float temperature = row.temperature;
    if (row.top_k > 0 && row.top_k < scratch.size) peak = scratch.top_k(row.top_k, peak, std::exchange(temperature, 1));
    peak = scratch.weigh(peak, temperature);
    if (row.top_p != 1) scratch.top_p(row.top_p, peak);
    if (row.typical_p != 1) peak = scratch.typical_p(row.typical_p, peak);
    if (row.min_p != 0) scratch.min_p(row.min_p, peak);
  } else if (reported || row.top_n > 0) {
    scratch.weigh(peak, 1);
  }
  const int64_t place = !row.do_sample ? scratch.first_of(peak)
                        : possible     ? scratch.draw(uniform(row.seed, row.steps))
                                       : scratch.size - 1;
  Chosen chosen{scratch.token(place), 0, {}};
  if (!reported && row.top_n == 0) return chosen;
  const double all = std::log(static_cast<double>(scratch.total()) / ONE);
  const auto logprob = [&](int64_t at) {
    return static_cast<float>(static_cast<double>(scratch.scores[at]) - peak - all);
  };
  chosen.logprob = logprob(place);
  if (row.top_n > 0)
    for (const int64_t at : scratch.top(row.top_n)) chosen.top.emplace_back(scratch.token(at), logprob(at));
  return chosen;
}

// The state of a batch: one row for each sequence.
class Sampler : public torch::CustomClassHolder {
 public:
  // gamma, delta, key: of the watermark.
  Sampler(int64_t rows, int64_t vocab_size, double gamma, double delta, int64_t key)
      : rows_(rows), vocab_size_(vocab_size),
        watermark_{static_cast<uint64_t>(key), static_cast<uint32_t>(gamma * 0x1p32), static_cast<float>(delta)} {}

  // Gives a row to a request. text: prompt and generated tokens, from which penalties are computed.
  void add(int64_t row, const SamplingParametersPtr& parameters, const std::vector<int64_t>& text) {
    Row added(*parameters);
    if (added.counts())
      for (size_t i = 0; i < text.size(); ++i)
        if (text[i] < vocab_size_) added.count(text[i], static_cast<int64_t>(i) >= added.prompt_length);
    rows_.at(row) = std::make_unique<Row>(std::move(added));
  }

  void move(int64_t source, int64_t target) { rows_.at(target) = std::move(rows_.at(source)); }

  void clear(int64_t row) { rows_.at(row).reset(); }

  // logits: [n, vocab_size]; rows: of each; one that is free, or -1, is greedy. masks, masked_rows: as in argmax.
  // reported: the places, among the n, whose log-probability is wanted. Returns the tokens [n] int64, their
  // log-probabilities [reported] float32, and the likeliest tokens of all rows that want them, in order, best first,
  // and their log-probabilities, [k, most]; minus infinity where there are no more.
  std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> sample(const at::Tensor& logits,
                                                                    const std::vector<int64_t>& rows,
                                                                    const std::optional<at::Tensor>& masks,
                                                                    const std::vector<int64_t>& masked_rows,
                                                                    const std::vector<int64_t>& reported) const {
    const at::Tensor x = logits.contiguous();
    const int64_t n = x.size(0), words = masks ? masks->size(1) : 0;
    TORCH_CHECK(x.size(1) == vocab_size_ && static_cast<int64_t>(rows.size()) == n, "logits of other rows");
    const auto mask_of = masks_by_row(n, masks, masked_rows);
    std::vector<char> is_reported(n);
    for (const int64_t place : reported) is_reported.at(place) = true;
    std::vector<Chosen> chosen(n);
    by_dtype(x, [&]<typename T>(T*) {
      const T* from = x.const_data_ptr<T>();
      parallel_for(n, [&](int64_t i) {
        thread_local Scratch scratch;
        const T* own = from + i * vocab_size_;
        const float peak = mask_of[i]
                               ? scratch.load(own, vocab_size_, std::min(vocab_size_, words * BITS), Mask{mask_of[i]})
                               : scratch.load(own, vocab_size_, vocab_size_, Everything{});
        chosen[i] = choose(scratch, peak, row(rows[i]), watermark_, is_reported[i]);
      });
    });
    return packed(chosen, rows, reported);
  }

  // Appends a token to each row. tokens: [n] int64.
  void accept(const at::Tensor& tokens, const std::vector<int64_t>& rows) {
    const auto token = tokens.accessor<int64_t, 1>();
    for (size_t i = 0; i < rows.size(); ++i) {
      Row* const row = rows[i] < 0 ? nullptr : rows_.at(rows[i]).get();
      if (!row) continue;
      ++row->steps, row->previous = token[i];
      if (row->counts()) row->count(token[i], true);
    }
  }

 private:
  const Row& row(int64_t number) const {
    static const Row greedy;
    const Row* const found = number < 0 ? nullptr : rows_.at(number).get();
    return found ? *found : greedy;
  }

  std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> packed(const std::vector<Chosen>& chosen,
                                                                    const std::vector<int64_t>& rows,
                                                                    const std::vector<int64_t>& reported) const {
    const auto integers = at::TensorOptions().dtype(at::kLong), floats = at::TensorOptions().dtype(at::kFloat);
    const int64_t n = static_cast<int64_t>(chosen.size());
    at::Tensor tokens = at::empty({n}, integers), logprobs = at::empty({static_cast<int64_t>(reported.size())}, floats);
    for (int64_t i = 0; i < n; ++i) tokens.mutable_data_ptr<int64_t>()[i] = chosen[i].token;
    for (size_t i = 0; i < reported.size(); ++i) logprobs.mutable_data_ptr<float>()[i] = chosen[reported[i]].logprob;
    int64_t tall = 0, wide = 1;
    for (int64_t i = 0; i < n; ++i)
      if (row(rows[i]).top_n > 0) ++tall, wide = std::max(wide, static_cast<int64_t>(chosen[i].top.size()));
    at::Tensor top = at::full({tall, wide}, 0, integers), top_logprobs = at::full({tall, wide}, LOWEST, floats);
    for (int64_t i = 0, r = 0; i < n; ++i) {
      if (row(rows[i]).top_n == 0) continue;
      for (size_t k = 0; k < chosen[i].top.size(); ++k) {
        top.mutable_data_ptr<int64_t>()[r * wide + k] = chosen[i].top[k].first;
        top_logprobs.mutable_data_ptr<float>()[r * wide + k] = chosen[i].top[k].second;
      }
      ++r;
    }
    return {tokens, logprobs, top, top_logprobs};
  }

  std::vector<std::unique_ptr<Row>> rows_;
  int64_t vocab_size_;
  WatermarkRule watermark_;
};

}  // namespace

}  // namespace oatmill

TORCH_LIBRARY_FRAGMENT(oatmill, library) {
  using namespace oatmill;
  library.class_<SamplingParameters>("SamplingParameters")
      .def(torch::init<>())
      .def_readwrite("do_sample", &SamplingParameters::do_sample)
      .def_readwrite("watermark", &SamplingParameters::watermark)
      .def_readwrite("temperature", &SamplingParameters::temperature)
      .def_readwrite("top_p", &SamplingParameters::top_p)
      .def_readwrite("typical_p", &SamplingParameters::typical_p)
      .def_readwrite("min_p", &SamplingParameters::min_p)
      .def_readwrite("repetition_penalty", &SamplingParameters::repetition_penalty)
      .def_readwrite("frequency_penalty", &SamplingParameters::frequency_penalty)
      .def_readwrite("presence_penalty", &SamplingParameters::presence_penalty)
      .def_readwrite("count_penalty", &SamplingParameters::count_penalty)
      .def_readwrite("top_k", &SamplingParameters::top_k)
      .def_readwrite("seed", &SamplingParameters::seed)
      .def_readwrite("min_tokens", &SamplingParameters::min_tokens)
      .def_readwrite("top_n", &SamplingParameters::top_n)
      .def_readwrite("prompt_length", &SamplingParameters::prompt_length)
      .def_readwrite("steps", &SamplingParameters::steps)
      .def_readwrite("previous", &SamplingParameters::previous)
      .def_readwrite("biased", &SamplingParameters::biased)
      .def_readwrite("late_tokens", &SamplingParameters::late_tokens)
      .def_readwrite("biases", &SamplingParameters::biases);
  library.class_<Sampler>("Sampler")
      .def(torch::init<int64_t, int64_t, double, double, int64_t>())
      .def("add", &Sampler::add)
      .def("move", &Sampler::move)
      .def("clear", &Sampler::clear)
      .def("sample", &Sampler::sample)
      .def("accept", &Sampler::accept);
}
