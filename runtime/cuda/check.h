// SPDX-License-Identifier: Apache-2.0
// Turns CUDA's error codes into Errors that name the call.
#pragma once

#include <cuda_runtime.h>
#include <sherd/runtime/error.h>

namespace sherd::cuda {

[[noreturn]] void fail_call(cudaError_t error, const char* call, const char* file, int line);

}  // namespace sherd::cuda

#define SHERD_CUDA_CHECK(call)                                               \
  do {                                                                       \
    const cudaError_t sherd_cuda_error = (call);                             \
    if (sherd_cuda_error != cudaSuccess)                                     \
      ::sherd::cuda::fail_call(sherd_cuda_error, #call, __FILE__, __LINE__); \
  } while (false)
