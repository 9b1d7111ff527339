// SPDX-License-Identifier: Apache-2.0
#include <sherd/runtime/cuda/check.h>
#include <sherd/runtime/cuda/device.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

namespace sherd::cuda {

void fail_call(cudaError_t error, const char* call, const char* file, int line) {
  const std::string_view path = file;
  const std::string_view name = path.substr(path.find_last_of('/') + 1);
  const char* advice = "";
  // What the device ran into comes to light in a later call.
  if (error == cudaErrorIllegalAddress || error == cudaErrorLaunchFailure)
    advice = "; an earlier kernel failed: run again with CUDA_LAUNCH_BLOCKING=1 to see which";
  fail("CUDA: {} ({}) in {} at {}:{}{}", cudaGetErrorString(error), cudaGetErrorName(error), call,
       name, line, advice);
}

namespace {

// What a waiting thread calls: Stream::watch. Once it has thrown, the events from before carry the
// error, and a synchronize() throws it unless another wait has.
class Watch {
 public:
  explicit Watch(std::function<void(bool)> look) : look_(std::move(look)) {}

  void look(bool done) {
    const std::lock_guard lock(mutex_);
    if (error_) {
      told_ = true;
      std::rethrow_exception(error_);
    }
    if (!look_) return;
    try {
      look_(done);
    } catch (...) {
      error_ = std::current_exception();
      told_ = true;
      throw;
    }
  }
  void stop() {
    const std::lock_guard lock(mutex_);
    look_ = nullptr;
  }
  bool concerns_new_work() {
    const std::lock_guard lock(mutex_);
    return look_ && !error_;
  }
  bool is_over() {
    const std::lock_guard lock(mutex_);
    return error_ ? told_ : !look_;
  }

