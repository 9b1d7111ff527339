// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sherd/kernels/arguments/strided_copy.h>

namespace sherd::cpu {

using arguments::kMaxCopyRank;
using arguments::StridedView;

// to[i] = the view's element i in row-major order; '='. `from` is the element at index zero;
// element_size is 1, 2, 4 or 8. The two must not overlap.
void strided_copy(int threads, const StridedView& view, std::size_t element_size, const void* from,
                  void* to);

}  // namespace sherd::cpu
