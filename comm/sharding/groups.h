// SPDX-License-Identifier: Apache-2.0
// The groups of ranks that sharding works with, and the stream on which they talk beside the
// computation.
//
// There is one stream, on which every rank makes its calls in the order in which its program asks
// for them, gathers and reductions alike. So ranks that come to do different things are found by
// the first comparison of their calls. With two streams one rank could wait in a gather for another
// that waits in a reduction for it.
#pragma once

#include <sherd/comm/communicator.h>
#include <sherd/comm/sharding/options.h>
#include <sherd/runtime/context.h>

#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace sherd {

struct ShardingGroups {
  // All ranks together: makes the groups of the options' mesh.
  ShardingGroups(Context& context, Communicator& world, const ShardingOptions& options);

  Communicator& world;                  // for the calling thread, while the stream is idle or not
  int shard_rank = 0, shard_count = 1;  // place among the ranks that share one copy of the model
  int replica = 0;                      // which copy
  std::unique_ptr<Communicator> shard;  // of the ranks that share a copy
  std::unique_ptr<Communicator> replicate;  // of the ranks with the same shard; null: one copy
  std::unique_ptr<Communicator> secondary;  // of K neighbours, see ReshardAfterForward

  // Puts a call on the stream; the event is done when it has run. On meta, where communicators only
  // count, it runs at once. Where there are groups beside `shard`, all ranks compare the label
  // first, since ranks of different groups would not notice that they disagree.
  Event enqueue(const std::string& label, std::function<void()> call);
  // For such calls: data[count] := its sum over all ranks.
  void sum_over_all(void* data, std::int64_t count, DType dtype, std::string_view label);

  CommunicationCounters counters() const;  // of all groups; synchronize() first
  void synchronize();                      // waits for all calls; rethrows what went wrong
  void drain();                            // waits for all calls

 private:
  std::unique_ptr<Communicator> all_;  // compares; null where `shard` has all ranks
  Stream stream_;
  Trace& trace_;
  int track_;
};

}  // namespace sherd
