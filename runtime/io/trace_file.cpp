// SPDX-License-Identifier: Apache-2.0
#include <sherd/runtime/io/file.h>
#include <sherd/runtime/io/trace_file.h>

namespace sherd {

void write_trace(const Trace& trace, const std::string& path) {
  constexpr std::size_t kChunk = std::size_t{1} << 20;  // bytes handed to the system at once
  AtomicFile file(path);
  std::string chunk;
  trace.write_json([&](std::string_view text) {
    chunk += text;
    if (chunk.size() < kChunk) return;
    file.write(chunk);
    chunk.clear();
  });
  file.write(chunk);
  file.commit();
}

}  // namespace sherd
