// SPDX-License-Identifier: Apache-2.0
// The branch of device.h for the emulator. Include that one.
#pragma once

#include <cuda_runtime.h>
#include <emulator/device.h>

#include <utility>

#define SHERD_SHARED(T, name, count) EMULATOR_SHARED(T, name, count)
#define SHERD_DYNAMIC_SHARED(T, name) EMULATOR_DYNAMIC_SHARED(T, name)

namespace sherd::cuda {

using emulator::launch;
namespace ptx = emulator::ptx;

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
