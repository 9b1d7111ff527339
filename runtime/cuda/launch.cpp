// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>
#include <sherd/runtime/cuda/check.h>
#include <sherd/runtime/stream.h>

namespace sherd::cuda {

cudaStream_t native(const Stream& stream) {
  void* const handle = stream.native();
  SHERD_INTERNAL_CHECK(handle != nullptr, "a CUDA kernel on stream {}, which is not CUDA's",
                       stream.name());
  return static_cast<cudaStream_t>(handle);
}

}  // namespace sherd::cuda
