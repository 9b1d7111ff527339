// SPDX-License-Identifier: Apache-2.0
// A step that was recorded on meta, placed in time over a system.
//
//   const auto step = record_step(settings, ranks);              // tools/trainer/plan.h
//   const StepTimes times = time_step(*step, settings, system, ranks);
//   write_trace(*planned_trace(*step, times.simulation), "plan.json");
#pragma once

#include <sherd/tools/planner/simulate.h>
#include <sherd/tools/planner/system.h>
#include <sherd/tools/trainer/plan.h>

#include <memory>
#include <string>
#include <vector>

namespace sherd {

// What work a system spends its time on.
enum class Resource : std::uint8_t { products, memory, network, host, launches };
inline constexpr std::size_t kResources = 5;
SHERD_API std::string_view name_of(Resource resource);
SHERD_API Resource resource_of(const Work& work);

struct StepTimes {
  Simulation simulation;
  double seconds = 0.0;
  std::vector<double> busy;        // by Resource, of this rank
  double exposed = 0.0;            // of that, waiting for collectives
  double images_per_second = 0.0;  // of all ranks
  double mfu = 0.0;                // model FLOPs over the peak of all devices; 0: no peak is known
  // By Resource: what part of the step would be saved if it were twice as fast.
  std::vector<double> sensitivity;
};

// Throws where the system cannot run it: another device, too many ranks, a type it has no rates of.
SHERD_API StepTimes time_step(const RecordedStep& step, const TrainSettings& settings,
                              const System& system, int ranks);

// How long a piece of work takes there, and how streams go together.
SHERD_API SimulationRules rules_for(const RecordedStep& step, const System& system, int ranks);

// What a rank's device may hold: --memory-limit, else what the system has; 0 where neither is
// known.
SHERD_API std::int64_t memory_limit_of(const TrainSettings& settings, const System* system,
                                       int ranks);

// The trace of the step that a run would write: the same scopes on the same tracks, and the memory.
SHERD_API std::unique_ptr<Trace> planned_trace(const RecordedStep& step,
                                               const Simulation& simulation);

}  // namespace sherd
