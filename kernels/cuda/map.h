// SPDX-License-Identifier: Apache-2.0
// to[i] = operation(a[i], b[i]) over arrays of any types, with none, one or two inputs.
#pragma once

#include <sherd/kernels/cuda/pack.h>

namespace sherd::cuda {

inline constexpr int kMapThreads = 256;
// Vectors of a thread, all loaded before the first is needed: what hides the memory's latency.
inline constexpr int kMapVectors = 4;

// In place of an input that an operation does not have.
struct None {};

template <typename Operation, typename A, typename B>
__device__ __forceinline__ auto call(const Operation& operation, A a, B b) {
  if constexpr (std::is_same_v<A, None>) {
    return operation();
  } else if constexpr (std::is_same_v<B, None>) {
    return operation(a);
  } else {
    return operation(a, b);
  }
}
template <int N, typename T>
__device__ __forceinline__ Pack<T, N> load_input(const T* from, std::int64_t first) {
  if constexpr (std::is_same_v<T, None>) {
    return {};
  } else {
    return load<N>(from + first);
  }
}

template <int V, typename Operation, typename To, typename A, typename B>
__global__ void __launch_bounds__(kMapThreads)
    map_kernel(VectorRange range, Operation operation, const A* a, const B* b, To* to) {
  const std::int64_t first =
      static_cast<std::int64_t>(blockIdx.x) * (kMapThreads * kMapVectors) + threadIdx.x;
  Pack<A, V> in_a[kMapVectors];
  Pack<B, V> in_b[kMapVectors];
#pragma unroll
  for (int k = 0; k < kMapVectors; ++k) {
    const std::int64_t vector = first + k * kMapThreads;
    if (vector >= range.vectors) continue;
    in_a[k] = load_input<V>(a, range.head + vector * V);
    in_b[k] = load_input<V>(b, range.head + vector * V);
  }
#pragma unroll
  for (int k = 0; k < kMapVectors; ++k) {
    const std::int64_t vector = first + k * kMapThreads;
    if (vector >= range.vectors) continue;
    Pack<To, V> out;
#pragma unroll
    for (int i = 0; i < V; ++i) out.at[i] = call(operation, in_a[k].at[i], in_b[k].at[i]);
    store<V>(to + range.head + vector * V, out);
  }
  if (blockIdx.x > 0) return;
  const std::int64_t i = single_element<V>(range, threadIdx.x);
  if (i >= 0) to[i] = call(operation, load_input<1>(a, i).at[0], load_input<1>(b, i).at[0]);
}

// An output may be the very array that is an input.
template <typename Operation, typename To, typename A = None, typename B = None>
void map(Stream& stream, std::int64_t n, const Operation& operation, To* to, const A* a = nullptr,
         const B* b = nullptr) {
  if (n == 0) return;
  constexpr int V = kVectorOf<To, A, B>;
  const int head = elements_before_vectors<V>(a, b, to);
  const VectorRange range = head < 0 ? vector_range<1>(n, 0) : vector_range<V>(n, head);
  const std::int64_t blocks =
      std::max<std::int64_t>(1, ceil_div(range.vectors, kMapThreads * kMapVectors));
  const auto kernel =
      head < 0 ? map_kernel<1, Operation, To, A, B> : map_kernel<V, Operation, To, A, B>;
  launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kMapThreads), 0, native(stream), range,
         operation, a, b, to);
}

}  // namespace sherd::cuda
