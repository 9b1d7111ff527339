// SPDX-License-Identifier: Apache-2.0
// Which memory NCCL may work on in place.
//
// Note [Registered segments]
// NCCL copies what it sends through buffers of its own, unless it knows the memory: then network
// adapters and switches that add work on it directly. So each segment of the allocator in which a
// call has a buffer is registered with the communicator, once, and deregistered before it is freed
// or the communicator ends. NCCL leaves undefined what happens where some ranks of a call give it
// registered memory and others do not. Here nothing that may differ between ranks decides: all
// register or none, and before every call the segments of its buffers, wherever they lie.
//
// All register where each is on a machine of its own. Inside a machine registered memory must come
// from CUDA's calls for virtual memory; ours is cudaMalloc's, for which NCCL does nothing by
// default because it may hang, and for which it can try to set up NVLS anew in every call.
// NCCL_LEGACY_CUDA_REGISTER=1, with which NCCL is told to do it nevertheless, is heeded here too.
//
// While a graph is captured nothing is registered: NCCL then does so by itself with the memory of
// every call, for as long as the graph lives.
#pragma once

#include <sherd/comm/nccl_handle.h>
#include <sherd/runtime/allocator.h>
#include <sherd/runtime/stream.h>

#include <map>
#include <memory>
#include <span>

namespace sherd {

// What a rank tells the others before they decide.
struct RegistrationFacts {
  std::int64_t machine = 0;  // the same on one machine; 0: not known
  std::int64_t legacy = 0;   // 1: NCCL_LEGACY_CUDA_REGISTER=1
};
bool registers_segments(std::span<const RegistrationFacts> ranks);

class NcclRegistration {
 public:
  // All ranks of `host` together. The calls go on the stream.
  NcclRegistration(NcclHandle& nccl, Communicator& host, std::shared_ptr<Allocator> allocator,
                   Stream& stream);
  NcclRegistration(const NcclRegistration&) = delete;
  NcclRegistration& operator=(const NcclRegistration&) = delete;
  // When all calls are over, and before the handle ends.
  ~NcclRegistration();

  // Before a call with a buffer at this address, which may be none of the allocator's.
  void prepare(const void* address);

 private:
  void before_free(std::span<std::byte> segment);

  NcclHandle& nccl_;
  const std::shared_ptr<Allocator> allocator_;
  Stream& stream_;
  bool on_;
  std::map<const std::byte*, void*> handles_;  // NCCL's, by the first byte of the segment
  std::shared_ptr<void> listener_;
};

}  // namespace sherd
