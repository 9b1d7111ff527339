// SPDX-License-Identifier: Apache-2.0
// Dropout (Srivastava et al., 2014) with a counter-based mask, so that nothing has to be saved: the
// backward pass is the same function applied to the gradient.
#pragma once

#include <cmath>
#include <cstdint>

namespace sherd::arguments {

// Which words of the random stream keep their element: those up to `limit`.
struct DropoutRule {
  bool any = false;
  std::uint32_t limit = 0;
};
inline DropoutRule dropout_rule(double keep_probability) {
  const double threshold = std::round(keep_probability * 0x1p32);
  if (threshold < 1) return {};
  return {true, static_cast<std::uint32_t>(static_cast<std::uint64_t>(threshold) - 1)};
}

}  // namespace sherd::arguments
