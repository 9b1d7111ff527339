// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/cuda/dropout.h>
#include <sherd/kernels/cuda/elementwise.h>
#include <sherd/kernels/cuda/pack.h>
#include <sherd/runtime/philox.h>

namespace sherd::cuda {
namespace {

constexpr int kThreads = 256;

template <typename T>
struct Dropout {
  VectorRange range;
  std::uint64_t key = 0, step = 0, first_index = 0;
  std::uint32_t limit = 0;
  acc_t<T> factor = 1;
  const T* in = nullptr;
  T* out = nullptr;
};

// Elements [first, first + N). N of 4 and more begin with a block of the random stream; fewer lie
// within one.
template <int N, typename T>
__device__ __forceinline__ void drop(const Dropout<T>& p, std::int64_t first) {
  const std::uint64_t index = p.first_index + static_cast<std::uint64_t>(first);
  Pack<T, N> pack = load<N>(p.in + first);
#pragma unroll
  for (int begin = 0; begin < N; begin += 4) {
    const auto words = random_block(p.key, p.step, index / 4 + begin / 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = N >= 4 ? begin + i : i - static_cast<int>(index % 4);
      if (at < 0 || at >= N) continue;
      const acc_t<T> scaled = to_acc(pack.at[at]) * p.factor;
      pack.at[at] = words[i] <= p.limit ? from_acc<T>(scaled) : from_acc<T>(0);
    }
  }
  store<N>(p.out + first, pack);
}

template <int V, typename T>
__global__ void __launch_bounds__(kThreads) dropout_kernel(Dropout<T> p) {
  const std::int64_t vector = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (vector < p.range.vectors) drop<V>(p, p.range.head + vector * V);
  if (blockIdx.x > 0) return;
  const std::int64_t i = single_element<V>(p.range, threadIdx.x);
  if (i >= 0) drop<1>(p, i);
}

}  // namespace

template <typename T>
void dropout(Stream& stream, std::int64_t n, const T* in, T* out, double keep_probability,
             const RandomStream& random, std::uint64_t first_index) {
  const arguments::DropoutRule rule = arguments::dropout_rule(keep_probability);
  if (!rule.any) return fill<T>(stream, n, 0, out);
  if (n == 0) return;
  constexpr int V = kVectorOf<T>;
  // Vectors begin with blocks of the random stream as well.
  const int head = elements_before_vectors<V>(in, out);
  const bool vectors = head >= 0 && (first_index + static_cast<std::uint64_t>(head)) % V == 0;
  Dropout<T> p;
  p.range = vectors ? vector_range<V>(n, head) : vector_range<1>(n, 0);
  p.key = random.key();
  p.step = random.step();
  p.first_index = first_index;
  p.limit = rule.limit;
  p.factor = static_cast<acc_t<T>>(1 / keep_probability);
  p.in = in;
  p.out = out;
  const std::int64_t blocks = std::max<std::int64_t>(1, ceil_div(p.range.vectors, kThreads));
  const auto kernel = vectors ? dropout_kernel<V, T> : dropout_kernel<1, T>;
  launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, native(stream), p);
}

#define SHERD_INSTANTIATE(T)                                                                 \
  template void dropout<T>(Stream&, std::int64_t, const T*, T*, double, const RandomStream&, \
                           std::uint64_t);
SHERD_INSTANTIATE(double)
SHERD_INSTANTIATE(float)
SHERD_INSTANTIATE(bf16)
SHERD_INSTANTIATE(f16)
#undef SHERD_INSTANTIATE

}  // namespace sherd::cuda
