// SPDX-License-Identifier: Apache-2.0
// What the files of the host side share: errors of a thread, devices, pointers.
#pragma once

#include <cstddef>
#include <functional>
#include <string>

#include <emulator/emulator.h>
#include <emulator/runtime_api.h>

namespace emulator {

// Remembers an error as the thread's last one, and returns it.
cudaError_t remember(cudaError_t error);

int device_count();
std::size_t device_bytes();
int current_device();

// ---- memory.cpp
struct Pointer {
  cudaMemoryType type = cudaMemoryTypeUnregistered;
  int device = 0;
  std::size_t bytes_after = 0;  // from the address to the end of its allocation
};
Pointer find_pointer(const void* address);

// ---- guard.cpp: device memory is reachable while one of these lives anywhere.
class DeviceAccess {
 public:
  DeviceAccess();
  ~DeviceAccess();
  DeviceAccess(const DeviceAccess&) = delete;
  DeviceAccess& operator=(const DeviceAccess&) = delete;
};
// The guard is off while there are streams with threads.
void stream_threads_changed(int by);
// A range of reserved addresses that becomes reachable and unreachable with the others.
void guard_range(char* low, std::size_t bytes);

}  // namespace emulator
