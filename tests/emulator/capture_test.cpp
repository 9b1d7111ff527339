// SPDX-License-Identifier: Apache-2.0
// Capture: what is recorded, what replays do, what is forbidden meanwhile.
#include <thread>

#include "emulated.h"

using namespace emulated;

namespace {

__global__ void add(int* p, int term) {
  *p += term;
}
__global__ void multiply(int* p, const int* factor) {
  *p *= *factor;
}

constexpr cudaStreamCaptureMode kGlobal = cudaStreamCaptureModeGlobal;

struct Streams {
  cudaStream_t a, b;
  cudaEvent_t fork, join;
  Streams() {
    expect(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking));
    expect(cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking));
    expect(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
    expect(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
  }
  ~Streams() {
    cudaGetLastError();
    cudaStreamDestroy(a);
    cudaStreamDestroy(b);
    cudaEventDestroy(fork);
    cudaEventDestroy(join);
    CHECK(cudaGetLastError() == cudaSuccess);
  }
};

int read(const int* p) {
  int value;
  expect(cudaMemcpy(&value, p, sizeof value, cudaMemcpyDeviceToHost));
  return value;
}

void check_replay() {
  Streams s;
  const DeviceArray<int> x(std::vector<int>{1}), y(std::vector<int>{3});
  int* pinned;
  expect(cudaMallocHost(&pinned, sizeof(int)));
  *pinned = 0;
  int calls = 0;
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  expect(cudaStreamBeginCapture(s.a, kGlobal));
  cudaStreamCaptureStatus status;
  expect(cudaStreamIsCapturing(s.a, &status));
  CHECK(status == cudaStreamCaptureStatusActive);
  expect(cudaStreamIsCapturing(s.b, &status));
  CHECK(status == cudaStreamCaptureStatusNone);
  expect(emulator::launch(add, 1, 1, 0, s.a, x.data(), 1));
  expect(cudaEventRecord(s.fork, s.a));
  expect(cudaStreamWaitEvent(s.b, s.fork, 0));
  expect(emulator::launch(add, 1, 1, 0, s.b, y.data(), 1));
  expect(cudaEventRecord(s.join, s.b));
  expect(cudaStreamWaitEvent(s.a, s.join, 0));
  expect(emulator::launch(multiply, 1, 1, 0, s.a, x.data(), y.data()));
  expect(cudaMemcpyAsync(pinned, x.data(), sizeof(int), cudaMemcpyDeviceToHost, s.a));
  emulator::enqueue(s.a, [&calls] { ++calls; });
  expect(cudaStreamEndCapture(s.a, &graph));
  expect(cudaGraphInstantiate(&executable, graph, 0));
  expect(cudaGraphDestroy(graph));
  CHECK(read(x.data()) == 1);  // recorded, not run
  CHECK(read(y.data()) == 3);
  int expected_x = 1, expected_y = 3;
  for (int replay = 1; replay <= 3; ++replay) {
    expect(cudaGraphLaunch(executable, s.b));
    expect(cudaStreamSynchronize(s.b));
    expected_x = (expected_x + 1) * ++expected_y;
    CHECK(read(x.data()) == expected_x);
    CHECK(read(y.data()) == expected_y);
    CHECK(*pinned == expected_x);
    CHECK(calls == replay);
  }
  expect(cudaGraphExecDestroy(executable));
  expect(cudaFreeHost(pinned));
  // The streams are ordinary ones again.
  expect(emulator::launch(add, 1, 1, 0, s.a, x.data(), 1));
  expect(cudaStreamSynchronize(s.a));
  CHECK(read(x.data()) == expected_x + 1);
}

// In a capture of stream a: `call` returns `error`, and the capture is invalid if `spoils`.
template <class F>
void forbidden(cudaError_t error, bool spoils, F call, cudaStreamCaptureMode mode = kGlobal) {
  Streams s;
  expect(cudaStreamBeginCapture(s.a, mode));
  const cudaError_t got = call(s);
  CHECK(std::string(cudaGetErrorName(got)) == cudaGetErrorName(error));
  cudaGraph_t graph;
  const cudaError_t end = cudaStreamEndCapture(s.a, &graph);
  CHECK(std::string(cudaGetErrorName(end)) ==
        cudaGetErrorName(spoils ? cudaErrorStreamCaptureInvalidated : cudaSuccess));
  CHECK((graph == nullptr) == spoils);
  if (graph != nullptr) expect(cudaGraphDestroy(graph));
}

constexpr cudaError_t kUnsupported = cudaErrorStreamCaptureUnsupported;

}  // namespace

TEST_CASE("emulator: a captured graph replays the work of all its streams") {
  check_replay();
  emulator::set_streams(emulator::Streams::threads, 20);
  check_replay();
  emulator::set_streams(emulator::Streams::in_place);
}

