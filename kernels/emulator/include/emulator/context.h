// SPDX-License-Identifier: Apache-2.0
// Where a fiber goes on, and the switch from one to another.
//
// Note [The switch is inline]
// A function that was entered before a switch and returns after it is mispredicted: the processor's
// stack of return addresses belongs to another fiber. So a kernel switches in its own code, and
// what comes before and after are calls that return in order.
#pragma once

#include <cstddef>

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define EMULATOR_TSAN 1
#endif
#if __has_feature(address_sanitizer)
#define EMULATOR_ASAN 1
#endif
#endif
#if defined(__SANITIZE_THREAD__)
#define EMULATOR_TSAN 1
#endif
#if defined(__SANITIZE_ADDRESS__)
#define EMULATOR_ASAN 1
#endif
#ifndef EMULATOR_TSAN
#define EMULATOR_TSAN 0
#endif
#ifndef EMULATOR_ASAN
#define EMULATOR_ASAN 0
#endif

// Elsewhere than on x86-64, or with -DEMULATOR_UCONTEXT, ucontext switches: 100 times slower, since
// it saves the signal mask by a system call.
#if defined(__x86_64__) && !defined(EMULATOR_UCONTEXT)
#define EMULATOR_ASSEMBLY_SWITCH 1
#else
#define EMULATOR_ASSEMBLY_SWITCH 0
#include <ucontext.h>
#endif

namespace emulator {

struct Context {
#if EMULATOR_ASSEMBLY_SWITCH
  void* stack_pointer = nullptr;  // the assembly below knows the offsets of these three
  void* instruction = nullptr;
  void* frame = nullptr;
#else
  ucontext_t machine;
#endif
  char* stack = nullptr;  // null: the OS thread's own, of a launch's caller
  void* tsan_fiber = nullptr;
  void* asan_fake_stack = nullptr;
  const void* stack_low = nullptr;  // of the OS thread, for the address sanitizer
  std::size_t stack_bytes = 0;
};

#if EMULATOR_ASSEMBLY_SWITCH
#ifdef __AVX512F__
#define EMULATOR_CLOBBERS_512                                                                   \
  , "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25",   \
      "xmm26", "xmm27", "xmm28", "xmm29", "xmm30", "xmm31", "k1", "k2", "k3", "k4", "k5", "k6", \
      "k7"
#else
#define EMULATOR_CLOBBERS_512
#endif
// The compiler keeps what it needs on the stack, since every register is overwritten. Nothing is
// pushed: below the stack pointer a leaf function may have variables.
inline __attribute__((always_inline)) void switch_stacks(Context* from, Context* to) {
  asm volatile(
      "leaq 1f(%%rip), %%rax\n\t"
      "movq %%rsp, 0(%0)\n\t"
      "movq %%rax, 8(%0)\n\t"
      "movq %%rbp, 16(%0)\n\t"
      "movq 0(%1), %%rsp\n\t"
      "movq 16(%1), %%rbp\n\t"
      "jmpq *8(%1)\n"
      "1:"
      : "+D"(from), "+S"(to)
      :
      : "rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "xmm0",
        "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11",
        "xmm12", "xmm13", "xmm14", "xmm15", "memory", "cc" EMULATOR_CLOBBERS_512);
}
#undef EMULATOR_CLOBBERS_512
#else
inline void switch_stacks(Context* from, Context* to) {
  swapcontext(&from->machine, &to->machine);
}
#endif

#if EMULATOR_TSAN || EMULATOR_ASAN
void switch_context(Context* from, Context* to);
void after_wait();  // in the kernel's thread: what orders it is acquired, its accesses are seen
                    // again
#else
inline __attribute__((always_inline)) void switch_context(Context* from, Context* to) {
  switch_stacks(from, to);
}
inline void after_wait() {}
#endif

}  // namespace emulator
