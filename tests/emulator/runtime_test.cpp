// SPDX-License-Identifier: Apache-2.0
// The runtime API in place: devices, memory, copies, error codes.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <thread>

#include "emulated.h"

using namespace emulated;

namespace {

constexpr cudaError_t kInvalid = cudaErrorInvalidValue;

__global__ void add_one(int* p, int n) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n) p[i] += 1;
}

void* allocate(std::size_t bytes) {
  void* p;
  expect(cudaMalloc(&p, bytes));
  return p;
}

}  // namespace

TEST_CASE("emulator: devices") {
  int value = -1;
  expect(cudaGetDeviceCount(&value));
  CHECK(value == 8);
  CHECK(cudaSetDevice(8) == cudaErrorInvalidDevice);
  CHECK(cudaSetDevice(-1) == cudaErrorInvalidDevice);
  expect(cudaSetDevice(5));
  std::thread([] {
    int device = -1;
    cudaGetDevice(&device);
    CHECK(device == 0);  // every thread has its own
    CHECK(cudaPeekAtLastError() == cudaSuccess);
  }).join();
  expect(cudaGetDevice(&value));
  CHECK(value == 5);
  expect(cudaSetDevice(0));
  CHECK(cudaGetLastError() == cudaErrorInvalidDevice);
  cudaDeviceProp properties;
  expect(cudaGetDeviceProperties(&properties, 2));
  CHECK(std::string(properties.name) == "emulated");
  CHECK(properties.major == 9);
  CHECK(properties.sharedMemPerBlockOptin == 227 * 1024);
  expect(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 2));
  CHECK(value == properties.multiProcessorCount);
  expect(cudaDeviceGetAttribute(&value, cudaDevAttrMaxSharedMemoryPerBlockOptin, 2));
  CHECK(value == 227 * 1024);
  CHECK(cudaGetDeviceProperties(&properties, 9) == cudaErrorInvalidDevice);
  char first[16], second[16];
  expect(cudaDeviceGetPCIBusId(first, 16, 0));
  expect(cudaDeviceGetPCIBusId(second, 16, 1));
  CHECK(std::strcmp(first, second) != 0);
  expect(cudaDeviceCanAccessPeer(&value, 0, 1));
  CHECK(value == 1);
  expect(cudaDeviceEnablePeerAccess(1, 0));
  CHECK(cudaDeviceEnablePeerAccess(1, 0) == cudaErrorPeerAccessAlreadyEnabled);
  expect(cudaRuntimeGetVersion(&value));
  CHECK(value == CUDART_VERSION);
  CHECK(std::string(cudaGetErrorName(cudaErrorMemoryAllocation)) == "cudaErrorMemoryAllocation");
  CHECK(std::string(cudaGetErrorString(cudaErrorMemoryAllocation)) == "out of memory");
  CHECK(std::string(cudaGetErrorName(static_cast<cudaError_t>(12345))) ==
        "unrecognized error code");
  cudaGetLastError();
}

TEST_CASE("emulator: device memory is counted and runs out") {
  std::size_t before, now, total;
  expect(cudaMemGetInfo(&before, &total));
  CHECK(total == std::size_t{16} << 30);
  void* p = allocate(1);
  void* q = allocate(1000);
  expect(cudaMemGetInfo(&now, &total));
  CHECK(before - now == 512 + 1024);
  CHECK(reinterpret_cast<std::uintptr_t>(p) % 256 == 0);
  CHECK(reinterpret_cast<std::uintptr_t>(q) % 256 == 0);
  void* none = p;
  CHECK(cudaMalloc(&none, total) == cudaErrorMemoryAllocation);
  CHECK(none == nullptr);
  CHECK(cudaGetLastError() == cudaErrorMemoryAllocation);
  expect(cudaMalloc(&none, 0));
  CHECK(none == nullptr);
  expect(cudaFree(nullptr));
  expect(cudaFree(p));
  CHECK(cudaFree(p) == kInvalid);
  CHECK(cudaFree(static_cast<char*>(q) + 512) == kInvalid);
  int host;
  CHECK(cudaFree(&host) == kInvalid);
  expect(cudaFree(q));
  expect(cudaMemGetInfo(&now, &total));
  CHECK(now == before);
  cudaGetLastError();
}

TEST_CASE("emulator: blocks of device memory do not overlap and are used again") {
  unsigned state = 1;
  struct Block {
    unsigned char* p;
    std::size_t bytes;
    int mark;
  };
  std::vector<Block> blocks;
  std::size_t before, after, total;
  expect(cudaMemGetInfo(&before, &total));
  const auto check_and_free = [&](std::size_t k) {
    std::vector<unsigned char> got(blocks[k].bytes);
    expect(cudaMemcpy(got.data(), blocks[k].p, got.size(), cudaMemcpyDeviceToHost));
    REQUIRE(std::all_of(got.begin(), got.end(), [&](int c) { return c == blocks[k].mark; }));
    expect(cudaFree(blocks[k].p));
    blocks.erase(blocks.begin() + static_cast<std::ptrdiff_t>(k));
  };
  for (int step = 0; step < 400; ++step) {
    state = state * 1664525 + 1013904223;
    const std::size_t bytes = 1 + (state >> 8) % (step % 10 == 0 ? 3000000 : 5000);
    Block block{static_cast<unsigned char*>(allocate(bytes)), bytes, step % 251};
    unsigned char fresh;
    expect(cudaMemcpy(&fresh, block.p + bytes - 1, 1, cudaMemcpyDeviceToHost));
    REQUIRE(fresh == 0xFF);  // also where an earlier block lay
    expect(cudaMemset(block.p, block.mark, bytes));
    blocks.push_back(block);
    if (blocks.size() > 20) check_and_free((state >> 16) % blocks.size());
  }
  while (!blocks.empty()) check_and_free(0);
  expect(cudaMemGetInfo(&after, &total));
  CHECK(after == before);
}

