// SPDX-License-Identifier: Apache-2.0
// A caching allocator: released blocks are kept and handed out again, since a training step asks for
// the same sizes over and over. Sizes are rounded the same way on every device. Stream-ordered: a
// release counts at once in the ledger, while the bytes are reused only after the events that were
// given with it. Not thread-safe: the host thread of a context owns it.
#pragma once

#include <sherd/runtime/device.h>
#include <sherd/runtime/ledger.h>
#include <sherd/runtime/stream.h>

#include <map>
#include <vector>

namespace sherd {

struct MemoryBlock {
  void* data = nullptr;       // null on meta
  std::size_t bytes = 0;      // rounded; what the ledger counts
  std::size_t capacity = 0;   // what the system gave; >= bytes
};

class SHERD_API Allocator {
 public:
  static constexpr std::size_t kGranule = 512;     // bytes every size is rounded up to
  static constexpr std::size_t kAlignment = 64;    // of every block's address

  // limit: the most bytes this allocator may reserve, 0 for no limit.
  Allocator(Device device, std::size_t limit);
  ~Allocator();
  Allocator(const Allocator&) = delete;
  Allocator& operator=(const Allocator&) = delete;

  static std::size_t rounded(std::size_t bytes);

  // Throws, naming the category and what lives, when the limit or the machine's memory is exceeded.
  MemoryBlock allocate(std::size_t bytes, MemoryCategory category);
  void release(const MemoryBlock& block, MemoryCategory category, std::vector<Event> pending);
  void trim();  // returns cached blocks to the system

  Ledger& ledger() { return ledger_; }
  const Ledger& ledger() const { return ledger_; }
  std::size_t limit() const { return limit_; }
  std::size_t reserved_bytes() const { return reserved_; }       // live and cached
  std::size_t peak_reserved_bytes() const { return peak_reserved_; }

 private:
  struct CachedBlock {
    void* data;
    std::vector<Event> pending;
  };
  void* take_cached(std::size_t bytes, std::size_t* capacity);
  void* reserve(std::size_t bytes, MemoryCategory category);

  Device device_;
  std::size_t limit_;
  std::size_t reserved_ = 0, peak_reserved_ = 0;
  Ledger ledger_;
  std::multimap<std::size_t, CachedBlock> cache_;  // by capacity
};

}  // namespace sherd
