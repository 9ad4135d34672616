// Sixteen floats at a time on every CPU, by the compiler's own vector types: layouts in memory are made for this
// number.
//
// They are one register with AVX-512 and several with other instruction sets. Vectors that no register holds go through
// memory after every operation, and selections and conversions are done element by element: so these are written
// register by register, as is what takes time.

#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "simd/simd.h"

namespace oatmill {

constexpr int LANES = 16;

using F32x16 = float __attribute__((vector_size(LANES * sizeof(float))));
using I32x16 = int32_t __attribute__((vector_size(LANES * sizeof(int32_t))));

// Register i of a vector.
template <typename Register, typename Vector>
Register register_at(const Vector& vector, int i) {
  return load_as<Register>(reinterpret_cast<const char*>(&vector) + i * sizeof(Register));
}

// The vector whose register i is work(i).
template <typename Vector, typename Work>
Vector by_registers(const Work& work) {
  Vector vector;
#pragma GCC unroll 4
  for (int i = 0; i < LANES / WIDTH; ++i) {
    const auto registers = work(i);
    std::memcpy(reinterpret_cast<char*>(&vector) + i * sizeof(registers), &registers, sizeof(registers));
  }
  return vector;
}

template <typename T>
F32x16 load(const T* from) {
  return by_registers<F32x16>([&](int i) { return load_f32(from + i * WIDTH); });
}

// Of vectors that are no register; those that are one have functions of the same names in simd.h.
template <typename V>
concept MultiRegister = std::is_same_v<V, F32x16> && !std::is_same_v<F32x16, F32>;

template <typename T, MultiRegister V>
void store(T* to, V lanes) {
#pragma GCC unroll 4
  for (int i = 0; i < LANES / WIDTH; ++i) store(to + i * WIDTH, register_at<F32>(lanes, i));
}

template <MultiRegister V>
V vmax(V a, V b) {
  return by_registers<V>([&](int i) { return vmax(register_at<F32>(a, i), register_at<F32>(b, i)); });
}

template <MultiRegister V>
V vmin(V a, V b) {
  return by_registers<V>([&](int i) { return vmin(register_at<F32>(a, i), register_at<F32>(b, i)); });
}

template <MultiRegister V>
V select(I32x16 mask, V a, V b) {
  return by_registers<V>(
      [&](int i) { return select(register_at<I32>(mask, i), register_at<F32>(a, i), register_at<F32>(b, i)); });
}

template <MultiRegister V>
float reduce_max(V lanes) {
  F32 most = register_at<F32>(lanes, 0);
  for (int i = 1; i < LANES / WIDTH; ++i) most = vmax(most, register_at<F32>(lanes, i));
  return reduce_max(most);
}

template <MultiRegister V>
float sum(V lanes) {
  F32 total = register_at<F32>(lanes, 0);
  for (int i = 1; i < LANES / WIDTH; ++i) total += register_at<F32>(lanes, i);
  return sum(total);
}

template <MultiRegister V>
I32x16 round_i32(V lanes) {
  return by_registers<I32x16>([&](int i) { return round_i32(register_at<F32>(lanes, i)); });
}

template <MultiRegister V>
V exponential(V lanes) {
  return by_registers<V>([&](int i) { return exponential(register_at<F32>(lanes, i)); });
}

// -1 where a number is below the limit, else 0.
inline I32x16 below(I32x16 numbers, int32_t limit) {
  return by_registers<I32x16>([&](int i) { return register_at<I32>(numbers, i) < I32{} + limit; });
}

// -1 where a number is one, else 0.
inline I32x16 defined(F32x16 lanes) {
  return by_registers<I32x16>([&](int i) { return register_at<F32>(lanes, i) == register_at<F32>(lanes, i); });
}

}  // namespace oatmill
