// SPDX-License-Identifier: Apache-2.0
// Device memory and pinned host memory.
//
// A device's memory lies in one reserved range of addresses, so that the guard can close it by one
// call; blocks of it are found first-fit. Under sanitizers every allocation is one of the host's,
// which they watch. At least 256 bytes after an allocation hold 0xFF and are checked when it is
// freed.
#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "block.h"
#include "stream.h"

namespace emulator {
namespace {

constexpr bool kSanitized = EMULATOR_ASAN || EMULATOR_TSAN;
constexpr std::size_t kAlignment = 512;
constexpr std::size_t kMargin = 256;
constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr int kMaxDevices = 64;

std::size_t round_up(std::size_t n, std::size_t to) {
  return (n + to - 1) / to * to;
}
std::size_t with_margin(std::size_t bytes) {
  return kSanitized ? bytes : round_up(bytes + kMargin, kAlignment);
}

struct Arena {
  char* low = nullptr;
  std::size_t reserved = 0, used_to = 0;  // used_to: what the guard opens and closes
  std::size_t allocated = 0;              // bytes asked for, rounded up to 512
  std::map<char*, std::size_t> holes;     // below used_to
};

std::mutex mutex;
Arena arenas[kMaxDevices];
std::map<char*, Allocation>& allocations() {
  static auto* all = new std::map<char*, Allocation>;
  return *all;
}
std::atomic<std::string (*)(const char*, std::size_t)> free_check{nullptr};

std::map<char*, std::size_t>& pinned() {
  static auto* all = new std::map<char*, std::size_t>;
  return *all;
}

void reserve(Arena& arena) {
  // Twice the device's memory: room for holes that do not fit, as virtual addresses have on a
  // device.
  arena.reserved = round_up(2 * device_bytes(), kHugePage) + kHugePage;
  void* p =
      mmap(nullptr, arena.reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) {
    report("no addresses for the memory of a device: " + std::to_string(arena.reserved) +
           " bytes\n");
  }
  const auto start = reinterpret_cast<std::uintptr_t>(p);
  const std::size_t skip = (kHugePage - start % kHugePage) % kHugePage;
  arena.low = static_cast<char*>(p) + skip;
  arena.reserved -= skip;
  madvise(arena.low, arena.reserved, MADV_HUGEPAGE);
  guard_range(arena.low, 0);
}

char* take(Arena& arena, std::size_t bytes) {
  if (kSanitized) {
    void* p = nullptr;
    return posix_memalign(&p, kAlignment, bytes) == 0 ? static_cast<char*>(p) : nullptr;
  }
  if (arena.low == nullptr) reserve(arena);
  for (auto hole = arena.holes.begin(); hole != arena.holes.end(); ++hole) {
    if (hole->second < bytes) continue;
    char* found = hole->first;
    const std::size_t left = hole->second - bytes;
    arena.holes.erase(hole);
    if (left != 0) arena.holes[found + bytes] = left;
    return found;
  }
  if (arena.reserved - arena.used_to < bytes) return nullptr;
  char* found = arena.low + arena.used_to;
  const std::size_t to = round_up(arena.used_to + bytes, kHugePage);
  if (to > arena.used_to + bytes) arena.holes[found + bytes] = to - arena.used_to - bytes;
  arena.used_to = to;
  grow_guarded_range(arena.low, to);
  return found;
}

void give_back(Arena& arena, char* address, std::size_t bytes) {
  if (kSanitized) return std::free(address);
  if (bytes >= kHugePage) madvise(address, bytes, MADV_DONTNEED);
  auto hole = arena.holes.emplace(address, bytes).first;
  const auto next = std::next(hole);
  if (next != arena.holes.end() && hole->first + hole->second == next->first) {
    hole->second += next->second;
    arena.holes.erase(next);
  }
  if (hole == arena.holes.begin()) return;
  const auto before = std::prev(hole);
  if (before->first + before->second == hole->first) {
    before->second += hole->second;
    arena.holes.erase(hole);
  }
}

template <class Map>
auto find_in(Map& map, const void* address) {
  auto found = map.upper_bound(const_cast<char*>(static_cast<const char*>(address)));
  return found == map.begin() ? map.end() : std::prev(found);
}

}  // namespace

bool is_device_address(const void* address) {
  const auto* p = static_cast<const char*>(address);
  return std::any_of(arenas, arenas + kMaxDevices, [&](const Arena& arena) {
    return p >= arena.low && p < arena.low + arena.reserved;
  });
}

void check_before_free(std::string (*check)(const char* address, std::size_t bytes)) {
  free_check = check;
}

bool find_allocation_unlocked(const void* address, Allocation& found) {
  const auto it = find_in(allocations(), address);
  if (it == allocations().end() || address >= it->first + it->second.bytes) return false;
  found = it->second;
  return true;
}

Pointer find_pointer(const void* address) {
  const HiddenLocks hidden;
  const std::lock_guard lock(mutex);
  Allocation found;
  if (find_allocation_unlocked(address, found)) {
    const auto offset = static_cast<std::size_t>(static_cast<const char*>(address) - found.address);
    return {cudaMemoryTypeDevice, found.device, found.bytes - offset};
  }
  const auto it = find_in(pinned(), address);
  if (it != pinned().end() && address < it->first + it->second) {
    const auto offset = static_cast<std::size_t>(static_cast<const char*>(address) - it->first);
    return {cudaMemoryTypeHost, 0, it->second - offset};
  }
  return {};
}

}  // namespace emulator

