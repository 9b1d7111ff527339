// SPDX-License-Identifier: Apache-2.0
// A strided view copied into contiguous memory: permutations, slices and broadcasts.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace sherd::cpu {

inline constexpr int kMaxCopyRank = 6;

struct StridedView {
  int rank = 0;  // at most kMaxCopyRank; 0 is one element
  std::array<std::int64_t, kMaxCopyRank> size{};
  std::array<std::int64_t, kMaxCopyRank> stride{};  // in elements; may be 0 or negative
};

// to[i] = the view's element i in row-major order; '='. `from` is the element at index zero;
// element_size is 1, 2, 4 or 8. The two must not overlap.
void strided_copy(int threads, const StridedView& view, std::size_t element_size, const void* from,
                  void* to);

}  // namespace sherd::cpu
