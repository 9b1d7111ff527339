// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <sherd/runtime/error.h>
#include <sherd/runtime/flat_layout.h>
#include <sherd/runtime/philox.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

using sherd::FlatLayout;
using sherd::FlatParameter;
using sherd::ShardSegment;

namespace {

// Checks every promise of the header, element by element.
void check_layout(const FlatLayout& layout) {
  const auto& parameters = layout.parameters();
  REQUIRE(layout.padded_numel() == layout.shard_numel() * layout.world_size());
  REQUIRE(layout.shard_numel() % layout.alignment() == 0);
  REQUIRE(layout.padded_numel() >= layout.numel());

  std::int64_t end = 0;
  std::int64_t numel = 0;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    REQUIRE(layout.offset(i) % layout.alignment() == 0);
    REQUIRE(layout.offset(i) >= end);
    REQUIRE(layout.offset(i) - end < layout.alignment());  // no more padding than it takes
    REQUIRE(layout.find(parameters[i].name) == i);
    end = layout.offset(i) + parameters[i].numel;
    numel += parameters[i].numel;
  }
  REQUIRE(numel == layout.numel());
  REQUIRE(layout.padded_numel() >= end);
  REQUIRE(layout.padded_numel() - end < layout.world_size() * layout.alignment());

  std::vector<std::vector<int>> covered;
  for (const FlatParameter& parameter : parameters) {
    covered.emplace_back(static_cast<std::size_t>(parameter.numel), 0);
  }
  for (int rank = 0; rank < layout.world_size(); ++rank) {
    REQUIRE(layout.shard_offset(rank) == rank * layout.shard_numel());
    std::int64_t shard_end = 0;
    for (const ShardSegment& segment : layout.segments(rank)) {
      REQUIRE(segment.numel > 0);
      REQUIRE(segment.offset_in_shard >= shard_end);
      shard_end = segment.offset_in_shard + segment.numel;
      REQUIRE(shard_end <= layout.shard_numel());
      REQUIRE(layout.shard_offset(rank) + segment.offset_in_shard ==
              layout.offset(segment.parameter) + segment.offset_in_parameter);
      for (std::int64_t i = 0; i < segment.numel; ++i) {
        ++covered[segment.parameter].at(static_cast<std::size_t>(segment.offset_in_parameter + i));
      }
      REQUIRE(layout.rank_of(layout.shard_offset(rank) + segment.offset_in_shard) == rank);
      REQUIRE(layout.rank_of(layout.shard_offset(rank) + shard_end - 1) == rank);
    }
  }
  for (const auto& counts : covered) {
    for (const int count : counts) REQUIRE(count == 1);
  }
}

}  // namespace

TEST_CASE("a flat layout places parameters and cuts them over ranks") {
  const FlatLayout layout({{"weight", 40}, {"scale", 1}, {"none", 0}, {"bias", 10}}, 3, 4);
  check_layout(layout);
  CHECK(layout.numel() == 51);
  CHECK(layout.offset(0) == 0);
  CHECK(layout.offset(1) == 40);
  CHECK(layout.offset(2) == 44);
  CHECK(layout.offset(3) == 44);
  CHECK(layout.shard_numel() == 20);  // 54 / 3 = 18, rounded up to fours
  CHECK(layout.padded_numel() == 60);
  CHECK(layout.segments(0) == std::vector<ShardSegment>{{0, 0, 0, 20}});
  CHECK(layout.segments(1) == std::vector<ShardSegment>{{0, 20, 0, 20}});
  CHECK(layout.segments(2) == std::vector<ShardSegment>{{1, 0, 0, 1}, {3, 0, 4, 10}});
  CHECK(layout.rank_of(19) == 0);
  CHECK(layout.rank_of(20) == 1);
  CHECK(layout.rank_of(59) == 2);
  CHECK(layout.find("bias") == 3u);
  CHECK_FALSE(layout.find("gamma").has_value());
}

TEST_CASE("fp32 views of a flat layout start on 64 bytes unless told otherwise") {
  const FlatLayout layout({{"a", 1}, {"b", 17}, {"c", 5}}, 2);
  check_layout(layout);
  CHECK(layout.alignment() == 16);
  CHECK(layout.offset(1) == 16);
  CHECK(layout.offset(2) == 48);
  CHECK(layout.shard_numel() == 32);
}

