// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/cuda/reduce.h>
#include <sherd/kernels/cuda/vector.h>

#include <algorithm>

namespace sherd::cuda {
namespace {

constexpr int kThreads = 256;

// The sum of a block of kReduceBlock elements.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    sum_blocks(std::int64_t n, const T* in, bool whole, acc_t<T>* partial) {
  using A = acc_t<T>;
  constexpr int kPiece = kVector<T>, kPieces = kReduceBlock / (kThreads * kPiece);
  SHERD_SHARED(A, shared, kWarp);
  const std::int64_t begin = blockIdx.x * kReduceBlock;
  const std::int64_t end = begin + kReduceBlock < n ? begin + kReduceBlock : n;
  A sum = 0;
#pragma unroll
  for (int k = 0; k < kPieces; ++k) {
    const std::int64_t at = begin + (k * kThreads + static_cast<int>(threadIdx.x)) * kPiece;
    A x[kPiece];
    // A last piece that is not whole is read one by one.
    unpack<T>(load_piece(in, at, end, whole && at + kPiece <= end), x);
    sum += sum_of(x);
  }
  sum = block_sum(sum, shared);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// One block for what is left.
template <typename A>
__global__ void __launch_bounds__(kThreads)
    sum_partial(std::int64_t count, const A* partial, A factor, A* out) {
  SHERD_SHARED(A, shared, kWarp);
  A sum = 0;
#pragma unroll 4
  for (std::int64_t i = threadIdx.x; i < count; i += kThreads) sum += partial[i];
  sum = block_sum(sum, shared);
  if (threadIdx.x == 0) *out = sum * factor;
}

using Word = unsigned long long;
static_assert(sizeof(Word) == sizeof(std::int64_t));

// -1 is the largest of all as a Word, so the smallest index wins over it.
__global__ void set_no_index(Word* index) {
  *index = ~Word{0};
}
template <typename T>
__global__ void __launch_bounds__(kThreads)
    find_non_finite(std::int64_t n, const T* in, bool whole, Word* index) {
  using A = acc_t<T>;
  constexpr int kPiece = kVector<T>;
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads * kPiece;
  std::int64_t at = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * kPiece;
  for (; at < n; at += step) {
    A x[kPiece];
    unpack<T>(load_piece(in, at, n, whole && at + kPiece <= n), x);
    // v * 0 is 0 unless v is infinite or NaN, and a NaN stays in a sum.
    A zero = 0;
#pragma unroll
    for (int i = 0; i < kPiece; ++i) zero += x[i] * A(0);
    if (zero == 0) continue;
    int first = 0;
#pragma unroll
    for (int i = kPiece - 1; i >= 0; --i) {
      if (!(x[i] * A(0) == 0)) first = i;
    }
    atomicMin(index, static_cast<Word>(at + first));
    return;  // what this thread would see later is behind
  }
}

}  // namespace

template <typename T>
void sum(Stream& stream, std::int64_t n, const T* in, acc_t<T> factor, acc_t<T>* out,
         acc_t<T>* workspace) {
  const std::int64_t blocks = ceil_div(n, kReduceBlock);
  if (blocks > 0) {
    launch(sum_blocks<T>, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, native(stream), n,
           in, is_aligned({in}), workspace);
  }
  launch(sum_partial<acc_t<T>>, dim3(1), dim3(kThreads), 0, native(stream), blocks, workspace,
         factor, out);
}

template <typename T>
void first_non_finite(Stream& stream, std::int64_t n, const T* in, std::int64_t* index) {
  constexpr std::int64_t kMostBlocks = 2112;  // 16 for each of the 132 processors of an H100
  auto* const word = reinterpret_cast<Word*>(index);
  launch(set_no_index, dim3(1), dim3(1), 0, native(stream), word);
  const std::int64_t blocks = std::min(kMostBlocks, ceil_div(n, kThreads * kVector<T>));
  if (blocks == 0) return;
  launch(find_non_finite<T>, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, native(stream),
         n, in, is_aligned({in}), word);
}

#define SHERD_INSTANTIATE(T)                                                             \
  template void sum<T>(Stream&, std::int64_t, const T*, acc_t<T>, acc_t<T>*, acc_t<T>*); \
  template void first_non_finite<T>(Stream&, std::int64_t, const T*, std::int64_t*);
SHERD_INSTANTIATE(double)
SHERD_INSTANTIATE(float)
SHERD_INSTANTIATE(bf16)
SHERD_INSTANTIATE(f16)
#undef SHERD_INSTANTIATE

}  // namespace sherd::cuda
