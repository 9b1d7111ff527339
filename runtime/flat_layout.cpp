// SPDX-License-Identifier: Apache-2.0
#include <sherd/runtime/error.h>
#include <sherd/runtime/flat_layout.h>

#include <algorithm>
#include <utility>

namespace sherd {
namespace {

std::int64_t checked_add(std::int64_t a, std::int64_t b) {
  std::int64_t sum = 0;
  SHERD_CHECK(!__builtin_add_overflow(a, b, &sum),
              "FlatLayout: the buffer would have more than 2^63 - 1 elements");
  return sum;
}

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  const std::int64_t rest = value % multiple;
  return rest == 0 ? value : checked_add(value, multiple - rest);
}

}  // namespace

FlatLayout::FlatLayout(std::vector<FlatParameter> parameters, int world_size,
                       std::int64_t alignment)
    : parameters_(std::move(parameters)), world_size_(world_size), alignment_(alignment) {
  SHERD_CHECK(world_size >= 1, "FlatLayout: world size is {}, expected at least 1", world_size);
  SHERD_CHECK(alignment >= 1, "FlatLayout: alignment is {} elements, expected at least 1",
              alignment);
  offsets_.reserve(parameters_.size());
  std::int64_t end = 0;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const auto& [name, numel] = parameters_[i];
    SHERD_CHECK(numel >= 0, "FlatLayout: parameter '{}' has {} elements, expected 0 or more", name,
                numel);
    const auto [known, inserted] = index_.try_emplace(name, i);
    SHERD_CHECK(inserted, "FlatLayout: two parameters, {} and {}, are both named '{}'",
                known->second, i, name);
    offsets_.push_back(round_up(end, alignment));
    end = checked_add(offsets_.back(), numel);
    numel_ += numel;
  }
  shard_numel_ = round_up(end / world_size + (end % world_size != 0 ? 1 : 0), alignment);
  std::int64_t padded = 0;
  SHERD_CHECK(!__builtin_mul_overflow(shard_numel_, std::int64_t{world_size}, &padded),
              "FlatLayout: {} shards of {} elements are more than 2^63 - 1", world_size,
              shard_numel_);
}

std::int64_t FlatLayout::shard_offset(int rank) const {
  SHERD_CHECK(rank >= 0 && rank < world_size_, "FlatLayout: rank is {}, expected one in [0, {})",
              rank, world_size_);
  return rank * shard_numel_;
}

std::int64_t FlatLayout::offset(std::size_t parameter) const {
  SHERD_CHECK(parameter < offsets_.size(), "FlatLayout: parameter index is {}, there are {}",
              parameter, offsets_.size());
  return offsets_[parameter];
}

std::optional<std::size_t> FlatLayout::find(std::string_view name) const {
  const auto found = index_.find(name);
  if (found == index_.end()) return std::nullopt;
  return found->second;
}

int FlatLayout::rank_of(std::int64_t offset) const {
  SHERD_CHECK(offset >= 0 && offset < padded_numel(),
              "FlatLayout: offset is {}, expected one in [0, {})", offset, padded_numel());
  return static_cast<int>(offset / shard_numel_);
}

std::vector<ShardSegment> FlatLayout::segments(int rank) const {
  const std::int64_t shard_begin = shard_offset(rank);
  const std::int64_t shard_end = shard_begin + shard_numel_;
  // The last parameter that starts at or before the shard; empty ones share a start with the next.
  const auto after = std::upper_bound(offsets_.begin(), offsets_.end(), shard_begin);
  std::size_t i = static_cast<std::size_t>(after - offsets_.begin());
  if (i > 0) --i;
  std::vector<ShardSegment> result;
  for (; i < offsets_.size() && offsets_[i] < shard_end; ++i) {
    const std::int64_t begin = std::max(offsets_[i], shard_begin);
    const std::int64_t end = std::min(offsets_[i] + parameters_[i].numel, shard_end);
    if (begin < end) {
      result.push_back({.parameter = i,
                        .offset_in_parameter = begin - offsets_[i],
                        .offset_in_shard = begin - shard_begin,
                        .numel = end - begin});
    }
  }
  return result;
}

}  // namespace sherd
