// SPDX-License-Identifier: Apache-2.0
// Where an allocator's segments come from: ordinary memory of the process, or a GPU's and pinned
// memory (runtime/cuda/device.h).
#pragma once

#include <sherd/runtime/stream.h>

#include <cstddef>
#include <memory>
#include <vector>

namespace sherd {

class SHERD_API MemorySource {
 public:
  virtual ~MemorySource() = default;
  // At least aligned so; null where the machine has no more.
  virtual std::byte* reserve(std::size_t bytes, std::size_t alignment) = 0;
  virtual void free(std::byte* data) = 0;
  // Whether pages in the middle of a segment can be given back, and come back when they are used.
  virtual bool gives_pages_back() const { return false; }
  virtual void give_back(std::byte* /*data*/, std::size_t /*bytes*/) {}
  virtual void prefer_huge_pages(std::byte* /*data*/, std::size_t /*bytes*/) {}
  // Before bytes are used again for which these events were given. What went wrong on a stream is
  // for those who wait for its results; only the order matters here.
  virtual void wait_for(const std::vector<Event>& events) = 0;
};

SHERD_API std::unique_ptr<MemorySource> make_process_memory();

// Blocks the calling thread until the events are done.
SHERD_API void wait_until_done(const std::vector<Event>& events);

}  // namespace sherd
