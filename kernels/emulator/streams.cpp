// SPDX-License-Identifier: Apache-2.0
// Streams: in place, or one OS thread each.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <random>

#include "block.h"
#include "stream.h"

struct CUstream_st {
  emulator::StreamPtr stream;
};

namespace emulator {
namespace {

struct StreamsSetting {
  Streams mode = Streams::in_place;
  int delay = 0;
};
StreamsSetting streams_of_environment() {
  const char* text = std::getenv("EMULATOR_STREAMS");
  if (text == nullptr || std::strcmp(text, "in_place") == 0) return {};
  if (std::strcmp(text, "threads") == 0) return {Streams::threads, 0};
  if (std::strncmp(text, "threads:", 8) == 0) {
    char* end;
    const long delay = std::strtol(text + 8, &end, 10);
    if (end != text + 8 && *end == '\0' && delay >= 0 && delay <= 1000000) {
      return {Streams::threads, static_cast<int>(delay)};
    }
  }
  report(std::string("EMULATOR_STREAMS: expected in_place, threads or threads:MICROSECONDS, got ") +
         text + "\n");
  return {};
}

// All that lives: handles that are valid, and default streams by device.
struct Registry {
  std::mutex mutex;
  StreamsSetting setting = streams_of_environment();
  std::set<cudaStream_t> handles;
  std::map<int, StreamPtr> defaults;
};
Registry& registry() {
  static auto* all = new Registry;  // threads of streams may outlive the program's end
  return *all;
}

void run_queue(StreamPtr stream) {
  std::minstd_rand random(
      static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(stream.get()) >> 4));
  for (;;) {
    std::unique_ptr<Item> item;
    {
      const HiddenLocks hidden;
      std::unique_lock lock(stream->mutex);
      stream->busy = false;
      stream->changed.notify_all();
      stream->changed.wait(lock, [&] { return stream->closing || !stream->queue.empty(); });
      if (stream->queue.empty()) return;
      item = std::move(stream->queue.front());
      stream->queue.pop_front();
      stream->busy = !item->marks;
    }
    acquire_order(item.get());
    if (stream->delay > 0) {
      const auto delay = random() % static_cast<unsigned>(stream->delay + 1);
      std::this_thread::sleep_for(std::chrono::microseconds(delay));
    }
    try {
      item->work();
    } catch (...) {
      const HiddenLocks hidden;
      const std::lock_guard lock(stream->mutex);
      if (stream->error == nullptr) stream->error = std::current_exception();
    }
  }
}

StreamPtr make_stream(int device, bool blocking, StreamsSetting setting) {
  auto stream = std::make_shared<Stream>();
  stream->device = device;
  stream->blocking = blocking;
  if (setting.mode == Streams::threads) {
    stream_threads_changed(+1);
    stream->has_thread = true;
    stream->delay = setting.delay;
    std::thread(run_queue, stream).detach();
  }
  return stream;
}

void push(Stream& stream, Work work, bool marks = false) {
  auto item = std::make_unique<Item>(Item{std::move(work), marks});
  release_order(item.get());
  const HiddenLocks hidden;
  const std::lock_guard lock(stream.mutex);
  stream.queue.push_back(std::move(item));
  stream.changed.notify_all();
}

// What `later` gets from now on comes after what `earlier` got so far.
void chain(Stream& earlier, Stream& later) {
  auto marker = std::make_shared<Marker>();
  push(
      earlier, [marker] { marker->pass(); }, true);
  push(later, [marker] { marker->wait(); });
}

void order_with_default(const StreamPtr& stream) {
  std::vector<StreamPtr> before;
  {
    const HiddenLocks hidden;
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    if (stream->is_default) {
      for (const cudaStream_t handle : all.handles) {
        const StreamPtr& other = handle->stream;
        if (other->blocking && other->device == stream->device) before.push_back(other);
      }
    } else if (stream->blocking) {
      const auto found = all.defaults.find(stream->device);
      if (found != all.defaults.end()) before.push_back(found->second);
    }
  }
  for (const StreamPtr& other : before) {
    if (other->has_thread) chain(*other, *stream);
  }
}

// The thread ends when it has done its work.
void close(Stream& stream) {
  if (!stream.has_thread) return;
  const HiddenLocks hidden;
  const std::lock_guard lock(stream.mutex);
  if (stream.closing) return;
  stream.closing = true;
  stream.changed.notify_all();
  stream_threads_changed(-1);
}
// Also if waiting for its work throws.
struct Closing {
  Stream& stream;
  ~Closing() { close(stream); }
};

cudaError_t create(cudaStream_t* handle, unsigned flags) {
  if (handle == nullptr || flags > cudaStreamNonBlocking) return remember(cudaErrorInvalidValue);
  const HiddenLocks hidden;
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  *handle = new CUstream_st{make_stream(current_device(), flags == cudaStreamDefault, all.setting)};
  all.handles.insert(*handle);
  return cudaSuccess;
}

}  // namespace

