// SPDX-License-Identifier: Apache-2.0
#include <sherd/runtime/allocator.h>
#include <sherd/runtime/error.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <limits>

namespace sherd {
namespace {

// Requests up to kSmall share segments of kSmallSegment bytes, so that they do not nibble at the
// large ones. Larger ones share segments of a multiple of kLargeSegment, split as long as what is
// left over is itself large: neighbours that are freed merge, so that the flat gradients of a unit
// find room where many activations were. Pages that are never touched cost nothing.
constexpr std::size_t kSmall = std::size_t{256} << 10;
constexpr std::size_t kSmallSegment = std::size_t{1} << 20;
constexpr std::size_t kLargeSegment = std::size_t{64} << 20;

// From twice this size on a segment consists of huge pages: fewer page faults and TLB misses on
// activations of tens of megabytes.
constexpr std::size_t kHugePage = std::size_t{2} << 20;

std::byte* system_allocate(std::size_t bytes) {
  const bool huge = bytes % kHugePage == 0;
  void* data = std::aligned_alloc(huge ? kHugePage : Allocator::kAlignment, bytes);
  if (data != nullptr && huge) madvise(data, bytes, MADV_HUGEPAGE);
  return static_cast<std::byte*>(data);
}

std::size_t round_up(std::size_t bytes, std::size_t multiple) {
  return (bytes + multiple - 1) / multiple * multiple;
}

// Only the order matters here: what went wrong on a stream is for those who wait for its results.
void finish(std::vector<Event>& events) {
  for (const Event& event : events) {
    while (!event.wait_for(std::chrono::hours(1))) {
    }
  }
  events.clear();
}

}  // namespace

Allocator::Allocator(Device device, std::size_t limit) : device_(device), limit_(limit) {}

Allocator::~Allocator() {
  trim();
}

std::size_t Allocator::rounded(std::size_t bytes) {
  SHERD_CHECK(bytes <= std::numeric_limits<std::size_t>::max() - kGranule,
              "an allocation of {} bytes overflows", bytes);
  return (bytes + kGranule - 1) / kGranule * kGranule;
}

MemoryBlock Allocator::allocate(std::size_t bytes, MemoryCategory category) {
  MemoryBlock block;
  block.bytes = rounded(bytes);
  if (device_ != Device::meta && block.bytes > 0) {
    const bool small = block.bytes <= kSmall;
    Piece* piece = take(block.bytes, small);
    if (piece == nullptr) piece = reserve(block.bytes, small, category);
    split(piece, block.bytes);
    piece->free = false;
    block.data = piece->data;
    block.piece = piece;
  }
  ledger_.add(category, static_cast<std::int64_t>(block.bytes));
  return block;
}

void Allocator::release(const MemoryBlock& block, MemoryCategory category,
                        std::vector<Event> pending) {
  ledger_.remove(category, static_cast<std::int64_t>(block.bytes));
  if (block.piece == nullptr) return;
  auto* piece = static_cast<Piece*>(block.piece);
  piece->free = true;
  piece->pending = std::move(pending);
  if (piece->next != nullptr && piece->next->free) piece = merge(piece, piece->next);
  if (piece->previous != nullptr && piece->previous->free) piece = merge(piece->previous, piece);
  free_pieces(piece->small).insert(piece);
}

// The smallest free piece that fits.
Allocator::Piece* Allocator::take(std::size_t bytes, bool small) {
  FreePieces& pieces = free_pieces(small);
  Piece key;
  key.bytes = bytes;
  const auto found = pieces.lower_bound(&key);
  if (found == pieces.end()) return nullptr;
  Piece* piece = *found;
  pieces.erase(found);
  finish(piece->pending);
  return piece;
}

// Leaves the first `bytes` to the piece and makes the rest a free piece, where it is of use.
void Allocator::split(Piece* piece, std::size_t bytes) {
  const std::size_t rest = piece->bytes - bytes;
  if (rest < (piece->small ? kGranule : kSmall)) return;
  auto* right = new Piece{piece->data + bytes, rest, piece, piece->next, piece->small, true, {}};
  if (right->next != nullptr) right->next->previous = right;
  piece->next = right;
  piece->bytes = bytes;
  free_pieces(piece->small).insert(right);
}

// Two neighbours, both free, become one. Whichever is in the set of free pieces leaves it.
Allocator::Piece* Allocator::merge(Piece* left, Piece* right) {
  free_pieces(left->small).erase(left);
  free_pieces(left->small).erase(right);
  left->bytes += right->bytes;
  left->next = right->next;
  if (left->next != nullptr) left->next->previous = left;
  std::ranges::move(right->pending, std::back_inserter(left->pending));
  delete right;
  return left;
}

Allocator::Piece* Allocator::reserve(std::size_t bytes, bool small, MemoryCategory category) {
  std::size_t segment = small ? kSmallSegment : round_up(bytes, kLargeSegment);
  const auto over_limit = [&] { return limit_ > 0 && reserved_ + segment > limit_; };
  if (over_limit()) trim();
  // Near the limit a segment of just the size that is needed may still fit.
  if (over_limit() && !small) {
    segment = bytes < 2 * kHugePage ? bytes : round_up(bytes, kHugePage);
  }
  SHERD_CHECK(!over_limit(),
              "out of memory: {} more for {} would exceed the limit of {}; in use: {}. Raise the "
              "memory limit, or lower the batch size",
              format_bytes(static_cast<std::int64_t>(bytes)), name_of(category),
              format_bytes(static_cast<std::int64_t>(limit_)), format_breakdown(ledger_.live()));
  std::byte* data = system_allocate(segment);
  if (data == nullptr) {
    trim();
    data = system_allocate(segment);
  }
  SHERD_CHECK(data != nullptr, "out of memory: the system refused {} for {}; in use: {}",
              format_bytes(static_cast<std::int64_t>(segment)), name_of(category),
              format_breakdown(ledger_.live()));
  reserved_ += segment;
  peak_reserved_ = std::max(peak_reserved_, reserved_);
  return new Piece{data, segment, nullptr, nullptr, small, false, {}};
}

// A free piece without neighbours is a whole segment.
void Allocator::trim() {
  for (FreePieces* pieces : {&free_small_, &free_large_}) {
    for (auto it = pieces->begin(); it != pieces->end();) {
      Piece* piece = *it;
      if (piece->previous != nullptr || piece->next != nullptr) {
        ++it;
        continue;
      }
      finish(piece->pending);
      std::free(piece->data);
      reserved_ -= piece->bytes;
      delete piece;
      it = pieces->erase(it);
    }
  }
}

}  // namespace sherd
