// SPDX-License-Identifier: Apache-2.0
// The branch of device_code.h for nvcc. Include that one.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <utility>

#define SHERD_SHARED(T, name, count) __shared__ __align__(16) T name[count]
#define SHERD_DYNAMIC_SHARED(T, name)                                    \
  extern __shared__ __align__(128) unsigned char sherd_dynamic_shared[]; \
  T* name = reinterpret_cast<T*>(sherd_dynamic_shared)

namespace sherd::cuda {

// Throws where the launch is refused: the message names the sizes.
void check_launch(cudaError_t error, const void* kernel, dim3 grid, dim3 block, std::size_t shared);

template <typename... P, typename... A>
void launch(void (*kernel)(P...), dim3 grid, dim3 block, std::size_t shared, cudaStream_t stream,
            A&&... arguments) {
  const void* address = reinterpret_cast<const void*>(kernel);
  constexpr std::size_t kWithoutAsking = 32 * 1024;  // of 48 KiB, which static arrays share
  if (shared > kWithoutAsking) {
    check_launch(cudaFuncSetAttribute(address, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      static_cast<int>(shared)),
                 address, grid, block, shared);
  }
  kernel<<<grid, block, shared, stream>>>(static_cast<P>(std::forward<A>(arguments))...);
  check_launch(cudaGetLastError(), address, grid, block, shared);
}

__device__ __forceinline__ float to_float(bf16 value) {
  return __uint_as_float(static_cast<unsigned>(value.bits) << 16);
}
__device__ __forceinline__ float to_float(f16 value) {
  return __half2float(__ushort_as_half(value.bits));
}
template <typename T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float value) {
  bf16 result;
  result.bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
  return result;
}
template <>
__device__ __forceinline__ f16 from_float<f16>(float value) {
  f16 result;
  result.bits = __half_as_ushort(__float2half_rn(value));
  return result;
}

// Two 16-bit values in a register, the first in the low half.
template <typename T>
__device__ __forceinline__ std::uint32_t pack2(float low, float high);
template <>
__device__ __forceinline__ std::uint32_t pack2<bf16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}
template <>
__device__ __forceinline__ std::uint32_t pack2<f16>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}
template <typename T>
__device__ __forceinline__ float2 unpack2(std::uint32_t pair) {
  T low, high;
  low.bits = static_cast<std::uint16_t>(pair);
  high.bits = static_cast<std::uint16_t>(pair >> 16);
  return make_float2(to_float(low), to_float(high));
}

namespace ptx {

__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// Loads 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8 (16
// bytes, aligned). After it lane i holds elements 2 (i % 4) and 2 (i % 4) + 1 of row i / 4 of each
// matrix, or with trans of each transposed matrix.
__device__ __forceinline__ void ldmatrix_x4(std::uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(std::uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x2(std::uint32_t (&r)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];\n"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x2_trans(std::uint32_t (&r)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];\n"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared_address(row))
               : "memory");
}

// d (16x8 fp32) += a (16x16, rows) b (16x8, columns), a and b of T. With g = lane / 4 and t = 2
// (lane % 4): a holds rows g and g + 8 at columns t, then t + 8; b rows t and t + 8 of column g; d
// rows g, then g + 8, at columns t and t + 1.
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const std::uint32_t (&a)[4],
                                             const std::uint32_t (&b)[2]);
template <>
__device__ __forceinline__ void mma_m16n8k16<bf16>(float (&d)[4], const std::uint32_t (&a)[4],
                                                   const std::uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <>
__device__ __forceinline__ void mma_m16n8k16<f16>(float (&d)[4], const std::uint32_t (&a)[4],
                                                  const std::uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Copies 16 (or 4) bytes from global to shared memory, both aligned, in the background; those
// beyond source_bytes are zeros. Complete after its group is committed and waited for, for the
// thread that copied; for others after a barrier.
__device__ __forceinline__ void cp_async16(void* to, const void* from, int source_bytes = 16) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(to)),
               "l"(from), "r"(source_bytes)
               : "memory");
}
__device__ __forceinline__ void cp_async4(void* to, const void* from, int source_bytes = 4) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(shared_address(to)),
               "l"(from), "r"(source_bytes)
               : "memory");
}
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}
// Until at most `pending` of this thread's latest groups are under way.
template <int pending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(pending) : "memory");
}

// One access to global memory, aligned to its size. nvcc splits some assignments of these types
// into words of four bytes.
__device__ __forceinline__ void store(void* to, uint4 words) {
  asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(__cvta_generic_to_global(to)),
               "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w)
               : "memory");
}
__device__ __forceinline__ void store(void* to, uint2 words) {
  asm volatile("st.global.v2.u32 [%0], {%1,%2};" ::"l"(__cvta_generic_to_global(to)), "r"(words.x),
               "r"(words.y)
               : "memory");
}

// 2^x, two units in the last place; subnormal results are 0.
__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace ptx
}  // namespace sherd::cuda
