// SPDX-License-Identifier: Apache-2.0
// A trace as a file.
#pragma once

#include <sherd/runtime/trace.h>

#include <string>

namespace sherd {

// Writes the Chrome trace to `path` completely or not at all (AtomicFile).
SHERD_API void write_trace(const Trace& trace, const std::string& path);

}  // namespace sherd
