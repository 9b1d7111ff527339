// SPDX-License-Identifier: Apache-2.0
// Reads a Chrome trace that Sherd wrote: of a run, of all its ranks, or of a plan.
//
//   const TraceFile run = read_trace("out/trace.json");
//   for (const TraceFile::Rank& rank : run.ranks) ...
//
// Only what is in a trace of ours is taken: the object form with otherData.recorded_events (one
// part, runtime/trace.h) or otherData.parts (tools/trainer/trace_gather.h), and complete, instant,
// counter and metadata events.
#pragma once

#include <sherd/runtime/api.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace sherd {

struct TraceFile {
  // Names are numbers into texts. Times are microseconds.
  struct Event {
    std::uint32_t name = 0, category = 0;
    std::int32_t track = 0;  // place in Rank::tracks
    double start = 0.0, duration = 0.0;
    double issued = 0.0;  // when the host asked for it; else its start
    double end() const { return start + duration; }
  };
  struct Instant {
    std::uint32_t name = 0, category = 0;
    double time = 0.0;
  };
  struct Counter {
    std::uint32_t name = 0;
    double time = 0.0, value = 0.0;
  };
  struct Rank {
    int rank = 0;
    std::vector<std::string> tracks;
    // In the file's order, which on one track is that in which they ended.
    std::vector<Event> events;
    std::vector<Instant> instants;
    std::vector<Counter> counters;
    std::int64_t dropped = 0;                            // events that the trace had no room for
    double clock_offset = 0.0, clock_uncertainty = 0.0;  // seconds, to rank 0
  };

  std::string path;
  std::vector<Rank> ranks;  // ascending
  std::string incomplete;   // why parts are missing; empty where none is
  std::vector<std::string> texts;

  const std::string& text(std::uint32_t index) const { return texts[index]; }
};

// Throws an Error that names the file and what is wrong: no JSON, an end too early, a trace of
// another program, an event that is none of ours (and its number).
SHERD_API TraceFile read_trace(const std::string& path);
// The same of a text; `path` for messages.
SHERD_API TraceFile read_trace_text(std::string_view text, const std::string& path);

}  // namespace sherd
