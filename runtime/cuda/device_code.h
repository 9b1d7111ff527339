// SPDX-License-Identifier: Apache-2.0
// What kernel sources are written against: the CUDA language under nvcc, the emulator elsewhere.
// This is the one place that knows which build it is.
//
//   launch(kernel, grid, block, shared_bytes, stream, arguments...)
//   SHERD_SHARED(T, name, count)     a static shared array
//   SHERD_DYNAMIC_SHARED(T, name)    the dynamic shared memory of the launch
//   ptx::                            instructions that C++ has no words for
//   to_float, from_float, pack2, unpack2    of bf16 and f16
//
// Kernels use these and plain C++, in fp32 (fp64 for fp64): the library's own arithmetic on 16-bit
// types, approximate functions other than ex2, and CUB do not exist in the emulator.
#pragma once

#include <sherd/runtime/dtype.h>

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#include <sherd/runtime/cuda/device_code_nvcc.h>
#else
#include <sherd/runtime/cuda/device_code_emulated.h>
#endif

namespace sherd {

class Stream;

namespace cuda {

// The CUDA stream behind a Stream of a CUDA context; its device becomes the calling thread's.
cudaStream_t native(const Stream& stream);

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

// The sum over the lanes of a warp, the same bits in every lane: a butterfly adds in one fixed
// tree.
template <typename A>
__device__ __forceinline__ A warp_sum(A value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    value += __shfl_xor_sync(0xffffffffu, value, distance);
  return value;
}
template <typename A>
__device__ __forceinline__ A warp_max(A value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    const A other = __shfl_xor_sync(0xffffffffu, value, distance);
    value = other > value ? other : value;
  }
  return value;
}

}  // namespace cuda
}  // namespace sherd
