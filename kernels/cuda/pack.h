// SPDX-License-Identifier: Apache-2.0
// Neighbouring elements moved in one access of up to 16 bytes.
//
// Note [Vectors of an array]
// Kernels over arrays take V elements a thread, V being what fills 16 bytes of the widest type, so
// that a warp's accesses are contiguous for each of them. An array cut somewhere in the middle (a
// shard) begins anywhere: the elements before the first place where all arrays are aligned, and
// those behind the last whole vector, go one by one. Arrays that are never aligned together take
// V = 1.
#pragma once

#include <sherd/kernels/cuda/device.h>

#include <algorithm>
#include <bit>

namespace sherd::cuda {

// N neighbours.
template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  static_assert(sizeof(T) * N <= 16);
  T at[N];
};

// Words of four bytes put together from elements and taken apart. (With memcpy nvcc splits some of
// the stores.)
template <int N, typename T>
__device__ __forceinline__ std::uint32_t word_of(const Pack<T, N>& pack, int word) {
  if constexpr (sizeof(T) == 2) {
    return pack.at[2 * word].bits | static_cast<std::uint32_t>(pack.at[2 * word + 1].bits) << 16;
  } else if constexpr (sizeof(T) == 4) {
    return std::bit_cast<std::uint32_t>(pack.at[word]);
  } else {
    static_assert(sizeof(T) == 8);
    const auto bits = std::bit_cast<std::uint64_t>(pack.at[word / 2]);
    return static_cast<std::uint32_t>(word % 2 == 0 ? bits : bits >> 32);
  }
}
template <int N, typename T>
__device__ __forceinline__ void set_word(Pack<T, N>& pack, int word, std::uint32_t bits) {
  if constexpr (sizeof(T) == 1) {
#pragma unroll
    for (int i = 0; i < 4; ++i) pack.at[4 * word + i] = static_cast<T>(bits >> (8 * i));
  } else if constexpr (sizeof(T) == 2) {
    pack.at[2 * word].bits = static_cast<std::uint16_t>(bits);
    pack.at[2 * word + 1].bits = static_cast<std::uint16_t>(bits >> 16);
  } else if constexpr (sizeof(T) == 4) {
    pack.at[word] = std::bit_cast<T>(bits);
  } else {
    auto both = std::bit_cast<std::uint64_t>(pack.at[word / 2]);
    both = word % 2 == 0 ? bits : both | static_cast<std::uint64_t>(bits) << 32;
    pack.at[word / 2] = std::bit_cast<T>(both);
  }
}

template <int N, typename T>
__device__ __forceinline__ Pack<T, N> load(const T* from) {
  Pack<T, N> pack;
  if constexpr (sizeof pack == 16) {
    const uint4 words = *static_cast<const uint4*>(static_cast<const void*>(from));
    set_word(pack, 0, words.x);
    set_word(pack, 1, words.y);
    set_word(pack, 2, words.z);
    set_word(pack, 3, words.w);
  } else if constexpr (sizeof pack == 8 && N > 1) {
    const uint2 words = *static_cast<const uint2*>(static_cast<const void*>(from));
    set_word(pack, 0, words.x);
    set_word(pack, 1, words.y);
  } else if constexpr (sizeof pack == 4 && N > 1) {
    set_word(pack, 0, *static_cast<const std::uint32_t*>(static_cast<const void*>(from)));
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) pack.at[i] = from[i];
  }
  return pack;
}

template <int N, typename T>
__device__ __forceinline__ void store(T* to, const Pack<T, N>& pack) {
  if constexpr (sizeof pack == 16) {
    ptx::store(to,
               make_uint4(word_of(pack, 0), word_of(pack, 1), word_of(pack, 2), word_of(pack, 3)));
  } else if constexpr (sizeof pack == 8 && N > 1) {
    ptx::store(to, make_uint2(word_of(pack, 0), word_of(pack, 1)));
  } else if constexpr (sizeof pack == 4 && N > 1) {
    *static_cast<std::uint32_t*>(static_cast<void*>(to)) = word_of(pack, 0);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = pack.at[i];
  }
}

// V for kernels over arrays of these types.
template <typename... T>
inline constexpr int kVectorOf = 16 / static_cast<int>(std::max({sizeof(T)...}));

template <typename T>
bool aligned(const T* address, std::size_t bytes) {
  return reinterpret_cast<std::uintptr_t>(address) % bytes == 0;
}

// The elements before the first vector of V in all of these arrays, null ones apart; -1 where they
// have none in common.
template <int V, typename... T>
int elements_before_vectors(const T*... arrays) {
  for (int head = 0; head < V; ++head) {
    if ((... && (arrays == nullptr || aligned(arrays + head, sizeof(T) * V)))) return head;
  }
  return -1;
}

// A cut of n elements into `head` single ones, vectors, and single ones.
struct VectorRange {
  std::int64_t n = 0;
  std::int64_t head = 0;
  std::int64_t vectors = 0;
};
template <int V>
VectorRange vector_range(std::int64_t n, int head) {
  const std::int64_t first = n < head ? n : head;
  return {n, first, (n - first) / V};
}
// The element that thread `i` of the grid takes beside its vectors; -1: none.
template <int V>
__device__ __forceinline__ std::int64_t single_element(const VectorRange& range, std::int64_t i) {
  if (i < range.head) return i;
  const std::int64_t element = i + range.vectors * V;
  return V > 1 && element < range.n ? element : -1;
}

}  // namespace sherd::cuda
