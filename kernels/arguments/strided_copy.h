// SPDX-License-Identifier: Apache-2.0
// A strided view copied into contiguous memory: permutations, slices and broadcasts.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace sherd::arguments {

inline constexpr int kMaxCopyRank = 8;  // images cut into patches of three dimensions need 8

struct StridedView {
  int rank = 0;  // at most kMaxCopyRank; 0 is one element
  std::array<std::int64_t, kMaxCopyRank> size{};
  std::array<std::int64_t, kMaxCopyRank> stride{};  // in elements; may be 0 or negative
};

// Adds a dimension inside the others.
inline void append(StridedView& view, std::int64_t size, std::int64_t stride) {
  const auto at = static_cast<std::size_t>(view.rank++);
  view.size[at] = size;
  view.stride[at] = stride;
}

// The same view with sizes of 1 dropped and neighbours merged where one stride continues the other:
// fewer, longer rows.
inline StridedView merged(const StridedView& view) {
  StridedView out;
  for (int d = 0; d < view.rank; ++d) {
    const auto at = static_cast<std::size_t>(d);
    if (view.size[at] == 1) continue;
    const auto last = static_cast<std::size_t>(out.rank - 1);
    if (out.rank > 0 && out.stride[last] == view.stride[at] * view.size[at]) {
      out.size[last] *= view.size[at];
      out.stride[last] = view.stride[at];
      continue;
    }
    append(out, view.size[at], view.stride[at]);
  }
  return out;
}

}  // namespace sherd::arguments
