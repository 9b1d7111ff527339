// SPDX-License-Identifier: Apache-2.0
// Device functions that a single thread computes: arithmetic, bits, conversions, atomics.
//
// Fast functions (__expf, rsqrtf, ...) are the exact ones rounded to fp32: the device's
// approximation error is not modelled. Nothing is flushed to zero.
#pragma once

#include <cfenv>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include <emulator/qualifiers.h>

// ---- arithmetic with one rounding, never contracted
inline float __fadd_rn(float a, float b) {
  return a + b;
}
inline float __fsub_rn(float a, float b) {
  return a - b;
}
inline float __fmul_rn(float a, float b) {
  return a * b;
}
inline float __fdiv_rn(float a, float b) {
  return a / b;
}
inline float __frcp_rn(float a) {
  return 1.0f / a;
}
inline float __fsqrt_rn(float a) {
  return std::sqrt(a);
}
inline float __fmaf_rn(float a, float b, float c) {
  return std::fma(a, b, c);
}
inline double __dadd_rn(double a, double b) {
  return a + b;
}
inline double __dsub_rn(double a, double b) {
  return a - b;
}
inline double __dmul_rn(double a, double b) {
  return a * b;
}
inline double __ddiv_rn(double a, double b) {
  return a / b;
}
inline double __drcp_rn(double a) {
  return 1.0 / a;
}
inline double __dsqrt_rn(double a) {
  return std::sqrt(a);
}
inline double __fma_rn(double a, double b, double c) {
  return std::fma(a, b, c);
}

// ---- fast functions. The C library's header declares some of these names, hence noexcept.
inline float __expf(float x) noexcept {
  return std::exp(x);
}
inline float __exp10f(float x) noexcept {
  return static_cast<float>(std::pow(10.0, static_cast<double>(x)));
}
inline float __logf(float x) noexcept {
  return std::log(x);
}
inline float __log2f(float x) noexcept {
  return std::log2(x);
}
inline float __log10f(float x) noexcept {
  return std::log10(x);
}
inline float __powf(float x, float y) noexcept {
  return std::pow(x, y);
}
inline float __sinf(float x) noexcept {
  return std::sin(x);
}
inline float __cosf(float x) noexcept {
  return std::cos(x);
}
inline float __tanf(float x) noexcept {
  return std::tan(x);
}
inline float __fdividef(float a, float b) {
  return a / b;
}
inline float __saturatef(float x) {
  return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f;
}
inline float rsqrtf(float x) {
  return 1.0f / std::sqrt(x);
}
inline double rsqrt(double x) {
  return 1.0 / std::sqrt(x);
}

// ---- the same bits as another type
namespace emulator {
template <class To, class From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}
}  // namespace emulator
inline unsigned __float_as_uint(float x) {
  return emulator::bits_as<unsigned>(x);
}
inline int __float_as_int(float x) {
  return emulator::bits_as<int>(x);
}
inline float __uint_as_float(unsigned x) {
  return emulator::bits_as<float>(x);
}
inline float __int_as_float(int x) {
  return emulator::bits_as<float>(x);
}
inline long long __double_as_longlong(double x) {
  return emulator::bits_as<long long>(x);
}
inline double __longlong_as_double(long long x) {
  return emulator::bits_as<double>(x);
}

// ---- to and from integers. The device saturates and turns NaN into 0; C++ leaves that undefined.
namespace emulator {
template <class Int, class Float>
inline Int saturate(Float rounded) {
  constexpr Int low = std::numeric_limits<Int>::min(), high = std::numeric_limits<Int>::max();
  if (!(rounded == rounded)) return 0;
  if (rounded <= static_cast<Float>(low)) return low;
  return rounded >= static_cast<Float>(high) ? high : static_cast<Int>(rounded);
}
}  // namespace emulator
inline int __float2int_rn(float x) {
  return emulator::saturate<int>(std::nearbyint(x));
}
inline int __float2int_rz(float x) {
  return emulator::saturate<int>(std::trunc(x));
}
inline int __float2int_rd(float x) {
  return emulator::saturate<int>(std::floor(x));
}
inline int __float2int_ru(float x) {
  return emulator::saturate<int>(std::ceil(x));
}
inline unsigned __float2uint_rn(float x) {
  return emulator::saturate<unsigned>(std::nearbyint(x));
}
inline unsigned __float2uint_rz(float x) {
  return emulator::saturate<unsigned>(std::trunc(x));
}
inline int __double2int_rn(double x) {
  return emulator::saturate<int>(std::nearbyint(x));
}
inline int __double2int_rz(double x) {
  return emulator::saturate<int>(std::trunc(x));
}
inline long long __double2ll_rn(double x) {
  return emulator::saturate<long long>(std::nearbyint(x));
}
inline float __int2float_rn(int x) {
  return static_cast<float>(x);
}
inline float __uint2float_rn(unsigned x) {
  return static_cast<float>(x);
}
inline float __ll2float_rn(long long x) {
  return static_cast<float>(x);
}
inline float __ull2float_rn(unsigned long long x) {
  return static_cast<float>(x);
}
inline double __int2double_rn(int x) {
  return x;
}
inline double __uint2double_rn(unsigned x) {
  return x;
}
inline double __ll2double_rn(long long x) {
  return static_cast<double>(x);
}
inline double __ull2double_rn(unsigned long long x) {
  return static_cast<double>(x);
}
inline float __double2float_rn(double x) {
  return static_cast<float>(x);
}

