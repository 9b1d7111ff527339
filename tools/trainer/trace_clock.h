// SPDX-License-Identifier: Apache-2.0
// The clocks of ranks beside each other, so that their traces share one time line.
#pragma once

#include <sherd/comm/communicator.h>
#include <sherd/runtime/trace.h>

#include <functional>

namespace sherd {

// This rank's clock minus rank 0's, in seconds: the true difference lies within
// seconds +- uncertainty.
struct ClockOffset {
  double seconds = 0.0, uncertainty = 0.0;
};

// Cristian's estimate (F. Cristian, "Probabilistic clock synchronization", 1989). `own` reads this
// rank's clock, `ask` sends a question to the other one and returns what its clock said in between,
// both in seconds: that was somewhere between the two readings of our own, so half the round trip
// is the uncertainty. Of `rounds` the shortest counts.
SHERD_API ClockOffset estimate_clock_offset(const std::function<double()>& own,
                                            const std::function<double()>& ask, int rounds);

// All ranks together: each one's offset to rank 0, whose own is 0. Clocks that differ by no more
// than the uncertainty are taken to be one: those of two machines count from their starts, which
// are not that close. `clock` is this rank's, in seconds.
SHERD_API ClockOffset measure_clock_offset(Communicator& world,
                                           const std::function<double()>& clock);

// A moment that all ranks agree on, for their traces, as this rank's clock told it.
struct TraceOrigin {
  Trace::Clock::time_point time;
  ClockOffset offset;
};
// All ranks together.
SHERD_API TraceOrigin common_trace_origin(Communicator& world);

}  // namespace sherd
