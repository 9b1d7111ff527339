// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sherd/kernels/arguments/strided_copy.h>

namespace sherd {

class Stream;

namespace cuda {

using arguments::kMaxCopyRank;
using arguments::StridedView;

// to[i] = the view's element i in row-major order; '='. `from` is the element at index zero;
// element_size is 1, 2, 4 or 8. The two must not overlap. From `wide_from` words of up to 16 bytes
// on, places are computed in 64 bits.
void strided_copy(Stream& stream, const StridedView& view, std::size_t element_size,
                  const void* from, void* to, std::int64_t wide_from = std::int64_t{1} << 31);

}  // namespace cuda
}  // namespace sherd
