// SPDX-License-Identifier: Apache-2.0
#include <sherd/runtime/memory_source.h>
#include <sys/mman.h>

#include <cstdlib>

namespace sherd {
namespace {

class ProcessMemory final : public MemorySource {
 public:
  std::byte* reserve(std::size_t bytes, std::size_t alignment) override {
    return static_cast<std::byte*>(std::aligned_alloc(alignment, bytes));
  }
  void free(std::byte* data) override { std::free(data); }
  bool gives_pages_back() const override { return true; }
  void give_back(std::byte* data, std::size_t bytes) override {
    madvise(data, bytes, MADV_DONTNEED);
  }
  void prefer_huge_pages(std::byte* data, std::size_t bytes) override {
    madvise(data, bytes, MADV_HUGEPAGE);
  }
  void wait_for(const std::vector<Event>& events) override { wait_until_done(events); }
};

}  // namespace

std::unique_ptr<MemorySource> make_process_memory() {
  return std::make_unique<ProcessMemory>();
}

void wait_until_done(const std::vector<Event>& events) {
  for (const Event& event : events) {
    while (!event.wait_for(std::chrono::hours(1))) {
    }
  }
}

}  // namespace sherd
