// SPDX-License-Identifier: Apache-2.0
// Times of single operations on a device.
#pragma once

#include <sherd/runtime/tensor.h>

#include <functional>

namespace sherd::cli {

struct CallTimes {
  double median = 0.0, fastest = 0.0;  // seconds
  double quartile = 0.0;               // a quarter of the calls were faster
  int calls = 0;
  std::int64_t flops = 0;  // of the products inside one call
};

// Note [Timing a kernel]
// Before each timed call a buffer is read that is larger than the caches: the call finds its
// operands in memory, as in a training step, where a hundred other kernels ran since they were
// written. Read and not overwritten, which would leave the cache full of lines that the call must
// first write back. On a GPU that takes longer than the host needs to enqueue the call, so that the
// call's first kernel is in the queue when the device comes to it, and events of the device, right
// before and after the call, time what the device did and not how fast the host was.
class KernelTimer {
 public:
  // buffer: bytes that are read. repeat: timed calls of each kind, or 0: as many as take a
  // tenth of a second, 3 to 200.
  // ready: is called right before each timed call; ranks meet there that are to compute at once.
  KernelTimer(Context& context, std::size_t buffer, int repeat, std::function<void()> ready = {});

  CallTimes measure(const std::function<void()>& call);

 private:
  double time_once(const std::function<void()>& call);

  Context& context_;
  Tensor buffer_;
  int repeat_;
  std::function<void()> ready_;
};

}  // namespace sherd::cli
