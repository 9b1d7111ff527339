// SPDX-License-Identifier: Apache-2.0
// A caching allocator: memory is asked from the system in segments and handed out in pieces, which
// are split and merged again; a training step asks for the same sizes over and over. Sizes are
// rounded the same way on every device. Stream-ordered: a release counts at once in the ledger,
// while the bytes are reused only after the events that were given with it. Not thread-safe: the
// host thread of a context owns it.
#pragma once

#include <sherd/runtime/device.h>
#include <sherd/runtime/ledger.h>
#include <sherd/runtime/stream.h>

#include <memory>
#include <set>
#include <vector>

namespace sherd {

struct MemoryBlock {
  void* data = nullptr;   // null on meta
  std::size_t bytes = 0;  // rounded; what the ledger counts
  void* piece = nullptr;  // the allocator's own
};

class SHERD_API Allocator {
 public:
  static constexpr std::size_t kGranule = 512;   // bytes every size is rounded up to
  static constexpr std::size_t kAlignment = 64;  // of every block's address

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
  std::size_t reserved_bytes() const { return reserved_; }  // live and cached
  std::size_t peak_reserved_bytes() const { return peak_reserved_; }

 private:
  // A stretch of a segment; neighbours in the segment are linked.
  struct Piece {
    std::byte* data = nullptr;
    std::size_t bytes = 0;
    Piece *previous = nullptr, *next = nullptr;
    bool small = false;  // of a segment for small requests
    bool free = false;
    std::vector<Event> pending;
  };
  struct BySize {
    bool operator()(const Piece* a, const Piece* b) const {
      return a->bytes != b->bytes ? a->bytes < b->bytes : a->data < b->data;
    }
  };
  using FreePieces = std::set<Piece*, BySize>;  // best fit, then lowest address: deterministic

  FreePieces& free_pieces(bool small) { return small ? free_small_ : free_large_; }
  Piece* take(std::size_t bytes, bool small);
  Piece* reserve(std::size_t bytes, bool small, MemoryCategory category);
  void split(Piece* piece, std::size_t bytes);
  Piece* merge(Piece* left, Piece* right);

  Device device_;
  std::size_t limit_;
  std::size_t reserved_ = 0, peak_reserved_ = 0;
  Ledger ledger_;
  FreePieces free_small_, free_large_;
};

}  // namespace sherd