 private:
  std::mutex mutex_;
  std::function<void(bool)> look_;
  std::exception_ptr error_;
  bool told_ = false;
};
using Watches = std::vector<std::shared_ptr<Watch>>;

// Waits without the driver, which would not come back from work that never ends.
template <typename Query>
void wait_and_look(const Watches& watches, const Query& is_done) {
  using Clock = std::chrono::steady_clock;
  constexpr auto kLook = std::chrono::milliseconds(2);
  auto next = Clock::now() + kLook;
  for (int looks = 0; !is_done(); ++looks) {
    if (looks < 100) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    if (Clock::now() < next) continue;
    for (const auto& watch : watches) watch->look(false);
    next = Clock::now() + kLook;
  }
  for (const auto& watch : watches) watch->look(true);
}

// Done events are made and destroyed a few hundred times a step; CUDA's are cheap without timing.
class CudaEvent final : public Event::State {
 public:
  CudaEvent(cudaStream_t stream, Watches watches) : watches_(std::move(watches)) {
    SHERD_CUDA_CHECK(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
    SHERD_CUDA_CHECK(cudaEventRecord(event_, stream));
  }
  ~CudaEvent() override { cudaEventDestroy(event_); }

  cudaEvent_t get() const { return event_; }
  const Watches& watches() const { return watches_; }

  bool done() override {
    const cudaError_t state = cudaEventQuery(event_);
    if (state == cudaErrorNotReady) return false;
    SHERD_CUDA_CHECK(state);
    return true;
  }
  void wait() override {
    if (!watches_.empty()) wait_and_look(watches_, [this] { return done(); });
    SHERD_CUDA_CHECK(cudaEventSynchronize(event_));
  }
  bool wait_for(std::chrono::milliseconds time) override {
    const auto end = std::chrono::steady_clock::now() + time;
    while (!done()) {
      if (std::chrono::steady_clock::now() >= end) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    return true;
  }

 private:
  cudaEvent_t event_ = nullptr;
  const Watches watches_;
};

class CudaStream final : public Stream::Backend {
 public:
  explicit CudaStream(int device) : device_(device) {
    SHERD_CUDA_CHECK(cudaSetDevice(device_));
    SHERD_CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  ~CudaStream() override {
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
  }

  void enqueue(std::function<void()> work) override {
    SHERD_CUDA_CHECK(cudaSetDevice(device_));
    work();
  }
  void enqueue_on_host(std::function<void()> work) override {
    auto owned = std::make_unique<std::function<void()>>(std::move(work));
    const auto run = [](void* data) {
      const std::unique_ptr<std::function<void()>> mine(static_cast<std::function<void()>*>(data));
      (*mine)();
    };
    SHERD_CUDA_CHECK(cudaLaunchHostFunc(stream_, run, owned.get()));
    owned.release();
  }
  Event record() override {
    Watches all = watches();
    std::erase_if(all, [](const auto& watch) { return !watch->concerns_new_work(); });
    return Event(std::make_shared<CudaEvent>(static_cast<cudaStream_t>(native()), std::move(all)));
  }
  void wait(const Event& event) override {
    if (const auto* cuda_event = dynamic_cast<const CudaEvent*>(event.state())) {
      SHERD_CUDA_CHECK(cudaStreamWaitEvent(stream_, cuda_event->get(), 0));
      add(cuda_event->watches());
    } else {
      event.wait();  // of a thread: what is enqueued later then starts after it
    }
  }
  void synchronize() override {
    const Watches all = watches();
    if (!all.empty()) {
      wait_and_look(all, [this] {
        const cudaError_t state = cudaStreamQuery(stream_);
        if (state != cudaErrorNotReady) SHERD_CUDA_CHECK(state);
        return state == cudaSuccess;
      });
    }
    SHERD_CUDA_CHECK(cudaStreamSynchronize(stream_));
  }
  void* native() override {
    SHERD_CUDA_CHECK(cudaSetDevice(device_));
    return stream_;
  }
  std::shared_ptr<void> watch(std::function<void(bool)> look) override {
    auto made = std::make_shared<Watch>(std::move(look));
    add({made});
    return {made.get(), [made](void*) { made->stop(); }};
  }

 private:
  // Of this stream and of what it waits for.
  Watches watches() {
    const std::lock_guard lock(mutex_);
    std::erase_if(watches_, [](const auto& watch) { return watch->is_over(); });
    return watches_;
  }
  void add(const Watches& more) {
    const std::lock_guard lock(mutex_);
    for (const auto& watch : more) {
      if (std::ranges::find(watches_, watch) == watches_.end()) watches_.push_back(watch);
    }
  }

  int device_;
  cudaStream_t stream_ = nullptr;
  std::mutex mutex_;
  Watches watches_;
};

cudaStream_t stream_of(Stream& stream) {
  void* const native = stream.native();
  SHERD_INTERNAL_CHECK(native != nullptr, "stream {} is not a CUDA stream", stream.name());
  return static_cast<cudaStream_t>(native);
}

// cudaMalloc's and cudaHostAlloc's answer where there is no more is no failure: the allocator gives
// back what it caches, and then says what the memory is used for.
bool has_memory(cudaError_t error, const char* call) {
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // or the next check finds it
    return false;
  }
  if (error != cudaSuccess) fail_call(error, call, __FILE__, __LINE__);
  return true;
}

class DeviceMemory final : public MemorySource {
 public:
  DeviceMemory(int device, Stream& stream) : device_(device), stream_(stream) {}

  std::byte* reserve(std::size_t bytes, std::size_t /*alignment: cudaMalloc's is 256*/) override {
    SHERD_CUDA_CHECK(cudaSetDevice(device_));
    void* data = nullptr;
    return has_memory(cudaMalloc(&data, bytes), "cudaMalloc") ? static_cast<std::byte*>(data)
                                                              : nullptr;
  }
  void free(std::byte* data) override {
    cudaSetDevice(device_);
    cudaFree(data);  // waits for the device
  }
  void wait_for(const std::vector<Event>& events) override {
    for (const Event& event : events) stream_.wait(event);
  }

 private:
  int device_;
  Stream& stream_;
};

class PinnedMemory final : public MemorySource {
 public:
  explicit PinnedMemory(int device) : device_(device) {}

  std::byte* reserve(std::size_t bytes, std::size_t /*alignment: whole pages*/) override {
    SHERD_CUDA_CHECK(cudaSetDevice(device_));
    void* data = nullptr;
    return has_memory(cudaHostAlloc(&data, bytes, cudaHostAllocPortable), "cudaHostAlloc")
               ? static_cast<std::byte*>(data)
               : nullptr;
  }
  void free(std::byte* data) override {
    cudaSetDevice(device_);
    cudaFreeHost(data);
  }
  void wait_for(const std::vector<Event>& events) override { wait_until_done(events); }

 private:
  int device_;
};

}  // namespace

int device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return count;
}

void require_device(int device) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    cudaGetLastError();
    fail(
        "device cuda: {} ({}); does nvidia-smi list a GPU, and is its driver as new as CUDA {}.{}? "
        "Use --device cpu, or a machine with a GPU",
        cudaGetErrorString(error), cudaGetErrorName(error), CUDART_VERSION / 1000,
        CUDART_VERSION % 1000 / 10);
  }
  SHERD_CHECK(device >= 0 && device < count,
              "device cuda: GPU {} was asked for, and this process sees {} (CUDA_VISIBLE_DEVICES "
              "limits it); a rank needs a GPU of its own",
              device, count);
}

std::string device_name(int device) {
  cudaDeviceProp properties;
  SHERD_CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
  return properties.name;
}

std::unique_ptr<Stream> make_stream(int device, std::string name) {
  return std::make_unique<Stream>(std::make_unique<CudaStream>(device), std::move(name));
}

std::unique_ptr<MemorySource> make_device_memory(int device, Stream& stream) {
  return std::make_unique<DeviceMemory>(device, stream);
}

std::unique_ptr<MemorySource> make_pinned_memory(int device) {
  return std::make_unique<PinnedMemory>(device);
}

void copy(Stream& stream, void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  SHERD_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_of(stream)));
}

bool is_pinned(const void* address) {
  cudaPointerAttributes attributes;
  SHERD_CUDA_CHECK(cudaPointerGetAttributes(&attributes, address));
  return attributes.type == cudaMemoryTypeHost;
}

void fill_zero(Stream& stream, void* to, std::size_t bytes) {
  if (bytes == 0) return;
  SHERD_CUDA_CHECK(cudaMemsetAsync(to, 0, bytes, stream_of(stream)));
}

}  // namespace sherd::cuda
