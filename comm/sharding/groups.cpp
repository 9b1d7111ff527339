// SPDX-License-Identifier: Apache-2.0
#include <sherd/comm/sharding/groups.h>

#include <sherd/runtime/error.h>

#include <algorithm>
#include <chrono>
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

Event run_on(Stream& stream, Trace& trace, int track, std::string label,
             std::function<void()> call) {
  stream.enqueue([&trace, track, label = std::move(label), call = std::move(call)] {
    const TraceScope scope(trace, label, "communication", track);
    call();
  });
  return stream.record();
}

}  // namespace

ShardingGroups::ShardingGroups(Context& context, Communicator& all, const ShardingOptions& options)
    : world(all),
      gather_stream(stream_kind(context), "gather stream"),
      reduce_stream(stream_kind(context), "reduce stream"),
      trace(context.trace()),
      gather_track(trace.track("gather stream")),
      reduce_track(trace.track("reduce stream")),
      wait_limit_seconds(options.wait_limit_seconds) {
  const ProcessMesh mesh = mesh_of(options, world.size());
  const int rank = world.rank();
  std::vector<int> sharers{rank};
  if (has_axis(mesh, "shard")) sharers = mesh.group(rank, "shard");
  gather = world.split(sharers, "sharding: ranks that gather together");
  reduce = world.split(sharers, "sharding: ranks that reduce together");
  shard_rank = gather->rank();
  shard_count = gather->size();
  if (has_axis(mesh, "replicate") && mesh.axis_size("replicate") > 1) {
    replica = mesh.coordinate(rank, "replicate");
    replicate = world.split(mesh.group(rank, "replicate"), "sharding: ranks with the same shard");
  }
  if (options.reshard_after_forward.kind == ReshardAfterForward::Kind::group) {
    const int size = options.reshard_after_forward.group_size;
    std::vector<int> neighbours(static_cast<std::size_t>(size));
    std::iota(neighbours.begin(), neighbours.end(), shard_rank / size * size);
    secondary = gather->split(neighbours, "sharding: neighbours with a secondary copy");
  }
}

Event ShardingGroups::on_gather_stream(std::string label, std::function<void()> call) {
  return run_on(gather_stream, trace, gather_track, std::move(label), std::move(call));
}

Event ShardingGroups::on_reduce_stream(std::string label, std::function<void()> call) {
  return run_on(reduce_stream, trace, reduce_track, std::move(label), std::move(call));
}

void ShardingGroups::wait(const Event& event, const std::string& label) {
  const std::chrono::duration<double> limit(wait_limit_seconds);
  if (!event.wait_for(std::chrono::duration_cast<std::chrono::milliseconds>(limit))) {
    world.abort(
        fmt::format("rank {} has waited {} s for '{}', for which not all ranks have come; all must "
                    "run the same units in the same order",
                    world.rank(), wait_limit_seconds, label));
  }
  event.wait();
}

}  // namespace sherd
