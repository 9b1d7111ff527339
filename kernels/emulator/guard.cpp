// SPDX-License-Identifier: Apache-2.0
// Device memory out of reach of host code.
//
// Note [The guard]
// The addresses of device memory have no access rights while no device work runs in the process: a
// host that reads a device pointer gets a fault, as it would with a device, and the handler says
// what the address is. Where streams are OS threads device work may run at any time, so the guard
// is off; under sanitizers it is off because device memory is then ordinary memory that they watch.
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "block.h"
#include "memory.h"

namespace emulator {
namespace {

bool guard_of_environment() {
  if (EMULATOR_ASAN || EMULATOR_TSAN) return false;
  const char* text = std::getenv("EMULATOR_GUARD");
  return text == nullptr || std::strcmp(text, "off") != 0;
}
std::atomic<bool>& guard_switch() {
  static std::atomic<bool> on{guard_of_environment()};
  return on;
}

struct Range {
  char* low;
  std::size_t bytes;
};
std::mutex mutex;
Range ranges[64];
int range_count = 0;
int accesses = 0;     // DeviceAccess objects that live
bool closed = false;  // the ranges have no access rights
int stream_threads = 0;

bool guarding() {
  return guard_switch() && stream_threads == 0;
}

void protect(int rights) {
  for (int i = 0; i < range_count; ++i) mprotect(ranges[i].low, ranges[i].bytes, rights);
  closed = rights == PROT_NONE;
}

void apply_guard() {
  const bool close = guarding() && accesses == 0;
  if (close != closed) protect(close ? PROT_NONE : PROT_READ | PROT_WRITE);
}

// ---- the message of a fault. Runs in a signal handler of a process that is about to die: it uses
// no lock and little memory, and after it the previous handler takes over.
void write_text(const char* text) {
  const ssize_t written = write(STDERR_FILENO, text, std::strlen(text));
  static_cast<void>(written);
}

void explain_kernel_fault(const Block& b, const void* address) {
  char text[256];
  const auto* p = static_cast<const unsigned char*>(address);
  const char* what = "no memory of the device or the host";
  if (p >= b.dynamic_data && p < b.dynamic_data + b.dynamic_bytes + 8192) {
    std::snprintf(text, sizeof text, "byte %zu of %zu bytes of dynamic shared memory",
                  static_cast<std::size_t>(p - b.dynamic_data), b.dynamic_bytes);
    what = text;
  } else if (is_stack_guard(address)) {
    what = "the end of the stack of an emulated thread: too many local variables";
  }
  char line[512];
  std::snprintf(line, sizeof line, "emulator: a kernel accesses %p: %s\n", address, what);
  write_text(line);
  write_text(describe_position(b, {nullptr, 0}).c_str());
}

void explain_host_fault(const void* address) {
  Allocation found;
  char line[512];
  if (find_allocation_unlocked(address, found)) {
    const auto offset = static_cast<const char*>(address) - found.address;
    std::snprintf(
        line, sizeof line,
        "emulator: host code accesses device memory at %p: byte %zu of the %zu bytes at %p "
        "of device %d. Copy it with cudaMemcpy, or access it in a kernel.\n",
        address, static_cast<std::size_t>(offset), found.bytes,
        static_cast<const void*>(found.address), found.device);
  } else {
    std::snprintf(
        line, sizeof line,
        "emulator: host code accesses device memory at %p, which is not allocated (freed?)\n",
        address);
  }
  write_text(line);
}

struct sigaction previous;

void on_fault(int, siginfo_t* info, void*) {
  const void* address = info->si_addr;
  if (block != nullptr && block->launch != nullptr && block->current != nullptr) {
    explain_kernel_fault(*block, address);
  } else if (is_device_address(address)) {
    explain_host_fault(address);
  }
  sigaction(SIGSEGV, &previous, nullptr);  // the access is repeated, and this one dies of it
}

}  // namespace

// Test frameworks install handlers of their own at any time, hence a look before all device work.
static void install_fault_handler() {
  if (EMULATOR_ASAN || EMULATOR_TSAN) return;
  struct sigaction current;
  sigaction(SIGSEGV, nullptr, &current);
  if ((current.sa_flags & SA_SIGINFO) != 0 && current.sa_sigaction == on_fault) return;
  previous = current;
  struct sigaction ours = {};
  ours.sa_sigaction = on_fault;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&ours.sa_mask);
  sigaction(SIGSEGV, &ours, nullptr);
}

static void use_signal_stack() {
  // A fiber that ran out of stack has none for a handler.
  struct SignalStack {
    char* memory = nullptr;
    ~SignalStack() {
      if (memory == nullptr) return;
      stack_t off = {};
      off.ss_flags = SS_DISABLE;
      sigaltstack(&off, nullptr);
      delete[] memory;
    }
  };
  static thread_local SignalStack own;
  if (EMULATOR_ASAN || EMULATOR_TSAN || own.memory != nullptr) return;
  constexpr std::size_t kBytes = 64 * 1024;
  own.memory = new char[kBytes];
  stack_t stack = {};
  stack.ss_sp = own.memory;
  stack.ss_size = kBytes;
  sigaltstack(&stack, nullptr);
}

void set_guard(bool on) {
  if (EMULATOR_ASAN || EMULATOR_TSAN) return;
  const std::lock_guard lock(mutex);
  guard_switch() = on;
  apply_guard();
}

void stream_threads_changed(int by) {
  if (EMULATOR_ASAN || EMULATOR_TSAN) return;
  const std::lock_guard lock(mutex);
  stream_threads += by;
  apply_guard();
}

void guard_range(char* low, std::size_t bytes) {
  const std::lock_guard lock(mutex);
  if (range_count == 64) std::abort();
  ranges[range_count++] = {low, bytes};
  mprotect(low, bytes, closed ? PROT_NONE : PROT_READ | PROT_WRITE);
}

void grow_guarded_range(char* low, std::size_t bytes) {
  const std::lock_guard lock(mutex);
  for (int i = 0; i < range_count; ++i) {
    if (ranges[i].low != low) continue;
    ranges[i].bytes = bytes;
    mprotect(low, bytes, closed ? PROT_NONE : PROT_READ | PROT_WRITE);
  }
}

DeviceAccess::DeviceAccess() {
  if (EMULATOR_ASAN || EMULATOR_TSAN) return;
  use_signal_stack();
  install_fault_handler();
  const std::lock_guard lock(mutex);
  if (accesses++ == 0 && closed) protect(PROT_READ | PROT_WRITE);
}

DeviceAccess::~DeviceAccess() {
  if (EMULATOR_ASAN || EMULATOR_TSAN) return;
  const std::lock_guard lock(mutex);
  if (--accesses == 0 && guarding()) protect(PROT_NONE);
}

}  // namespace emulator
