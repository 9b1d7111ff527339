// SPDX-License-Identifier: Apache-2.0
// What the system says when a call on a path fails, and what to do about it.
#pragma once

#include <string>

namespace sherd {

std::string directory_of(const std::string& path);
// "cannot DOING 'PATH': ..."
[[noreturn]] void fail_on_path(const char* doing, const std::string& path, int error);

}  // namespace sherd
