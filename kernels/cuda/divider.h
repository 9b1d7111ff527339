// SPDX-License-Identifier: Apache-2.0
// Division of many numbers by one that the host knows.
#pragma once

#include <cstdint>

namespace sherd::cuda {

// Of numbers below 2^31, by one of them: a multiplication and a shift (Granlund and Montgomery,
// "Division by invariant integers using multiplication", PLDI 1994, figure 4.1).
struct Divider32 {
  using Index = std::uint32_t;
  std::uint32_t divisor = 1, multiplier = 1, shift = 0;

  Divider32() = default;
  explicit Divider32(std::int64_t by) : divisor(static_cast<std::uint32_t>(by)) {
    while ((std::uint64_t{1} << shift) < divisor) ++shift;
    const std::uint64_t excess = (std::uint64_t{1} << shift) - divisor;
    multiplier = static_cast<std::uint32_t>((excess << 32) / divisor + 1);
  }
  constexpr std::uint32_t quotient(std::uint32_t number) const {
    const auto high = static_cast<std::uint32_t>(std::uint64_t{number} * multiplier >> 32);
    return (high + number) >> shift;
  }
};

// Of any number that is not negative.
struct Divider64 {
  using Index = std::int64_t;
  std::int64_t divisor = 1;

  Divider64() = default;
  explicit Divider64(std::int64_t by) : divisor(by) {}
  constexpr std::int64_t quotient(std::int64_t number) const { return number / divisor; }
};

}  // namespace sherd::cuda
