// SPDX-License-Identifier: Apache-2.0
// Wrong kernels, and what the emulator says: the problem, the kernel, block, thread and line, and
// where the other threads are.
#include <atomic>
#include <cstdint>

#include "emulated.h"

using namespace emulated;

namespace {

std::atomic<int> line_of_mistake, line_of_others;
#define MISTAKE line_of_mistake = __LINE__,
#define OTHERS line_of_others = __LINE__,

__global__ void divergent_barrier() {
  if (threadIdx.x < 40) {
    OTHERS __syncthreads();
  } else {
    MISTAKE __syncthreads();
  }
}

__global__ void barrier_of_some() {
  if (threadIdx.x % 32 == 3) __shfl_sync(1u << 3, 1, 3);  // alone: allowed
  if (threadIdx.x < 64) return;
  if (threadIdx.x == 70) {
    MISTAKE __syncwarp(0xFFu << 6);  // lanes 7 to 13 never come
  } else {
    OTHERS __syncthreads();
  }
}

__global__ void divergent_shuffle(float* out) {
  float v = static_cast<float>(threadIdx.x);
  if (threadIdx.x < 16) {
    OTHERS v += __shfl_xor_sync(~0u, v, 1);
  } else {
    MISTAKE v += __shfl_xor_sync(~0u, v, 2);
  }
  out[threadIdx.x] = v;
}

__global__ void different_masks() {
  for (unsigned k = 0; k < 2; ++k) {
    if (threadIdx.x / 16 != k) continue;
    MISTAKE __ballot_sync(threadIdx.x < 16 ? ~0u : 0xFFFF0000u, 1);
  }
}

__global__ void overlapping_masks() {
  if (threadIdx.x < 8) {
    OTHERS __ballot_sync(0xFFFFu, 1);
  } else if (threadIdx.x < 16) {
    __syncthreads();
  } else {
    MISTAKE __ballot_sync(0xFFFFFF00u, 1);
  }
}

__global__ void not_in_mask() {
  if (threadIdx.x == 4) MISTAKE __any_sync(0xFu, 1);
}

__global__ void exited_lane() {
  if (threadIdx.x == 9) return;
  MISTAKE __shfl_sync(~0u, 1, 0);
}

__global__ void outside_mask() {
  if (threadIdx.x < 8) MISTAKE __shfl_down_sync(0xFFu, 1, 3);
}

__global__ void odd_width() {
  MISTAKE __shfl_xor_sync(~0u, 1, 1, 12);
}

__global__ void partial_matrix() {
  EMULATOR_SHARED(std::uint16_t, tile, 256);
  std::uint32_t r[4];
  MISTAKE emulator::ldmatrix_x4(r, tile);
}

__global__ void partial_product() {
  float d[4] = {};
  const std::uint32_t a[4] = {}, b[2] = {};
  MISTAKE emulator::mma_m16n8k16(d, a, b, emulator::Bf16{});
}

__global__ void unaligned_row() {
  EMULATOR_SHARED(std::uint16_t, tile, 1024);
  std::uint32_t r[4];
  MISTAKE emulator::ldmatrix_x4(r, &tile[threadIdx.x * 12]);
}

__global__ void row_outside(const std::uint16_t* global) {
  std::uint32_t r[2];
  MISTAKE emulator::ldmatrix_x2(r, global + threadIdx.x * 8);
}

__global__ void unaligned_copy(const float* in) {
  EMULATOR_SHARED(float, tile, 64);
  MISTAKE emulator::cp_async16(&tile[4], in + 1);
  emulator::cp_async_commit();
  emulator::cp_async_wait<0>();
}

__global__ void unaligned_target(const float* in) {
  EMULATOR_SHARED(float, tile, 64);
  MISTAKE emulator::cp_async8(&tile[1], in);
}

__global__ void copy_to_global(const float* in, float* out) {
  MISTAKE emulator::cp_async16(out, in);
}

__global__ void too_many_bytes(const float* in) {
  EMULATOR_SHARED(float, tile, 64);
  MISTAKE emulator::cp_async4(tile, in, 8);
}

__global__ void pending_copy(const float* in) {
  EMULATOR_SHARED(float, tile, 4 * 32);
  MISTAKE emulator::cp_async16(&tile[threadIdx.x * 4], in);
  emulator::cp_async_commit();
}

__global__ void barrier_counts() {
  if (threadIdx.x < 32) {
    OTHERS emulator::named_barrier(2, 64);
  } else {
    MISTAKE emulator::named_barrier(2, 96);
  }
}

__global__ void bad_count() {
  MISTAKE emulator::named_barrier(1, 40);
}
__global__ void bad_number() {
  MISTAKE emulator::named_barrier(16, 64);
}

__global__ void deadlock() {
  if (threadIdx.x < 32) {
    OTHERS emulator::named_barrier(3, 64);
  } else {
    MISTAKE emulator::named_barrier(4, 64);
  }
}

__global__ void waits_for_ended() {
  if (threadIdx.x < 32) MISTAKE emulator::named_barrier(5, 64);
}

__global__ void too_much_static() {
  EMULATOR_SHARED(float, first, 8 * 1024);
  EMULATOR_SHARED(float, second, 4 * 1024 + 1);
  first[0] = second[0] = 0;
}

__global__ void beyond_static() {
  EMULATOR_SHARED(int, counts, 10);
  EMULATOR_SHARED(int, others, 10);
  if (threadIdx.x < 11) counts[threadIdx.x] = 0;
  others[0] = 0;
}

__global__ void beyond_dynamic() {
  EMULATOR_DYNAMIC_SHARED(char, data);
  data[threadIdx.x] = 0;
}

__global__ void writes(char* out, std::size_t at) {
  out[at] = 0;
}

template <int Size>
__global__ void with_arguments(const float*, long) {
  MISTAKE __syncwarp(0);
}

__global__ void harmless() {
  __syncthreads();
}

// Runs the kernel and checks what is said of thread `thread` of block 0.
template <class... P, class... A>
std::string report_of(const std::string& problem, int thread, unsigned threads,
                      void (*kernel)(P...), const std::string& name, A... arguments) {
  const std::string message = mistake([&] { run(kernel, 1, threads, arguments...); });
  CHECK(contains(message, problem));
  CHECK(contains(message, "kernel (anonymous namespace)::" + name));
  CHECK(contains(message, "block (0,0,0) thread (" + std::to_string(thread) + ",0,0), " +
                              at_line(__FILE__, line_of_mistake)));
  return message;
}

}  // namespace

