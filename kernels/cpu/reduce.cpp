// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/cpu/reduce.h>
#include <sherd/kernels/cpu/vector_loop.h>

#include <atomic>

namespace sherd::cpu {
namespace {

constexpr std::int64_t kBlocksPerTask = kElementwiseBlock / kReduceBlock;

std::int64_t block_count(std::int64_t n) {
  return (n + kReduceBlock - 1) / kReduceBlock;
}

// partial[b] = reduce(elements of block b, their count) for every block.
template <typename T, typename Reduce>
SHERD_INLINE void reduce_blocks(int threads, std::int64_t n, const T* in, acc_t<T>* partial,
                                const Reduce& reduce) {
  parallel_blocks(threads, block_count(n), kBlocksPerTask,
                  [=](std::int64_t begin, std::int64_t end) {
                    for (std::int64_t b = begin; b < end; ++b) {
                      const std::int64_t first = b * kReduceBlock;
                      partial[b] = reduce(in + first, std::min(kReduceBlock, n - first));
                    }
                  });
}

}  // namespace

template <typename T>
std::size_t reduce_workspace_bytes(std::int64_t n) {
  return static_cast<std::size_t>(block_count(n)) * sizeof(acc_t<T>);
}

template <typename T>
acc_t<T> sum(int threads, std::int64_t n, const T* in, acc_t<T>* workspace) {
  reduce_blocks<T>(threads, n, in, workspace, [](const T* x, std::int64_t count) {
    return row_sum<T>(
        count, [=](std::int64_t i, int lanes)
                   __attribute__((always_inline)) { return load<T>(x + i, lanes); });
  });
  std::int64_t left = block_count(n);
  if (left == 0) return 0;
  while (left > 1) {
    const std::int64_t pairs = left / 2;
    for (std::int64_t i = 0; i < pairs; ++i) workspace[i] = workspace[2 * i] + workspace[2 * i + 1];
    if (left % 2 != 0) workspace[pairs] = workspace[left - 1];
    left -= pairs;
  }
  return workspace[0];
}

template <typename T>
std::int64_t first_non_finite(int threads, std::int64_t n, const T* in) {
  using A = acc_t<T>;
  std::atomic<std::int64_t> found = n;
  parallel_blocks(threads, n, kElementwiseBlock, [&](std::int64_t begin, std::int64_t end) {
    if (begin > found.load(std::memory_order_relaxed)) return;
    // v * 0 is 0 unless v is infinite or NaN, and a NaN stays in a sum.
    const T* const x = in + begin;
    const A zero = row_sum<T>(
        end - begin, [=](std::int64_t i, int count)
                         __attribute__((always_inline)) { return load<T>(x + i, count) * A(0); });
    if (zero == 0) return;
    std::int64_t i = begin;
    while (static_cast<A>(in[i]) * A(0) == 0) ++i;
    std::int64_t seen = found.load(std::memory_order_relaxed);
    while (i < seen && !found.compare_exchange_weak(seen, i, std::memory_order_relaxed)) {
    }
  });
  return found < n ? found.load() : -1;
}

#define SHERD_INSTANTIATE(T)                                            \
  template std::size_t reduce_workspace_bytes<T>(std::int64_t);         \
  template acc_t<T> sum<T>(int, std::int64_t, const T*, acc_t<T>*);     \
  template std::int64_t first_non_finite<T>(int, std::int64_t, const T*);
SHERD_INSTANTIATE(double)
SHERD_INSTANTIATE(float)
SHERD_INSTANTIATE(bf16)
SHERD_INSTANTIATE(f16)
#undef SHERD_INSTANTIATE

}  // namespace sherd::cpu
