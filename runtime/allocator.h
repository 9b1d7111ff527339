// SPDX-License-Identifier: Apache-2.0
// A caching allocator: memory is asked from the system in segments and handed out in pieces, which
// are split and merged again; a training step asks for the same sizes over and over. Sizes are
// rounded the same way on every device. Stream-ordered: a release counts at once in the ledger,
// while the bytes are reused only after the events that were given with it. Not thread-safe: the
// host thread of a context owns it.
//
// Note [Near the limit]
// Far from its limit an allocator keeps what it got from the system. Where a request would exceed
// the limit, free pages are given back first, in the middle of segments too, and a new segment has
// only the pages that are asked for; pages given back return when a piece over them is handed out.
// So what is reserved can always shrink to what is live, up to the pages that two pieces share, and
// a step whose planned peak is P runs under a limit of little more than P, however its requests cut
// up the segments. A GPU's memory comes without pages: near the limit whole free segments are given
// back, and a new one has what is asked for alone.
#pragma once

#include <sherd/runtime/memory_source.h>
#include <sherd/runtime/out_of_memory.h>

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <vector>

namespace sherd {

struct MemoryBlock {
  void* data = nullptr;   // null on meta
  std::size_t bytes = 0;  // rounded; what the ledger counts
  void* piece = nullptr;  // the allocator's own
};

class SHERD_API Allocator {
 public:
  static constexpr std::size_t kGranule = 512;   // of the device's memory
  static constexpr std::size_t kAlignment = 64;  // of the address of its blocks
  // Of both for the host's memory: files are read and written directly there.
  static constexpr std::size_t kHostGranule = 4096;

  // limit: the most bytes this allocator may reserve, 0 for no limit. granule: what every size is
  // rounded up to, a multiple of the alignment. pool: named in errors. Without a source it only
  // counts, as on meta.
  Allocator(std::unique_ptr<MemorySource> source, std::size_t limit,
            MemoryPool pool = MemoryPool::device, std::size_t granule = kGranule,
            std::size_t alignment = kAlignment);
  ~Allocator();
  Allocator(const Allocator&) = delete;
  Allocator& operator=(const Allocator&) = delete;

  static std::size_t rounded(std::size_t bytes, std::size_t granule = kGranule);

  // Throws OutOfMemory when the limit or the machine's memory is exceeded.
  MemoryBlock allocate(std::size_t bytes, MemoryCategory category);
  void release(const MemoryBlock& block, MemoryCategory category, std::vector<Event> pending);
  void trim();  // returns cached blocks to the system

  // Memory that a captured graph goes on using: what is allocated between the two calls comes from
  // segments of its own, which serve nobody else until free_private().
  void begin_private();
  void end_private();
  void free_private();  // of all; what is still live stays until it is released, then is cached

  // Whoever makes memory known elsewhere, as to a network adapter, does so by segments: what was
  // got from the system at once, the blocks in it side by side. The one with this address; empty
  // where it is none of this allocator's.
  std::span<std::byte> segment_of(const void* address) const;
  // Called before a segment goes back to the system, while its last work may still run; throws
  // nothing. Until the result is dropped, which the allocator need not outlive.
  using SegmentListener = std::function<void(std::span<std::byte> segment)>;
  std::shared_ptr<void> before_segment_is_freed(SegmentListener listener);

  Ledger& ledger() { return ledger_; }
  const Ledger& ledger() const { return ledger_; }
  std::size_t reserved_bytes() const { return reserved_; }  // live and cached
  std::size_t peak_reserved_bytes() const { return peak_reserved_; }

 private:
  struct Segment;
  // A stretch of a segment; neighbours in the segment are linked.
  struct Piece {
    std::byte* data = nullptr;
    std::size_t bytes = 0;
    Segment* segment = nullptr;
    Piece *previous = nullptr, *next = nullptr;
    bool free = false;
    std::vector<Event> pending;
  };
  struct BySize {
    bool operator()(const Piece* a, const Piece* b) const {
      return a->bytes != b->bytes ? a->bytes < b->bytes : a->data < b->data;
    }
  };
  using FreePieces = std::set<Piece*, BySize>;  // best fit, then lowest address: deterministic

  struct Pool {
    FreePieces small, large;
    FreePieces& pieces(bool of_small) { return of_small ? small : large; }
  };

  static FreePieces& free_pieces(const Segment& segment);
  bool exceeds(std::size_t more) const { return limit_ > 0 && reserved_ + more > limit_; }
  void count_reserved(std::size_t bytes);
  Piece* take(std::size_t bytes, bool small);  // null where none fits
  Piece* reserve(std::size_t bytes, bool small);
  [[noreturn]] void refuse(std::size_t bytes, MemoryCategory category, std::size_t limit) const;
  bool back_with_pages(const Piece& piece);
  bool make_room(std::size_t more);
  void finish(std::vector<Event>& events);
  void give_back(Piece& piece, std::size_t most);
  void split(Piece* piece, std::size_t bytes);
  Piece* merge(Piece* left, Piece* right);
  void put_back(Piece* piece);
  void free_segment(const Segment* segment);

  std::unique_ptr<MemorySource> source_;
  std::size_t limit_;
  MemoryPool pool_;
  std::size_t granule_, alignment_;
  std::size_t reserved_ = 0, peak_reserved_ = 0;
  Ledger ledger_;
  std::map<const std::byte*, const Segment*> segments_;  // by their first byte
  std::vector<std::weak_ptr<SegmentListener>> listeners_;
  Pool common_, private_;
  Pool* current_ = &common_;
  bool holds_private_ = false;
};

}  // namespace sherd
