// SPDX-License-Identifier: Apache-2.0
// reduce_in_tree of reduce.h on a GPU: the same tree and the same bits.
#pragma once

#include <sherd/comm/communicator.h>
#include <sherd/runtime/stream.h>

namespace sherd {

// What the ranks sent, in the device's memory: own is this rank's, the others' lie one after the
// other from `received` on, `stride` elements apart, by rank.
struct DeviceSources {
  const void* own;
  const void* received;
  std::int64_t stride;
  int rank, ranks;
};

// output[count] := their reduction, put on the stream; output may be own where the types are equal.
void reduce_in_tree(Stream& stream, const DeviceSources& sources, void* output, std::int64_t count,
                    DType dtype, DType result, ReduceOp op);

}  // namespace sherd
