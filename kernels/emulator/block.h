// SPDX-License-Identifier: Apache-2.0
// The block of threads that an OS thread runs, and its scheduler.
//
// Note [How a block runs]
// Every thread is a fiber. A thread runs until it waits for others or ends; then the scheduler
// picks the next one that is ready, first in the same warp. Nothing runs in parallel, so a kernel's
// plain reads and writes are safe for the host, and a missing barrier shows as a wrong result in
// some order, as NaN from unwritten shared memory, or as a race to the thread sanitizer. A thread
// that starts takes over the stack of one that has just ended, without a switch: kernels without
// barriers are plain loops.
#pragma once

#include <cstring>
#include <vector>

#include <emulator/device.h>
#include <emulator/emulator.h>

#include "fiber.h"

namespace emulator {

struct Warp;

struct PendingCopy {
  char* to;
  const char* from;
  int bytes, source_bytes, group;
  Location where;
};

struct Thread {
  Context context;
  uint3 index;
  unsigned lane;
  Warp* warp;
  bool started, exited;
  Wait waits;
  Location waits_at;
  int barrier;  // the number it waits at
  std::vector<PendingCopy> copies;
  int copy_group;
  void* order_token;  // of the barrier it waits at, for the thread sanitizer
};

struct Warp {
  unsigned live;   // lanes that exist: fewer than 32 in the last warp of an odd block
  unsigned ready;  // lanes that can go on
  unsigned exited;
  int meetings;
  Meeting meeting[32];
  Thread* thread[32];
  unsigned barriers;      // warp barriers begun
  char order_tokens[64];  // their addresses order threads for the thread sanitizer
};

struct Barrier {
  int arrived, expected;  // expected 0: all threads that have not exited
  int predicates, result;
  Location where;
  unsigned phase;
  // Two, since a thread may release the next phase before the others acquire this one.
  char order_tokens[2];
};

struct StaticArray {
  const void* tag;
  const char* name;
  unsigned char* data;
  std::size_t bytes;
};

struct Block {
  const Launch* launch = nullptr;  // null: no grid runs
  const std::function<void()>* body;
  Context caller;
  Thread* current;
  std::vector<Thread> threads = std::vector<Thread>(1024);
  std::vector<Warp> warps = std::vector<Warp>(32);
  int thread_count, warp_count, running_warp;
  int alive;
  Barrier barriers[16];
  Order order;
  std::uint64_t random_state;
  std::string failure;  // of an abandoned launch
  char start_token, end_token;

  // shared memory
  unsigned char* dynamic_data = nullptr;
  std::size_t dynamic_bytes;
  unsigned char* static_arena = nullptr;
  std::vector<StaticArray> static_arrays;
  std::size_t static_bytes, static_end;  // asked for; used with what lies between

  Block() = default;
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block();
};
extern EMULATOR_THREAD_LOCAL Block* block;  // of this OS thread; null before its first launch

// Runs all blocks of the grid, in turn. Throws Error if the kernel is wrong and errors are thrown.
void run_grid(const Launch& launch, const std::function<void()>& body);

// The current thread waits until its lane is made ready: who runs now.
Context* next_thread();
unsigned random_number(Block& b);
inline bool same_line(Location a, Location b) {
  return a.line == b.line && (a.file == b.file || std::strcmp(a.file, b.file) == 0);
}

// ---- shared_memory.cpp
void prepare_shared_memory(Block& b);  // before a grid
void poison_shared_memory(Block& b);   // before a block
void check_shared_memory(Block& b);    // after a block: was anything written beyond the arrays?
void release_shared_memory(Block& b);

// ---- report.cpp
std::string kernel_name(const void* kernel);
std::string describe(Location where);
// "  kernel ...\n  block (...) thread (...), file:line\n" and where the other threads wait.
std::string describe_position(const Block& b, Location where);
void report(
    const std::string& message);  // throws Error or prints and aborts, on the caller's stack

}  // namespace emulator
