// SPDX-License-Identifier: Apache-2.0
// Streams, events and graphs of CUDA.
#include <sherd/runtime/cuda/check.h>
#include <sherd/runtime/cuda/device.h>
#include <sherd/runtime/cuda/graph.h>
#include <sherd/runtime/cuda/watch.h>

#include <chrono>
#include <thread>

namespace sherd::cuda {
namespace {

class CudaStream;

// What the streams of a context share. Which capture is under way: its events belong to it, the
// host cannot ask for them, and after it they mean nothing, since a graph keeps their order by
// itself.
struct CaptureState {
  std::uint64_t number = 0;
  bool active = false;
  std::vector<CudaStream*> streams;
};

// Events are made and destroyed a few hundred times a step; CUDA's are cheap without timing.
class CudaEvent final : public Event::State {
 public:
  CudaEvent(cudaStream_t stream, std::shared_ptr<const CaptureState> state, Watches watches,
            unsigned flags = cudaEventDisableTiming)
      : state_(std::move(state)),
        capture_(state_->active ? state_->number : 0),
        watches_(std::move(watches)) {
    SHERD_CUDA_CHECK(cudaEventCreateWithFlags(&event_, flags));
    SHERD_CUDA_CHECK(cudaEventRecord(event_, stream));
  }
  ~CudaEvent() override { cudaEventDestroy(event_); }

  cudaEvent_t get() const { return event_; }
  const Watches& watches() const { return watches_; }
  bool of_capture() const { return capture_ != 0; }
  bool of_this_capture() const { return state_->active && state_->number == capture_; }

  bool done() override {
    if (of_capture()) return !of_this_capture();
    const cudaError_t state = cudaEventQuery(event_);
    if (state == cudaErrorNotReady) return false;
    SHERD_CUDA_CHECK(state);
    return true;
  }
  void wait() override {
    check_waitable();
    if (of_capture()) return;
    if (!watches_.empty()) wait_and_look(watches_, [this] { return done(); });
    SHERD_CUDA_CHECK(cudaEventSynchronize(event_));
  }
  // Throws nothing: what has failed is over, and was or will be reported elsewhere.
  bool wait_for(std::chrono::milliseconds time) override {
    if (of_capture()) return true;
    const auto end = std::chrono::steady_clock::now() + time;
    while (cudaEventQuery(event_) == cudaErrorNotReady) {
      if (std::chrono::steady_clock::now() >= end) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    return true;
  }

 private:
  void check_waitable() const {
    SHERD_CHECK(!of_this_capture(), "the host waits for device work that is being captured");
  }

  cudaEvent_t event_ = nullptr;
  std::shared_ptr<const CaptureState> state_;
  std::uint64_t capture_;  // in which it was recorded; 0: in none
  const Watches watches_;
};

class CudaStream final : public Stream::Backend {
 public:
  CudaStream(int device, std::shared_ptr<CaptureState> capture, bool first)
      : device_(device), capture_(std::move(capture)) {
    SHERD_CUDA_CHECK(cudaSetDevice(device_));
    int least = 0, greatest = 0;
    SHERD_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    SHERD_CUDA_CHECK(
        cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, first ? greatest : least));
    capture_->streams.push_back(this);
  }
  ~CudaStream() override {
    std::erase(capture_->streams, this);
    wait_for_end();
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
  }

  int device() const { return device_; }
  const std::shared_ptr<CaptureState>& capture() const { return capture_; }

  void enqueue(std::function<void()> work) override {
    SHERD_CUDA_CHECK(cudaSetDevice(device_));
    work();
  }
  void enqueue_on_host(std::function<void()> work) override {
    SHERD_CHECK(!capture_->active, "work of the host cannot be captured");
    auto owned = std::make_unique<std::function<void()>>(std::move(work));
    const auto run = [](void* data) {
      const std::unique_ptr<std::function<void()>> mine(static_cast<std::function<void()>*>(data));
      (*mine)();
    };
    SHERD_CUDA_CHECK(cudaLaunchHostFunc(stream_, run, owned.get()));
    owned.release();
  }
  Event record() override {
    Watches all = watches_.all();
    std::erase_if(all, [](const auto& watch) { return !watch->concerns_new_work(); });
    return Event(
        std::make_shared<CudaEvent>(static_cast<cudaStream_t>(native()), capture_, std::move(all)));
  }
  void wait(const Event& event) override {
    const auto* of_cuda = dynamic_cast<const CudaEvent*>(event.state());
    if (of_cuda == nullptr) return event.wait();  // of a thread: later work then starts after it
    if (of_cuda->of_capture() && !of_cuda->of_this_capture()) return;
    if (capture_->active && !of_cuda->of_capture()) {
      SHERD_CHECK(event.done(), "captured work waits for work from before the capture");
      return;
    }
    SHERD_CUDA_CHECK(cudaStreamWaitEvent(stream_, of_cuda->get(), 0));
    watches_.add(of_cuda->watches());
  }
  void synchronize() override {
    const Watches all = watches_.all();
    if (!all.empty()) {
      wait_and_look(all, [this] {
        const cudaError_t state = cudaStreamQuery(stream_);
        if (state != cudaErrorNotReady) SHERD_CUDA_CHECK(state);
        return state == cudaSuccess;
      });
    }
    SHERD_CUDA_CHECK(cudaStreamSynchronize(stream_));
  }
  // Until its work is done, or it is known that some never will be without an abort, which has
  // begun then. Throws nothing, and leaves errors to those who wait for results.
  void wait_for_end() {
    const Watches all = watches_.all();
    if (all.empty() || capture_->active) return;
    wait_until(
        all, [this] { return cudaStreamQuery(stream_) != cudaErrorNotReady; },
        [](Watch& watch) { return !watch.has_error(false); });
  }
  std::shared_ptr<void> watch(std::function<void(bool)> look) override {
    auto made = std::make_shared<Watch>(std::move(look));
    watches_.add({made});
    return {made.get(), [made](void*) { made->stop(); }};
  }
  void* native() override {
    SHERD_CUDA_CHECK(cudaSetDevice(device_));
    return stream_;
  }

