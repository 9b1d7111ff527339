// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sherd/kernels/arguments/patchify.h>

namespace sherd {

class Stream;

namespace cuda {

using arguments::PatchShape;

// patches '='; element_size is 1, 2, 4 or 8.
void patchify(Stream& stream, const PatchShape& shape, std::size_t element_size, const void* images,
              void* patches);
// images '='; the inverse, and so the backward pass.
void unpatchify(Stream& stream, const PatchShape& shape, std::size_t element_size,
                const void* patches, void* images);

}  // namespace cuda
}  // namespace sherd
