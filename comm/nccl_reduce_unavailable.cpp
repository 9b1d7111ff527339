// SPDX-License-Identifier: Apache-2.0
// In builds without CUDA.
#include <sherd/comm/nccl_reduce.h>
#include <sherd/runtime/error.h>

namespace sherd {

void reduce_in_tree(Stream& stream, const DeviceSources&, void*, std::int64_t, DType, DType,
                    ReduceOp) {
  fail("stream {}: this build has no CUDA to reduce with", stream.name());
}

}  // namespace sherd
