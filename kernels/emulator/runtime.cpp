// SPDX-License-Identifier: Apache-2.0
// Devices and errors.
#include "runtime.h"

#include <atomic>
#include <cstdio>
#include <cstring>
#include <utility>

#include "limits.h"
#include "stream.h"

namespace emulator {
namespace {

std::atomic<int> devices{8};
std::atomic<std::size_t> bytes_of_device{std::size_t{16} << 30};
thread_local int device_of_thread = 0;
thread_local cudaError_t last_error = cudaSuccess;

bool is_device(int device) {
  return device >= 0 && device < devices;
}

struct ErrorText {
  cudaError_t code;
  const char *name, *text;
};
#define EMULATOR_ERROR(code, text) \
  { code, #code, text }
const ErrorText kErrors[] = {
    EMULATOR_ERROR(cudaSuccess, "no error"),
    EMULATOR_ERROR(cudaErrorInvalidValue, "invalid argument"),
    EMULATOR_ERROR(cudaErrorMemoryAllocation, "out of memory"),
    EMULATOR_ERROR(cudaErrorInitializationError, "initialization error"),
    EMULATOR_ERROR(cudaErrorInvalidConfiguration, "invalid configuration argument"),
    EMULATOR_ERROR(cudaErrorInvalidPitchValue, "invalid pitch argument"),
    EMULATOR_ERROR(cudaErrorInvalidMemcpyDirection, "invalid copy direction for memcpy"),
    EMULATOR_ERROR(cudaErrorInvalidDeviceFunction, "invalid device function"),
    EMULATOR_ERROR(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    EMULATOR_ERROR(cudaErrorInvalidDevice, "invalid device ordinal"),
    EMULATOR_ERROR(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    EMULATOR_ERROR(cudaErrorNotReady, "device not ready"),
    EMULATOR_ERROR(cudaErrorPeerAccessAlreadyEnabled, "peer access is already enabled"),
    EMULATOR_ERROR(cudaErrorPeerAccessNotEnabled, "peer access has not been enabled"),
    EMULATOR_ERROR(cudaErrorIllegalAddress, "an illegal memory access was encountered"),
    EMULATOR_ERROR(cudaErrorLaunchFailure, "unspecified launch failure"),
    EMULATOR_ERROR(cudaErrorNotSupported, "operation not supported"),
    EMULATOR_ERROR(cudaErrorStreamCaptureUnsupported,
                   "operation not permitted when stream is capturing"),
    EMULATOR_ERROR(cudaErrorStreamCaptureInvalidated,
                   "operation failed due to a previous error during capture"),
    EMULATOR_ERROR(cudaErrorStreamCaptureMerge,
                   "operation would result in a merge of separate capture sequences"),
    EMULATOR_ERROR(cudaErrorStreamCaptureUnmatched,
                   "capture was not ended in the same stream as it began"),
    EMULATOR_ERROR(cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work"),
    EMULATOR_ERROR(cudaErrorStreamCaptureIsolation,
                   "dependency created on uncaptured work in another stream"),
    EMULATOR_ERROR(cudaErrorStreamCaptureImplicit,
                   "operation would make the legacy stream depend on a capturing blocking stream"),
    EMULATOR_ERROR(cudaErrorCapturedEvent,
                   "operation not permitted on an event last recorded in a capturing stream"),
    EMULATOR_ERROR(cudaErrorStreamCaptureWrongThread,
                   "attempt to terminate a thread-local capture sequence from another thread"),
    EMULATOR_ERROR(cudaErrorUnknown, "unknown error"),
};
#undef EMULATOR_ERROR

const ErrorText* find_error(cudaError_t error) {
  for (const ErrorText& e : kErrors) {
    if (e.code == error) return &e;
  }
  return nullptr;
}

}  // namespace

cudaError_t remember(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

void set_devices(int count, std::size_t bytes_each) {
  devices = count;
  bytes_of_device = bytes_each;
}
int device_count() {
  return devices;
}
std::size_t device_bytes() {
  return bytes_of_device;
}
int current_device() {
  return device_of_thread;
}

void enqueue(CUstream_st* handle, std::function<void()> work) {
  const StreamPtr stream = find_stream(handle);
  const cudaError_t error = stream == nullptr ? cudaErrorInvalidResourceHandle
                                              : submit(stream, Kind::device, std::move(work));
  if (remember(error) != cudaSuccess) {
    throw Error(std::string("emulator: enqueue: ") + cudaGetErrorString(error));
  }
}

}  // namespace emulator

using namespace emulator;

const char* cudaGetErrorName(cudaError_t error) {
  const ErrorText* e = find_error(error);
  return e == nullptr ? "unrecognized error code" : e->name;
}
const char* cudaGetErrorString(cudaError_t error) {
  const ErrorText* e = find_error(error);
  return e == nullptr ? "unrecognized error code" : e->text;
}
cudaError_t cudaGetLastError() {
  return std::exchange(last_error, cudaSuccess);
}
cudaError_t cudaPeekAtLastError() {
  return last_error;
}

cudaError_t cudaGetDeviceCount(int* count) {
  if (count == nullptr) return remember(cudaErrorInvalidValue);
  *count = devices;
  return remember(devices == 0 ? cudaErrorNoDevice : cudaSuccess);
}
cudaError_t cudaSetDevice(int device) {
  if (!is_device(device)) return remember(cudaErrorInvalidDevice);
  device_of_thread = device;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  if (device == nullptr) return remember(cudaErrorInvalidValue);
  *device = device_of_thread;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  if (p == nullptr) return remember(cudaErrorInvalidValue);
  if (!is_device(device)) return remember(cudaErrorInvalidDevice);
  *p = {};
  std::strcpy(p->name, "emulated");
  std::memcpy(p->uuid.bytes, "emulated device", 15);
  p->uuid.bytes[15] = static_cast<char>(device);
  p->totalGlobalMem = bytes_of_device;
  p->sharedMemPerBlock = kMaxStaticShared;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->warpSize = 32;
  p->maxThreadsPerBlock = kMaxBlockThreads;
  p->maxThreadsDim[0] = kMaxBlockX;
  p->maxThreadsDim[1] = kMaxBlockY;
  p->maxThreadsDim[2] = kMaxBlockZ;
  p->maxGridSize[0] = kMaxGridX;
  p->maxGridSize[1] = kMaxGridY;
  p->maxGridSize[2] = kMaxGridZ;
  p->totalConstMem = 65536;
  p->major = 9;
  p->multiProcessorCount = 4;  // few, so that loops over more blocks than fit run in tests
  p->canMapHostMemory = p->concurrentKernels = p->unifiedAddressing = 1;
  p->pciBusID = device + 1;
  p->asyncEngineCount = 2;
  p->memoryBusWidth = 5120;
  p->l2CacheSize = 50 << 20;
  p->maxThreadsPerMultiProcessor = 2048;
  p->sharedMemPerMultiprocessor = 228 * 1024;
  p->sharedMemPerBlockOptin = kMaxShared;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (value == nullptr) return remember(cudaErrorInvalidValue);
  cudaDeviceProp p;
  const cudaError_t error = cudaGetDeviceProperties(&p, device);
  if (error != cudaSuccess) return error;
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = static_cast<int>(p.sharedMemPerBlock); break;
    case cudaDevAttrWarpSize: *value = p.warpSize; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = static_cast<int>(p.sharedMemPerMultiprocessor);
      break;
    case cudaDevAttrPageableMemoryAccess: *value = 0; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(p.sharedMemPerBlockOptin);
      break;
    default: return remember(cudaErrorInvalidValue);
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* id, int bytes, int device) {
  if (id == nullptr || bytes < 13) return remember(cudaErrorInvalidValue);
  if (!is_device(device)) return remember(cudaErrorInvalidDevice);
  std::snprintf(id, static_cast<std::size_t>(bytes), "0000:%02X:00.0",
                static_cast<unsigned>(device + 1) & 255u);
  return cudaSuccess;
}
// All devices see each other's memory.
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  if (can == nullptr) return remember(cudaErrorInvalidValue);
  if (!is_device(device) || !is_device(peer)) return remember(cudaErrorInvalidDevice);
  *can = device != peer;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
  thread_local std::set<std::pair<int, int>> enabled;
  if (flags != 0) return remember(cudaErrorInvalidValue);
  if (!is_device(peer) || peer == device_of_thread) return remember(cudaErrorInvalidDevice);
  const bool fresh = enabled.insert({device_of_thread, peer}).second;
  return remember(fresh ? cudaSuccess : cudaErrorPeerAccessAlreadyEnabled);
}
cudaError_t cudaDriverGetVersion(int* version) {
  return cudaRuntimeGetVersion(version);
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  if (version == nullptr) return remember(cudaErrorInvalidValue);
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  const cudaError_t error = refuse_unsafe_call();
  if (error != cudaSuccess) return remember(error);
  for (const StreamPtr& stream : all_streams(device_of_thread)) drain(stream);
  return cudaSuccess;
}
