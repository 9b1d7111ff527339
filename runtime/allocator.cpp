// SPDX-License-Identifier: Apache-2.0
#include <sherd/runtime/allocator.h>
#include <sherd/runtime/error.h>

#include <algorithm>
#include <bit>
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

// In which what is reserved is counted near the limit.
constexpr std::size_t kPage = 4096;

std::size_t round_up(std::size_t bytes, std::size_t multiple) {
  return (bytes + multiple - 1) / multiple * multiple;
}

}  // namespace

// Memory from the system. Absent pages were given back, or not counted yet.
struct Allocator::Segment {
  std::byte* data;
  std::size_t bytes;
  bool small;  // for small requests
  Pool* pool;
  std::vector<bool> absent = std::vector<bool>(bytes / kPage);
  std::size_t absent_pages = 0;

  // The pages that a piece touches, and those that it has to itself.
  std::pair<std::size_t, std::size_t> touched(const Piece& piece) const {
    const auto begin = static_cast<std::size_t>(piece.data - data);
    return {begin / kPage, (begin + piece.bytes + kPage - 1) / kPage};
  }
  std::pair<std::size_t, std::size_t> owned(const Piece& piece) const {
    const auto begin = static_cast<std::size_t>(piece.data - data);
    return {(begin + kPage - 1) / kPage, (begin + piece.bytes) / kPage};
  }
};

Allocator::Allocator(std::unique_ptr<MemorySource> source, std::size_t limit, MemoryPool pool,
                     std::size_t granule, std::size_t alignment)
    : source_(std::move(source)),
      limit_(limit),
      pool_(pool),
      granule_(granule),
      alignment_(alignment) {
  SHERD_CHECK(std::has_single_bit(alignment) && granule > 0 && granule % alignment == 0,
              "allocator: expected an alignment that is a power of two and a granule that is a "
              "multiple of it, got {} and {}",
              alignment, granule);
}

// After a failure on a GPU even asking whether its work is done fails, and was reported already.
Allocator::~Allocator() {
  try {
    free_private();
    trim();
  } catch (const Error&) {
  }
}

std::size_t Allocator::rounded(std::size_t bytes, std::size_t granule) {
  SHERD_CHECK(bytes <= std::numeric_limits<std::size_t>::max() - granule,
              "an allocation of {} bytes overflows", bytes);
  return round_up(bytes, granule);
}

MemoryBlock Allocator::allocate(std::size_t bytes, MemoryCategory category) {
  MemoryBlock block;
  block.bytes = rounded(bytes, granule_);
  if (source_ && block.bytes > 0) {
    const bool small = block.bytes <= kSmall;
    Piece* piece = take(block.bytes, small);
    if (piece == nullptr) piece = reserve(block.bytes, small);
    if (piece == nullptr) refuse(block.bytes, category, exceeds(block.bytes) ? limit_ : 0);
    piece->free = false;
    split(piece, block.bytes);
    if (!back_with_pages(*piece)) {
      put_back(piece);
      trim();
      refuse(block.bytes, category, limit_);
    }
    block.data = piece->data;
    block.piece = piece;
  }
  ledger_.add(category, static_cast<std::int64_t>(block.bytes));
  return block;
}

void Allocator::refuse(std::size_t bytes, MemoryCategory category, std::size_t limit) const {
  throw OutOfMemory(pool_, category, static_cast<std::int64_t>(bytes),
                    static_cast<std::int64_t>(limit), ledger_);
}

void Allocator::release(const MemoryBlock& block, MemoryCategory category,
                        std::vector<Event> pending) {
  ledger_.remove(category, static_cast<std::int64_t>(block.bytes));
  if (block.piece == nullptr) return;
  auto* piece = static_cast<Piece*>(block.piece);
  piece->pending = std::move(pending);
  put_back(piece);
}

Allocator::FreePieces& Allocator::free_pieces(const Segment& segment) {
  return segment.pool->pieces(segment.small);
}

void Allocator::begin_private() {
  SHERD_INTERNAL_CHECK(current_ == &common_, "allocator: private memory inside private memory");
  trim();  // what is cached would be kept beside it
  current_ = &private_;
  holds_private_ = true;
}

void Allocator::end_private() {
  current_ = &common_;
}

void Allocator::free_private() {
  holds_private_ = false;
  for (const bool small : {false, true}) {
    for (Piece* piece : private_.pieces(small)) {
      // Its live neighbours follow when they are released.
      piece->segment->pool = &common_;
      common_.pieces(small).insert(piece);
    }
    private_.pieces(small).clear();
  }
}

// The smallest free piece that fits.
Allocator::Piece* Allocator::take(std::size_t bytes, bool small) {
  FreePieces& pieces = current_->pieces(small);
  Piece key;
  key.bytes = bytes;
  const auto found = pieces.lower_bound(&key);
  if (found == pieces.end()) return nullptr;
  Piece* piece = *found;
  pieces.erase(found);
  finish(piece->pending);
  return piece;
}

// Leaves the first `bytes` to the piece and makes the rest a free piece, where it is of use: under
// a limit its pages are.
void Allocator::split(Piece* piece, std::size_t bytes) {
  const std::size_t rest = piece->bytes - bytes;
  const bool small = piece->segment->small;
  if (rest < (small ? granule_ : limit_ > 0 ? kPage : kSmall)) return;
  auto* right = new Piece{piece->data + bytes, rest, piece->segment, piece, piece->next, true, {}};
  if (right->next != nullptr) right->next->previous = right;
  piece->next = right;
  piece->bytes = bytes;
  free_pieces(*piece->segment).insert(right);
}

