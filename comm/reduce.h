// SPDX-License-Identifier: Apache-2.0
// The one way in which values of several ranks are reduced.
//
// Note [One tree]
// The values of ranks 0..n-1 are combined in a fixed binary tree: the left part has the largest
// power of two below n ranks, and both parts are combined in the same way. For n = 4: (0+1)+(2+3);
// for 6:
// ((0+1)+(2+3))+(4+5). Sums of 16-bit values are taken in fp32 and rounded once, or stay in fp32.
// So the result is a function of the values and n alone, and reducing inside contiguous groups of a
// power of two first, then across the groups, gives the same bits where the first result is not
// rounded.
#pragma once

#include <sherd/comm/communicator.h>

#include <span>

namespace sherd {

// output[count] := the reduction of sources[r][count] over r. `result`: the type of output: dtype,
// in which case output may be one of the sources, or f32 of 16-bit types.
void reduce_in_tree(std::span<const void* const> sources, void* output, std::int64_t count,
                    DType dtype, DType result, ReduceOp op);

}  // namespace sherd
