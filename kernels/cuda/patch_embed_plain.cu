// SPDX-License-Identifier: Apache-2.0
// Patch embedding in fp32 and fp64, by multiply-adds: a block of 256 threads computes 64 x 64 of
// the result, in steps of 16 along the sum.
#include <sherd/kernels/cuda/math.h>
#include <sherd/kernels/cuda/patch_matrix.cuh>

namespace sherd::cuda {
namespace {

constexpr int kTile = 64, kStep = 16;
constexpr int kPitch = kTile + 1;
constexpr int kSide = 16;  // of the square of threads: each has every 16th row and column
constexpr int kThreads = kSide * kSide;
constexpr int kSums = kTile / kSide;
static_assert(kTile == kPatchEmbedTile<float> && kTile == kPatchEmbedTile<double>);

// result(row, column) = sum over k of left(row, k) right(column, k), from begin to end. kAcross:
// neighbours in memory are those of another row, not of another k. Then store(row, column, sum).
template <bool kAcross, typename A, typename Left, typename Right, typename Store>
__device__ __forceinline__ void multiply(A* left_tile, A* right_tile, int begin, int end,
                                         const Left& left, const Right& right, const Store& store) {
  const int thread = static_cast<int>(threadIdx.x);
  const int x = thread % kSide, y = thread / kSide;
  A sums[kSums][kSums] = {};
  for (int start = begin; start < end; start += kStep) {
#pragma unroll
    for (int i = 0; i < kTile * kStep / kThreads; ++i) {
      const int element = thread + i * kThreads;
      const int row = kAcross ? element % kTile : element / kStep;
      const int k = kAcross ? element / kTile : element % kStep;
      const bool inside = start + k < end;
      left_tile[k * kPitch + row] = inside ? left(row, start + k) : A(0);
      right_tile[k * kPitch + row] = inside ? right(row, start + k) : A(0);
    }
    __syncthreads();
#pragma unroll 4
    for (int k = 0; k < kStep; ++k) {
      A l[kSums], r[kSums];
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        l[i] = left_tile[k * kPitch + y + i * kSide];
        r[i] = right_tile[k * kPitch + x + i * kSide];
      }
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
#pragma unroll
        for (int j = 0; j < kSums; ++j) sums[i][j] = madd(l[i], r[j], sums[i][j]);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
#pragma unroll
    for (int j = 0; j < kSums; ++j) store(y + i * kSide, x + j * kSide, sums[i][j]);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(PatchMatrix<T> patches, int dim, int tiles_across, const T* weight,
                   const T* bias, T* out) {
  SHERD_SHARED(T, left_tile, kStep * kPitch);
  SHERD_SHARED(T, right_tile, kStep * kPitch);
  const int row = static_cast<int>(blockIdx.x) / tiles_across * kTile;
  const int column = static_cast<int>(blockIdx.x) % tiles_across * kTile;
  multiply<false>(
      left_tile, right_tile, 0, patches.columns,
      [&](int r, int k) {
        if (row + r >= patches.rows) return T(0);
        return patches.images[patches.row_offset(row + r) + patches.column_offset(k)];
      },
      [&](int c, int k) {
        if (column + c >= dim) return T(0);
        return weight[std::int64_t{column + c} * patches.columns + k];
      },
      [&](int r, int c, T sum) {
        r += row, c += column;
        if (r >= patches.rows || c >= dim) return;
        out[std::int64_t{r} * dim + c] = bias == nullptr ? sum : sum + bias[c];
      });
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    backward_weight_kernel(PatchMatrix<T> patches, int dim, int tiles_across, int rows_per_part,
                           const T* grad_output, T* partial) {
  SHERD_SHARED(T, left_tile, kStep * kPitch);
  SHERD_SHARED(T, right_tile, kStep * kPitch);
  const int row = static_cast<int>(blockIdx.x) / tiles_across * kTile;
  const int column = static_cast<int>(blockIdx.x) % tiles_across * kTile;
  const int begin = static_cast<int>(blockIdx.y) * rows_per_part;
  const int end = begin + rows_per_part < patches.rows ? begin + rows_per_part : patches.rows;
  T* const out = partial + std::int64_t{blockIdx.y} * dim * patches.columns;
  multiply<true>(
      left_tile, right_tile, begin, end,
      [&](int r, int k) {
        if (row + r >= dim) return T(0);
        return grad_output[std::int64_t{k} * dim + row + r];
      },
      [&](int c, int k) {
        if (column + c >= patches.columns) return T(0);
        return patches.images[patches.row_offset(k) + patches.column_offset(column + c)];
      },
      [&](int r, int c, T sum) {
        r += row, c += column;
        if (r < dim && c < patches.columns) out[std::int64_t{r} * patches.columns + c] = sum;
      });
}

}  // namespace

template <typename T>
void plain_patch_embed_forward(Stream& stream, const PatchEmbedForward<T>& p) {
  const PatchMatrix<T> patches(p.shape, p.images);
  const std::int64_t across = ceil_div(p.dim, kTile);
  launch(forward_kernel<T>, dim3(static_cast<unsigned>(ceil_div(patches.rows, kTile) * across)),
         dim3(kThreads), 0, native(stream), patches, static_cast<int>(p.dim),
         static_cast<int>(across), p.weight, p.bias, p.out);
}

template <typename T>
void plain_patch_embed_backward_weight(Stream& stream, const PatchEmbedBackwardWeight<T>& p,
                                       const PatchEmbedCut& cut, T* sums) {
  const PatchMatrix<T> patches(p.shape, p.images);
  const std::int64_t across = ceil_div(patches.columns, kTile);
  launch(backward_weight_kernel<T>,
         dim3(static_cast<unsigned>(ceil_div(p.dim, kTile) * across),
              static_cast<unsigned>(cut.parts)),
         dim3(kThreads), 0, native(stream), patches, static_cast<int>(p.dim),
         static_cast<int>(across), static_cast<int>(cut.rows_per_part), p.grad_output, sums);
}

#define SHERD_INSTANTIATE(T)                                                                      \
  template void plain_patch_embed_forward<T>(Stream&, const PatchEmbedForward<T>&);               \
  template void plain_patch_embed_backward_weight<T>(Stream&, const PatchEmbedBackwardWeight<T>&, \
                                                     const PatchEmbedCut&, T*);
SHERD_INSTANTIATE(double)
SHERD_INSTANTIATE(float)
#undef SHERD_INSTANTIATE

}  // namespace sherd::cuda
