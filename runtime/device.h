// SPDX-License-Identifier: Apache-2.0
// Where a context computes, and where the bytes of a tensor lie.
//   cpu   the processor and the memory of the process.
//   cuda  an NVIDIA GPU, or in a build with -Dcuda=emulate the emulator that stands for one.
//   meta  checks shapes and counts bytes and FLOPs, but allocates and computes nothing: the
//   unchanged
//         training step runs on it to plan a model that fits on no machine at hand.
#pragma once

#include <sherd/runtime/api.h>

#include <cstdint>
#include <string_view>

namespace sherd {

enum class Device : std::uint8_t { cpu, cuda, meta };

SHERD_API std::string_view name_of(Device device);
SHERD_API Device device_from_name(std::string_view name);  // throws on an unknown name

}  // namespace sherd
