// SPDX-License-Identifier: Apache-2.0
// A fiber: a stack and a place to go on. One for each thread of the running block.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sanitizers.h"

// The switch is 15 lines of assembly on x86-64, and ucontext (100 times slower: it saves the signal
// mask by a system call) elsewhere.
#if defined(__x86_64__) && !defined(EMULATOR_UCONTEXT)
#define EMULATOR_ASSEMBLY_SWITCH 1
#else
#define EMULATOR_ASSEMBLY_SWITCH 0
#include <ucontext.h>
#endif

namespace emulator {

#if EMULATOR_TSAN || EMULATOR_ASAN
inline constexpr std::size_t kStackBytes = 512 * 1024;
#else
inline constexpr std::size_t kStackBytes = 128 * 1024;
#endif

struct Context {
#if EMULATOR_ASSEMBLY_SWITCH
  void* stack_pointer = nullptr;
#else
  ucontext_t machine;
#endif
  char* stack = nullptr;  // null: the OS thread's own, of a launch's caller
  void* tsan_fiber = nullptr;
  void* asan_fake_stack = nullptr;
  const void* stack_low = nullptr;  // of the OS thread, for the address sanitizer
  std::size_t stack_bytes = 0;
};

// Stacks come from a pool of the OS thread, which returns to all when the thread ends. A page
// without access lies below each.
char* take_stack();
void give_stack(char* stack);
bool is_stack_guard(const void* address);  // of any stack

void become_context(Context& caller);                   // the running OS thread
void prepare_context(Context& fiber, void (*entry)());  // takes a stack if it has none
void destroy_tsan_fiber(Context& fiber);
// ends: the current fiber does not go on.
void switch_context(Context& from, Context& to, bool ends = false);
void context_entered();  // the first thing that an entry calls

}  // namespace emulator
