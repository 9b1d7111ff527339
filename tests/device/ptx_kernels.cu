// SPDX-License-Identifier: Apache-2.0
#include <sherd/runtime/cuda/device_code.h>

#include "ptx_kernels.h"

namespace sherd::test {
namespace {

using cuda::launch;
using cuda::native;
namespace ptx = cuda::ptx;

__global__ void ldmatrix_kernel(int matrices, bool transposed, const std::uint16_t* rows,
                                std::uint32_t* out) {
  SHERD_SHARED(std::uint16_t, tile, 32 * 8);
  const int lane = static_cast<int>(threadIdx.x);
  for (int i = 0; i < 8; ++i) tile[lane * 8 + i] = rows[lane * 8 + i];
  __syncthreads();
  const std::uint16_t* row = tile + (matrices == 4 ? lane : lane % 16) * 8;
  std::uint32_t four[4] = {}, two[2] = {};
  if (matrices == 4 && transposed) ptx::ldmatrix_x4_trans(four, row);
  if (matrices == 4 && !transposed) ptx::ldmatrix_x4(four, row);
  if (matrices == 2 && transposed) ptx::ldmatrix_x2_trans(two, row);
  if (matrices == 2 && !transposed) ptx::ldmatrix_x2(two, row);
  for (int i = 0; i < matrices; ++i) out[lane * 4 + i] = matrices == 4 ? four[i] : two[i % 2];
}

template <typename T>
__global__ void mma_kernel(const std::uint32_t* a, const std::uint32_t* b, float* d) {
  const int lane = static_cast<int>(threadIdx.x);
  std::uint32_t left[4], right[2];
  float sum[4];
  for (int i = 0; i < 4; ++i) left[i] = a[lane * 4 + i];
  for (int i = 0; i < 2; ++i) right[i] = b[lane * 2 + i];
  for (int i = 0; i < 4; ++i) sum[i] = d[lane * 4 + i];
  ptx::mma_m16n8k16<T>(sum, left, right);
  for (int i = 0; i < 4; ++i) d[lane * 4 + i] = sum[i];
}

__global__ void shuffle_kernel(const std::uint32_t* values, std::uint32_t* out) {
  const int lane = static_cast<int>(threadIdx.x);
  const std::uint32_t value = values[lane];
  out[lane * 5] = __shfl_xor_sync(0xffffffffu, value, 5);
  out[lane * 5 + 1] = __shfl_up_sync(0xffffffffu, value, 3);
  out[lane * 5 + 2] = __shfl_down_sync(0xffffffffu, value, 3);
  out[lane * 5 + 3] = __shfl_sync(0xffffffffu, value, 7);
  out[lane * 5 + 4] = __ballot_sync(0xffffffffu, value % 2 == 1);
}

__global__ void copy_kernel(bool whole, const std::uint16_t* from, std::uint16_t* to) {
  SHERD_SHARED(std::uint16_t, tile, 32 * 8);
  const int lane = static_cast<int>(threadIdx.x);
  const int bytes = 16 * (lane + 1) / 32;
  if (whole) {
    ptx::cp_async16(tile + lane * 8, from + lane * 8, bytes);
  } else {
    for (int i = 0; i < 8; i += 2) {
      const int left = bytes - 2 * i;
      ptx::cp_async4(tile + lane * 8 + i, from + lane * 8 + i, left < 0 ? 0 : left < 4 ? left : 4);
    }
  }
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  __syncthreads();
  for (int i = 0; i < 8; ++i) to[lane * 8 + i] = tile[lane * 8 + i];
}

}  // namespace

void run_ldmatrix(Stream& stream, int matrices, bool transposed, const std::uint16_t* rows,
                  std::uint32_t* out) {
  launch(ldmatrix_kernel, dim3(1), dim3(32), 0, native(stream), matrices, transposed, rows, out);
}

void run_mma(Stream& stream, bool of_bf16, const std::uint32_t* a, const std::uint32_t* b,
             float* d) {
  launch(of_bf16 ? mma_kernel<bf16> : mma_kernel<f16>, dim3(1), dim3(32), 0, native(stream), a, b,
         d);
}

void run_shuffles(Stream& stream, const std::uint32_t* values, std::uint32_t* out) {
  launch(shuffle_kernel, dim3(1), dim3(32), 0, native(stream), values, out);
}

void run_copy(Stream& stream, bool whole, const std::uint16_t* from, std::uint16_t* to) {
  launch(copy_kernel, dim3(1), dim3(32), 0, native(stream), whole, from, to);
}

}  // namespace sherd::test
