// SPDX-License-Identifier: Apache-2.0
// Communicators for tensors of GPUs.
#pragma once

#include <sherd/comm/communicator.h>
#include <sherd/runtime/context.h>

#include <memory>

namespace sherd {

// The ranks of `host`, each with the GPU of its context. Calls are compared through `host`, put on
// the stream, and return; what they are given must stay until the stream has passed. One rank
// alone needs no more than CUDA; several need NCCL, and an Error says so where the build has none.
// exact_sums: in the tree of reduce.h instead of NCCL's order. `host` and the stream must outlive
// it.
SHERD_API std::unique_ptr<Communicator> make_device_communicator(Communicator& host,
                                                                 Context& context, Stream& stream,
                                                                 bool exact_sums);

// Of the device's memory, that such a communicator of so many ranks holds.
SHERD_API std::size_t device_staging_bytes(int ranks);

}  // namespace sherd
