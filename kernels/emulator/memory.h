// SPDX-License-Identifier: Apache-2.0
// What the guard asks of device memory.
#pragma once

#include "runtime.h"

namespace emulator {

struct Allocation {
  char* address;
  std::size_t bytes;  // as asked for
  int device;
};
// Without locks, for signal handlers.
bool is_device_address(const void* address);
bool find_allocation_unlocked(const void* address, Allocation& found);

// Asked by cudaFree before it frees: what is wrong with that, "" for nothing.
void check_before_free(std::string (*check)(const char* address, std::size_t bytes));

// The first `bytes` of a guarded range are in use.
void grow_guarded_range(char* low, std::size_t bytes);

}  // namespace emulator
