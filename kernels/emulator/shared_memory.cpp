// SPDX-License-Identifier: Apache-2.0
// Shared memory of a block. Static arrays lie in an arena with strips between them, dynamic shared
// memory ends at a page without access. What nobody may write holds 0xFF bytes and is checked after
// each block; the address sanitizer knows it as poisoned and finds the writing line.
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "block.h"
#include "limits.h"

namespace emulator {
namespace {

constexpr std::size_t kStrip = 128;  // after each static array
constexpr std::size_t kStaticArena = 4 * kMaxStaticShared;
constexpr std::size_t kPage = 4096;
constexpr std::size_t kDynamicArena = (kMaxShared + 2 * kPage) & ~(kPage - 1);

unsigned char* map_arena(std::size_t bytes) {
  void* p =
      mmap(nullptr, bytes + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED || mprotect(static_cast<char*>(p) + bytes, kPage, PROT_NONE) != 0) {
    std::fprintf(stderr, "emulator: no memory for the shared memory of a block\n");
    std::abort();
  }
  return static_cast<unsigned char*>(p);
}

std::size_t round_up(std::size_t n, std::size_t to) {
  return (n + to - 1) / to * to;
}

unsigned char* dynamic_arena(const Block& b) {
  return b.dynamic_data + round_up(b.dynamic_bytes, 128) - kDynamicArena;
}

bool all_ones(const unsigned char* from, const unsigned char* to) {
  return std::all_of(from, to, [](unsigned char c) { return c == 0xFF; });
}

}  // namespace

void prepare_shared_memory(Block& b) {
  if (b.static_arena == nullptr) {
    b.static_arena = map_arena(kStaticArena);
    b.static_end = kStaticArena;
    b.dynamic_bytes = 0;
    b.dynamic_data = map_arena(kDynamicArena) + kDynamicArena;
  }
  unsigned char* arena = dynamic_arena(b);
  b.dynamic_bytes = b.launch->shared_bytes;
  b.dynamic_data = arena + kDynamicArena - round_up(b.dynamic_bytes, 128);
  unpoison(arena, kDynamicArena);
  poison(arena, static_cast<std::size_t>(b.dynamic_data - arena));
  poison(b.dynamic_data + b.dynamic_bytes, round_up(b.dynamic_bytes, 128) - b.dynamic_bytes);
}

void poison_shared_memory(Block& b) {
  unpoison(b.static_arena, b.static_end);
  std::memset(b.static_arena, 0xFF, b.static_end);
  poison(b.static_arena, kStaticArena);
  b.static_arrays.clear();
  b.static_bytes = b.static_end = 0;
  if (EMULATOR_ASAN) {
    std::memset(b.dynamic_data, 0xFF, b.dynamic_bytes);
  } else {
    std::memset(b.dynamic_data, 0xFF, round_up(b.dynamic_bytes, 128));
  }
}

void check_shared_memory(Block& b) {
  if (EMULATOR_ASAN) return;  // has found it where it happened
  std::string what;
  const std::size_t slack = round_up(b.dynamic_bytes, 128) - b.dynamic_bytes;
  if (!all_ones(b.dynamic_data + b.dynamic_bytes, b.dynamic_data + b.dynamic_bytes + slack)) {
    what = "bytes after the " + std::to_string(b.dynamic_bytes) +
           " bytes of dynamic shared memory were written";
  }
  for (const StaticArray& array : b.static_arrays) {
    const unsigned char* end = array.data + array.bytes;
    if (all_ones(end, array.data + round_up(array.bytes, kStrip) + kStrip)) continue;
    what = std::string("bytes after the ") + std::to_string(array.bytes) +
           " bytes of the shared array '" + array.name + "' were written";
    break;
  }
  if (!what.empty()) b.failure = what + "\n" + describe_position(b, {nullptr, 0});
}

void release_shared_memory(Block& b) {
  if (b.static_arena == nullptr) return;
  unsigned char* arena = dynamic_arena(b);
  unpoison(arena, kDynamicArena);
  unpoison(b.static_arena, kStaticArena);
  munmap(arena, kDynamicArena + kPage);
  munmap(b.static_arena, kStaticArena + kPage);
}

void* static_shared(const void* tag, std::size_t bytes, std::size_t alignment, const char* name) {
  const Hidden hidden;
  Block& b = *block;
  for (const StaticArray& array : b.static_arrays) {
    if (array.tag == tag) return array.data;
  }
  b.static_bytes = round_up(b.static_bytes, std::max<std::size_t>(alignment, 16)) + bytes;
  const std::size_t space = round_up(bytes, kStrip) + kStrip;
  if (b.static_bytes > kMaxStaticShared || b.static_end + space > kStaticArena) {
    b.failure = "static shared memory of a kernel is limited to " +
                std::to_string(kMaxStaticShared) + " bytes; with '" + name + "' it takes " +
                std::to_string(b.static_bytes);
    fail({nullptr, 0}, b.failure.c_str());
  }
  unsigned char* data = b.static_arena + b.static_end;
  unpoison(data, bytes);
  std::memset(data, 0xFF, EMULATOR_ASAN ? bytes : space);
  b.static_arrays.push_back({tag, name, data, bytes});
  b.static_end += space;
  return data;
}

void* dynamic_shared() {
  return block->dynamic_data;
}

void check_shared(const void* address, std::size_t bytes, const char* operation, Location where) {
  Block& b = *block;
  const auto* p = static_cast<const unsigned char*>(address);
  const bool aligned = reinterpret_cast<std::uintptr_t>(p) % bytes == 0;
  const bool dynamic = p >= b.dynamic_data && p + bytes <= b.dynamic_data + b.dynamic_bytes;
  const bool fixed = p >= b.static_arena && p + bytes <= b.static_arena + b.static_end;
  if (aligned && (dynamic || fixed)) return;
  const Hidden hidden;
  b.failure = std::string(operation) + ": the address is not " +
              (aligned ? "in the block's shared memory" : "a multiple of " + std::to_string(bytes));
  fail(where, b.failure.c_str());
}

}  // namespace emulator
