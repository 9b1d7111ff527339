// SPDX-License-Identifier: Apache-2.0
// A planned step beside the steps of a traced run, event for event.
//
//   const Comparison comparison = compare(read_trace("plan.json"), read_trace("run.json"));
//   fmt::print("{}", to_text(comparison));
//
// The order of events is compared track by track, in the order in which they ended, with what is
// inside what; the order of the tracks' events among each other is a matter of time. Memory is
// compared change by change. Times are seconds. Steps that cannot be compared are named: the
// program's first, which takes memory from the system, those of a graph, of another size, and those
// whose gradients overflowed.
#pragma once

#include <sherd/tools/planner/trace_reader.h>

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace sherd {

struct Comparison {
  // Of values over ranks and steps.
  struct Range {
    double median = 0.0, lowest = 0.0, highest = 0.0;
  };
  struct Step {
    int rank = 0;
    std::int64_t step = 0;
    std::string left_out;  // why; empty where it was compared
    bool same_events = false, same_memory = false;
    double seconds = 0.0;
  };
  // The first one of a step on a track, or in a pool of memory.
  struct Difference {
    int rank = 0;
    std::int64_t step = 0;
    std::string where;                // "main", "memory", "host memory"
    std::int64_t position = 0;        // from 0, among the track's events or the pool's changes
    std::string expected, came;       // of the plan, of the run
    std::vector<std::string> before;  // the last ones that both have
    std::vector<std::string> planned_next, traced_next;  // from the difference on
    std::int64_t more = 0;  // other steps that differ there in the same way
  };
  // An event that all steps with the plan's events have.
  struct Event {
    std::string track, category, name;
    std::int64_t position = 0;
    double planned = 0.0;
    Range traced;
    int slowest_rank = 0;
  };
  // Seconds a step, without events inside. On tracks other than "main" they overlap with it. Of a
  // GPU those of its streams, not of the host that asks for their work.
  struct Kind {
    std::string track, kind;
    double planned = 0.0;
    Range traced;
  };
  struct Memory {
    std::string pool;                              // "memory" of the device, "host memory"
    std::int64_t changes = 0;                      // planned, a step
    double planned_peak = 0.0, traced_peak = 0.0;  // bytes; of the run over ranks and steps
  };

  std::string plan, run;           // paths
  std::vector<std::string> notes;  // what a reader must know: parts that are missing
  std::vector<Step> steps;
  std::vector<Difference> differences;
  std::vector<Event> events;  // the largest |traced - planned| first
  std::vector<Kind> kinds;
  std::vector<Memory> memory;
  double planned_seconds = 0.0;  // of the step
  Range traced_seconds;          // of the steps that were compared

  std::int64_t compared_steps() const;
  bool same() const { return differences.empty() && compared_steps() > 0; }
};

// Throws where there is no step in one of them, or in the run none that can be compared. The plan
// is of one rank, with which all are compared: of several the first counts, and of several steps
// the last.
SHERD_API Comparison compare(const TraceFile& plan, const TraceFile& run);

// For people: `most` rows of events.
SHERD_API std::string to_text(const Comparison& comparison, std::size_t most = 20);
SHERD_API nlohmann::ordered_json to_json(const Comparison& comparison);

}  // namespace sherd