void Marker::pass() {
  release_order(this);
  const HiddenLocks hidden;
  const std::lock_guard lock(mutex_);
  when_ = std::chrono::steady_clock::now();
  passed_ = true;
  changed_.notify_all();
}

void Marker::wait() {
  {
    const HiddenLocks hidden;
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return passed_; });
  }
  acquire_order(this);
}

bool Marker::passed() {
  {
    const HiddenLocks hidden;
    const std::lock_guard lock(mutex_);
    if (!passed_) return false;
  }
  acquire_order(this);
  return true;
}

void set_streams(Streams mode, int delay_microseconds) {
  std::map<int, StreamPtr> defaults;
  {
    const HiddenLocks hidden;
    const std::lock_guard lock(registry().mutex);
    registry().setting = {mode, delay_microseconds};
    defaults.swap(registry().defaults);  // made again at their next use
  }
  for (const auto& [device, stream] : defaults) {
    const Closing closing{*stream};
    drain(stream);
  }
}

StreamPtr find_stream(cudaStream_t handle) {
  const HiddenLocks hidden;
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  if (handle == nullptr || handle == cudaStreamLegacy) {
    StreamPtr& stream = all.defaults[current_device()];
    if (stream == nullptr) {
      stream = make_stream(current_device(), false, all.setting);
      stream->is_default = true;
    }
    return stream;
  }
  return all.handles.contains(handle) ? handle->stream : nullptr;
}

std::vector<StreamPtr> all_streams(int device) {
  const HiddenLocks hidden;
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  std::vector<StreamPtr> found;
  for (const cudaStream_t handle : all.handles) {
    if (handle->stream->device == device) found.push_back(handle->stream);
  }
  const auto by_default = all.defaults.find(device);
  if (by_default != all.defaults.end()) found.push_back(by_default->second);
  return found;
}

cudaError_t submit(const StreamPtr& stream, Kind kind, Work work) {
  if (kind == Kind::device) {
    work = [inner = std::move(work)] {
      const DeviceAccess access;
      inner();
    };
  }
  if (is_capturing(stream)) return capture_work(stream, std::move(work));
  if (const cudaError_t error = refuse_default_stream(stream)) return error;
  if (!stream->has_thread) {
    work();
    return cudaSuccess;
  }
  order_with_default(stream);
  push(*stream, std::move(work));
  return cudaSuccess;
}

void drain(const StreamPtr& stream) {
  if (!stream->has_thread) return;
  auto marker = std::make_shared<Marker>();
  push(
      *stream, [marker] { marker->pass(); }, true);
  marker->wait();
  std::exception_ptr error;
  {
    const HiddenLocks hidden;
    const std::lock_guard lock(stream->mutex);
    error = std::exchange(stream->error, nullptr);
  }
  if (error != nullptr) std::rethrow_exception(error);
}

}  // namespace emulator

using namespace emulator;

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return create(stream, cudaStreamDefault);
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return create(stream, flags);
}
// A priority changes when work runs, never the result: there is nothing to emulate.
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return create(stream, flags);
}

// Unlike the device's, waits for the stream's work.
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  if (handle == nullptr || handle == cudaStreamLegacy)
    return remember(cudaErrorInvalidResourceHandle);
  const StreamPtr stream = find_stream(handle);
  if (stream == nullptr) return remember(cudaErrorInvalidResourceHandle);
  if (const cudaError_t error = refuse_in_capture(stream)) return remember(error);
  {
    const HiddenLocks hidden;
    const std::lock_guard lock(registry().mutex);
    registry().handles.erase(handle);
  }
  delete handle;
  const Closing closing{*stream};
  drain(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  const StreamPtr stream = find_stream(handle);
  if (stream == nullptr) return remember(cudaErrorInvalidResourceHandle);
  if (const cudaError_t error = refuse_in_capture(stream)) return remember(error);
  if (const cudaError_t error = refuse_default_stream(stream)) return remember(error);
  if (stream->has_thread) order_with_default(stream);
  drain(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  const StreamPtr stream = find_stream(handle);
  if (stream == nullptr) return remember(cudaErrorInvalidResourceHandle);
  if (const cudaError_t error = refuse_in_capture(stream)) return remember(error);
  if (!stream->has_thread) return cudaSuccess;
  {
    const HiddenLocks hidden;
    const std::lock_guard lock(stream->mutex);
    const auto is_work = [](const std::unique_ptr<Item>& item) { return !item->marks; };
    if (stream->busy || std::any_of(stream->queue.begin(), stream->queue.end(), is_work)) {
      return cudaErrorNotReady;
    }
  }
  drain(stream);  // at once: for the order, and for an error
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
  const StreamPtr stream = find_stream(handle);
  if (stream == nullptr) return remember(cudaErrorInvalidResourceHandle);
  if (function == nullptr) return remember(cudaErrorInvalidValue);
  return remember(submit(stream, Kind::host, [function, data] { function(data); }));
}
