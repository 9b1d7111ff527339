// SPDX-License-Identifier: Apache-2.0
// What the thread and address sanitizers are told. In other builds all of this is nothing.
//
// Note [What the thread sanitizer sees]
// Every thread of a block is a thread to the sanitizer, with no order between them but what the
// kernel asks for: __syncthreads, named barriers and __syncwarp order them, shuffles and votes do
// not. So a missing barrier is a data race in the kernel's own code. The emulator's bookkeeping is
// hidden: reads and writes in its scopes are ignored, and so are the locks of its queues, which
// would order streams that no event orders; what does order them is told by release and acquire.
#pragma once

#include <emulator/context.h>

#if EMULATOR_TSAN
#include <sanitizer/tsan_interface.h>
extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
void AnnotateIgnoreSyncBegin(const char* file, int line);
void AnnotateIgnoreSyncEnd(const char* file, int line);
}
#define EMULATOR_NOT_SANITIZED __attribute__((no_sanitize("thread"), noinline))
#else
#define EMULATOR_NOT_SANITIZED
#endif
#if EMULATOR_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace emulator {

// What this scope reads and writes is the emulator's own.
inline void hide_begin() {
#if EMULATOR_TSAN
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
#endif
}
inline void hide_end() {
#if EMULATOR_TSAN
  AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
#endif
}
struct Hidden {
  Hidden() { hide_begin(); }
  ~Hidden() { hide_end(); }
  Hidden(const Hidden&) = delete;
  Hidden& operator=(const Hidden&) = delete;
};
// And the locks of this scope order nothing.
struct HiddenLocks {
  HiddenLocks() {
#if EMULATOR_TSAN
    AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
#endif
  }
  ~HiddenLocks() {
#if EMULATOR_TSAN
    AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
#endif
  }
  HiddenLocks(const HiddenLocks&) = delete;
  HiddenLocks& operator=(const HiddenLocks&) = delete;

 private:
  Hidden hidden_;
};

// What happened before released(p) is seen after acquired(p).
inline void release_order([[maybe_unused]] void* p) {
#if EMULATOR_TSAN
  __tsan_release(p);
#endif
}
inline void acquire_order([[maybe_unused]] void* p) {
#if EMULATOR_TSAN
  __tsan_acquire(p);
#endif
}

inline void poison([[maybe_unused]] const void* p, [[maybe_unused]] unsigned long bytes) {
#if EMULATOR_ASAN
  __asan_poison_memory_region(p, bytes);
#endif
}
inline void unpoison([[maybe_unused]] const void* p, [[maybe_unused]] unsigned long bytes) {
#if EMULATOR_ASAN
  __asan_unpoison_memory_region(p, bytes);
#endif
}

}  // namespace emulator
