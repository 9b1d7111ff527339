// SPDX-License-Identifier: Apache-2.0
// The branch of device_code.h for the emulator. Include that one.
#pragma once

#include <cuda_runtime.h>
#include <emulator/device.h>

#include <utility>

#define SHERD_SHARED(T, name, count) EMULATOR_SHARED(T, name, count)
#define SHERD_DYNAMIC_SHARED(T, name) EMULATOR_DYNAMIC_SHARED(T, name)

namespace sherd::cuda {

// Throws where the launch is refused.
void check_launch(cudaError_t error);

template <typename... P, typename... A>
void launch(void (*kernel)(P...), dim3 grid, dim3 block, std::size_t shared, cudaStream_t stream,
            A&&... arguments) {
  constexpr std::size_t kWithoutAsking = 32 * 1024;  // of 48 KiB, which static arrays share
  if (shared > kWithoutAsking) {
    check_launch(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                      cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      static_cast<int>(shared)));
  }
  check_launch(
      emulator::launch(kernel, grid, block, shared, stream, std::forward<A>(arguments)...));
}

namespace ptx {

using emulator::cp_async16;
using emulator::cp_async4;
using emulator::cp_async_commit;
using emulator::cp_async_wait;
using emulator::ex2;
using emulator::ldmatrix_x2;
using emulator::ldmatrix_x2_trans;
using emulator::ldmatrix_x4;
using emulator::ldmatrix_x4_trans;

template <typename T>
void mma_m16n8k16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2],
                  EMULATOR_HERE) {
  using Tag = std::conditional_t<std::is_same_v<T, bf16>, emulator::Bf16, emulator::F16>;
  emulator::mma_m16n8k16(d, a, b, Tag{}, where);
}

inline void store(void* to, uint4 words) {
  *static_cast<uint4*>(to) = words;
}
inline void store(void* to, uint2 words) {
  *static_cast<uint2*>(to) = words;
}

}  // namespace ptx

inline float to_float(bf16 value) {
  return static_cast<float>(value);
}
inline float to_float(f16 value) {
  return static_cast<float>(value);
}
template <typename T>
T from_float(float value) {
  return T(value);
}

template <typename T>
std::uint32_t pack2(float low, float high) {
  return T(low).bits | static_cast<std::uint32_t>(T(high).bits) << 16;
}
template <typename T>
float2 unpack2(std::uint32_t pair) {
  T low, high;
  low.bits = static_cast<std::uint16_t>(pair);
  high.bits = static_cast<std::uint16_t>(pair >> 16);
  return make_float2(to_float(low), to_float(high));
}

}  // namespace sherd::cuda
