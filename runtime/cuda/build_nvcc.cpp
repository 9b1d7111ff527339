// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>
#include <fmt/format.h>
#include <sherd/runtime/cuda/device.h>

namespace sherd::cuda {

std::string_view build_name() {
  static const std::string kName =
      fmt::format("CUDA {}.{}", CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
  return kName;
}

}  // namespace sherd::cuda
