// SPDX-License-Identifier: Apache-2.0
// What the elementwise and row kernels share: a threaded loop over the vectors of an array, and
// masks for its last, partial vector.
#pragma once

#include <sherd/kernels/cpu/parallel.h>
#include <sherd/kernels/cpu/simd.h>

#include <algorithm>

namespace sherd::cpu {

// Calls body(offset, count) for each vector of an array. `body` captures by value: its copy on the
// thread's own stack lets the compiler keep pointers and scalars in registers, where a shared
// closure would be read again after every store.
template <typename T, typename Body>
SHERD_INLINE void parallel_vectors(int threads, std::int64_t size, const Body& body,
                                   std::int64_t block = kElementwiseBlock) {
  parallel_blocks(threads, size, block, [body](std::int64_t begin, std::int64_t end) {
    const Body local = body;
    for_each_vector<T>(
        end - begin, [ begin, local ](std::int64_t i, int count)
                         __attribute__((always_inline)) { local(begin + i, count); });
  });
}

namespace detail {
template <typename Lane, int kCount>
struct MaskWindow {
  constexpr MaskWindow() {
    for (int i = 0; i < kCount; ++i) lane[i] = -1;
  }
  Lane lane[2 * kCount] = {};
};
template <typename Lane, int kCount>
inline constexpr MaskWindow<Lane, kCount> kMaskWindow;
}  // namespace detail

// All bits set in the first `count` lanes.
template <typename T>
SHERD_INLINE Mask<T> lanes_below(int count) {
  using Lane = std::conditional_t<std::is_same_v<T, double>, std::int64_t, std::int32_t>;
  Mask<T> mask;
  std::memcpy(&mask, detail::kMaskWindow<Lane, kLanes<T>>.lane + kLanes<T> - count, sizeof mask);
  return mask;
}

// v where the mask is set, zero elsewhere, whatever v holds there.
template <typename T>
SHERD_INLINE Vec<T> keep(const Mask<T>& mask, const Vec<T>& v) {
  return (Vec<T>)((Mask<T>)v & mask);
}

// Square roots (the maskz forms because g++ 12 warns about the plain ones).
SHERD_INLINE VecOf<float>::type vsqrt(VecOf<float>::type x) {
#if defined(__AVX512F__)
  return (VecOf<float>::type)_mm512_maskz_sqrt_ps(0xffff, (__m512)x);
#else
  for (int i = 0; i < kLanes<float>; ++i) x[i] = std::sqrt(x[i]);
  return x;
#endif
}
SHERD_INLINE VecOf<double>::type vsqrt(VecOf<double>::type x) {
#if defined(__AVX512F__)
  return (VecOf<double>::type)_mm512_maskz_sqrt_pd(0xff, (__m512d)x);
#else
  for (int i = 0; i < kLanes<double>; ++i) x[i] = std::sqrt(x[i]);
  return x;
#endif
}

// Whether any lane of a mask is set.
template <typename T>
SHERD_INLINE bool any_lane(const Mask<T>& mask) {
  std::uint64_t words[8] = {};
  std::memcpy(words, &mask, sizeof mask);
  std::uint64_t any = 0;
  for (const std::uint64_t word : words) any |= word;
  return any != 0;
}

// The sum of term(offset, count) over the vectors of a row and their lanes, in four running sums:
// one would wait for the adder at every step. What a term holds past `count` does not matter.
template <typename T, typename Term>
SHERD_INLINE acc_t<T> row_sum(std::int64_t cols, const Term& term) {
  constexpr int n = kLanes<T>;
  Vec<T> sum[4] = {};
  std::int64_t c = 0;
  for (; c + 4 * n <= cols; c += 4 * n) {
    sum[0] += term(c, n);
    sum[1] += term(c + n, n);
    sum[2] += term(c + 2 * n, n);
    sum[3] += term(c + 3 * n, n);
  }
  for (; c + n <= cols; c += n) sum[0] += term(c, n);
  if (c < cols) {
    const auto count = static_cast<int>(cols - c);
    sum[1] += keep<T>(lanes_below<T>(count), term(c, count));
  }
  return horizontal_sum<T>((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

// The bits of |v|: as integers they are ordered like the magnitudes, with NaN above infinity.
template <typename T>
SHERD_INLINE Mask<T> magnitude_bits(const Vec<T>& v) {
  if constexpr (std::is_same_v<T, double>) {
    return (Mask<T>)v & INT64_MAX;
  } else {
    return (Mask<T>)v & INT32_MAX;
  }
}

// Rows that make up about one elementwise block.
inline std::int64_t rows_per_task(std::int64_t cols) {
  return std::max<std::int64_t>(1, kElementwiseBlock / 2 / std::max<std::int64_t>(1, cols));
}

}  // namespace sherd::cpu
