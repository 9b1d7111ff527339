// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace sherd {

enum class Activation : std::uint8_t { none, relu, gelu_erf, gelu_tanh };

}  // namespace sherd
