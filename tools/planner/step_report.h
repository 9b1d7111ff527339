// SPDX-License-Identifier: Apache-2.0
// What a planned step says to people and programs: the moment of its peak, what travels, tables.
#pragma once

#include <sherd/tools/planner/planned_step.h>

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace sherd {

// "1.250 s", "12.345 ms", "7.1 us"
SHERD_API std::string seconds_text(double seconds);

// Of the device's memory in the recorded step.
struct PeakMoment {
  std::int64_t bytes = 0;
  MemoryBreakdown held{};
  std::string where;      // "blocks.3 in backward of step": the scopes that are open, inside first
  double fraction = 0.0;  // of the step's entries before it
};
SHERD_API PeakMoment peak_moment(const Schedule& schedule);

// Collectives of one kind for one purpose: "unshard", "reduce", ...
struct Traffic {
  std::string purpose;
  std::string collective;
  DType dtype = DType::f32;
  int ranks = 1;
  std::int64_t calls = 0, bytes = 0;  // of whole buffers
  double seconds = 0.0;               // 0 without a system
};
SHERD_API std::vector<Traffic> traffic_of(const Schedule& schedule, const SimulationRules* rules);

// Everything, for programs; times is null without a system.
SHERD_API nlohmann::ordered_json plan_json(const RecordedStep& step, const TrainSettings& settings,
                                           int ranks, const System* system, const StepTimes* times);
// The same for people, in lines.
SHERD_API std::string plan_text(const RecordedStep& step, const TrainSettings& settings, int ranks,
                                const System* system, const StepTimes* times);

}  // namespace sherd
