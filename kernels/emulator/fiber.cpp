// SPDX-License-Identifier: Apache-2.0
#include "fiber.h"

#include <pthread.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <vector>

namespace emulator {
namespace {

constexpr std::size_t kGuardBytes = 4096;
// Room to start stacks at different offsets: at equal ones all fibers would share few cache sets.
constexpr std::size_t kColors = 32, kColorBytes = 256;
constexpr std::size_t kMappingBytes = kGuardBytes + kStackBytes + kColors * kColorBytes;

struct Stacks {
  std::mutex mutex;
  std::vector<char*> free, mappings;
};
Stacks& shared_stacks() {
  static Stacks* stacks = new Stacks;  // outlives every thread
  return *stacks;
}

struct ThreadStacks {
  std::vector<char*> free;
  ~ThreadStacks() {
    const HiddenLocks hidden;
    Stacks& shared = shared_stacks();
    const std::lock_guard lock(shared.mutex);
    shared.free.insert(shared.free.end(), free.begin(), free.end());
  }
};
thread_local ThreadStacks thread_stacks;

char* map_stack(Stacks& shared) {
  void* mapping = mmap(nullptr, kMappingBytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED || mprotect(mapping, kGuardBytes, PROT_NONE) != 0) {
    std::fprintf(stderr, "emulator: no memory for the stack of a thread of a block\n");
    std::abort();
  }
  shared.mappings.push_back(static_cast<char*>(mapping));
  return shared.mappings.back() + kGuardBytes + shared.mappings.size() % kColors * kColorBytes;
}

}  // namespace

char* take_stack() {
  std::vector<char*>& free = thread_stacks.free;
  if (free.empty()) {
    const HiddenLocks hidden;
    Stacks& shared = shared_stacks();
    const std::lock_guard lock(shared.mutex);
    if (shared.free.empty()) shared.free.push_back(map_stack(shared));
    free.push_back(shared.free.back());
    shared.free.pop_back();
  }
  char* stack = free.back();
  free.pop_back();
  return stack;
}

void give_stack(char* stack) {
  thread_stacks.free.push_back(stack);
}

void give_stack_to_all(char* stack) {
  const HiddenLocks hidden;
  Stacks& shared = shared_stacks();
  const std::lock_guard lock(shared.mutex);
  shared.free.push_back(stack);
}

bool is_stack_guard(const void* address) {
  // Called from a signal handler: no lock, a wrong answer costs a less clear message.
  for (const char* mapping : shared_stacks().mappings) {
    if (address >= mapping && address < mapping + kGuardBytes) return true;
  }
  return false;
}

void become_context([[maybe_unused]] Context& caller) {
#if EMULATOR_TSAN
  caller.tsan_fiber = __tsan_get_current_fiber();
#endif
#if EMULATOR_ASAN
  if (caller.stack_low == nullptr) {
    pthread_attr_t attributes;
    void* low;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &low, &caller.stack_bytes);
    pthread_attr_destroy(&attributes);
    caller.stack_low = low;
  }
#endif
}

void prepare_context(Context& fiber, void (*entry)()) {
  if (fiber.stack == nullptr) fiber.stack = take_stack();
#if EMULATOR_ASSEMBLY_SWITCH
  const auto top =
      (reinterpret_cast<std::uintptr_t>(fiber.stack) + kStackBytes) & ~std::uintptr_t{63};
  void** sp = reinterpret_cast<void**>(top);
  *--sp = nullptr;  // where the entry would return to
  fiber.stack_pointer = sp;
  fiber.instruction = reinterpret_cast<void*>(entry);
  fiber.frame = nullptr;
#else
  getcontext(&fiber.machine);
  fiber.machine.uc_stack.ss_sp = fiber.stack;
  fiber.machine.uc_stack.ss_size = kStackBytes;
  fiber.machine.uc_link = nullptr;
  makecontext(&fiber.machine, entry, 0);
#endif
}

void create_tsan_fiber([[maybe_unused]] Context& fiber, [[maybe_unused]] int number) {
#if EMULATOR_TSAN
  if (fiber.tsan_fiber != nullptr) return;
  fiber.tsan_fiber = __tsan_create_fiber(0);
  __tsan_set_fiber_name(fiber.tsan_fiber,
                        ("thread " + std::to_string(number) + " of a block").c_str());
#endif
}

void destroy_tsan_fiber([[maybe_unused]] Context& fiber) {
#if EMULATOR_TSAN
  if (fiber.tsan_fiber != nullptr) __tsan_destroy_fiber(fiber.tsan_fiber);
  fiber.tsan_fiber = nullptr;
#endif
}

EMULATOR_NOT_SANITIZED void abandon_tsan_fiber([[maybe_unused]] Context& fiber,
                                               [[maybe_unused]] bool failed,
                                               [[maybe_unused]] void* token) {
#if EMULATOR_TSAN
  void* const me = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(fiber.tsan_fiber, __tsan_switch_to_fiber_no_sync);
  release_order(token);
  if (!failed) hide_end();
  __tsan_switch_to_fiber(me, __tsan_switch_to_fiber_no_sync);
  if (!failed) destroy_tsan_fiber(fiber);
  fiber.tsan_fiber = nullptr;
#endif
}

#if EMULATOR_TSAN || EMULATOR_ASAN
namespace {
EMULATOR_NOT_SANITIZED void announced_switch(Context* from, Context* to,
                                             [[maybe_unused]] bool ends) {
#if EMULATOR_TSAN
  __tsan_switch_to_fiber(to->tsan_fiber, __tsan_switch_to_fiber_no_sync);
#endif
#if EMULATOR_ASAN
  __sanitizer_start_switch_fiber(ends ? nullptr : &from->asan_fake_stack,
                                 to->stack != nullptr ? to->stack : to->stack_low,
                                 to->stack != nullptr ? kStackBytes : to->stack_bytes);
#endif
  switch_stacks(from, to);
#if EMULATOR_ASAN
  __sanitizer_finish_switch_fiber(from->asan_fake_stack, nullptr, nullptr);
#endif
}
}  // namespace

EMULATOR_NOT_SANITIZED void switch_context(Context* from, Context* to) {
  announced_switch(from, to, false);
}
EMULATOR_NOT_SANITIZED void leave_context(Context& from, Context& to) {
  announced_switch(&from, &to, true);
}
#else
void leave_context(Context& from, Context& to) {
  switch_stacks(&from, &to);
}
#endif

void context_entered() {
#if EMULATOR_ASAN
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
}

}  // namespace emulator
