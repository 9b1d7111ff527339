// SPDX-License-Identifier: Apache-2.0
// Fixed-width vectors for CPU kernels: 16 fp32 or 8 fp64 lanes on every machine (the compiler
// splits them where registers are narrower).
//
// Note [Same bits wherever an array is cut]
// A kernel written over Vec handles the end of an array by loading a partial vector padded with
// zeros and running the very same instructions. The build sets -ffp-contract=off and never
// -ffast-math, fused multiply-adds are written out (madd), and horizontal sums add in one fixed
// tree. So an element's result depends neither on its position in the vector nor on whether the
// compiler vectorised a loop, and a shard of a tensor gets the bits the whole tensor would get.
#pragma once

#include <sherd/kernels/arguments/types.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define SHERD_INLINE inline __attribute__((always_inline))

namespace sherd::cpu {

using arguments::acc_t;

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
inline constexpr int kVectorBytes = 32;
#else
inline constexpr int kVectorBytes = 16;
#endif

template <typename A>
struct VecOf;
template <>
struct VecOf<float> {
  static constexpr int kLanes = kVectorBytes / 4;
  typedef float type __attribute__((vector_size(kVectorBytes)));
  typedef std::int32_t mask __attribute__((vector_size(kVectorBytes)));
};
template <>
struct VecOf<double> {
  static constexpr int kLanes = kVectorBytes / 8;
  typedef double type __attribute__((vector_size(kVectorBytes)));
  typedef std::int64_t mask __attribute__((vector_size(kVectorBytes)));
};
// The vector a kernel over elements of type T computes with; comparisons give Mask (0 or -1 a
// lane).
template <typename T>
using Vec = typename VecOf<acc_t<T>>::type;
template <typename T>
using Mask = typename VecOf<acc_t<T>>::mask;
template <typename T>
inline constexpr int kLanes = VecOf<acc_t<T>>::kLanes;

template <typename T>
SHERD_INLINE Vec<T> broadcast(acc_t<T> value) {
  return value - Vec<T>{};  // not {} + value: that would turn -0 into 0, and cost an addition
}

namespace detail {

// 16-bit halves of the lanes, for conversions of bf16.
typedef std::uint16_t Halves __attribute__((vector_size(kVectorBytes / 2)));
typedef std::uint32_t Words __attribute__((vector_size(kVectorBytes)));

// One instruction each with AVX-512; g++ 12 makes three of the plain form.
SHERD_INLINE Words zero_extended(Halves halves) {
#if defined(__AVX512F__)
  return (Words)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)halves);
#else
  return __builtin_convertvector(halves, Words);
#endif
}
SHERD_INLINE Halves truncated(Words words) {
#if defined(__AVX512F__)
  return (Halves)_mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)words);
#else
  return __builtin_convertvector(words, Halves);
#endif
}

SHERD_INLINE VecOf<float>::type widen(Halves halves, bf16) {
  return (VecOf<float>::type)(zero_extended(halves) << 16);
}
// bf16's own rounding (runtime/dtype.h), lane by lane. The processor's instruction equals it,
// except that it takes subnormal numbers for zero.
SHERD_INLINE Halves narrow(VecOf<float>::type v, bf16) {
#if defined(__AVX512BF16__) && defined(__AVX512DQ__)
  constexpr int kSubnormal = 0x20;
  if (__builtin_expect(_mm512_fpclass_ps_mask((__m512)v, kSubnormal) == 0, 1)) {
    return (Halves)_mm512_cvtneps_pbh((__m512)v);
  }
#endif
  const auto word = (Words)v;
  const Words upper = word >> 16;
  const Words rounded = (word + 0x7fffu + (upper & 1u)) >> 16;
  return truncated(v == v ? rounded : upper | 0x40u);
}

// The processor's conversion equals f16's, except that it keeps the payload of a NaN.
SHERD_INLINE VecOf<float>::type widen(Halves halves, f16) {
#if defined(__AVX512F__)
  return (VecOf<float>::type)_mm512_maskz_cvtph_ps(0xffff, (__m256i)halves);
#elif defined(__AVX2__) && defined(__F16C__)
  return (VecOf<float>::type)_mm256_cvtph_ps((__m128i)halves);
#else
  VecOf<float>::type v;
  for (int i = 0; i < VecOf<float>::kLanes; ++i) v[i] = f16::to_float(halves[i]);
  return v;
#endif
}
SHERD_INLINE Halves narrow(VecOf<float>::type v, f16) {
#if defined(__AVX512F__)
  return (Halves)_mm512_maskz_cvtps_ph(0xffff, (__m512)v, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__AVX2__) && defined(__F16C__)
  return (Halves)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
#else
  Halves halves;
  for (int i = 0; i < VecOf<float>::kLanes; ++i) halves[i] = f16::from_float(v[i]);
  return halves;
#endif
}

}  // namespace detail

template <typename T>
SHERD_INLINE Vec<T> load(const T* from) {
  if constexpr (std::is_same_v<T, acc_t<T>>) {
    Vec<T> v;
    std::memcpy(&v, from, sizeof v);
    return v;
  } else {
    detail::Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    return detail::widen(halves, T{});
  }
}