using namespace emulator;

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  if (pointer == nullptr) return remember(cudaErrorInvalidValue);
  if (const cudaError_t error = refuse_unsafe_call()) return remember(error);
  *pointer = nullptr;
  if (bytes == 0) return cudaSuccess;
  const HiddenLocks hidden;
  const std::lock_guard lock(mutex);
  const int device = current_device();
  Arena& arena = arenas[device];
  const std::size_t counted = round_up(bytes, kAlignment);
  if (bytes > device_bytes() || arena.allocated + counted > device_bytes()) {
    return remember(cudaErrorMemoryAllocation);
  }
  char* address = take(arena, with_margin(bytes));
  if (address == nullptr) return remember(cudaErrorMemoryAllocation);
  arena.allocated += counted;
  allocations()[address] = {address, bytes, device};
  const DeviceAccess access;
  std::memset(address, 0xFF, with_margin(bytes));
  *pointer = address;
  return cudaSuccess;
}

cudaError_t cudaFree(void* pointer) {
  if (pointer == nullptr) return cudaSuccess;
  if (const cudaError_t error = refuse_unsafe_call()) return remember(error);
  Allocation freed{};
  {
    const HiddenLocks hidden;
    const std::lock_guard lock(mutex);
    const auto found = allocations().find(static_cast<char*>(pointer));
    if (found == allocations().end()) return remember(cudaErrorInvalidValue);
    freed = found->second;
  }
  if (const auto check = free_check.load()) {
    const std::string problem = check(freed.address, freed.bytes);
    if (!problem.empty()) report(problem);
  }
  for (const StreamPtr& stream : all_streams(freed.device)) drain(stream);
  std::string damage;
  {
    const HiddenLocks hidden;
    const std::lock_guard lock(mutex);
    const DeviceAccess access;
    const auto* end = reinterpret_cast<const unsigned char*>(freed.address) + freed.bytes;
    const auto* limit =
        reinterpret_cast<const unsigned char*>(freed.address) + with_margin(freed.bytes);
    const auto* written = std::find_if(end, limit, [](unsigned char c) { return c != 0xFF; });
    if (written != limit) {
      damage = "bytes after the " + std::to_string(freed.bytes) +
               " bytes of a device allocation were written, the first of them " +
               std::to_string(written - end) + " bytes after its end (found by cudaFree)\n";
    }
    allocations().erase(freed.address);
    Arena& arena = arenas[freed.device];
    arena.allocated -= round_up(freed.bytes, kAlignment);
    give_back(arena, freed.address, with_margin(freed.bytes));
  }
  if (!damage.empty()) report(damage);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  if (free_bytes == nullptr || total_bytes == nullptr) return remember(cudaErrorInvalidValue);
  const HiddenLocks hidden;
  const std::lock_guard lock(mutex);
  *total_bytes = device_bytes();
  *free_bytes = device_bytes() - arenas[current_device()].allocated;
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned flags) {
  constexpr unsigned kFlags =
      cudaHostAllocPortable | cudaHostAllocMapped | cudaHostAllocWriteCombined;
  if (pointer == nullptr || (flags & ~kFlags) != 0) return remember(cudaErrorInvalidValue);
  if (const cudaError_t error = refuse_unsafe_call()) return remember(error);
  *pointer = nullptr;
  if (bytes == 0) return cudaSuccess;
  const HiddenLocks hidden;
  const std::lock_guard lock(mutex);
  char* address = static_cast<char*>(std::aligned_alloc(4096, round_up(bytes, 4096)));
  if (address == nullptr) return remember(cudaErrorMemoryAllocation);
  pinned()[address] = bytes;
  *pointer = address;
  return cudaSuccess;
}
cudaError_t cudaMallocHost(void** pointer, size_t bytes) {
  return cudaHostAlloc(pointer, bytes, cudaHostAllocDefault);
}
cudaError_t cudaFreeHost(void* pointer) {
  if (pointer == nullptr) return cudaSuccess;
  if (const cudaError_t error = refuse_unsafe_call()) return remember(error);
  for (const StreamPtr& stream : all_streams(current_device())) drain(stream);
  const HiddenLocks hidden;
  const std::lock_guard lock(mutex);
  if (pinned().erase(static_cast<char*>(pointer)) == 0) return remember(cudaErrorInvalidValue);
  std::free(pointer);
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  if (attributes == nullptr || pointer == nullptr) return remember(cudaErrorInvalidValue);
  const Pointer found = find_pointer(pointer);
  void* address = const_cast<void*>(pointer);
  *attributes = {found.type, found.type == cudaMemoryTypeUnregistered ? -2 : found.device,
                 found.type == cudaMemoryTypeUnregistered ? nullptr : address,
                 found.type == cudaMemoryTypeDevice ? nullptr : address};
  return cudaSuccess;
}
