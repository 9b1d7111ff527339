// SPDX-License-Identifier: Apache-2.0
// "did you mean": the nearest known word, for messages about unknown names, flags and keys.
#pragma once

#include <sherd/runtime/api.h>

#include <string>
#include <string_view>
#include <vector>

namespace sherd {

// "; did you mean 'x'?" when a known word is near, else "; known: a, b, c".
SHERD_API std::string did_you_mean(std::string_view word, const std::vector<std::string>& known);

}  // namespace sherd
