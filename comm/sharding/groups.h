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
#include <sherd/runtime/io/block_file.h>
#include <sherd/runtime/tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace sherd {

struct ShardingGroups {
  // All ranks together: makes the groups of the options' mesh.
  ShardingGroups(Context& context, Communicator& world, const ShardingOptions& options);

  ~ShardingGroups();

  Communicator& world;                  // for the calling thread, while the stream is idle or not
  int shard_rank = 0, shard_count = 1;  // place among the ranks that share one copy of the model
  int replica = 0;                      // which copy
  // For tensors of the device, in the order of the stream. On a GPU these are of its own memory,
  // beside those of the host's in which ranks compare their calls and agree.
  Communicator* shard = nullptr;      // of the ranks that share a copy
  Communicator* replicate = nullptr;  // of the ranks with the same shard; null: one copy
  Communicator* secondary = nullptr;  // of K neighbours, see ReshardAfterForward

  // Puts a call on the stream, behind what has been computed so far; the event is done when it has
  // run. On meta, where communicators only count, it runs at once. Where there are groups beside
  // `shard`, all ranks compare the label first, since ranks of different groups would not notice
  // that they disagree. It also waits for `after`.
  Event enqueue(const std::string& label, std::function<void()> call, const Event& after = {});
  // For such calls: data[count] := its sum over all ranks; of a tensor, or of a message in the
  // host's memory.
  void sum_over_all(void* data, std::int64_t count, DType dtype, std::string_view label);
  void sum_on_host(void* data, std::int64_t count, DType dtype, std::string_view label);
  // On a GPU: copies from the host's memory once it has been read there from a file. Where that
  // fails, whoever waits for the file says so.
  void copy_when_read(void* to, const void* from, std::size_t bytes, const BlockTransfer& read);

  // What is computed from here on comes after all calls.
  void join();

  CommunicationCounters counters() const;  // of all groups; synchronize() first
  void synchronize();                      // waits for all calls; rethrows what went wrong
  void drain();                            // waits for all calls

 private:
  Communicator* on_device(Communicator& host);

  Context& context_;
  std::unique_ptr<Stream> stream_;
  std::vector<std::unique_ptr<Communicator>> owned_;
  std::vector<Tensor> staging_;  // on meta: what communicators of GPUs hold
  Communicator *host_shard_ = nullptr, *host_replicate_ = nullptr;
  Communicator* all_ = nullptr;  // compares; null where `shard` has all ranks
  bool exact_sums_ = false;
  Trace& trace_;
  int track_;
};

}  // namespace sherd
