// SPDX-License-Identifier: Apache-2.0
// The groups of ranks and the streams that sharding works with.
//
// A communicator serves one thread at a time, so each stream has its own: all-gathers run on the
// gather stream, reductions on the reduce stream, and what all ranks must agree on once a step goes
// through the world communicator on the calling thread.
#pragma once

#include <sherd/comm/communicator.h>
#include <sherd/comm/sharding/options.h>
#include <sherd/runtime/context.h>

#include <memory>

namespace sherd {

struct ShardingGroups {
  // All ranks together: makes the groups of the options' mesh.
  ShardingGroups(Context& context, Communicator& world, const ShardingOptions& options);

  Communicator& world;
  int shard_rank = 0, shard_count = 1;  // place among the ranks that share one copy of the model
  int replica = 0;                      // which copy
  std::unique_ptr<Communicator> gather, reduce;  // of the ranks that share a copy
  std::unique_ptr<Communicator> replicate;       // of the ranks with the same shard; null: one copy
  std::unique_ptr<Communicator> secondary;       // of K neighbours, see ReshardAfterForward

  // On meta, where communicators only count, calls run at once.
  Stream gather_stream, reduce_stream;
  Trace& trace;
  int gather_track, reduce_track;

  // Puts a call on a stream; the event is done when it has run.
  Event on_gather_stream(std::string label, std::function<void()> call);
  Event on_reduce_stream(std::string label, std::function<void()> call);

  // Blocks until the event, or ends all ranks after the options' limit. Rethrows what went wrong.
  void wait(const Event& event, const std::string& label);
  const double wait_limit_seconds;
};

}  // namespace sherd
