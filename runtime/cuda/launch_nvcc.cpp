// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>
#include <sherd/runtime/error.h>

namespace sherd::cuda {

void check_launch(cudaError_t error, const void* kernel, dim3 grid, dim3 block,
                  std::size_t shared) {
  if (error == cudaSuccess) return;
  const char* name = "?";
  if (cudaFuncGetName(&name, kernel) != cudaSuccess) name = "?";
  fail(
      "CUDA: {} ({}) at the launch of {} on {} x {} x {} blocks of {} x {} x {} threads with {} "
      "bytes of shared memory",
      cudaGetErrorString(error), cudaGetErrorName(error), name, grid.x, grid.y, grid.z, block.x,
      block.y, block.z, shared);
}

}  // namespace sherd::cuda
