// SPDX-License-Identifier: Apache-2.0
// Limits of the emulated device: those of compute capability 9.0.
#pragma once

#include <cstddef>

namespace emulator {

inline constexpr std::size_t kMaxStaticShared = 48 * 1024;
inline constexpr std::size_t kMaxShared = 227 * 1024;  // dynamic, with cudaFuncSetAttribute
inline constexpr unsigned kMaxBlockThreads = 1024;
inline constexpr unsigned kMaxBlockX = 1024, kMaxBlockY = 1024, kMaxBlockZ = 64;
inline constexpr unsigned kMaxGridX = 2147483647, kMaxGridY = 65535, kMaxGridZ = 65535;

}  // namespace emulator
