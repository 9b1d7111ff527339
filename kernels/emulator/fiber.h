// SPDX-License-Identifier: Apache-2.0
// A fiber: a stack and a place to go on. One for each thread of the running block.
#pragma once

#include <cstddef>
#include <cstdint>

#include <emulator/context.h>

#include "sanitizers.h"

namespace emulator {

#if EMULATOR_TSAN || EMULATOR_ASAN
inline constexpr std::size_t kStackBytes = 512 * 1024;
#else
inline constexpr std::size_t kStackBytes = 128 * 1024;
#endif

// Stacks come from a pool of the OS thread, which returns to all when the thread ends. A page
// without access lies below each.
char* take_stack();
void give_stack(char* stack);
void give_stack_to_all(char* stack);       // when the thread ends
bool is_stack_guard(const void* address);  // of any stack

void become_context(Context& caller);                   // the running OS thread
void prepare_context(Context& fiber, void (*entry)());  // takes a stack if it has none
// Before any thread of a block runs: what creates another would come before it. Named by its
// number.
void create_tsan_fiber(Context& fiber, int number);
void destroy_tsan_fiber(Context& fiber);
// Of a fiber that will not go on, in the middle of an operation: releases the token for it, and it
// hides no more. One that failed hid an unknown number of times; it is left to the sanitizer.
void abandon_tsan_fiber(Context& fiber, bool failed, void* token);
void leave_context(Context& from, Context& to);  // `from` does not go on
void context_entered();                          // the first thing that an entry calls

}  // namespace emulator