TEST_CASE("emulator: waits and allocations are forbidden during capture") {
  const DeviceArray<int> x(std::vector<int>{1});
  static int* data;
  data = x.data();
  static int pageable = 0;
  static void* p;
  forbidden(kUnsupported, true, [](Streams& s) { return cudaStreamSynchronize(s.a); });
  forbidden(kUnsupported, true, [](Streams& s) { return cudaStreamQuery(s.a); });
  forbidden(kUnsupported, true, [](Streams&) { return cudaDeviceSynchronize(); });
  forbidden(kUnsupported, true, [](Streams&) { return cudaMalloc(&p, 8); });
  forbidden(
      kUnsupported, true, [](Streams&) { return cudaMalloc(&p, 8); },
      cudaStreamCaptureModeThreadLocal);
  forbidden(kUnsupported, true, [](Streams&) { return cudaFree(data); });
  forbidden(kUnsupported, true, [](Streams&) { return cudaMallocHost(&p, 8); });
  forbidden(kUnsupported, true, [](Streams& s) {
    return cudaMemcpyAsync(data, &pageable, 4, cudaMemcpyHostToDevice, s.a);
  });
  forbidden(
      cudaSuccess, false,
      [](Streams&) {
        const cudaError_t error = cudaMalloc(&p, 8);
        if (error == cudaSuccess) cudaFree(p);
        return error;
      },
      cudaStreamCaptureModeRelaxed);
  // Work after a mistake is refused until the capture ends.
  forbidden(cudaErrorStreamCaptureInvalidated, true, [](Streams& s) {
    cudaStreamSynchronize(s.a);
    return emulator::launch(add, 1, 1, 0, s.a, data, 1);
  });
  CHECK(x.host()[0] == 1);
}

TEST_CASE("emulator: captures of one thread and calls of another") {
  static void* p;
  const auto allocate_elsewhere = [](Streams&) {
    cudaError_t error;
    std::thread([&error] { error = cudaMalloc(&p, 8); }).join();
    if (error == cudaSuccess) {
      std::thread([] { cudaFree(p); }).join();
    }
    return error;
  };
  forbidden(kUnsupported, true, allocate_elsewhere);
  forbidden(cudaSuccess, false, allocate_elsewhere, cudaStreamCaptureModeThreadLocal);
  forbidden(cudaSuccess, false, [](Streams&) {
    cudaError_t error;
    std::thread([&error] {
      cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal;
      cudaThreadExchangeStreamCaptureMode(&mode);
      error = cudaMalloc(&p, 8);
      cudaFree(p);
    }).join();
    return error;
  });
  forbidden(cudaErrorStreamCaptureWrongThread, false, [](Streams& s) {
    cudaError_t error;
    cudaGraph_t graph;
    std::thread([&] { error = cudaStreamEndCapture(s.a, &graph); }).join();
    return error;
  });
}

TEST_CASE("emulator: events and streams that do not fit a capture") {
  forbidden(cudaErrorCapturedEvent, true, [](Streams& s) {
    cudaEventRecord(s.fork, s.a);
    return cudaEventQuery(s.fork);
  });
  forbidden(cudaErrorCapturedEvent, true, [](Streams& s) {
    cudaEventRecord(s.fork, s.a);
    return cudaEventSynchronize(s.fork);
  });
  forbidden(cudaErrorStreamCaptureIsolation, true, [](Streams& s) {
    cudaEventRecord(s.fork, s.b);  // outside
    return cudaStreamWaitEvent(s.a, s.fork, 0);
  });
  forbidden(cudaSuccess, false, [](Streams& s) { return cudaStreamWaitEvent(s.a, s.fork, 0); });
  forbidden(cudaErrorStreamCaptureMerge, true, [](Streams& s) {
    cudaStreamBeginCapture(s.b, kGlobal);
    cudaEventRecord(s.fork, s.b);
    const cudaError_t error = cudaStreamWaitEvent(s.a, s.fork, 0);
    cudaGraph_t graph;
    CHECK(cudaStreamEndCapture(s.b, &graph) == cudaErrorStreamCaptureInvalidated);
    return error;
  });
  forbidden(cudaErrorStreamCaptureUnmatched, true, [](Streams& s) {
    cudaEventRecord(s.fork, s.a);
    cudaStreamWaitEvent(s.b, s.fork, 0);
    cudaGraph_t graph;
    return cudaStreamEndCapture(s.b, &graph);
  });
  cudaGraph_t graph;
  CHECK(cudaStreamBeginCapture(nullptr, kGlobal) == kUnsupported);
  CHECK(cudaStreamEndCapture(nullptr, &graph) == cudaErrorInvalidValue);
  // A captured blocking stream keeps the default stream from work.
  cudaStream_t blocking;
  expect(cudaStreamCreate(&blocking));
  expect(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeRelaxed));
  CHECK(emulator::launch(add, 1, 1, 0, nullptr, static_cast<int*>(nullptr), 1) ==
        cudaErrorStreamCaptureImplicit);
  CHECK(cudaStreamEndCapture(blocking, &graph) == cudaErrorStreamCaptureInvalidated);
  expect(cudaStreamDestroy(blocking));
  cudaGetLastError();
}

TEST_CASE("emulator: work that nobody waits for ends a capture with an error") {
  const DeviceArray<int> x(std::vector<int>{1});
  Streams s;
  cudaGraph_t graph;
  expect(cudaStreamBeginCapture(s.a, kGlobal));
  expect(cudaEventRecord(s.fork, s.a));
  expect(cudaStreamWaitEvent(s.b, s.fork, 0));
  expect(emulator::launch(add, 1, 1, 0, s.b, x.data(), 1));
  CHECK(cudaStreamEndCapture(s.a, &graph) == cudaErrorStreamCaptureUnjoined);
  cudaStreamCaptureStatus status;
  expect(cudaStreamIsCapturing(s.b, &status));
  CHECK(status == cudaStreamCaptureStatusNone);
  CHECK(cudaStreamWaitEvent(s.b, s.fork, 0) == cudaErrorCapturedEvent);  // its capture is over
}
