// SPDX-License-Identifier: Apache-2.0
// The source line of a kernel that calls a barrier or warp operation, for messages.
#pragma once

namespace emulator {

// As a default argument, `Location where = Location::here()` is the line of the caller. (Not
// std::source_location: clang 14 lacks its builtin.)
struct Location {
  const char* file;
  int line;
  static constexpr Location here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

}  // namespace emulator
