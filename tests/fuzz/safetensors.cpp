// SPDX-License-Identifier: Apache-2.0
#include <sherd/runtime/io/safetensors.h>

#include "targets.h"

namespace sherd::fuzz {

void safetensors(const std::uint8_t* data, std::size_t size) {
  expect_errors_only([&] { (void)parse_safetensors_header({data, size}, "fuzz.safetensors"); });
}

}  // namespace sherd::fuzz