TEST_CASE("emulator: divergence at barriers is reported") {
  std::string message =
      report_of("divergence: threads of a block come to __syncthreads at different lines", 40, 96,
                divergent_barrier, "divergent_barrier()");
  CHECK(contains(message, "threads 0-39: at __syncthreads, " + at_line(__FILE__, line_of_others)));
  CHECK(contains(message, "threads 41-95: not yet run"));
  message = mistake([] { run(barrier_of_some, 1, 96); });
  CHECK(contains(message, "deadlock: no thread of the block can go on"));
  CHECK(contains(message, "thread 70: at __syncwarp, " + at_line(__FILE__, line_of_mistake)));
  CHECK(contains(message, "threads 64-69: at __syncthreads, " + at_line(__FILE__, line_of_others)));
  CHECK(contains(message, "threads 0-63: ended"));
  message = report_of("different counts", 32, 96, barrier_counts, "barrier_counts()");
  CHECK(contains(message, "threads 0-31: at named barrier 2, "));
  report_of("multiple of 32", 0, 64, bad_count, "bad_count()");
  report_of("not 0 to 15", 0, 64, bad_number, "bad_number()");
}

TEST_CASE("emulator: deadlocks are reported") {
  std::string message =
      report_of("deadlock: no thread of the block can go on", 63, 64, deadlock, "deadlock()");
  CHECK(
      contains(message, "threads 0-31: at named barrier 3, " + at_line(__FILE__, line_of_others)));
  CHECK(contains(message, "threads 32-62: at named barrier 4, "));
  message = mistake([] { run(waits_for_ended, 1, 64); });
  CHECK(contains(message, "deadlock: this thread ended, and no other of its block can go on"));
  CHECK(
      contains(message, "threads 0-31: at named barrier 5, " + at_line(__FILE__, line_of_mistake)));
}

