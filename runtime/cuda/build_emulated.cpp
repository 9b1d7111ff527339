// SPDX-License-Identifier: Apache-2.0
#include <sherd/runtime/cuda/device.h>

namespace sherd::cuda {

std::string_view build_name() {
  return "emulated CUDA";
}

}  // namespace sherd::cuda
