// SPDX-License-Identifier: Apache-2.0
// The entry of libFuzzer, for the target that the build names.
#include "targets.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  sherd::fuzz::SHERD_FUZZ_TARGET(data, size);
  return 0;
}
