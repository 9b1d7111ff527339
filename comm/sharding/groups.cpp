// SPDX-License-Identifier: Apache-2.0
#include <sherd/comm/sharding/groups.h>

#include <sherd/comm/device_communicator.h>
#include <sherd/runtime/cuda/device.h>
#include <sherd/runtime/cuda/stream_times.h>
#include <sherd/runtime/error.h>

#include <algorithm>
#include <exception>
#include <numeric>

namespace sherd {
namespace {

std::unique_ptr<Stream> make_stream(Context& context) {
  static constexpr const char* kName = "communication stream";
  // Where communicators count, calls have to be made.
  if (context.is_meta() && context.schedule() == nullptr)
    return std::make_unique<Stream>(Stream::Kind::in_place, kName);
  return context.make_stream(kName);
}

ProcessMesh mesh_of(const ShardingOptions& options, int ranks) {
  return options.mesh ? *options.mesh : ProcessMesh({{"shard", ranks}});
}

bool has_axis(const ProcessMesh& mesh, const char* name) {
  return std::ranges::any_of(mesh.axes(), [&](const auto& axis) { return axis.name == name; });
}

}  // namespace

ShardingGroups::ShardingGroups(Context& context, Communicator& ranks,
                               const ShardingOptions& options)
    : world(ranks),
      context_(context),
      stream_(make_stream(context)),
      trace_(context.trace()),
      track_(trace_.track("communication stream")) {
  trace_.add_stream_times(track_, cuda::kCommunicationTrack,
                          cuda::make_stream_times(context, *stream_, trace_));
  const ProcessMesh mesh = mesh_of(options, world.size());
  exact_sums_ = options.exact_sums;
  const int rank = world.rank();
  std::vector<int> sharers{rank};
  if (has_axis(mesh, "shard")) sharers = mesh.group(rank, "shard");
  owned_.push_back(world.split(sharers, "sharding: ranks that share a copy of the model"));
  host_shard_ = owned_.back().get();
  shard = on_device(*host_shard_);
  shard_rank = shard->rank();
  shard_count = shard->size();
  if (has_axis(mesh, "replicate") && mesh.axis_size("replicate") > 1) {
    replica = mesh.coordinate(rank, "replicate");
    owned_.push_back(
        world.split(mesh.group(rank, "replicate"), "sharding: ranks with the same shard"));
    host_replicate_ = owned_.back().get();
    replicate = on_device(*host_replicate_);
  }
  if (options.reshard_after_forward.kind == ReshardAfterForward::Kind::group) {
    const int size = options.reshard_after_forward.group_size;
    std::vector<int> neighbours(static_cast<std::size_t>(size));
    std::iota(neighbours.begin(), neighbours.end(), shard_rank / size * size);
    owned_.push_back(host_shard_->split(neighbours, "sharding: neighbours with a secondary copy"));
    secondary = on_device(*owned_.back());
  }
  if (replicate != nullptr || secondary != nullptr) {
    std::vector<int> everyone(static_cast<std::size_t>(world.size()));
    std::iota(everyone.begin(), everyone.end(), 0);
    owned_.push_back(world.split(everyone, "sharding: all ranks"));
    all_ = owned_.back().get();
  }
}

// Those of a GPU before those of the host that they compare their calls in.
ShardingGroups::~ShardingGroups() {
  while (!owned_.empty()) owned_.pop_back();
}

// The same ranks for tensors. On a GPU a communicator of its own, which puts its calls on the
// stream.
Communicator* ShardingGroups::on_device(Communicator& host) {
  if (context_.is_meta() && context_.target() == Device::cuda) {
    const auto bytes = static_cast<std::int64_t>(device_staging_bytes(host.size()));
    staging_.push_back(Tensor::empty(context_, {bytes}, DType::u8, MemoryCategory::communication));
  }
  if (context_.device() != Device::cuda) return &host;
  owned_.push_back(make_device_communicator(host, context_, *stream_, exact_sums_));
  return owned_.back().get();
}

Event ShardingGroups::enqueue(const std::string& label, std::function<void()> call,
                              const Event& after) {
  const Event computed = context_.compute_stream().record();
  if (!computed.done()) stream_->wait(computed);
  if (!after.done()) stream_->wait(after);
  stream_->enqueue([this, label, call = std::move(call)] {
    const TraceScope scope(trace_, label, "communication", track_);
    if (all_) all_->barrier(label);
    call();
  });
  return stream_->record();
}

void ShardingGroups::sum_over_all(void* data, std::int64_t count, DType dtype,
                                  std::string_view label) {
  shard->all_reduce(data, count, dtype, ReduceOp::sum, label);
  if (replicate != nullptr) replicate->all_reduce(data, count, dtype, ReduceOp::sum, label);
}

void ShardingGroups::sum_on_host(void* data, std::int64_t count, DType dtype,
                                 std::string_view label) {
  host_shard_->all_reduce(data, count, dtype, ReduceOp::sum, label);
  if (host_replicate_ != nullptr)
    host_replicate_->all_reduce(data, count, dtype, ReduceOp::sum, label);
}

void ShardingGroups::copy_when_read(void* to, const void* from, std::size_t bytes,
                                    const BlockTransfer& read) {
  stream_->enqueue_on_host([read]() mutable {
    try {
      read.wait();
    } catch (const Error&) {
    }
  });
  cuda::copy(*stream_, to, from, bytes);
}

void ShardingGroups::join() {
  stream_->wait(context_.compute_stream().record());  // where a capture is under way, take part
  context_.compute_stream().wait(stream_->record());
}

void ShardingGroups::synchronize() {
  stream_->synchronize();
}

void ShardingGroups::drain() {
  try {
    stream_->synchronize();
  } catch (const std::exception&) {  // for those who waited for the call
  }
}

CommunicationCounters ShardingGroups::counters() const {
  CommunicationCounters total;
  const auto count = [&total](const Communicator& group) {
    for (std::size_t i = 0; i < kCollectives; ++i) {
      total.calls[i] += group.counters().calls[i];
      total.bytes[i] += group.counters().bytes[i];
    }
  };
  count(world);
  for (const auto& group : owned_) count(*group);
  return total;
}

}  // namespace sherd
