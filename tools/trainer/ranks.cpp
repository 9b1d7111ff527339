// SPDX-License-Identifier: Apache-2.0
#include <sherd/tools/trainer/ranks.h>

#include <sherd/comm/mpi.h>
#include <sherd/comm/rank_threads.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

namespace sherd {
namespace {

// On MPI every process has a message of its own to print; rank 0 prints the one that counts.
void run_launched(const std::function<void(Communicator&)>& body) {
  const std::unique_ptr<Communicator> world = make_mpi_communicator();
  try {
    body(*world);
    world->barrier("the end of the program");
  } catch (const std::exception& error) {
    const std::string prefix = fmt::format("rank {}: ", world->rank());
    const std::string message = error.what();
    world->abort(message.starts_with(prefix) ? message : prefix + message);
    throw GroupEnded(world->end_reason());
  }
}

}  // namespace

bool under_launcher() {
  const std::optional<Launcher> launcher = detect_launcher();
  return launcher && launcher->size > 1;
}

bool is_first_process() {
  const std::optional<Launcher> launcher = detect_launcher();
  return !launcher || launcher->rank == 0;
}

int planned_ranks(const TrainSettings& settings) {
  check_range("--ranks", settings.ranks, 1, 4096);
  const std::optional<Launcher> launcher = detect_launcher();
  if (!launcher || launcher->size <= 1) return static_cast<int>(settings.ranks);
  SHERD_CHECK(mpi_built(),
              "{} started {} processes, but this build has no MPI, so each would train on its own; "
              "install mpich and libmpich-dev and build with -Dmpi=enabled, or use --ranks {} "
              "without a launcher",
              launcher->name, launcher->size, launcher->size);
  SHERD_CHECK(settings.ranks == 1,
              "--ranks {}: makes threads of one process, but {} started {} processes already; "
              "leave --ranks out, or start sherd without {}",
              settings.ranks, launcher->name, launcher->size, launcher->name);
  return launcher->size;
}

void run_on_ranks(const TrainSettings& settings, const std::function<void(Communicator&)>& body) {
  const int ranks = planned_ranks(settings);
  if (under_launcher()) {
    run_launched(body);
  } else {
    run_rank_threads(ranks, body);
  }
}

ShardingOptions sharding_options(const TrainSettings& settings, int ranks) {
  ShardingOptions options;
  if (settings.shard == "auto") {
    options.policy = ranks == 1 ? ShardingPolicy::none : ShardingPolicy::zero3;
  } else {
    options.policy = sharding_policy_from_name(settings.shard);
  }
  options.units = UnitRule::parse(settings.unit);
  options.reshard_after_forward = ReshardAfterForward::parse(settings.reshard_after_forward);
  check_range("--prefetch", settings.prefetch, 0, 1 << 20);
  options.prefetch = static_cast<int>(settings.prefetch);
  options.persist_below = settings.persist_below;
  SHERD_CHECK(settings.reduce_every == "step" || settings.reduce_every == "micro",
              "--reduce-every: expected step or micro, got '{}'", settings.reduce_every);
  options.reduce_every_pass = settings.reduce_every == "micro";
  if (!settings.mesh.empty()) options.mesh = ProcessMesh::parse(settings.mesh);
  validate(options, ranks);
  return options;
}

ContextOptions rank_context_options(const TrainSettings& settings, const Communicator& world) {
  ContextOptions options = context_options(settings);
  options.rank = world.rank();
  if (options.threads == 0) options.threads = std::max(1, default_threads() / world.size());
  return options;
}

Trace::Clock::time_point common_trace_origin(Communicator& world) {
  using Clock = Trace::Clock;
  std::int64_t origin = Clock::now().time_since_epoch().count();
  world.broadcast(&origin, 1, DType::i64, 0, "the origin of traces");
  return Clock::time_point(Clock::duration(origin));
}

std::string describe_ranks(const TrainSettings& settings, const Communicator& world) {
  const ShardingOptions options = sharding_options(settings, world.size());
  if (world.size() == 1) return fmt::format("1 rank, {}", name_of(options.policy));
  const char* kind = world.on_paper() ? "" : under_launcher() ? " as processes" : " as threads";
  return fmt::format("{} ranks{}, {}{}", world.size(), kind, name_of(options.policy),
                     options.mesh ? " over " + options.mesh->to_string() : std::string());
}

void agree_on_errors(Communicator& world, const std::string& message) {
  std::int32_t failed = message.empty() ? 0 : 1;
  world.all_reduce(&failed, 1, DType::i32, ReduceOp::max, "has any rank failed");
  if (failed == 0) return;
  std::array<char, 1024> text{};
  std::memcpy(text.data(), message.data(), std::min(message.size(), text.size() - 1));
  std::vector<char> all(text.size() * static_cast<std::size_t>(world.size()));
  world.all_gather(text.data(), all.data(), static_cast<std::int64_t>(text.size()), DType::u8,
                   "why a rank has failed");
  for (int r = 0; r < world.size(); ++r) {
    const std::string reason = all.data() + static_cast<std::size_t>(r) * text.size();
    if (reason.empty()) continue;
    throw AgreedError(world.size() == 1 ? reason : fmt::format("rank {}: {}", r, reason));
  }
}

}  // namespace sherd
