// SPDX-License-Identifier: Apache-2.0
#include <sherd/runtime/cuda/check.h>
#include <sherd/runtime/cuda/device.h>

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
  DeviceMemory(int device, std::shared_ptr<Stream> stream)
      : device_(device), stream_(std::move(stream)) {}

  std::byte* reserve(std::size_t bytes, std::size_t /*alignment: cudaMalloc's is 256*/) override {
    wait_before_driver_does(*stream_);
    SHERD_CUDA_CHECK(cudaSetDevice(device_));
    void* data = nullptr;
    return has_memory(cudaMalloc(&data, bytes), "cudaMalloc") ? static_cast<std::byte*>(data)
                                                              : nullptr;
  }
  void free(std::byte* data) override {
    wait_before_driver_does(*stream_);
    cudaSetDevice(device_);
    cudaFree(data);  // waits for the device
  }
  void wait_for(const std::vector<Event>& events) override {
    for (const Event& event : events) stream_->wait(event);
  }

 private:
  int device_;
  std::shared_ptr<Stream> stream_;
};

class PinnedMemory final : public MemorySource {
 public:
  PinnedMemory(int device, std::shared_ptr<Stream> stream)
      : device_(device), stream_(std::move(stream)) {}

  std::byte* reserve(std::size_t bytes, std::size_t /*alignment: whole pages*/) override {
    wait_before_driver_does(*stream_);
    SHERD_CUDA_CHECK(cudaSetDevice(device_));
    void* data = nullptr;
    return has_memory(cudaHostAlloc(&data, bytes, cudaHostAllocPortable), "cudaHostAlloc")
               ? static_cast<std::byte*>(data)
               : nullptr;
  }
  void free(std::byte* data) override {
    wait_before_driver_does(*stream_);
    cudaSetDevice(device_);
    cudaFreeHost(data);
  }
  void wait_for(const std::vector<Event>& events) override { wait_until_done(events); }

 private:
  int device_;
  std::shared_ptr<Stream> stream_;
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

std::unique_ptr<MemorySource> make_device_memory(int device, std::shared_ptr<Stream> stream) {
  return std::make_unique<DeviceMemory>(device, std::move(stream));
}

std::unique_ptr<MemorySource> make_pinned_memory(int device, std::shared_ptr<Stream> stream) {
  return std::make_unique<PinnedMemory>(device, std::move(stream));
}

void copy(Stream& stream, void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  SHERD_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_of(stream)));
}

bool reads_later(int device, const void* address) {
  int reaches = 0;
  SHERD_CUDA_CHECK(cudaDeviceGetAttribute(&reaches, cudaDevAttrPageableMemoryAccess, device));
  if (reaches != 0) return true;
  cudaPointerAttributes attributes;
  SHERD_CUDA_CHECK(cudaPointerGetAttributes(&attributes, address));
  return attributes.type == cudaMemoryTypeHost;
}

void fill_zero(Stream& stream, void* to, std::size_t bytes) {
  if (bytes == 0) return;
  SHERD_CUDA_CHECK(cudaMemsetAsync(to, 0, bytes, stream_of(stream)));
}

}  // namespace sherd::cuda
