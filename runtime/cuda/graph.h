// SPDX-License-Identifier: Apache-2.0
// Device work that is recorded once and replayed with one call: a CUDA graph.
//
// Note [What a graph is made of]
// Kernels, copies and collectives, with the addresses and numbers that they were recorded with. So
// what is replayed must find its inputs at the same addresses; what changes from one replay to the
// next lies in device memory that is written before; and memory that was given back while it was
// recorded is used again by every replay, in the order of the stream. The host's part of the
// recorded code is not repeated.
#pragma once

#include <sherd/runtime/api.h>
#include <sherd/runtime/stream.h>

#include <functional>
#include <memory>

namespace sherd::cuda {

class SHERD_API Graph {
 public:
  // Runs `body`. Device work that it puts on the stream, and on streams of the same context that
  // wait for it and that it waits for again, is recorded instead of run. All earlier work must be
  // done. Throws where something cannot be recorded, such as a read by the host; nothing has run
  // then.
  static std::unique_ptr<Graph> capture(Stream& stream, const std::function<void()>& body);
  virtual ~Graph() = default;

  virtual void launch(Stream& stream) = 0;  // in the order of the stream
};

}  // namespace sherd::cuda
