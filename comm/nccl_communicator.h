// SPDX-License-Identifier: Apache-2.0
// Ranks with a GPU each, over NCCL.
//
// Note [NCCL beside a host communicator]
// NCCL has no words for ranks that disagree: it waits for ever. So every call is first compared
// through a communicator of the same ranks in host memory, which has the usual errors; then it is
// put on a CUDA stream, and returns. What happens on the stream the host learns only by looking:
// who waits for it (Stream::watch) looks at NCCL's own errors and at whether the group has ended,
// and then aborts NCCL, whose kernels leave the device. So a rank that fails or dies ends the
// others here as everywhere.
#pragma once

#include <sherd/comm/communicator.h>
#include <sherd/runtime/allocator.h>

namespace sherd {

struct NcclOptions {
  // Sums of floating-point numbers in the tree of reduce.h, the bits of every other backend,
  // instead of NCCL's order. Pieces are exchanged and added by a kernel: an all-reduce moves what a
  // reduce-scatter and an all-gather do.
  bool exact_sums = false;
  // Of the device, for the staging memory; needed. Buffers lie in its memory on all ranks, or on
  // none: Note [Registered segments].
  std::shared_ptr<Allocator> allocator;
  std::size_t staging_bytes = std::size_t{32} << 20;  // at most so much is exchanged at once
};

// Whether this build has it.
bool nccl_built();

// The ranks of `host` with this device each, all together. Calls that are captured into a graph are
// compared when they are captured, not when they are replayed. Buffers must stay until the stream
// has passed; a barrier is one of the host alone. Of several groups only one at a time may have
// calls on the device (NCCL's rule), so give them one stream. `host` and the stream must outlive
// it. The staging memory is allocated at once, of MemoryCategory::communication.
std::unique_ptr<Communicator> make_nccl_communicator(Communicator& host, int device, Stream& stream,
                                                     const NcclOptions& options);

}  // namespace sherd
