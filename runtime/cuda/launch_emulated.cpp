// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>
#include <emulator/emulator.h>
#include <sherd/runtime/error.h>

namespace sherd::cuda {

void check_launch(cudaError_t error) {
  if (error == cudaSuccess) return;
  fail("emulated CUDA: {} ({}) at a launch: {}", cudaGetErrorString(error), cudaGetErrorName(error),
       emulator::launch_message());
}

}  // namespace sherd::cuda