// ---- bits
inline int __popc(unsigned x) {
  return __builtin_popcount(x);
}
inline int __popcll(unsigned long long x) {
  return __builtin_popcountll(x);
}
inline int __clz(int x) {
  return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x));
}
inline int __clzll(long long x) {
  return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x));
}
inline int __ffs(int x) {
  return __builtin_ffs(x);
}
inline int __ffsll(long long x) {
  return __builtin_ffsll(x);
}
inline unsigned __brev(unsigned x) {
  unsigned reversed = 0;
  for (int i = 0; i < 32; ++i) reversed |= (x >> i & 1u) << (31 - i);
  return reversed;
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<std::uint64_t>(a) * b >> 32);
}
inline int __mulhi(int a, int b) {
  return static_cast<int>(static_cast<std::int64_t>(a) * b >> 32);
}
namespace emulator {
__extension__ typedef __int128 Int128;
__extension__ typedef unsigned __int128 Uint128;
}  // namespace emulator
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<emulator::Uint128>(a) * b >> 64);
}
inline long long __mul64hi(long long a, long long b) {
  return static_cast<long long>(static_cast<emulator::Int128>(a) * b >> 64);
}
// Bytes of the eight in b:a, chosen by the low three bits of the four digits of the selector; a
// digit's fourth bit asks for the sign of that byte instead.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const std::uint64_t bytes = static_cast<std::uint64_t>(b) << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned digit = selector >> (4 * i) & 15u;
    unsigned byte = static_cast<unsigned>(bytes >> (8 * (digit & 7u))) & 255u;
    if (digit & 8u) byte = byte & 128u ? 255u : 0u;
    result |= byte << (8 * i);
  }
  return result;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  const std::uint64_t both = static_cast<std::uint64_t>(high) << 32 | low;
  return static_cast<unsigned>(both << (shift & 31u) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  const std::uint64_t both = static_cast<std::uint64_t>(high) << 32 | low;
  return static_cast<unsigned>(both >> (shift & 31u));
}

// ---- min and max, of floats as fminf: a NaN gives way to a number
#define EMULATOR_MIN_MAX(type)         \
  constexpr type min(type a, type b) { \
    return b < a ? b : a;              \
  }                                    \
  constexpr type max(type a, type b) { \
    return a < b ? b : a;              \
  }
EMULATOR_MIN_MAX(int)
EMULATOR_MIN_MAX(unsigned)
EMULATOR_MIN_MAX(long)
EMULATOR_MIN_MAX(unsigned long)
EMULATOR_MIN_MAX(long long)
EMULATOR_MIN_MAX(unsigned long long)
#undef EMULATOR_MIN_MAX
constexpr unsigned min(int a, unsigned b) {
  return min(static_cast<unsigned>(a), b);
}
constexpr unsigned min(unsigned a, int b) {
  return min(a, static_cast<unsigned>(b));
}
constexpr unsigned max(int a, unsigned b) {
  return max(static_cast<unsigned>(a), b);
}
constexpr unsigned max(unsigned a, int b) {
  return max(a, static_cast<unsigned>(b));
}
inline float min(float a, float b) {
  return std::fmin(a, b);
}
inline float max(float a, float b) {
  return std::fmax(a, b);
}
inline double min(double a, double b) {
  return std::fmin(a, b);
}
inline double max(double a, double b) {
  return std::fmax(a, b);
}
