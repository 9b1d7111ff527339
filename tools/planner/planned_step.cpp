// SPDX-License-Identifier: Apache-2.0
#include <sherd/tools/planner/planned_step.h>

#include <sherd/runtime/cuda/stream_times.h>
#include <sherd/runtime/error.h>
#include <sherd/tools/planner/cost_model.h>
#include <sherd/tools/planner/measured_cost.h>
#include <sherd/tools/trainer/step_note.h>

#include <algorithm>
#include <map>

namespace sherd {
namespace {

bool is_attention(const Work& work) {
  return work.kind == Work::Kind::kernel && work.flops > 0;
}

// A machine that was measured: what was not measured there, such as a disk, is as its file
// describes.
SimulationRules rules_of_measured(const RecordedStep& step, const System& system, int ranks) {
  const auto measured =
      std::make_shared<MeasuredCosts>(*system.measured, step.threads, ranks, system.path);
  const auto described = std::make_shared<CostModel>(system, ranks);
  SHERD_CHECK(
      system.cuda || system.network || ranks <= system.near_devices(),
      "system {}: {} ranks, and it is one machine of {} cores; plan for fewer ranks, or for "
      "another system",
      system.name, ranks, system.near_devices());
  SimulationRules rules;
  const bool on_cuda = system.cuda;
  rules.seconds = [measured, described, on_cuda](const Work& work) {
    const bool alone = work.kind == Work::Kind::collective && work.group.size == 1;
    if (alone) return 0.0;
    const bool moved = work.kind == Work::Kind::file || work.kind == Work::Kind::copy ||
                       work.kind == Work::Kind::host;
    // A GPU's links are described, those of other groups than were measured too.
    const bool elsewhere = on_cuda && work.kind == Work::Kind::collective &&
                           (work.group.size != measured->ranks() || work.group.stride != 1);
    return moved || elsewhere ? described->seconds(work) : measured->seconds(work);
  };
  rules.host_computes = !on_cuda;
  rules.launch_seconds = described->launch_seconds();
  if (on_cuda) {
    rules.seconds_beside_collective = [described, alone = rules.seconds](const Work& work) {
      const double seconds = described->seconds(work);
      return seconds > 0.0 ? alone(work) * described->seconds_beside_collective(work) / seconds
                           : alone(work);
    };
  } else {
    rules.shared_cores = ranks * (step.threads + 1) > measured->cores();
  }
  return rules;
}

}  // namespace

std::string_view name_of(Resource resource) {
  static constexpr std::string_view kNames[] = {"products", "memory bandwidth", "communication",
                                                "host and disk", "launches"};
  return kNames[static_cast<std::size_t>(resource)];
}

Resource resource_of(const Work& work) {
  switch (work.kind) {
    case Work::Kind::product: return Resource::products;
    case Work::Kind::kernel: return is_attention(work) ? Resource::products : Resource::memory;
    case Work::Kind::collective: return Resource::network;
    case Work::Kind::copy:
    case Work::Kind::host:
    case Work::Kind::file: break;
  }
  return Resource::host;
}

std::int64_t memory_limit_of(const TrainSettings& settings, const System* system, int ranks) {
  const std::size_t limit = parse_bytes(settings.memory_limit, "--memory-limit");
  if (limit > 0) return static_cast<std::int64_t>(limit);
  return system != nullptr ? system->memory_bytes / system->ranks_of_device(ranks) : 0;
}

SimulationRules rules_for(const RecordedStep& step, const System& system, int ranks) {
  if (!system.measured->empty()) return rules_of_measured(step, system, ranks);
  const auto described = std::make_shared<CostModel>(system, ranks);
  SimulationRules rules;
  rules.seconds = [described](const Work& work) { return described->seconds(work); };
  rules.seconds_beside_collective = [described](const Work& work) {
    return described->seconds_beside_collective(work);
  };
  rules.host_computes = !system.cuda;
  rules.launch_seconds = described->launch_seconds();
  return rules;
}

StepTimes time_step(const RecordedStep& step, const TrainSettings& settings, const System& system,
                    int ranks) {
  SHERD_CHECK(system.cuda == (settings.device == "cuda"),
              "--system {} is of device {}, and the step of --device {}; change one of them",
              system.name, system.cuda ? "cuda" : "cpu", settings.device);
  const SimulationRules rules = rules_for(step, system, ranks);
  StepTimes times;
  times.simulation = simulate(step.schedule, rules);
  times.seconds = times.simulation.seconds;
  times.exposed = times.simulation.exposed;
  times.images_per_second = static_cast<double>(settings.batch_size) / times.seconds;
  times.busy.assign(kResources, 0.0);
  for (const Simulation::PlacedWork& placed : times.simulation.works) {
    const Work& work = step.schedule.works()[static_cast<std::size_t>(placed.work)];
    times.busy[static_cast<std::size_t>(resource_of(work))] += rules.seconds(work);
  }
  times.busy[static_cast<std::size_t>(Resource::launches)] =
      rules.launch_seconds * static_cast<double>(times.simulation.works.size());
  const auto rates = system.products.find(step.dtype);
  if (rates != system.products.end()) {
    const double devices = static_cast<double>(ranks) / system.ranks_of_device(ranks);
    times.mfu = step.model_flops / (times.seconds * devices * rates->second.peak);
  }
  for (std::size_t i = 0; i < kResources; ++i) {
    const auto resource = static_cast<Resource>(i);
    SimulationRules faster = rules;
    if (resource == Resource::launches) faster.launch_seconds /= 2.0;
    faster.seconds = [&rules, resource](const Work& work) {
      return rules.seconds(work) / (resource_of(work) == resource ? 2.0 : 1.0);
    };
    if (rules.seconds_beside_collective) {
      faster.seconds_beside_collective = [&rules, resource](const Work& work) {
        return rules.seconds_beside_collective(work) / (resource_of(work) == resource ? 2.0 : 1.0);
      };
    }
    const double then = simulate(step.schedule, faster).seconds;
    times.sensitivity.push_back((times.seconds - then) / times.seconds);
  }
  return times;
}

// In the order in which a run records: a scope when it ends, memory when it changes.
std::unique_ptr<Trace> planned_trace(const RecordedStep& step, const Simulation& simulation) {
  using Kind = Schedule::Kind;
  constexpr double kMicroseconds = 1e6;
  // Of a GPU's scopes two events each: nothing may be dropped.
  auto trace = std::make_unique<Trace>(0, 2 * step.schedule.entries().size() + 1);
  trace->enable();
  const std::vector<std::string>& texts = step.schedule.texts();
  const auto text = [&](std::int32_t index) -> const std::string& {
    return texts[static_cast<std::size_t>(index)];
  };
  std::map<std::int32_t, std::size_t> scope_at;  // by the entry that began it
  std::size_t memory = 0;
  const std::vector<Schedule::Entry>& entries = step.schedule.entries();
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const Schedule::Entry& entry = entries[i];
    if (entry.kind == Kind::scope_begin) {
      const std::size_t next = scope_at.size();
      scope_at[static_cast<std::int32_t>(i)] = next;
    } else if (entry.kind == Kind::scope_end) {
      const Simulation::Scope& scope = simulation.scopes[scope_at.at(entry.index)];
      const std::string& track = text(scope.track);
      const auto tell = [&](const std::string& on) {
        trace->complete(text(scope.name), text(scope.category), trace->track(on),
                        scope.start * kMicroseconds, (scope.end - scope.start) * kMicroseconds);
      };
      tell(track);
      // Note [Device times in a trace]: a GPU's streams have tracks of their own.
      if (step.device != Device::cuda) continue;
      if (track == "main") tell(std::string(cuda::kComputeTrack));
      if (track == "communication stream") tell(std::string(cuda::kCommunicationTrack));
    } else if (entry.kind == Kind::memory) {
      const Simulation::Memory& change = simulation.memory[memory++];
      // What is there before the step is told before it begins.
      const double time = scope_at.empty() ? -1.0 : change.time * kMicroseconds;
      trace->counter(memory_counter(change.pool, change.category), static_cast<double>(change.live),
                     time);
    }
  }
  trace->instant(to_text(StepNote{.samples = step.batch_size}), StepNote::kCategory, 0,
                 simulation.seconds * kMicroseconds);
  return trace;
}

}  // namespace sherd
