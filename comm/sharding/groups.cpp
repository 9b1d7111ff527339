// SPDX-License-Identifier: Apache-2.0
#include <sherd/comm/sharding/groups.h>

#include <sherd/runtime/error.h>

#include <algorithm>
#include <exception>
#include <numeric>

namespace sherd {
namespace {

Stream::Kind stream_kind(const Context& context) {
  return context.is_meta() ? Stream::Kind::in_place : Stream::Kind::worker;
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
      stream_(stream_kind(context), "communication stream"),
      trace_(context.trace()),
      track_(trace_.track("communication stream")) {
  const ProcessMesh mesh = mesh_of(options, world.size());
  const int rank = world.rank();
  std::vector<int> sharers{rank};
  if (has_axis(mesh, "shard")) sharers = mesh.group(rank, "shard");
  shard = world.split(sharers, "sharding: ranks that share a copy of the model");
  shard_rank = shard->rank();
  shard_count = shard->size();
  if (has_axis(mesh, "replicate") && mesh.axis_size("replicate") > 1) {
    replica = mesh.coordinate(rank, "replicate");
    replicate = world.split(mesh.group(rank, "replicate"), "sharding: ranks with the same shard");
  }
  if (options.reshard_after_forward.kind == ReshardAfterForward::Kind::group) {
    const int size = options.reshard_after_forward.group_size;
    std::vector<int> neighbours(static_cast<std::size_t>(size));
    std::iota(neighbours.begin(), neighbours.end(), shard_rank / size * size);
    secondary = shard->split(neighbours, "sharding: neighbours with a secondary copy");
  }
  if (replicate || secondary) {
    std::vector<int> everyone(static_cast<std::size_t>(world.size()));
    std::iota(everyone.begin(), everyone.end(), 0);
    all_ = world.split(everyone, "sharding: all ranks");
  }
}

Event ShardingGroups::enqueue(const std::string& label, std::function<void()> call) {
  stream_.enqueue([this, label, call = std::move(call)] {
    const TraceScope scope(trace_, label, "communication", track_);
    if (all_) all_->barrier(label);
    call();
  });
  return stream_.record();
}

void ShardingGroups::sum_over_all(void* data, std::int64_t count, DType dtype,
                                  std::string_view label) {
  shard->all_reduce(data, count, dtype, ReduceOp::sum, label);
  if (replicate) replicate->all_reduce(data, count, dtype, ReduceOp::sum, label);
}

void ShardingGroups::synchronize() {
  stream_.synchronize();
}

void ShardingGroups::drain() {
  try {
    stream_.synchronize();
  } catch (const std::exception&) {  // for those who waited for the call
  }
}

CommunicationCounters ShardingGroups::counters() const {
  CommunicationCounters total;
  const Communicator* const groups[] = {&world, shard.get(), replicate.get(), secondary.get(),
                                        all_.get()};
  for (const Communicator* group : groups) {
    if (group == nullptr) continue;
    for (std::size_t i = 0; i < kCollectives; ++i) {
      total.calls[i] += group->counters().calls[i];
      total.bytes[i] += group->counters().bytes[i];
    }
  }
  return total;
}

}  // namespace sherd
