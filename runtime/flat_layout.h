// SPDX-License-Identifier: Apache-2.0
// FlatLayout: where parameters lie in one flat buffer, and which piece of it each rank owns. Pure
// arithmetic over counts of elements: no memory, no element type, no communicator.
//
//   |weight         |..|bias|..|        |        parameters, each start a multiple of `alignment`
//   |rank 0      |rank 1      |rank 2   |        world_size shards of one size, also a multiple of
//   it
//
// Parameters may be scalars (numel 1) or empty; a parameter may span several shards, a shard hold
// several parameters, part of one, or only padding (more ranks than elements).
#pragma once

#include <sherd/runtime/api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace sherd {

struct FlatParameter {
  std::string name;  // unique within a layout
  std::int64_t numel = 0;
};

// A run of one parameter's elements inside one rank's shard; never empty.
struct ShardSegment {
  std::size_t parameter = 0;  // index in FlatLayout::parameters()
  std::int64_t offset_in_parameter = 0;
  std::int64_t offset_in_shard = 0;
  std::int64_t numel = 0;

  bool operator==(const ShardSegment&) const = default;
};

class SHERD_API FlatLayout {
 public:
  // In elements: an fp32 view then starts on a 64-byte boundary.
  static constexpr std::int64_t kDefaultAlignment = 16;

  // Throws for a repeated name, a negative numel, a world size or alignment below 1, or a buffer of
  // more than 2^63 - 1 elements.
  FlatLayout(std::vector<FlatParameter> parameters, int world_size,
             std::int64_t alignment = kDefaultAlignment);

  const std::vector<FlatParameter>& parameters() const { return parameters_; }
  int world_size() const { return world_size_; }
  std::int64_t alignment() const { return alignment_; }

  std::int64_t numel() const { return numel_; }  // of all parameters, without padding
  std::int64_t padded_numel() const { return shard_numel_ * world_size_; }
  std::int64_t shard_numel() const { return shard_numel_; }
  std::int64_t shard_offset(int rank) const;  // where the rank's shard starts in the buffer

  std::int64_t offset(std::size_t parameter) const;  // where it starts in the buffer
  std::optional<std::size_t> find(std::string_view name) const;

  // The rank that owns element `offset` of the buffer, padding included.
  int rank_of(std::int64_t offset) const;
  // What the rank owns, in the buffer's order.
  std::vector<ShardSegment> segments(int rank) const;

 private:
  std::vector<FlatParameter> parameters_;
  std::vector<std::int64_t> offsets_;
  std::map<std::string, std::size_t, std::less<>> index_;
  int world_size_ = 1;
  std::int64_t alignment_ = kDefaultAlignment;
  std::int64_t numel_ = 0;
  std::int64_t shard_numel_ = 0;
};

}  // namespace sherd
