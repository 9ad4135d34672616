// What a machine can do at most: each instruction that the CPU kernels multiply with, by loops whose products do not
// wait for each other, and reading from each level of its memory. benchmarks/peaks.py compiles it and calls what is at
// the end.

#include <sys/mman.h>

#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define OATMILL_AMX 1
#else
#define OATMILL_AMX 0
#endif

namespace {

#if defined(__AVX512BW__)
constexpr int BYTES = 64;
#elif defined(__AVX2__)
constexpr int BYTES = 32;
#else
constexpr int BYTES = 16;
#endif
using Vector = uint8_t __attribute__((vector_size(BYTES)));
using Clock = std::chrono::steady_clock;

// Makes the compiler believe that a register is read and changed.
#if defined(__x86_64__)
#define OATMILL_KEEP(register) asm volatile("" : "+v"(register))
#elif defined(__aarch64__)
#define OATMILL_KEEP(register) asm volatile("" : "+w"(register))
#endif

// Accumulators of a loop: more than an instruction's latency times those that start in a cycle, on any of these CPUs.
constexpr int ACCUMULATORS = 12;

// operations: multiplications and additions of one call.
struct Instruction {
  const char* name;
  int64_t operations;
  void (*run)(int64_t times);
};

// Runs acc = add(acc, a, b) so many times for each of the accumulators. They stay in registers only if no loop over
// them is left and no reference to one is taken.
template <typename Add>
void repeat(int64_t times, const Add& add) {
  Vector sums[ACCUMULATORS], a{}, b{};
  OATMILL_KEEP(a);
  OATMILL_KEEP(b);
#pragma GCC unroll 12
  for (int n = 0; n < ACCUMULATORS; ++n) sums[n] = Vector{};
  for (int64_t i = 0; i < times; ++i)
#pragma GCC unroll 12
    for (int n = 0; n < ACCUMULATORS; ++n) sums[n] = add(sums[n], a, b);
#pragma GCC unroll 12
  for (int n = 0; n < ACCUMULATORS; ++n) OATMILL_KEEP(sums[n]);
}

#if defined(__x86_64__)
#define OATMILL_INSTRUCTION(name, lanes, code)               \
  Instruction {                                              \
    name, int64_t{lanes} * ACCUMULATORS, [](int64_t times) { \
      repeat(times, [](Vector sum, Vector a, Vector b) {     \
        asm volatile(code : "+v"(sum) : "v"(a), "v"(b));     \
        return sum;                                          \
      });                                                    \
    }                                                        \
  }
// Two instructions: of one the result is added by the other.
#define OATMILL_INSTRUCTION_PAIR(name, lanes, code)                      \
  Instruction {                                                          \
    name, int64_t{lanes} * ACCUMULATORS, [](int64_t times) {             \
      repeat(times, [](Vector sum, Vector a, Vector b) {                 \
        Vector product;                                                  \
        asm volatile(code : "+v"(sum), "=&v"(product) : "v"(a), "v"(b)); \
        return sum;                                                      \
      });                                                                \
    }                                                                    \
  }
#elif defined(__aarch64__)
#define OATMILL_INSTRUCTION(name, lanes, code)               \
  Instruction {                                              \
    name, int64_t{lanes} * ACCUMULATORS, [](int64_t times) { \
      repeat(times, [](Vector sum, Vector a, Vector b) {     \
        asm volatile(code : "+w"(sum) : "w"(a), "w"(b));     \
        return sum;                                          \
      });                                                    \
    }                                                        \
  }
#endif

#if OATMILL_AMX
// Tiles of 16 rows of 64 bytes.
struct alignas(64) TileLayout {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
const TileLayout TILE_LAYOUT;

// Two by two tiles of rows and weights, whose products are added to four others.
#define OATMILL_TILE_INSTRUCTION(name, depth, add)              \
  Instruction {                                                 \
    name, int64_t{2} * 16 * 16 * depth * 4, [](int64_t times) { \
      _tile_loadconfig(&TILE_LAYOUT);                           \
      _tile_zero(0);                                            \
      _tile_zero(1);                                            \
      _tile_zero(2);                                            \
      _tile_zero(3);                                            \
      _tile_zero(4);                                            \
      _tile_zero(5);                                            \
      _tile_zero(6);                                            \
      _tile_zero(7);                                            \
      for (int64_t i = 0; i < times; ++i) {                     \
        add(0, 4, 6);                                           \
        add(1, 4, 7);                                           \
        add(2, 5, 6);                                           \
        add(3, 5, 7);                                           \
      }                                                         \
      _tile_release();                                          \
    }                                                           \
  }
#endif

const Instruction INSTRUCTIONS[] = {
#if defined(__AVX512BW__)
    OATMILL_INSTRUCTION("vfmadd231ps", 32, "vfmadd231ps %2, %1, %0"),
#elif defined(__AVX2__)
    OATMILL_INSTRUCTION("vfmadd231ps", 16, "vfmadd231ps %2, %1, %0"),
    OATMILL_INSTRUCTION_PAIR("vpmaddwd", 32, "vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0"),
    OATMILL_INSTRUCTION_PAIR("vpmaddubsw", 64, "vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0"),
#elif defined(__aarch64__)
    OATMILL_INSTRUCTION("fmla", 8, "fmla %0.4s, %1.4s, %2.4s"),
    OATMILL_INSTRUCTION("smlal", 8, "smlal %0.4s, %1.4h, %2.4h"),
#endif
#if defined(__AVX512VNNI__)
    OATMILL_INSTRUCTION("vpdpwssd", 64, "vpdpwssd %2, %1, %0"),
    OATMILL_INSTRUCTION("vpdpbusd", 128, "vpdpbusd %2, %1, %0"),
#elif defined(__AVXVNNI__)
    OATMILL_INSTRUCTION("vpdpwssd", 32, "%{vex%} vpdpwssd %2, %1, %0"),
    OATMILL_INSTRUCTION("vpdpbusd", 64, "%{vex%} vpdpbusd %2, %1, %0"),
#endif
#if defined(__AVX512BF16__)
    OATMILL_INSTRUCTION("vdpbf16ps", 64, "vdpbf16ps %2, %1, %0"),
#endif
#if defined(__ARM_FEATURE_DOTPROD)
    OATMILL_INSTRUCTION("sdot", 32, "sdot %0.4s, %1.16b, %2.16b"),
#endif
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    OATMILL_INSTRUCTION("bfdot", 16, "bfdot %0.4s, %1.8h, %2.8h"),
    OATMILL_INSTRUCTION("bfmmla", 32, "bfmmla %0.4s, %1.8h, %2.8h"),
#endif
#if defined(__ARM_FEATURE_MATMUL_INT8)
    OATMILL_INSTRUCTION("smmla", 64, "smmla %0.4s, %1.16b, %2.16b"),
#endif
#if OATMILL_AMX
    OATMILL_TILE_INSTRUCTION("tdpbf16ps", 32, _tile_dpbf16ps),
    OATMILL_TILE_INSTRUCTION("tdpbusd", 64, _tile_dpbusd),
#endif
};

constexpr int TILE_INSTRUCTIONS = 2 * OATMILL_AMX;  // the last

// Returns true if the operating system gives this process AMX's registers, for which it has to be asked.
bool tiles_permitted() {
#if OATMILL_AMX
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // of Linux's arch_prctl
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
  return false;
#endif
}

// Runs work(thread) on so many threads at once, again and again for so many seconds. Returns how often a second all of
// them together ran it.
template <typename Prepare, typename Work>
double rate(int threads, double seconds, const Prepare& prepare, const Work& work) {
  std::vector<double> rates(threads);
  std::barrier together(threads);
  const auto serve = [&](int thread) {
    prepare(thread);
    together.arrive_and_wait();
    const Clock::time_point start = Clock::now();
    int64_t runs = 0;
    double passed = 0;
    for (; passed < seconds; ++runs) {
      work(thread);
      passed = std::chrono::duration<double>(Clock::now() - start).count();
    }
    rates[thread] = static_cast<double>(runs) / passed;
  };
  std::vector<std::thread> others;
  for (int thread = 1; thread < threads; ++thread) others.emplace_back(serve, thread);
  serve(0);
  for (std::thread& other : others) other.join();
  double sum = 0;
  for (const double each : rates) sum += each;
  return sum;
}

void read_all(const char* from, int64_t bytes) {
  constexpr int TOGETHER = 8;
  Vector seen[TOGETHER] = {};
  for (int64_t i = 0; i + TOGETHER * BYTES <= bytes; i += TOGETHER * BYTES)
#pragma GCC unroll 8
    for (int n = 0; n < TOGETHER; ++n) seen[n] |= *reinterpret_cast<const Vector*>(from + i + n * BYTES);
#pragma GCC unroll 8
  for (int n = 0; n < TOGETHER; ++n) OATMILL_KEEP(seen[n]);
}

}  // namespace

extern "C" {

// Returns how many instructions this CPU is measured with.
int instructions() {
  const int all = static_cast<int>(sizeof(INSTRUCTIONS) / sizeof(INSTRUCTIONS[0]));
  return tiles_permitted() ? all : all - TILE_INSTRUCTIONS;
}

const char* instruction_name(int index) { return INSTRUCTIONS[index].name; }

// Returns operations a second.
double instruction_rate(int index, int threads, double seconds) {
  constexpr int64_t TIMES = 1 << 14;
  const Instruction& instruction = INSTRUCTIONS[index];
  const auto run = [&](int) { instruction.run(TIMES); };
  return rate(threads, seconds, run, run) * static_cast<double>(TIMES * instruction.operations);
}

// Returns bytes a second, of threads that read so many bytes each, again and again; 0 if there is no memory.
double read_rate(int64_t bytes, int threads, double seconds) {
  constexpr size_t HUGE_PAGE = 2 << 20;
  std::vector<char*> buffers(threads);
  const size_t size = (static_cast<size_t>(bytes) + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
  for (char*& buffer : buffers) buffer = static_cast<char*>(std::aligned_alloc(HUGE_PAGE, size));
  bool enough = true;
  for (char* buffer : buffers) enough = enough && buffer;
  double found = 0;
  if (enough)
    found = rate(
                threads, seconds,
                [&](int thread) {
                  madvise(buffers[thread], size, MADV_HUGEPAGE);
                  std::memset(buffers[thread], 1, size);
                },
                [&](int thread) { read_all(buffers[thread], bytes); }) *
            static_cast<double>(bytes);
  for (char* buffer : buffers) std::free(buffer);
  return found;
}
}
