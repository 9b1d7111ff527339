// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/cuda/column_sum.h>
#include <sherd/kernels/cuda/vector.h>

namespace sherd::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kUnroll = 4;    // rows of a warp under way at once
constexpr int kAddRows = 32;  // threads that share the blocks of a column

static_assert(kColumnSumPieces == kWarp);

// A lane sums the columns of one piece over every eighth row of the block; then the warps' sums are
// added.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    sum_rows(std::int64_t rows, std::int64_t cols, std::int64_t rows_per_block, const T* in,
             bool whole, acc_t<T>* partial) {
  using A = acc_t<T>;
  constexpr int n = kVector<T>;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const std::int64_t at = (std::int64_t{blockIdx.x} * kWarp + lane) * n;
  const std::int64_t begin = blockIdx.y * rows_per_block;
  const std::int64_t end = begin + rows_per_block < rows ? begin + rows_per_block : rows;
  A sum[n] = {};
  const auto add = [&](const uint4& piece) {
    A x[n];
    unpack<T>(piece, x);
#pragma unroll
    for (int i = 0; i < n; ++i) sum[i] += x[i];
  };
  std::int64_t row = begin + warp;
  for (; row + (kUnroll - 1) * kWarps < end; row += kUnroll * kWarps) {
    uint4 pieces[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k)
      pieces[k] = load_piece(in + (row + k * kWarps) * cols, at, cols, whole);
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) add(pieces[k]);
  }
  for (; row < end; row += kWarps) add(load_piece(in + row * cols, at, cols, whole));

  SHERD_SHARED(A, sums, kThreads * n);
#pragma unroll
  for (int i = 0; i < n; ++i) sums[i * kThreads + threadIdx.x] = sum[i];
  __syncthreads();
  for (int k = threadIdx.x; k < kWarp * n; k += kThreads) {
    const int i = k % n, of_lane = k / n;
    const std::int64_t column = std::int64_t{blockIdx.x} * kWarp * n + k;
    A total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += sums[i * kThreads + w * kWarp + of_lane];
    if (column < cols) partial[blockIdx.y * cols + column] = total;
  }
}

// 32 columns a block; thread row y of 32 adds every 32nd of the blocks, then the 32 sums are added
// in order.
template <typename A>
__global__ void __launch_bounds__(kWarp* kAddRows)
    add_rows(std::int64_t blocks, std::int64_t cols, std::int64_t stride, const A* partial, A* out,
             A* second_out) {
  const int x = threadIdx.x, y = threadIdx.y;
  const std::int64_t column = std::int64_t{blockIdx.x} * kWarp + x;
  if (blockIdx.y == 1) partial += cols;
  A sum = 0;
  if (column < cols) {
#pragma unroll 4
    for (std::int64_t b = y; b < blocks; b += kAddRows) sum += partial[b * stride + column];
  }
  SHERD_SHARED(A, sums, kAddRows * kWarp);
  sums[y * kWarp + x] = sum;
  __syncthreads();
  if (y != 0 || column >= cols) return;
  A total = 0;
#pragma unroll
  for (int k = 0; k < kAddRows; ++k) total += sums[k * kWarp + x];
  (blockIdx.y == 0 ? out : second_out)[column] = total;
}

}  // namespace

template <typename A>
void add_blocks(Stream& stream, std::int64_t blocks, std::int64_t cols, std::int64_t stride,
                const A* partial, A* out, A* second_out) {
  if (cols == 0) return;
  launch(add_rows<A>,
         dim3(static_cast<unsigned>(ceil_div(cols, kWarp)), second_out != nullptr ? 2 : 1),
         dim3(kWarp, kAddRows), 0, native(stream), blocks, cols, stride, partial, out, second_out);
}

template <typename T>
void column_sum(Stream& stream, std::int64_t rows, std::int64_t cols, const T* in, acc_t<T>* out,
                acc_t<T>* workspace) {
  const ColumnSumCut cut = column_sum_cut(rows, cols, sizeof(T));
  if (rows > 0 && cols > 0) {
    launch(sum_rows<T>,
           dim3(static_cast<unsigned>(cut.column_blocks), static_cast<unsigned>(cut.row_blocks)),
           dim3(kThreads), 0, native(stream), rows, cols, cut.rows_per_block, in,
           is_aligned({in}) && cols % kVector<T> == 0, workspace);
  }
  add_blocks(stream, cut.row_blocks, cols, cols, workspace, out);
}

#define SHERD_INSTANTIATE(T) \
  template void column_sum<T>(Stream&, std::int64_t, std::int64_t, const T*, acc_t<T>*, acc_t<T>*);
SHERD_INSTANTIATE(double)
SHERD_INSTANTIATE(float)
SHERD_INSTANTIATE(bf16)
SHERD_INSTANTIATE(f16)
#undef SHERD_INSTANTIATE
template void add_blocks<double>(Stream&, std::int64_t, std::int64_t, std::int64_t, const double*,
                                 double*, double*);
template void add_blocks<float>(Stream&, std::int64_t, std::int64_t, std::int64_t, const float*,
                                float*, float*);

}  // namespace sherd::cuda
