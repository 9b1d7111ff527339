// SPDX-License-Identifier: Apache-2.0
// The steps of a trace: what belongs to each, and how its events lie in one another.
#pragma once

#include <sherd/tools/planner/trace_reader.h>
#include <sherd/tools/trainer/step_note.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

namespace sherd {

// The events of one track in a step, in the order in which they ended, so that those inside come
// before those around them.
struct TracedTrack {
  static constexpr int kNone = -1;
  std::vector<TraceFile::Event> events;
  // Of each event the place of the one around it, or kNone. Whether an event that took no time and
  // ended when another began is inside that one cannot be told: then `sure` is false.
  std::vector<int> parents;
  std::vector<bool> sure;
  // Microseconds of each outside of those inside it.
  std::vector<double> own;
};

struct TracedStep {
  std::int64_t number = 0;  // of the note, else its place in the trace
  std::optional<StepNote> note;
  double start = 0.0, duration = 0.0;         // microseconds
  std::map<std::string, TracedTrack> tracks;  // those with events; "main" has the step's own
  std::vector<TraceFile::Counter> counters;   // of memory, in the trace's order
  std::map<std::uint32_t, double> before;     // counter: its value at the start, where known
};

// A step is an event "step" of category "step" on the track "main". What starts on another track
// while it lasts belongs to it; writing checkpoints, which goes on beside steps, does not.
SHERD_API std::vector<TracedStep> steps_of(const TraceFile& file, const TraceFile::Rank& rank);

}  // namespace sherd
