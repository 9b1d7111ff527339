// SPDX-License-Identifier: Apache-2.0
// In builds with a sanitizer: that it finds mistakes in kernels and names their lines. Each runs in
// a process of its own, this program started again for one planted test case.
#include <cstdio>
#include <thread>

#include "emulated.h"

using namespace emulated;

#if EMULATOR_ASAN || EMULATOR_TSAN

namespace {

std::string output_of(const std::string& test_case) {
  const std::string command = "exec /proc/$PPID/exe --no-skip --test-case='" + test_case + "' 2>&1";
  FILE* stream = popen(command.c_str(), "r");
  REQUIRE(stream != nullptr);
  std::string output;
  char buffer[4096];
  for (std::size_t n; (n = fread(buffer, 1, sizeof buffer, stream)) > 0;) output.append(buffer, n);
  CHECK(pclose(stream) != 0);
  return output;
}

void names_line(const std::string& output, const std::string& finding, int line) {
  CHECK(contains(output, finding));
  CHECK(contains(output, at_line("sanitizer_test.cpp", line)));
}

}  // namespace

#endif

#if EMULATOR_TSAN

namespace {

constexpr int kWrite = __LINE__ + 4;
__global__ void no_barrier(int* out) {
  EMULATOR_SHARED(int, box, 64);
  const unsigned i = threadIdx.x;
  box[i] = static_cast<int>(i);
  out[i] = box[63 - i];
}
// The last thread to come to the first barrier writes before the others go on.
constexpr int kLateWrite = __LINE__ + 5;
__global__ void between_barriers(int* out) {
  EMULATOR_SHARED(int, box, 1);
  const unsigned i = threadIdx.x;
  __syncthreads();
  if (i == 63) box[0] = 1;
  out[i] = i == 0 ? box[0] : 0;
  __syncthreads();
}
constexpr int kWarpWrite = __LINE__ + 4;
__global__ void no_warp_barrier(int* out) {
  EMULATOR_SHARED(int, box, 32);
  const unsigned i = threadIdx.x;
  box[i] = __shfl_xor_sync(~0u, static_cast<int>(i), 1);
  out[i] = box[31 - i];
}
constexpr int kProduce = __LINE__ + 2, kConsume = __LINE__ + 5;
__global__ void produce(int* box) {
  *box = 1;
}
__global__ void consume(const int* box, int* out) {
  *out = *box;
}

}  // namespace

TEST_CASE("planted: no barrier" * doctest::skip()) {
  const DeviceArray<int> out(64);
  run(no_barrier, 1, 64, out.data());
}
TEST_CASE("planted: between barriers" * doctest::skip()) {
  const DeviceArray<int> out(64);
  run(between_barriers, 1, 64, out.data());
}
TEST_CASE("planted: no warp barrier" * doctest::skip()) {
  const DeviceArray<int> out(32);
  run(no_warp_barrier, 1, 32, out.data());
}
TEST_CASE("planted: no event" * doctest::skip()) {
  emulator::set_streams(emulator::Streams::threads);
  cudaStream_t a, b;
  expect(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking));
  expect(cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking));
  int *box, *out;
  expect(cudaMalloc(&box, sizeof(int)));
  expect(cudaMalloc(&out, sizeof(int)));
  expect(emulator::launch(produce, 1, 1, 0, a, box));
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // done by luck: still a race
  expect(emulator::launch(consume, 1, 1, 0, b, box, out));
  for (const cudaStream_t s : {a, b}) expect(cudaStreamDestroy(s));
}

TEST_CASE("emulator: the thread sanitizer names the line of a missing barrier or event") {
  names_line(output_of("planted: no barrier"), "data race", kWrite);
  names_line(output_of("planted: between barriers"), "data race", kLateWrite);
  names_line(output_of("planted: no warp barrier"), "data race", kWarpWrite);
  const std::string output = output_of("planted: no event");
  names_line(output, "data race", kProduce);
  names_line(output, "data race", kConsume);
}

#endif

#if EMULATOR_ASAN

namespace {

constexpr int kStatic = __LINE__ + 3;
__global__ void beyond_static() {
  EMULATOR_SHARED(int, box, 33);
  box[threadIdx.x + 2] = 1;
}
constexpr int kDynamic = __LINE__ + 3;
__global__ void beyond_dynamic() {
  EMULATOR_DYNAMIC_SHARED(int, box);
  box[threadIdx.x] = 1;
}
constexpr int kGlobal = __LINE__ + 2;
__global__ void beyond_global(int* p) {
  p[threadIdx.x] = 1;
}
constexpr int kCopy = __LINE__ + 3;
__global__ void beyond_source(const int* p) {
  EMULATOR_SHARED(int, box, 128);
  emulator::cp_async16(box + 4 * threadIdx.x, p + 4 * threadIdx.x);
  emulator::cp_async_commit();
  emulator::cp_async_wait<0>();
}

}  // namespace

TEST_CASE("planted: beyond static" * doctest::skip()) {
  run(beyond_static, 1, 32);
}
TEST_CASE("planted: beyond dynamic" * doctest::skip()) {
  emulator::launch(beyond_dynamic, 1, 32, 124, nullptr);
}
TEST_CASE("planted: beyond global" * doctest::skip()) {
  const DeviceArray<int> p(31);
  run(beyond_global, 1, 32, p.data());
}
TEST_CASE("planted: beyond source" * doctest::skip()) {
  const DeviceArray<int> p(127);
  run(beyond_source, 1, 32, p.data());
}

TEST_CASE("emulator: the address sanitizer names the line of an access outside of an array") {
  names_line(output_of("planted: beyond static"), "use-after-poison", kStatic);
  names_line(output_of("planted: beyond dynamic"), "use-after-poison", kDynamic);
  names_line(output_of("planted: beyond global"), "heap-buffer-overflow", kGlobal);
  names_line(output_of("planted: beyond source"), "heap-buffer-overflow", kCopy);
}

#endif