TEST_CASE("a flat layout covers every element once, whatever the sizes and the world size") {
  const sherd::RandomStream random(1, "test", "flat_layout");
  std::uint64_t draw = 0;
  for (int trial = 0; trial < 400; ++trial) {
    std::vector<FlatParameter> parameters;
    const std::uint64_t count = random.below(draw++, 9);
    for (std::uint64_t i = 0; i < count; ++i) {
      std::int64_t numel = 0;
      switch (random.below(draw++, 4)) {
        case 0: numel = 0; break;
        case 1: numel = 1; break;
        case 2: numel = static_cast<std::int64_t>(random.below(draw++, 40)); break;
        default: numel = static_cast<std::int64_t>(random.below(draw++, 700)); break;
      }
      parameters.push_back({fmt::format("p{}", i), numel});
    }
    const std::int64_t alignment = std::vector<std::int64_t>{1, 3, 16, 64}[random.below(draw++, 4)];
    check_layout(FlatLayout(parameters, trial % 64 + 1, alignment));
  }
}

TEST_CASE("a flat layout may be empty, or smaller than its world") {
  for (const FlatLayout& empty : {FlatLayout({}, 4), FlatLayout({{"a", 0}, {"b", 0}}, 4)}) {
    check_layout(empty);
    CHECK(empty.padded_numel() == 0);
    CHECK(empty.segments(3).empty());
    CHECK_THROWS_AS(empty.rank_of(0), sherd::Error);
  }
  const FlatLayout few({{"a", 3}, {"", 0}}, 64);
  check_layout(few);
  CHECK(few.segments(0).size() == 1);
  CHECK(few.segments(1).empty());
  CHECK(few.segments(63).empty());
  CHECK(few.padded_numel() == 64 * 16);
}

TEST_CASE("one huge parameter is cut into even shards") {
  const std::int64_t huge = std::int64_t{1} << 40;
  const FlatLayout layout({{"scalar", 1}, {"huge", huge}, {"tail", 1}}, 7);
  std::int64_t next = 0;
  for (int rank = 0; rank < 7; ++rank) {
    for (const ShardSegment& segment : layout.segments(rank)) {
      if (segment.parameter != 1) continue;
      CHECK(segment.offset_in_parameter == next);
      next += segment.numel;
    }
  }
  CHECK(next == huge);
  CHECK(layout.numel() == huge + 2);
  CHECK(layout.segments(3).size() == 1);
  CHECK(layout.segments(6).back().parameter == 2);
}

TEST_CASE("a flat layout says what is wrong with its arguments") {
  const auto makes = [](std::vector<FlatParameter> parameters, int world_size,
                        std::int64_t alignment) {
    return FlatLayout(std::move(parameters), world_size, alignment);
  };
  using doctest::Contains;
  CHECK_THROWS_WITH_AS(makes({{"a", 1}, {"b", 1}, {"a", 2}}, 1, 1),
                       Contains("two parameters, 0 and 2, are both named 'a'"), sherd::Error);
  CHECK_THROWS_WITH_AS(makes({{"a", -1}}, 1, 1), Contains("parameter 'a' has -1 elements"),
                       sherd::Error);
  CHECK_THROWS_WITH_AS(makes({}, 0, 1), Contains("world size is 0"), sherd::Error);
  CHECK_THROWS_WITH_AS(makes({}, 1, 0), Contains("alignment is 0"), sherd::Error);
  const std::int64_t most = std::numeric_limits<std::int64_t>::max();
  CHECK_THROWS_WITH_AS(makes({{"a", most}, {"b", 1}}, 1, 1), Contains("more than 2^63 - 1"),
                       sherd::Error);
  CHECK_THROWS_WITH_AS(makes({{"a", most - 1}}, 5, 16), Contains("more than 2^63 - 1"),
                       sherd::Error);
  const FlatLayout layout({{"a", 5}}, 2, 1);
  CHECK_THROWS_WITH_AS(layout.segments(2), Contains("rank is 2, expected one in [0, 2)"),
                       sherd::Error);
  CHECK_THROWS_WITH_AS(layout.segments(-1), Contains("rank is -1"), sherd::Error);
  CHECK_THROWS_WITH_AS(layout.offset(1), Contains("parameter index is 1, there are 1"),
                       sherd::Error);
  CHECK_THROWS_WITH_AS(layout.rank_of(6), Contains("offset is 6, expected one in [0, 6)"),
                       sherd::Error);
  CHECK_THROWS_WITH_AS(layout.rank_of(-1), Contains("offset is -1"), sherd::Error);
}
