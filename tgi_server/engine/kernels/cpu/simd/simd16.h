// Sixteen floats at a time on every CPU, by the compiler's own vector types: layouts in memory are made for this number.
//
// They are one register with AVX-512 and several with other instruction sets. Vectors that no register holds go through
// memory after every operation, and selections and conversions are taken apart number by number: so these are written
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

using Lanes = float __attribute__((vector_size(LANES * sizeof(float))));
using Ints = int32_t __attribute__((vector_size(LANES * sizeof(int32_t))));

// Register i of a vector.
template <typename Register, typename Vector>
Register register_of(const Vector& vector, int i) {
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
Lanes load(const T* from) {
  return by_registers<Lanes>([&](int i) { return widened(from + i * WIDTH); });
}

// Of vectors that are no register; those that are one have functions of the same names in registers.h.
template <typename V>
concept Several = std::is_same_v<V, Lanes> && !std::is_same_v<Lanes, Floats>;

template <typename T, Several V>
void store(T* to, V lanes) {
#pragma GCC unroll 4
  for (int i = 0; i < LANES / WIDTH; ++i) store(to + i * WIDTH, register_of<Floats>(lanes, i));
}

template <Several V>
V larger(V a, V b) {
  return by_registers<V>([&](int i) { return larger(register_of<Floats>(a, i), register_of<Floats>(b, i)); });
}

template <Several V>
V smaller(V a, V b) {
  return by_registers<V>([&](int i) { return smaller(register_of<Floats>(a, i), register_of<Floats>(b, i)); });
}

template <Several V>
V chosen(Ints mask, V a, V b) {
  return by_registers<V>([&](int i) { return chosen(register_of<Whole>(mask, i), register_of<Floats>(a, i), register_of<Floats>(b, i)); });
}

template <Several V>
float largest(V lanes) {
  Floats most = register_of<Floats>(lanes, 0);
  for (int i = 1; i < LANES / WIDTH; ++i) most = larger(most, register_of<Floats>(lanes, i));
  return largest(most);
}

template <Several V>
float sum(V lanes) {
  Floats total = register_of<Floats>(lanes, 0);
  for (int i = 1; i < LANES / WIDTH; ++i) total += register_of<Floats>(lanes, i);
  return sum(total);
}

template <Several V>
Ints nearest(V lanes) {
  return by_registers<Ints>([&](int i) { return nearest(register_of<Floats>(lanes, i)); });
}

template <Several V>
V exponential(V lanes) {
  return by_registers<V>([&](int i) { return exponential(register_of<Floats>(lanes, i)); });
}

// -1 where a number is below the limit, else 0.
inline Ints below(Ints numbers, int32_t limit) {
  return by_registers<Ints>([&](int i) { return register_of<Whole>(numbers, i) < Whole{} + limit; });
}

// -1 where a number is one, else 0.
inline Ints defined(Lanes lanes) {
  return by_registers<Ints>([&](int i) { return register_of<Floats>(lanes, i) == register_of<Floats>(lanes, i); });
}

}  // namespace oatmill
