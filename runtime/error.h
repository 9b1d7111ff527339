// SPDX-License-Identifier: Apache-2.0
// Errors: every failure in Sherd is an exception of type sherd::Error whose message says what was
// expected, what came and where. The library never prints and never exits.
//
//   SHERD_CHECK(rows == 3, "layer_norm: weight has {} elements, expected {}", got, rows);
//
// SHERD_CHECK          the caller's mistake (a wrong shape, file or flag).
// SHERD_INTERNAL_CHECK ours: a broken invariant; the message asks for a report.
#pragma once

#include <fmt/format.h>
#include <sherd/runtime/api.h>

#include <stdexcept>
#include <string>

namespace sherd {

class SHERD_API Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message);
  ~Error() override;
};

namespace detail {
[[noreturn]] SHERD_API void throw_error(const std::string& message);
[[noreturn]] SHERD_API void throw_internal_error(const char* file, int line, const char* condition,
                                                 const std::string& message);
}  // namespace detail

// Throws Error with a formatted message.
template <typename... Args>
[[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) {
  detail::throw_error(fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace sherd

#define SHERD_CHECK(condition, ...)               \
  do {                                            \
    if (!(condition)) ::sherd::fail(__VA_ARGS__); \
  } while (false)

#define SHERD_INTERNAL_CHECK(condition, ...)                                \
  do {                                                                      \
    if (!(condition))                                                       \
      ::sherd::detail::throw_internal_error(__FILE__, __LINE__, #condition, \
                                            ::fmt::format(__VA_ARGS__));    \
  } while (false)