TEST_CASE("emulator: divergence in a warp is reported") {
  const DeviceArray<float> out(32);
  const std::string message =
      report_of("divergence: lanes of a warp come to different warp operations", 16, 32,
                divergent_shuffle, "divergent_shuffle(float*)", out.data());
  CHECK(contains(message, "threads 0-15: at __shfl_sync, " + at_line(__FILE__, line_of_others)));
  report_of("warp operations with different masks", 16, 32, different_masks, "different_masks()");
  report_of("the mask names lanes that wait in another", 16, 32, overlapping_masks,
            "overlapping_masks()");
  report_of("mask does not name it", 4, 32, not_in_mask, "not_in_mask()");
  report_of("lane 5 shuffles from lane 8, which is not in the mask 0x000000ff", 7, 32, outside_mask,
            "outside_mask()");
  report_of("not a power of two", 0, 32, odd_width, "odd_width()");
  report_of("mma.sync needs all 32 lanes", 15, 16, partial_product, "partial_product()");
  report_of("ldmatrix needs all 32 lanes", 23, 24, partial_matrix, "partial_matrix()");
}

TEST_CASE("emulator: a mask that names an exited lane is reported, whoever comes first") {
  // Forward: lanes 0 to 8 wait when lane 9 exits.
  std::string message = mistake([] { run(exited_lane, 1, 32); });
  CHECK(contains(message, "a lane exits that others wait for"));
  CHECK(contains(message, "threads 0-8: at __shfl_sync, " + at_line(__FILE__, line_of_mistake)));
  emulator::set_order(emulator::Order::reverse);
  message = mistake([] { run(exited_lane, 1, 10); });
  CHECK(contains(message, "names a lane that has exited"));
  emulator::set_order(emulator::Order::forward);
}

TEST_CASE("emulator: addresses of ldmatrix and cp.async are checked") {
  const DeviceArray<float> in(64);
  const DeviceArray<std::uint16_t> global(512);
  report_of("ldmatrix: the address is not a multiple of 16", 1, 32, unaligned_row,
            "unaligned_row()");
  report_of("ldmatrix: the address is not in the block's shared memory", 0, 32, row_outside,
            "row_outside(unsigned short const*)", global.data());
  report_of("cp.async: the source address is not a multiple", 0, 32, unaligned_copy,
            "unaligned_copy(float const*)", in.data());
  report_of("cp.async: the address is not a multiple of 8", 0, 32, unaligned_target,
            "unaligned_target(float const*)", in.data());
  report_of("cp.async: the address is not in the block's shared memory", 0, 32, copy_to_global,
            "copy_to_global(float const*, float*)", in.data(), in.data());
  report_of("not between 0 and the size", 0, 32, too_many_bytes, "too_many_bytes(float const*)",
            in.data());
  report_of("ends while a cp.async of its is not waited for", 0, 32, pending_copy,
            "pending_copy(float const*)", in.data());
}

