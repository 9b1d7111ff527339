// SPDX-License-Identifier: Apache-2.0
#include <sherd/tools/trainer/ranks.h>

#include <sherd/comm/mpi.h>
#include <sherd/comm/rank_threads.h>
#include <sherd/runtime/cuda/device.h>
#include <sherd/tools/trainer/setup.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <sstream>

namespace sherd {
namespace {

std::atomic<bool> met{false};  // over TCP, which is possible once

std::unique_ptr<Communicator> make_world(const Processes& all) {
  if (!all.tcp) return make_mpi_communicator();
  met = true;
  return make_tcp_communicator(*all.tcp);
}

// Where no launcher tells of a first process that has died, somebody must.
bool first_has_died(const std::string& reason) {
  const std::size_t at = reason.find("rank 0 of ");
  return at != std::string::npos && reason.find(" has died", at) != std::string::npos;
}

[[noreturn]] void throw_launched(Communicator& world, std::string message) {
  const std::string ended = world.end_reason();
  if (first_has_died(ended)) fail("{}", message);
  // What this rank has heard, and perhaps what became of the weights.
  if (!ended.empty() && message.find(ended) != std::string::npos) throw GroupEnded(message);
  const std::string prefix = fmt::format("rank {}: ", world.rank());
  if (!message.starts_with(prefix)) message = prefix + message;
  world.abort(message);
  // Of several ranks that fail at once, as when a file is missing, one gives the reason.
  throw GroupEnded(world.end_reason());
}

// Every process comes here with a message: its own, or the one that its group has ended with. The
// first process prints the group's, as one that runs ranks as threads does.
void run_launched(const Processes& all, const std::function<void(Communicator&)>& body) {
  const std::unique_ptr<Communicator> world = make_world(all);
  try {
    body(*world);
    world->barrier("the end of the program");
  } catch (const AgreedError& error) {
    throw GroupEnded(error.what());
  } catch (const std::exception& error) {
    throw_launched(*world, error.what());
  }
}

}  // namespace

std::optional<Processes> processes() {
  const std::optional<Launcher> launcher = detect_launcher();
  const bool chosen = std::getenv("SHERD_RENDEZVOUS") != nullptr;
  Processes all;
  if (!chosen && launcher && launcher->size > 1) {
    all = {launcher->name, launcher->rank, launcher->size, {}};
  } else if (const std::optional<TcpOptions> tcp = tcp_options_from_environment()) {
    all = {chosen ? "SHERD_RENDEZVOUS" : "MASTER_ADDR", tcp->rank, tcp->size, tcp};
  }
  if (all.size == 1) return {};
  return all;
}

namespace {

// Of an environment that makes sense.
std::optional<Processes> processes_if_clear() {
  try {
    return processes();
  } catch (const Error&) {
    return {};
  }
}

}  // namespace

bool under_launcher() {
  return processes_if_clear().has_value();
}

bool is_first_process() {
  const std::optional<Processes> all = processes_if_clear();
  return !all || all->rank == 0;
}

int planned_ranks(const TrainSettings& settings) {
  check_range("--ranks", settings.ranks, 1, 4096);
  const std::optional<Processes> all = processes();
  if (!all) return static_cast<int>(settings.ranks);
  SHERD_CHECK(all->tcp || mpi_built(),
              "{} started {} processes, but this build has no MPI, so each would train on its own; "
              "install mpich and libmpich-dev and build with -Dmpi=enabled, let them meet over TCP "
              "(SHERD_RENDEZVOUS), or use --ranks {} without a launcher",
              all->by, all->size, all->size);
  // The configuration of a run has its number of ranks, and may be repeated with processes.
  SHERD_CHECK(settings.ranks == 1 || settings.ranks == all->size,
              "--ranks {}: makes threads of one process, but by {} this is one of {} processes "
              "already; leave --ranks out (or take ranks out of the settings file), or start sherd "
              "without {}",
              settings.ranks, all->by, all->size, all->by);
  return all->size;
}

void report_to_launched(const std::string& message) {
  const std::optional<Processes> all = processes_if_clear();
  if (!all || (all->tcp ? met.load() : !mpi_built() || mpi_started())) return;
  const std::unique_ptr<Communicator> world = make_world(*all);
  // Without a rank's name: a mistyped flag is the same on all.
  world->abort(message);
  throw GroupEnded(world->end_reason());
}

void run_on_ranks(const TrainSettings& settings, const std::function<void(Communicator&)>& body) {
  const int ranks = planned_ranks(settings);
  if (const std::optional<Processes> all = processes()) {
    run_launched(*all, body);
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
  options.exact_sums = settings.exact_sums;
  if (!settings.mesh.empty()) options.mesh = ProcessMesh::parse(settings.mesh);
  options.offload_optimizer = OffloadTo::parse(settings.offload_optimizer, "--offload-optimizer");
  options.offload_parameters =
      OffloadTo::parse(settings.offload_parameters, "--offload-parameters");
  validate(options, ranks, training_precision(settings));
  return options;
}

void check_same_start(Communicator& world, std::vector<std::string> lines,
                      const TrainSettings& settings) {
  std::istringstream text(settings_to_toml(settings));
  for (std::string line; std::getline(text, line);) lines.push_back(line);
  check_same(world, lines, "were started with different data or settings");
}

ContextOptions rank_context_options(const TrainSettings& settings, Communicator& world) {
  ContextOptions options = context_options(settings);
  options.rank = world.rank();
  if (options.threads == 0) options.threads = std::max(1, default_threads() / world.size());
  if (options.device == Device::cuda && !world.on_paper()) {
    const int local = local_rank(world);
    // Some launchers show each process its own GPU alone.
    options.device_index = under_launcher() && cuda::device_count() == 1 ? 0 : local;
  }
  return options;
}

std::string describe_ranks(const TrainSettings& settings, const Communicator& world) {
  const ShardingOptions options = sharding_options(settings, world.size());
  std::string memory;
  if (settings.recompute != "none") memory += ", recompute " + settings.recompute;
  for (const auto& [what, to] : {std::pair{"optimizer", settings.offload_optimizer},
                                 {"parameters", settings.offload_parameters},
                                 {"activations", settings.offload_activations}}) {
    if (to != "none") memory += fmt::format(", {} offloaded to {}", what, to);
  }
  if (world.size() == 1) return fmt::format("1 rank, {}{}", name_of(options.policy), memory);
  const std::string kind = world.on_paper() ? ""
                           : under_launcher()
                               ? fmt::format(" as processes over {}", world.backend())
                               : " as threads";
  return fmt::format("{} ranks{}, {}{}{}", world.size(), kind, name_of(options.policy),
                     options.mesh ? " over " + options.mesh->to_string() : std::string(), memory);
}

}  // namespace sherd
