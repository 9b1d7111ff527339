// SPDX-License-Identifier: Apache-2.0
// Medians and quartiles of what was timed.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

namespace sherd::cli {

// q from 0 to 1, of at least one value. Between two values, the straight line.
inline double quantile(std::vector<double> values, double q) {
  std::ranges::sort(values);
  const double at = q * static_cast<double>(values.size() - 1);
  const auto below = static_cast<std::size_t>(at);
  const std::size_t above = std::min(below + 1, values.size() - 1);
  return values[below] + (at - std::floor(at)) * (values[above] - values[below]);
}

}  // namespace sherd::cli
