// SPDX-License-Identifier: Apache-2.0
// Large numbers for people.
#pragma once

#include <cstdint>
#include <string>

namespace sherd {

// 139018 -> "139,018"
inline std::string group_digits(std::int64_t value) {
  std::string digits = std::to_string(value);
  for (auto at = static_cast<std::ptrdiff_t>(digits.size()) - 3; at > (value < 0 ? 1 : 0);
       at -= 3) {
    digits.insert(static_cast<std::size_t>(at), ",");
  }
  return digits;
}

}  // namespace sherd