void Allocator::put_back(Piece* piece) {
  piece->free = true;
  if (!holds_private_) piece->segment->pool = &common_;
  if (piece->next != nullptr && piece->next->free) piece = merge(piece, piece->next);
  if (piece->previous != nullptr && piece->previous->free) piece = merge(piece->previous, piece);
  free_pieces(*piece->segment).insert(piece);
}

// Two neighbours, both free, become one. Whichever is in the set of free pieces leaves it.
Allocator::Piece* Allocator::merge(Piece* left, Piece* right) {
  FreePieces& pieces = free_pieces(*left->segment);
  pieces.erase(left);
  pieces.erase(right);
  left->bytes += right->bytes;
  left->next = right->next;
  if (left->next != nullptr) left->next->previous = left;
  std::ranges::move(right->pending, std::back_inserter(left->pending));
  delete right;
  return left;
}

// A new segment; near the limit its pages are absent, or it has no more than is asked for. Null
// where the system refuses.
Allocator::Piece* Allocator::reserve(std::size_t bytes, bool small) {
  std::size_t size = small ? kSmallSegment : round_up(bytes, kLargeSegment);
  if (exceeds(size) && !source_->gives_pages_back()) {
    trim();
    if (exceeds(size)) size = round_up(bytes, small ? kPage : kHugePage);
    if (exceeds(size)) return nullptr;
  }
  const std::size_t alignment = std::max(alignment_, small ? kPage : kHugePage);
  std::byte* data = source_->reserve(size, alignment);
  if (data == nullptr) {
    trim();
    data = source_->reserve(size, alignment);
  }
  if (data == nullptr) {  // perhaps no more than is asked for
    size = round_up(bytes, small ? kPage : kHugePage);
    data = source_->reserve(size, alignment);
  }
  if (data == nullptr) return nullptr;
  auto* segment = new Segment{data, size, small, current_};
  segments_.emplace(data, segment);
  if (exceeds(size)) {
    segment->absent.assign(size / kPage, true);
    segment->absent_pages = size / kPage;
  } else {
    if (!small) source_->prefer_huge_pages(data, size);
    count_reserved(size);
  }
  return new Piece{segment->data, size, segment, nullptr, nullptr, false, {}};
}

void Allocator::finish(std::vector<Event>& events) {
  if (!events.empty()) source_->wait_for(events);
  events.clear();
}

void Allocator::count_reserved(std::size_t bytes) {
  reserved_ += bytes;
  peak_reserved_ = std::max(peak_reserved_, reserved_);
}

// Counts the pages of a piece that were absent. False where the limit has no room for them.
bool Allocator::back_with_pages(const Piece& piece) {
  Segment& segment = *piece.segment;
  if (segment.absent_pages == 0) return true;
  const auto [begin, end] = segment.touched(piece);
  const auto first = segment.absent.begin() + static_cast<std::ptrdiff_t>(begin);
  const auto last = segment.absent.begin() + static_cast<std::ptrdiff_t>(end);
  const auto missing = static_cast<std::size_t>(std::count(first, last, true));
  if (!make_room(missing * kPage)) return false;
  std::fill(first, last, false);
  segment.absent_pages -= missing;
  count_reserved(missing * kPage);
  return true;
}

// Gives pages of free pieces back, of the largest first, until `more` bytes are within the limit.
bool Allocator::make_room(std::size_t more) {
  for (FreePieces* pieces : {&common_.large, &common_.small}) {
    for (auto it = pieces->rbegin(); exceeds(more) && it != pieces->rend(); ++it) {
      // As much as a huge page at once, for each time is a system call.
      give_back(**it, std::max(reserved_ + more - limit_, kHugePage));
    }
  }
  return !exceeds(more);
}

// The last pages first: a piece is handed out from its front.
void Allocator::give_back(Piece& piece, std::size_t most) {
  finish(piece.pending);
  Segment& segment = *piece.segment;
  const auto [begin, end] = segment.owned(piece);
  std::size_t given = 0;
  for (std::size_t last = end; last > begin && given < most; --last) {
    std::size_t first = last;
    while (first > begin && !segment.absent[first - 1] && given < most) {
      segment.absent[--first] = true;
      given += kPage;
    }
    if (first == last) continue;
    source_->give_back(segment.data + first * kPage, (last - first) * kPage);
    last = first + 1;
  }
  segment.absent_pages += given / kPage;
  reserved_ -= given;
}

// A free piece without neighbours is a whole segment.
void Allocator::trim() {
  for (FreePieces* pieces : {&common_.small, &common_.large}) {
    for (auto it = pieces->begin(); it != pieces->end();) {
      Piece* piece = *it;
      if (piece->previous != nullptr || piece->next != nullptr) {
        ++it;
        continue;
      }
      finish(piece->pending);
      free_segment(piece->segment);
      delete piece;
      it = pieces->erase(it);
    }
  }
}

void Allocator::free_segment(const Segment* segment) {
  std::erase_if(listeners_, [](const auto& listener) { return listener.expired(); });
  for (const auto& listener : listeners_) {
    if (const auto live = listener.lock()) (*live)({segment->data, segment->bytes});
  }
  reserved_ -= segment->bytes - segment->absent_pages * kPage;
  source_->free(segment->data);
  segments_.erase(segment->data);
  delete segment;
}

std::span<std::byte> Allocator::segment_of(const void* address) const {
  const auto* at = static_cast<const std::byte*>(address);
  auto found = segments_.upper_bound(at);
  if (found == segments_.begin()) return {};
  const Segment& segment = *std::prev(found)->second;
  if (at >= segment.data + segment.bytes) return {};
  return {segment.data, segment.bytes};
}

std::shared_ptr<void> Allocator::before_segment_is_freed(SegmentListener listener) {
  auto made = std::make_shared<SegmentListener>(std::move(listener));
  listeners_.push_back(made);
  return made;
}

}  // namespace sherd