 private:
  int device_;
  std::shared_ptr<CaptureState> capture_;
  cudaStream_t stream_ = nullptr;
  WatchList watches_;
};

CudaStream& backend_of(Stream& stream) {
  auto* const backend = dynamic_cast<CudaStream*>(&stream.backend());
  SHERD_INTERNAL_CHECK(backend != nullptr, "stream {} is not a CUDA stream", stream.name());
  return *backend;
}

class CudaGraph final : public Graph {
 public:
  explicit CudaGraph(cudaGraph_t graph) {
    const cudaError_t error = cudaGraphInstantiate(&executable_, graph, 0);
    cudaGraphDestroy(graph);
    SHERD_CUDA_CHECK(error);
  }
  ~CudaGraph() override { cudaGraphExecDestroy(executable_); }
  CudaGraph(const CudaGraph&) = delete;
  CudaGraph& operator=(const CudaGraph&) = delete;

  void launch(Stream& stream) override {
    SHERD_CUDA_CHECK(cudaGraphLaunch(executable_, static_cast<cudaStream_t>(stream.native())));
  }

 private:
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace

std::unique_ptr<Stream> make_stream(int device, std::string name) {
  return std::make_unique<Stream>(
      std::make_unique<CudaStream>(device, std::make_shared<CaptureState>(), false),
      std::move(name));
}

std::unique_ptr<Stream> make_sibling(Stream& stream, std::string name) {
  const CudaStream& other = backend_of(stream);
  return std::make_unique<Stream>(
      std::make_unique<CudaStream>(other.device(), other.capture(), true), std::move(name));
}

Event record_time(Stream& stream) {
  return Event(std::make_shared<CudaEvent>(static_cast<cudaStream_t>(stream.native()),
                                           backend_of(stream).capture(), Watches(),
                                           cudaEventDefault));
}

double seconds_between(const Event& first, const Event& second) {
  const auto* const start = dynamic_cast<const CudaEvent*>(first.state());
  const auto* const end = dynamic_cast<const CudaEvent*>(second.state());
  SHERD_INTERNAL_CHECK(start != nullptr && end != nullptr, "these events are not of CUDA streams");
  second.wait();
  float milliseconds = 0.f;
  SHERD_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, start->get(), end->get()));
  return static_cast<double>(milliseconds) / 1e3;
}

void wait_before_driver_does(Stream& stream) {
  for (CudaStream* one : backend_of(stream).capture()->streams) one->wait_for_end();
}

std::unique_ptr<Graph> Graph::capture(Stream& stream, const std::function<void()>& body) {
  CaptureState& state = *backend_of(stream).capture();
  SHERD_CHECK(!state.active, "a capture inside another");
  const auto native = static_cast<cudaStream_t>(stream.native());
  // Relaxed: other ranks are threads of this process, and the allocator may need a segment.
  SHERD_CUDA_CHECK(cudaStreamBeginCapture(native, cudaStreamCaptureModeRelaxed));
  ++state.number;
  state.active = true;
  cudaGraph_t graph = nullptr;
  try {
    body();
  } catch (...) {
    state.active = false;
    if (cudaStreamEndCapture(native, &graph) == cudaSuccess && graph != nullptr)
      cudaGraphDestroy(graph);
    cudaGetLastError();  // what ended the capture is reported by what was thrown
    throw;
  }
  state.active = false;
  SHERD_CUDA_CHECK(cudaStreamEndCapture(native, &graph));
  return std::make_unique<CudaGraph>(graph);
}

}  // namespace sherd::cuda
