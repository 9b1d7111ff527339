// SPDX-License-Identifier: Apache-2.0
#include <sherd/runtime/allocator.h>
#include <sherd/runtime/error.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <limits>

namespace sherd {
namespace {

// From this size on a block is aligned to, and asked for in, huge pages: fewer page faults and TLB
// misses on activations of tens of megabytes.
constexpr std::size_t kHugePage = std::size_t{2} << 20;

void* system_allocate(std::size_t bytes) {
  const bool huge = bytes >= 2 * kHugePage;
  const std::size_t alignment = huge ? kHugePage : Allocator::kAlignment;
  const std::size_t padded = (bytes + alignment - 1) / alignment * alignment;
  void* data = std::aligned_alloc(alignment, padded);
  if (data != nullptr && huge) madvise(data, padded, MADV_HUGEPAGE);
  return data;
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
  block.capacity = block.bytes;
  if (device_ != Device::meta && block.bytes > 0) {
    block.data = take_cached(block.bytes, &block.capacity);
    if (block.data == nullptr) block.data = reserve(block.bytes, category);
  }
  ledger_.add(category, static_cast<std::int64_t>(block.bytes));
  return block;
}

void Allocator::release(const MemoryBlock& block, MemoryCategory category,
                        std::vector<Event> pending) {
  ledger_.remove(category, static_cast<std::int64_t>(block.bytes));
  if (block.data != nullptr) {
    cache_.emplace(block.capacity, CachedBlock{block.data, std::move(pending)});
  }
}

// The smallest cached block that fits, unless it would waste more than an eighth.
void* Allocator::take_cached(std::size_t bytes, std::size_t* capacity) {
  const auto found = cache_.lower_bound(bytes);
  if (found == cache_.end() || found->first > bytes + bytes / 8) return nullptr;
  for (const Event& event : found->second.pending) event.wait();
  void* data = found->second.data;
  *capacity = found->first;
  cache_.erase(found);
  return data;
}

void* Allocator::reserve(std::size_t bytes, MemoryCategory category) {
  const auto over_limit = [&] { return limit_ > 0 && reserved_ + bytes > limit_; };
  if (over_limit()) trim();
  SHERD_CHECK(!over_limit(),
              "out of memory: {} more for {} would exceed the limit of {}; in use: {}. Raise the "
              "memory limit, or lower the batch size",
              format_bytes(static_cast<std::int64_t>(bytes)), name_of(category),
              format_bytes(static_cast<std::int64_t>(limit_)), format_breakdown(ledger_.live()));
  void* data = system_allocate(bytes);
  if (data == nullptr) {
    trim();
    data = system_allocate(bytes);
  }
  SHERD_CHECK(data != nullptr, "out of memory: the system refused {} for {}; in use: {}",
              format_bytes(static_cast<std::int64_t>(bytes)), name_of(category),
              format_breakdown(ledger_.live()));
  reserved_ += bytes;
  peak_reserved_ = std::max(peak_reserved_, reserved_);
  return data;
}

void Allocator::trim() {
  for (const auto& [capacity, block] : cache_) {
    for (const Event& event : block.pending) event.wait();
    std::free(block.data);
    reserved_ -= capacity;
  }
  cache_.clear();
}

}  // namespace sherd
