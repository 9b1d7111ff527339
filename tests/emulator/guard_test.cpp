// SPDX-License-Identifier: Apache-2.0
// Faults: what a child process says before it dies of one.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "emulated.h"

using namespace emulated;

#if !EMULATOR_ASAN && !EMULATOR_TSAN  // sanitizers watch memory themselves, and the guard is off

namespace {

__global__ void touch(volatile char* p) {
  *p = 1;
}
__global__ void beyond_dynamic() {
  EMULATOR_DYNAMIC_SHARED(volatile char, data);
  data[1024] = 1;
}
int deep(volatile int* p) {
  volatile char big[4096];
  big[0] = static_cast<char>(*p);
  return *p > 1000000 ? big[0] : deep(p) + big[0];
}
__global__ void deep_recursion(int* p) {
  *p = deep(p);
}

struct Death {
  std::string said;
  int signal;
};
template <class F>
Death dies(F f) {
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    signal(SIGSEGV, SIG_DFL);  // the test framework's handler would speak too
    signal(SIGABRT, SIG_DFL);
    emulator::enqueue(nullptr, [] {});  // device work puts the emulator's handler back
    dup2(ends[1], STDERR_FILENO);
    f();
    _exit(0);
  }
  close(ends[1]);
  Death death{};
  char buffer[512];
  for (ssize_t n; (n = read(ends[0], buffer, sizeof buffer)) > 0;) {
    death.said.append(buffer, static_cast<std::size_t>(n));
  }
  close(ends[0]);
  int status;
  REQUIRE(waitpid(child, &status, 0) == child);
  death.signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
  return death;
}

char* allocate(std::size_t bytes) {
  void* p;
  expect(cudaMalloc(&p, bytes));
  return static_cast<char*>(p);
}

}  // namespace

TEST_CASE("emulator: host code that touches device memory dies with a message") {
  expect(cudaSetDevice(3));
  char* p = allocate(1000);
  expect(cudaSetDevice(0));
  Death death = dies([p] { p[12] = 1; });
  CHECK(death.signal == SIGSEGV);
  CHECK(contains(death.said, "host code accesses device memory at "));
  CHECK(contains(death.said, "byte 12 of the 1000 bytes at "));
  CHECK(contains(death.said, "of device 3"));
  death = dies([p] { [[maybe_unused]] volatile char c = p[999]; });
  CHECK(contains(death.said, "byte 999 of the 1000 bytes"));
  death = dies([p] {
    cudaFree(p);
    p[5] = 1;
  });
  CHECK(death.signal == SIGSEGV);
  CHECK(contains(death.said, "which is not allocated (freed?)"));
  // A host function in a stream is host code too.
  death = dies([p] {
    cudaLaunchHostFunc(
        nullptr, [](void* q) { *static_cast<char*>(q) = 1; }, p);
  });
  CHECK(death.signal == SIGSEGV);
  CHECK(contains(death.said, "host code accesses device memory"));
  // Kernels, copies and other emulated libraries may.
  death = dies([p] {
    cudaSetDevice(3);
    run(touch, 1, 1, p);
    char c;
    cudaMemcpy(&c, p, 1, cudaMemcpyDeviceToHost);
    emulator::enqueue(nullptr, [p] { p[1] = 1; });
    emulator::set_guard(false);
    p[12] = 1;
  });
  CHECK(death.signal == 0);
  CHECK(death.said.empty());
  expect(cudaFree(p));
}

TEST_CASE("emulator: faults of kernels name the kernel and thread") {
  Death death = dies([] { run(touch, 1, 1, static_cast<char*>(nullptr)); });
  CHECK(death.signal == SIGSEGV);
  CHECK(contains(death.said, "no memory of the device or the host"));
  CHECK(contains(death.said, "touch(char volatile*)"));
  CHECK(contains(death.said, "block (0,0,0) thread (0,0,0)"));
  death = dies([] { emulator::launch(beyond_dynamic, 1, 1, 1024, nullptr); });
  CHECK(death.signal == SIGSEGV);
  CHECK(contains(death.said, "byte 1024 of 1024 bytes of dynamic shared memory"));
  int* p = reinterpret_cast<int*>(allocate(4));
  expect(cudaMemset(p, 0, 4));
  death = dies([p] { run(deep_recursion, 1, 1, p); });
  CHECK(death.signal == SIGSEGV);
  CHECK(contains(death.said, "the end of the stack of an emulated thread"));
  expect(cudaFree(p));
}

TEST_CASE("emulator: without throw_errors a wrong kernel ends the process") {
  const Death death = dies([] {
    emulator::launch(
        +[] { __syncwarp(0); }, 1, 32, 0, nullptr);
  });
  CHECK(death.signal == SIGABRT);
  CHECK(
      contains(death.said, "emulator: a lane calls a warp operation whose mask does not name it"));
}

#endif
