// SPDX-License-Identifier: Apache-2.0
#include <sherd/runtime/error.h>

namespace sherd {

Error::Error(const std::string& message) : std::runtime_error(message) {}
Error::~Error() = default;

namespace detail {

void throw_error(const std::string& message) {
  throw Error(message);
}

void throw_internal_error(const char* file, int line, const char* condition,
                          const std::string& message) {
  throw Error(
      fmt::format("internal error at {}:{} ({}): {}. This is a bug in Sherd, please report it",
                  file, line, condition, message));
}

}  // namespace detail
}  // namespace sherd
