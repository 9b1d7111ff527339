// SPDX-License-Identifier: Apache-2.0
// Text from a file, made fit for a message: quoted, short and printable.
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>

namespace sherd {

inline std::string quote(std::string_view text) {
  constexpr std::size_t kLongest = 120;
  std::string out = "'";
  for (const char c : text.substr(0, kLongest)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte >= 0x7f) {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      out += c;
    }
  }
  return out + (text.size() > kLongest ? "...'" : "'");
}

}  // namespace sherd
