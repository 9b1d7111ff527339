// SPDX-License-Identifier: Apache-2.0
// What the tensor-core kernels of attention share: tiles in shared memory and their way there and
// back.
//
// A block works on one head of one sample with kWarps warps. A `slice` is 16 consecutive rows
// (queries or keys): what one mma takes. A tile in shared memory has D elements a row.
#pragma once

#include <sherd/kernels/cuda/attention.h>
#include <sherd/kernels/cuda/device.h>
#include <sherd/kernels/cuda/fragments.cuh>

namespace sherd::cuda::attention {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kSlice = 16;
constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kLn2 = 0.69314718055994530942f;

// The matrix of one head of one sample; offsets inside it are int, see tensor_cores_take.
template <typename T>
struct Rows {
  __device__ __forceinline__ Rows(const AttentionView<T>& view, int b, int h)
      : data(view.data + b * view.batch_stride + h * view.head_stride),
        stride(static_cast<int>(view.token_stride)) {}
  T* data;
  int stride;
};

// Starts the copy of kRows rows from `first` on into a tile; rows from `count` on are zeros.
template <int kRows, int D, typename T>
__device__ __forceinline__ void copy_rows(T* tile, const Rows<const T>& rows, int first,
                                          int count) {
  constexpr int kChunks = D / 8;  // of 16 bytes
  static_assert(kRows * kChunks % kThreads == 0);
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll(4)  // more addresses at a time would cost registers
  for (int j = 0; j < kRows * kChunks / kThreads; ++j) {
    int row = (thread + j * kThreads) / kChunks, column = (thread + j * kThreads) % kChunks * 8;
    if constexpr (kThreads % kChunks == 0) {  // the same, in sums that share their first part
      row = thread / kChunks + j * (kThreads / kChunks);
      column = thread % kChunks * 8;
    }
    const bool inside = first + row < count;
    ptx::cp_async16(tile + row * kPitch<D> + column,
                    rows.data + (inside ? first + row : 0) * rows.stride + column, inside ? 16 : 0);
  }
}

// Two neighbouring accumulators of 16 x 8, rounded to T, are a left operand of 16 x 16.
template <typename T>
__device__ __forceinline__ void pack_left(std::uint32_t (&a)[4], const float (&low)[4],
                                          const float (&high)[4]) {
  a[0] = pack2<T>(low[0], low[1]);
  a[1] = pack2<T>(low[2], low[3]);
  a[2] = pack2<T>(high[0], high[1]);
  a[3] = pack2<T>(high[2], high[3]);
}

// Writes a slice of accumulators, times a factor for rows `group` and `group + 8`, to rows from
// `first` on; those from `count` on are left out. `staging` is 16 rows of a tile that only this
// warp uses: through it, global memory is written 16 bytes at a time.
template <int D, typename T>
__device__ __forceinline__ void store_slice(const float (&sums)[D / 8][4], float factor_low,
                                            float factor_high, T* staging, const Rows<T>& rows,
                                            int first, int count, const Lane& lane) {
  const auto pair = [&](int row, int column) {
    return reinterpret_cast<std::uint32_t*>(staging + row * kPitch<D> + column);
  };
  __syncwarp();  // other lanes may have been the last to read there
#pragma unroll
  for (int i = 0; i < D / 8; ++i) {
    const int column = i * 8 + lane.column;
    *pair(lane.group, column) = pack2<T>(sums[i][0] * factor_low, sums[i][1] * factor_low);
    *pair(lane.group + 8, column) = pack2<T>(sums[i][2] * factor_high, sums[i][3] * factor_high);
  }
  __syncwarp();
#pragma unroll
  for (int j = 0; j < kSlice * D / 8 / 32; ++j) {
    const int i = lane.lane + j * 32;
    const int row = i / (D / 8), column = i % (D / 8) * 8;
    if (first + row < count) {
      *reinterpret_cast<uint4*>(rows.data + (first + row) * rows.stride + column) =
          *reinterpret_cast<const uint4*>(staging + row * kPitch<D> + column);
    }
  }
}

// Whether the tensor-core kernels can read and write the views of `tokens` rows a head: whole
// 16-byte vectors, less than 2^31 elements from the first row to the last.
template <typename... T>
bool tensor_cores_take(std::int64_t tokens, const AttentionView<T>&... views) {
  const auto take = [&](const auto& view) {
    constexpr std::int64_t kElements = 16 / sizeof(*view.data);
    return reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0 &&
           view.batch_stride % kElements == 0 && view.token_stride % kElements == 0 &&
           view.head_stride % kElements == 0 &&
           tokens * view.token_stride < (std::int64_t{1} << 31);
  };
  return (take(views) && ...);
}

// Calls body with the head dimension as a constant; false where it is not one of these.
template <typename Body>
bool with_head_dim(std::int64_t head_dim, const Body& body) {
  switch (head_dim) {
    case 32: body(std::integral_constant<int, 32>{}); return true;
    case 64: body(std::integral_constant<int, 64>{}); return true;
    case 80: body(std::integral_constant<int, 80>{}); return true;
    case 96: body(std::integral_constant<int, 96>{}); return true;
    case 128: body(std::integral_constant<int, 128>{}); return true;
    default: return false;
  }
}

}  // namespace sherd::cuda::attention
