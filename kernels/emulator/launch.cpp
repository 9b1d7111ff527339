// SPDX-License-Identifier: Apache-2.0
// Launches: what the device would refuse, and attributes of kernels.
#include <cstdio>
#include <map>

#include "block.h"
#include "limits.h"
#include "stream.h"

namespace emulator {
namespace {

std::mutex attributes_mutex;
std::map<const void*, std::size_t>& dynamic_limits() {  // set by cudaFuncSetAttribute
  static auto* limits = new std::map<const void*, std::size_t>;
  return *limits;
}

std::size_t dynamic_limit(const void* kernel) {
  const HiddenLocks hidden;
  const std::lock_guard lock(attributes_mutex);
  const auto found = dynamic_limits().find(kernel);
  return found == dynamic_limits().end() ? kMaxStaticShared : found->second;
}

thread_local std::string last_launch_message;

std::string text(dim3 d) {
  return std::to_string(d.x) + " x " + std::to_string(d.y) + " x " + std::to_string(d.z);
}

cudaError_t refuse(const Launch& launch, cudaError_t error, const std::string& why) {
  last_launch_message = "launch of " + kernel_name(launch.kernel) + ": " + why;
  std::fprintf(stderr, "emulator: %s (%s)\n", last_launch_message.c_str(), cudaGetErrorName(error));
  return remember(error);
}

}  // namespace

const std::string& launch_message() {
  return last_launch_message;
}

cudaError_t launch_body(const Launch& launch, cudaStream_t handle, std::function<void()> thread) {
  const dim3 g = launch.grid, b = launch.block;
  const std::size_t threads = std::size_t{b.x} * b.y * b.z;
  if (threads == 0 || threads > kMaxBlockThreads || b.x > kMaxBlockX || b.y > kMaxBlockY ||
      b.z > kMaxBlockZ) {
    return refuse(launch, cudaErrorInvalidConfiguration,
                  "a block of " + text(b) + " threads; allowed are 1 to 1024, at most 64 in z");
  }
  if (g.x == 0 || g.y == 0 || g.z == 0 || g.x > kMaxGridX || g.y > kMaxGridY || g.z > kMaxGridZ) {
    return refuse(launch, cudaErrorInvalidConfiguration,
                  "a grid of " + text(g) + " blocks; allowed are 1 to 2147483647 x 65535 x 65535");
  }
  const std::size_t limit = dynamic_limit(launch.kernel);
  if (launch.shared_bytes > limit) {
    return refuse(launch, cudaErrorInvalidValue,
                  std::to_string(launch.shared_bytes) +
                      " bytes of dynamic shared memory, allowed are " + std::to_string(limit) +
                      "; cudaFuncSetAttribute raises that to at most " +
                      std::to_string(kMaxShared));
  }
  const StreamPtr stream = find_stream(handle);
  if (stream == nullptr) return refuse(launch, cudaErrorInvalidResourceHandle, "no such stream");
  if (stream->device != current_device()) {
    return refuse(launch, cudaErrorInvalidResourceHandle,
                  "the stream is of device " + std::to_string(stream->device) +
                      ", the thread's current device is " + std::to_string(current_device()));
  }
  return remember(
      submit(stream, Kind::device, [launch, body = std::move(thread)] { run_grid(launch, body); }));
}

}  // namespace emulator

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  using namespace emulator;
  if (kernel == nullptr) return remember(cudaErrorInvalidDeviceFunction);
  if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout) {
    return remember(value >= -1 && value <= 100 ? cudaSuccess : cudaErrorInvalidValue);  // a hint
  }
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 ||
      static_cast<std::size_t>(value) > kMaxShared) {
    return remember(cudaErrorInvalidValue);
  }
  const HiddenLocks hidden;
  const std::lock_guard lock(attributes_mutex);
  dynamic_limits()[kernel] = static_cast<std::size_t>(value);
  return cudaSuccess;
}
