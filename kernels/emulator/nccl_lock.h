// SPDX-License-Identifier: Apache-2.0
// The one lock of all emulated communicators.
#pragma once

#include <condition_variable>
#include <mutex>

namespace emulator::nccl {

std::mutex& mutex();
std::condition_variable& changed();  // of anything that somebody may wait for

}  // namespace emulator::nccl
