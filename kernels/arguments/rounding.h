// SPDX-License-Identifier: Apache-2.0
// The step before the rounding of fp64 to a 16-bit type.
#pragma once

#include <bit>
#include <cstdint>

namespace sherd::arguments {

// double -> bf16 or f16 goes through fp32. Were that step rounded to nearest, the second rounding
// could meet a tie that the first one made; rounded to odd, it cannot (Boldo and Melquiond, 2008).
constexpr float round_to_odd(double value) {
  const float nearest = static_cast<float>(value);
  const double error = value - static_cast<double>(nearest);
  const auto word = std::bit_cast<std::uint32_t>(nearest);
  if (!(error < 0 || error > 0) || (word & 1u) != 0 || (word & 0x7f800000u) == 0x7f800000u) {
    return nearest;
  }
  const bool away_from_zero = nearest == 0 || (error > 0) == (nearest > 0);
  return std::bit_cast<float>(away_from_zero ? word + 1 : word - 1);
}

}  // namespace sherd::arguments