TEST_CASE("emulator: shared memory beyond its limits is reported") {
  const std::string message = mistake([] { run(too_much_static, 1, 32); });
  CHECK(contains(message, "limited to 49152 bytes; with 'second' it takes 49156"));
  CHECK(contains(message, "too_much_static()"));
#if !EMULATOR_ASAN && !EMULATOR_TSAN  // the address sanitizer ends the process at the write
  CHECK(contains(mistake([] { run(beyond_static, 1, 32); }),
                 "bytes after the 40 bytes of the shared array 'counts' were written"));
  CHECK(mistake([] { run(beyond_static, 1, 10); }).empty());
  const std::string dynamic =
      mistake([] { emulator::launch(beyond_dynamic, 1, 101, 100, nullptr); });
  CHECK(contains(dynamic, "bytes after the 100 bytes of dynamic shared memory were written"));
  CHECK(mistake([] { emulator::launch(beyond_dynamic, 1, 100, 100, nullptr); }).empty());
#endif
}

#if !EMULATOR_ASAN && !EMULATOR_TSAN
TEST_CASE("emulator: a write after the end of a device array is found when it is freed") {
  for (const std::size_t at : {99, 100, 355}) {
    char* data;
    expect(cudaMalloc(&data, 100));
    run(writes, 1, 1, data, at);
    const std::string message = mistake([&] { cudaFree(data); });
    if (at < 100) CHECK(message.empty());
    if (at >= 100) {
      CHECK(contains(message,
                     "bytes after the 100 bytes of a device allocation were written, the first "
                     "of them " +
                         std::to_string(at - 100)));
    }
  }
}
#endif

TEST_CASE("emulator: messages name templates with their arguments, and the next launch works") {
  const std::string message = mistake([] { run(with_arguments<7>, 1, 32, nullptr, 0L); });
  CHECK(contains(message, "with_arguments<7>(float const*, long)"));
  // Often: fibers of abandoned launches must come back.
  for (int i = 0; i < (EMULATOR_TSAN ? 10 : 300); ++i) {
    CHECK_FALSE(mistake([] { run(divergent_barrier, 1, 1024); }).empty());
    run(harmless, 2, 1024);
  }
}

TEST_CASE("emulator: launches that the device refuses return its error codes") {
  const auto refused = [](cudaError_t code, const std::string& why, dim3 grid, dim3 block,
                          std::size_t bytes) {
    CHECK(emulator::launch(harmless, grid, block, bytes, nullptr) == code);
    CHECK(contains(emulator::launch_message(), why));
    CHECK(contains(emulator::launch_message(), "harmless()"));
    CHECK(cudaPeekAtLastError() == code);
    CHECK(cudaGetLastError() == code);
    CHECK(cudaGetLastError() == cudaSuccess);
  };
  const cudaError_t configuration = cudaErrorInvalidConfiguration;
  refused(configuration, "a block of 1025 x 1 x 1 threads", 1, 1025, 0);
  refused(configuration, "a block of 32 x 33 x 1 threads", 1, dim3(32, 33), 0);
  refused(configuration, "a block of 1 x 1 x 65 threads", 1, dim3(1, 1, 65), 0);
  refused(configuration, "a block of 0 x 1 x 1 threads", 1, 0, 0);
  refused(configuration, "a grid of 0 x 1 x 1 blocks", 0, 1, 0);
  refused(configuration, "a grid of 1 x 65536 x 1 blocks", dim3(1, 65536), 1, 0);
  refused(configuration, "a grid of 2147483648 x 1 x 1 blocks", 2147483648u, 1, 0);
  refused(cudaErrorInvalidValue, "49153 bytes of dynamic shared memory, allowed are 49152", 1, 32,
          49153);
  CHECK(cudaFuncSetAttribute(harmless, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             227 * 1024 + 1) == cudaErrorInvalidValue);
  cudaGetLastError();
  expect(cudaFuncSetAttribute(harmless, cudaFuncAttributeMaxDynamicSharedMemorySize, 60000));
  expect(emulator::launch(harmless, 1, 32, 60000, nullptr));
  refused(cudaErrorInvalidValue, "60001 bytes of dynamic shared memory, allowed are 60000", 1, 32,
          60001);
}