TEST_CASE("emulator: pointers know where they point") {
  void* device = nullptr;
  expect(cudaSetDevice(2));
  device = allocate(100);
  expect(cudaSetDevice(0));
  void* pinned;
  expect(cudaMallocHost(&pinned, 100));
  int pageable;
  cudaPointerAttributes a;
  expect(cudaPointerGetAttributes(&a, static_cast<char*>(device) + 99));
  CHECK((a.type == cudaMemoryTypeDevice && a.device == 2));
  expect(cudaPointerGetAttributes(&a, pinned));
  CHECK((a.type == cudaMemoryTypeHost && a.hostPointer == pinned));
  expect(cudaPointerGetAttributes(&a, &pageable));
  CHECK(a.type == cudaMemoryTypeUnregistered);
  expect(cudaPointerGetAttributes(&a, static_cast<char*>(device) + 100));
  CHECK(a.type == cudaMemoryTypeUnregistered);
  expect(cudaFree(device));
  expect(cudaFreeHost(pinned));
  CHECK(cudaFreeHost(pinned) == kInvalid);
  cudaGetLastError();
}

TEST_CASE("emulator: copies and fills, and what is refused") {
  std::vector<int> in(100), out(100);
  std::iota(in.begin(), in.end(), 0);
  const DeviceArray<int> a(in), b(100);
  expect(cudaMemcpyAsync(b.data(), a.data(), 400, cudaMemcpyDefault));
  expect(emulator::launch(add_one, 4, 32, 0, nullptr, b.data(), 100));
  expect(cudaMemcpy(out.data(), b.data(), 400, cudaMemcpyDefault));
  for (int i = 0; i < 100; ++i) CHECK(out[static_cast<std::size_t>(i)] == i + 1);
  // Columns 2 to 4 of a 10 x 10 matrix.
  std::vector<int> columns(30);
  expect(cudaMemcpy2DAsync(columns.data(), 12, a.data() + 2, 40, 12, 10, cudaMemcpyDeviceToHost));
  for (std::size_t i = 0; i < 30; ++i)
    CHECK(columns[i] == static_cast<int>(i / 3 * 10 + 2 + i % 3));
  expect(cudaMemset(b.data(), 1, 400));
  CHECK(b.host()[99] == 0x01010101);

  const auto refused = [](cudaError_t expected, cudaError_t got) {
    CHECK(std::string(cudaGetErrorName(got)) == cudaGetErrorName(expected));
    CHECK(cudaGetLastError() == expected);
  };
  refused(kInvalid, cudaMemcpy(out.data(), b.data(), 400, cudaMemcpyHostToDevice));
  refused(kInvalid, cudaMemcpy(b.data(), a.data(), 400, cudaMemcpyDeviceToHost));
  refused(kInvalid, cudaMemcpy(b.data(), a.data(), 401, cudaMemcpyDeviceToDevice));
  refused(kInvalid, cudaMemcpy(b.data() + 1, in.data(), 400, cudaMemcpyHostToDevice));
  refused(kInvalid, cudaMemset(b.data() + 1, 0, 400));
  refused(kInvalid, cudaMemset(out.data(), 0, 4));
  refused(cudaErrorInvalidMemcpyDirection,
          cudaMemcpy(b.data(), a.data(), 4, static_cast<cudaMemcpyKind>(7)));
  refused(cudaErrorInvalidPitchValue,
          cudaMemcpy2DAsync(columns.data(), 8, a.data(), 40, 12, 10, cudaMemcpyDeviceToHost));
  // The last row may end before its pitch does, but not beyond the array.
  expect(cudaMemcpy2DAsync(columns.data(), 12, a.data() + 7, 40, 12, 10, cudaMemcpyDeviceToHost));
  refused(kInvalid,
          cudaMemcpy2DAsync(columns.data(), 12, a.data() + 8, 40, 12, 10, cudaMemcpyDeviceToHost));
}

TEST_CASE("emulator: work belongs to the stream's device") {
  cudaStream_t stream;
  cudaEvent_t event;
  expect(cudaSetDevice(1));
  expect(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  expect(cudaSetDevice(0));
  expect(cudaEventCreate(&event));
  const DeviceArray<int> a(std::vector<int>{1});
  CHECK(emulator::launch(add_one, 1, 1, 0, stream, a.data(), 1) == cudaErrorInvalidResourceHandle);
  CHECK(contains(emulator::launch_message(),
                 "the stream is of device 1, the thread's current device is 0"));
  CHECK(cudaEventRecord(event, stream) == cudaErrorInvalidResourceHandle);
  expect(
      cudaStreamWaitEvent(stream, event, 0));  // of any device; never recorded: nothing to wait for
  expect(cudaStreamDestroy(stream));
  CHECK(cudaStreamDestroy(stream) == cudaErrorInvalidResourceHandle);
  CHECK(cudaStreamSynchronize(stream) == cudaErrorInvalidResourceHandle);
  CHECK(emulator::launch(add_one, 1, 1, 0, stream, a.data(), 1) == cudaErrorInvalidResourceHandle);
  CHECK(a.host()[0] == 1);
  expect(cudaEventDestroy(event));
  cudaGetLastError();
}
