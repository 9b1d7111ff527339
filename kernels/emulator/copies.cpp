// SPDX-License-Identifier: Apache-2.0
// Copies and fills. A copy from pageable host memory takes the bytes at the call, one from pinned
// memory when it runs: a program that overwrites the source too early computes wrong results here
// as on the device. A copy to pageable memory returns when it is done.
#include <cstring>

#include "stream.h"

using namespace emulator;

namespace {

bool on_device(const Pointer& p) {
  return p.type == cudaMemoryTypeDevice;
}

struct Copy {
  char* to;
  std::size_t to_pitch;
  const char* from;
  std::size_t from_pitch, width, height;

  std::size_t from_bytes() const { return (height - 1) * from_pitch + width; }
  std::size_t to_bytes() const { return (height - 1) * to_pitch + width; }
  void run() const {
    for (std::size_t row = 0; row < height; ++row) {
      std::memmove(to + row * to_pitch, from + row * from_pitch, width);
    }
  }
};

bool fits(cudaMemcpyKind kind, const Pointer& to, const Pointer& from) {
  switch (kind) {
    case cudaMemcpyHostToHost: return !on_device(to) && !on_device(from);
    case cudaMemcpyHostToDevice: return on_device(to) && !on_device(from);
    case cudaMemcpyDeviceToHost: return !on_device(to) && on_device(from);
    case cudaMemcpyDeviceToDevice: return on_device(to) && on_device(from);
    case cudaMemcpyDefault: return true;
  }
  return false;
}

cudaError_t copy(Copy c, cudaMemcpyKind kind, cudaStream_t handle, bool wait) {
  const StreamPtr stream = find_stream(handle);
  if (stream == nullptr) return remember(cudaErrorInvalidResourceHandle);
  if (kind < cudaMemcpyHostToHost || kind > cudaMemcpyDefault) {
    return remember(cudaErrorInvalidMemcpyDirection);
  }
  if (c.width == 0 || c.height == 0) return cudaSuccess;
  if (c.to == nullptr || c.from == nullptr) return remember(cudaErrorInvalidValue);
  if (c.width > c.to_pitch || c.width > c.from_pitch) return remember(cudaErrorInvalidPitchValue);
  const Pointer to = find_pointer(c.to), from = find_pointer(c.from);
  if (!fits(kind, to, from)) return remember(cudaErrorInvalidValue);
  if ((to.type != cudaMemoryTypeUnregistered && to.bytes_after < c.to_bytes()) ||
      (from.type != cudaMemoryTypeUnregistered && from.bytes_after < c.from_bytes())) {
    return remember(cudaErrorInvalidValue);
  }
  const bool pageable =
      to.type == cudaMemoryTypeUnregistered || from.type == cudaMemoryTypeUnregistered;
  if (pageable || wait) {
    if (const cudaError_t error = refuse_in_capture(stream)) return remember(error);
  }
  Work work = [c] { c.run(); };
  if (from.type == cudaMemoryTypeUnregistered && on_device(to) && stream->has_thread) {
    work = [c, bytes = std::vector<char>(c.from, c.from + c.from_bytes())]() mutable {
      c.from = bytes.data();
      c.run();
    };
  }
  if (const cudaError_t error = submit(stream, Kind::device, std::move(work)))
    return remember(error);
  if (wait || to.type == cudaMemoryTypeUnregistered || (!on_device(to) && !on_device(from))) {
    if (!is_capturing(stream)) drain(stream);
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return copy({static_cast<char*>(to), bytes, static_cast<const char*>(from), bytes, bytes, 1},
              kind, nullptr, true);
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return copy({static_cast<char*>(to), bytes, static_cast<const char*>(from), bytes, bytes, 1},
              kind, stream, false);
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind kind,
                              cudaStream_t stream) {
  return copy(
      {static_cast<char*>(to), to_pitch, static_cast<const char*>(from), from_pitch, width, height},
      kind, stream, false);
}
cudaError_t cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device,
                                size_t bytes, cudaStream_t stream) {
  if (bytes == 0) return cudaSuccess;
  const Pointer target = find_pointer(to), source = find_pointer(from);
  if (!on_device(target) || !on_device(source)) return remember(cudaErrorInvalidValue);
  if (target.device != to_device || source.device != from_device) {
    return remember(cudaErrorInvalidDevice);
  }
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t handle) {
  const StreamPtr stream = find_stream(handle);
  if (stream == nullptr) return remember(cudaErrorInvalidResourceHandle);
  if (bytes == 0) return cudaSuccess;
  const Pointer target = find_pointer(to);
  if (target.type == cudaMemoryTypeUnregistered || target.bytes_after < bytes) {
    return remember(cudaErrorInvalidValue);
  }
  return remember(
      submit(stream, Kind::device, [to, value, bytes] { std::memset(to, value, bytes); }));
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  return cudaMemsetAsync(to, value, bytes, nullptr);
}