template <typename T>
SHERD_INLINE void store(T* to, const Vec<T>& v) {
  if constexpr (std::is_same_v<T, acc_t<T>>) {
    std::memcpy(to, &v, sizeof v);
  } else {
    const detail::Halves halves = detail::narrow(v, T{});
    std::memcpy(static_cast<void*>(to), &halves, sizeof halves);
  }
}

// The first `count` lanes; the others read as zero. count in [1, kLanes].
template <typename T>
SHERD_INLINE Vec<T> load_first(const T* from, int count) {
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
  const auto mask = static_cast<std::uint16_t>((1u << count) - 1u);
  if constexpr (std::is_same_v<T, float>) {
    return (Vec<T>)_mm512_maskz_loadu_ps(mask, from);
  } else if constexpr (std::is_same_v<T, double>) {
    return (Vec<T>)_mm512_maskz_loadu_pd(static_cast<std::uint8_t>(mask), from);
  } else {
    return detail::widen((detail::Halves)_mm256_maskz_loadu_epi16(mask, from), T{});
  }
#else
  T padded[kLanes<T>] = {};
  std::memcpy(padded, from, static_cast<size_t>(count) * sizeof(T));
  return load<T>(padded);
#endif
}

template <typename T>
SHERD_INLINE void store_first(T* to, const Vec<T>& v, int count) {
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
  const auto mask = static_cast<std::uint16_t>((1u << count) - 1u);
  if constexpr (std::is_same_v<T, float>) {
    _mm512_mask_storeu_ps(to, mask, (__m512)v);
  } else if constexpr (std::is_same_v<T, double>) {
    _mm512_mask_storeu_pd(to, static_cast<std::uint8_t>(mask), (__m512d)v);
  } else {
    _mm256_mask_storeu_epi16(to, mask, (__m256i)detail::narrow(v, T{}));
  }
#else
  T padded[kLanes<T>];
  store<T>(padded, v);
  std::memcpy(to, padded, static_cast<size_t>(count) * sizeof(T));
#endif
}

// Calls body(offset, count) for each vector of an array of `size` elements; count < kLanes only for
// the last one.
template <typename T, typename Body>
SHERD_INLINE void for_each_vector(std::int64_t size, const Body& body) {
  std::int64_t i = 0;
  for (; i + kLanes<T> <= size; i += kLanes<T>) body(i, kLanes<T>);
  if (i < size) body(i, static_cast<int>(size - i));
}

template <typename T>
SHERD_INLINE Vec<T> load(const T* from, int count) {
  return count == kLanes<T> ? load<T>(from) : load_first<T>(from, count);
}
template <typename T>
SHERD_INLINE void store(T* to, const Vec<T>& v, int count) {
  if (count == kLanes<T>) {
    store<T>(to, v);
  } else {
    store_first<T>(to, v, count);
  }
}

// a * b + c with one rounding where the processor has it.
SHERD_INLINE VecOf<float>::type madd(VecOf<float>::type a, VecOf<float>::type b,
                                     VecOf<float>::type c) {
#if defined(__AVX512F__)
  return (VecOf<float>::type)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (VecOf<float>::type)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}
SHERD_INLINE VecOf<double>::type madd(VecOf<double>::type a, VecOf<double>::type b,
                                      VecOf<double>::type c) {
#if defined(__AVX512F__)
  return (VecOf<double>::type)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (VecOf<double>::type)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#else
  return a * b + c;
#endif
}

// mask ? a : b, lane by lane.
template <typename V, typename M>
SHERD_INLINE V select(M mask, V a, V b) {
  return mask ? a : b;
}

template <typename V>
SHERD_INLINE V vmax(V a, V b) {
  return a > b ? a : b;
}
template <typename V>
SHERD_INLINE V vmin(V a, V b) {
  return a < b ? a : b;
}

namespace detail {

// Folds the upper half of a vector onto the lower until one lane is left.
template <typename V, typename Fold, int... kLane>
SHERD_INLINE auto fold_halves(V v, const Fold& fold, std::integer_sequence<int, kLane...>) {
  constexpr int kHalf = sizeof...(kLane);
  if constexpr (kHalf == 1) {
    return fold(v[0], v[1]);
  } else {
    return fold_halves(fold(__builtin_shufflevector(v, v, kLane...),
                            __builtin_shufflevector(v, v, (kLane + kHalf)...)),
                       fold, std::make_integer_sequence<int, kHalf / 2>{});
  }
}
template <typename T, typename Fold>
SHERD_INLINE acc_t<T> fold_lanes(const Vec<T>& v, const Fold& fold) {
  return fold_halves(v, fold, std::make_integer_sequence<int, kLanes<T> / 2>{});
}

}  // namespace detail

// Lane sum and maximum by halving, (0+8)+(4+12) ... for 16 lanes: one fixed tree.
template <typename T>
SHERD_INLINE acc_t<T> horizontal_sum(const Vec<T>& v) {
  return detail::fold_lanes<T>(v, [](auto a, auto b) { return a + b; });
}
template <typename T>
SHERD_INLINE acc_t<T> horizontal_max(const Vec<T>& v) {
  return detail::fold_lanes<T>(v, [](auto a, auto b) { return a > b ? a : b; });
}

}  // namespace sherd::cpu
