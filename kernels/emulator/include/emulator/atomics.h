// SPDX-License-Identifier: Apache-2.0
// Atomic operations of the device. Real ones of the host: several OS threads may run kernels.
#pragma once

#include <type_traits>

#include <emulator/qualifiers.h>

namespace emulator {

template <class T>
using Same = std::type_identity_t<T>;  // keeps a parameter out of deduction

// Replaces *p by f(*p) and returns what was there.
template <class T, class F>
inline T atomic_update(T* p, F f) {
  T old, next;
  __atomic_load(p, &old, __ATOMIC_RELAXED);
  do {
    next = f(old);
  } while (!__atomic_compare_exchange(p, &old, &next, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return old;
}

template <class T>
concept AtomicInt =
    std::is_same_v<T, int> || std::is_same_v<T, unsigned> || std::is_same_v<T, unsigned long long>;
template <class T>
concept AtomicFloat = std::is_same_v<T, float> || std::is_same_v<T, double>;

}  // namespace emulator

template <emulator::AtomicInt T>
inline T atomicAdd(T* p, emulator::Same<T> value) {
  return __atomic_fetch_add(p, value, __ATOMIC_RELAXED);
}
template <emulator::AtomicFloat T>
inline T atomicAdd(T* p, emulator::Same<T> value) {
  return emulator::atomic_update(p, [value](T old) { return old + value; });
}
template <emulator::AtomicInt T>
inline T atomicSub(T* p, emulator::Same<T> value) {
  return __atomic_fetch_sub(p, value, __ATOMIC_RELAXED);
}
template <emulator::AtomicInt T>
inline T atomicMax(T* p, emulator::Same<T> value) {
  return emulator::atomic_update(p, [value](T old) { return old < value ? value : old; });
}
template <emulator::AtomicInt T>
inline T atomicMin(T* p, emulator::Same<T> value) {
  return emulator::atomic_update(p, [value](T old) { return value < old ? value : old; });
}
template <emulator::AtomicInt T>
inline T atomicAnd(T* p, emulator::Same<T> value) {
  return __atomic_fetch_and(p, value, __ATOMIC_RELAXED);
}
template <emulator::AtomicInt T>
inline T atomicOr(T* p, emulator::Same<T> value) {
  return __atomic_fetch_or(p, value, __ATOMIC_RELAXED);
}
template <emulator::AtomicInt T>
inline T atomicXor(T* p, emulator::Same<T> value) {
  return __atomic_fetch_xor(p, value, __ATOMIC_RELAXED);
}
template <class T>
requires(emulator::AtomicInt<T> || std::is_same_v<T, float>) inline T
    atomicExch(T* p, emulator::Same<T> value) {
  return emulator::atomic_update(p, [value](T) { return value; });
}
template <emulator::AtomicInt T>
inline T atomicCAS(T* p, emulator::Same<T> expected, emulator::Same<T> value) {
  __atomic_compare_exchange(p, &expected, &value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}
// 0 after `last`, as a counter of blocks that finish.
inline unsigned atomicInc(unsigned* p, unsigned last) {
  return emulator::atomic_update(p, [last](unsigned old) { return old >= last ? 0 : old + 1; });
}
