// SPDX-License-Identifier: Apache-2.0
// Streams that are OS threads: order within a stream, none between streams but by events.
#include <atomic>
#include <chrono>
#include <thread>

#include "emulated.h"

using namespace emulated;

namespace {

__global__ void scale_and_add(int* p, int factor, int term) {
  *p = *p * factor + term;
}
__global__ void shift(const int* from, int* to) {
  to[threadIdx.x] = from[threadIdx.x] + 1;
}
__global__ void bad() {
  __syncwarp(0);
}

struct Threads {
  explicit Threads(int delay) { emulator::set_streams(emulator::Streams::threads, delay); }
  ~Threads() { emulator::set_streams(emulator::Streams::in_place); }
};

cudaStream_t make(unsigned flags = cudaStreamNonBlocking) {
  cudaStream_t stream;
  expect(cudaStreamCreateWithFlags(&stream, flags));
  return stream;
}
cudaEvent_t make_event(unsigned flags = cudaEventDefault) {
  cudaEvent_t event;
  expect(cudaEventCreateWithFlags(&event, flags));
  return event;
}

// A gate that host code opens: what is behind it in a stream has to wait.
struct Gate {
  std::atomic<bool> open{false};
  static void wait(void* gate) {
    while (!static_cast<Gate*>(gate)->open) std::this_thread::yield();
  }
};

}  // namespace

TEST_CASE("emulator: a stream runs in order and apart from the host") {
  const Threads threads(20);
  const cudaStream_t stream = make();
  int* p;
  expect(cudaMalloc(&p, sizeof(int)));
  expect(cudaMemsetAsync(p, 0, sizeof(int), stream));
  Gate gate;
  expect(cudaLaunchHostFunc(stream, Gate::wait, &gate));
  int expected = 0;
  for (int i = 1; i < 50; ++i) {
    expect(emulator::launch(scale_and_add, 1, 1, 0, stream, p, i % 3, i));
    expected = expected * (i % 3) + i;
  }
  CHECK(cudaStreamQuery(stream) == cudaErrorNotReady);
  gate.open = true;
  int got = -1;
  expect(cudaMemcpyAsync(&got, p, sizeof(int), cudaMemcpyDeviceToHost, stream));  // pageable: waits
  CHECK(got == expected);
  expect(cudaStreamSynchronize(stream));
  CHECK(cudaStreamQuery(stream) == cudaSuccess);
  expect(cudaFree(p));
  expect(cudaStreamDestroy(stream));
}

TEST_CASE("emulator: events order streams") {
  const Threads threads(200);
  const cudaStream_t a = make(), b = make();
  const cudaEvent_t filled = make_event(), emptied = make_event(cudaEventDisableTiming);
  constexpr int kRounds = 40;
  int *box, *sum;
  expect(cudaMalloc(&box, sizeof(int)));
  expect(cudaMalloc(&sum, 32 * sizeof(int)));
  expect(cudaMemsetAsync(box, 0, sizeof(int), a));
  expect(cudaStreamSynchronize(a));
  // a writes the box, b takes it, again and again: any missing wait makes a number come twice.
  std::vector<int> taken(kRounds, -1);
  int* pinned;
  expect(cudaMallocHost(&pinned, kRounds * sizeof(int)));
  for (int i = 0; i < kRounds; ++i) {
    expect(cudaStreamWaitEvent(a, emptied, 0));
    expect(emulator::launch(scale_and_add, 1, 1, 0, a, box, 1, 1));
    expect(cudaEventRecord(filled, a));
    expect(cudaStreamWaitEvent(b, filled, 0));
    expect(cudaMemcpyAsync(pinned + i, box, sizeof(int), cudaMemcpyDeviceToHost, b));
    expect(cudaEventRecord(emptied, b));
  }
  expect(cudaEventSynchronize(emptied));
  for (int i = 0; i < kRounds; ++i) CHECK(pinned[i] == i + 1);
  float milliseconds = -1;
  CHECK(cudaEventElapsedTime(&milliseconds, filled, emptied) == cudaErrorInvalidResourceHandle);
  cudaGetLastError();
  expect(cudaFreeHost(pinned));
  expect(cudaFree(box));
  expect(cudaFree(sum));
  for (const cudaStream_t s : {a, b}) expect(cudaStreamDestroy(s));
  for (const cudaEvent_t e : {filled, emptied}) expect(cudaEventDestroy(e));
}

