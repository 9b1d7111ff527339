// SPDX-License-Identifier: Apache-2.0
// simulate: a schedule placed in time.
//
// Every stream does its work in order; a wait holds a stream, or the host, until another has come
// so far. What differs between devices:
//
//   a GPU   the host issues work, each piece at a cost, and runs ahead of the device until it
//   waits;
//           streams work at once.
//   a CPU   the host is the compute stream. Other streams are threads beside it: where all cores
//           compute, a thread that moves data takes half of one (Note [Shared cores]).
//
// Ranks are taken to be alike: no rank waits for a slower one.
#pragma once

#include <sherd/runtime/schedule.h>

#include <functional>
#include <string>
#include <vector>

namespace sherd {

struct SimulationRules {
  std::function<double(const Work&)> seconds;  // of a piece of work alone on its device
  bool host_computes = true;                   // a CPU
  bool shared_cores = false;                   // a CPU without a free core for other threads
  double launch_seconds = 0.0;                 // a GPU: of the host, for each piece of work
  // A GPU: of a kernel while a collective, which takes multiprocessors too, is under way all the
  // time. Empty: the same.
  std::function<double(const Work&)> seconds_beside_collective = {};
};

// Times in seconds from the start of the schedule.
struct Simulation {
  struct PlacedWork {
    std::int32_t work = 0;  // of the schedule's works()
    int stream = 0;
    double start = 0.0, end = 0.0;
  };
  struct Scope {
    std::int32_t name = 0, category = 0, track = 0;  // of the schedule's texts()
    double start = 0.0, end = 0.0;
  };
  struct Memory {
    double time = 0.0;
    MemoryPool pool = MemoryPool::device;
    MemoryCategory category = MemoryCategory::parameters;
    std::int64_t live = 0;
  };

  double seconds = 0.0;           // until the host and all streams are done
  std::vector<PlacedWork> works;  // in the order of the schedule
  std::vector<Scope> scopes;
  std::vector<Memory> memory;
  double exposed = 0.0;       // the compute stream waited for collectives
  double launch_bound = 0.0;  // a GPU's compute stream waited for the host
};

SHERD_API Simulation simulate(const Schedule& schedule, const SimulationRules& rules);

}  // namespace sherd