TEST_CASE("emulator: events tell whether and when") {
  const Threads threads(0);
  const cudaStream_t stream = make();
  const cudaEvent_t start = make_event(), end = make_event();
  CHECK(cudaEventQuery(start) == cudaSuccess);  // never recorded
  float milliseconds;
  CHECK(cudaEventElapsedTime(&milliseconds, start, end) == cudaErrorInvalidResourceHandle);
  Gate gate;
  expect(cudaEventRecord(start, stream));
  expect(cudaEventSynchronize(start));  // the stream's thread may be late
  expect(cudaLaunchHostFunc(stream, Gate::wait, &gate));
  expect(cudaEventRecord(end, stream));
  CHECK(cudaEventQuery(end) == cudaErrorNotReady);
  CHECK(cudaEventElapsedTime(&milliseconds, start, end) == cudaErrorNotReady);
  std::this_thread::sleep_for(std::chrono::milliseconds(3));
  gate.open = true;
  expect(cudaEventSynchronize(end));
  CHECK(cudaEventQuery(end) == cudaSuccess);
  expect(cudaEventElapsedTime(&milliseconds, start, end));
  CHECK(milliseconds >= 3);
  CHECK(milliseconds < 60000);
  expect(cudaEventDestroy(start));
  expect(cudaEventDestroy(end));
  expect(cudaStreamDestroy(stream));
  cudaGetLastError();
}

TEST_CASE(
    "emulator: copies from pageable memory are taken at the call, from pinned when they run") {
  const Threads threads(0);
  const cudaStream_t stream = make();
  int *device, *pinned, pageable = 1;
  expect(cudaMalloc(&device, 2 * sizeof(int)));
  expect(cudaMallocHost(&pinned, sizeof(int)));
  *pinned = 1;
  Gate gate;
  expect(cudaLaunchHostFunc(stream, Gate::wait, &gate));
  expect(cudaMemcpyAsync(device, &pageable, sizeof(int), cudaMemcpyHostToDevice, stream));
  expect(cudaMemcpyAsync(device + 1, pinned, sizeof(int), cudaMemcpyHostToDevice, stream));
  pageable = *pinned = 2;
  gate.open = true;
  expect(cudaStreamSynchronize(stream));
  int got[2];
  expect(cudaMemcpy(got, device, sizeof got, cudaMemcpyDeviceToHost));
  CHECK(got[0] == 1);
  CHECK(got[1] == 2);  // the bug of a program that writes too early
  expect(cudaFreeHost(pinned));
  expect(cudaFree(device));
  expect(cudaStreamDestroy(stream));
}

TEST_CASE("emulator: the default stream waits for blocking streams, and they for it") {
  const Threads threads(50);
  std::thread([] {  // the default stream of a device that no other test uses
    expect(cudaSetDevice(6));
    const cudaStream_t blocking = make(cudaStreamDefault), other = make(cudaStreamDefault),
                       apart = make();
    Gate gate, second;
    std::atomic<int> state{0};
    const auto set = [](void* p) { *static_cast<std::atomic<int>*>(p) += 1; };
    expect(cudaLaunchHostFunc(blocking, Gate::wait, &gate));
    expect(cudaLaunchHostFunc(nullptr, set, &state));  // behind the gate
    expect(cudaLaunchHostFunc(other, set, &state));    // behind the default stream
    expect(cudaLaunchHostFunc(
        apart, [](void* p) { static_cast<Gate*>(p)->open = true; }, &second));
    expect(cudaStreamSynchronize(apart));
    CHECK(second.open);
    CHECK(state == 0);
    CHECK(cudaStreamQuery(other) == cudaErrorNotReady);
    gate.open = true;
    expect(cudaStreamSynchronize(other));
    CHECK(state == 2);
    expect(cudaDeviceSynchronize());
    for (const cudaStream_t s : {blocking, other, apart}) expect(cudaStreamDestroy(s));
  })
      .join();
}

TEST_CASE("emulator: a wrong kernel is thrown by the next wait") {
  const Threads threads(0);
  const cudaStream_t stream = make();
  bool launched = false;
  const std::string message = mistake([&] {
    expect(emulator::launch(bad, 1, 32, 0, stream));
    launched = true;  // the launch itself says nothing
    cudaStreamSynchronize(stream);
  });
  CHECK(launched);
  CHECK(contains(message, "mask does not name it"));
  expect(cudaStreamSynchronize(stream));
  expect(cudaStreamDestroy(stream));
}

TEST_CASE("emulator: ranks with devices and streams of their own run at once") {
  const Threads threads(10);
  std::vector<std::thread> ranks;
  std::atomic<int> good{0};
  for (int rank = 0; rank < 4; ++rank) {
    ranks.emplace_back([rank, &good] {
      cudaSetDevice(rank);
      cudaStream_t stream;
      cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
      int *a, *b;
      cudaMalloc(&a, 64 * sizeof(int));
      cudaMalloc(&b, 64 * sizeof(int));
      cudaMemsetAsync(a, 0, 64 * sizeof(int), stream);
      for (int i = 0; i < 20; ++i) {
        emulator::launch(shift, 1, 64, 0, stream, a, b);
        emulator::launch(shift, 1, 64, 0, stream, b, a);
      }
      int got[64];
      cudaMemcpyAsync(got, a, sizeof got, cudaMemcpyDeviceToHost, stream);
      bool all = true;
      for (const int x : got) all = all && x == 40;
      good += all;
      cudaFree(a);
      cudaFree(b);
      cudaStreamDestroy(stream);
    });
  }
  for (std::thread& rank : ranks) rank.join();
  CHECK(good == 4);
}
