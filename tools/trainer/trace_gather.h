// SPDX-License-Identifier: Apache-2.0
// The traces of all ranks as one file.
//
// It is a Chrome trace (runtime/trace.h) with a process a rank. otherData.parts has of each rank
// what its trace had there, and clock_offset_seconds and clock_uncertainty_seconds
// (tools/trainer/trace_clock.h); the offset has been taken out of the times. A rank whose part did
// not come whole is named in otherData.incomplete.
#pragma once

#include <sherd/comm/communicator.h>
#include <sherd/tools/trainer/trace_clock.h>

#include <string>

namespace sherd {

// All ranks together: rank 0 writes `path` completely or not at all. The parts come one rank after
// the other, in pieces, so that no rank holds another's whole part. Returns, on rank 0, what kept
// the file from being written, else nothing. Throws where the group ends; what had come by then is
// written.
SHERD_API std::string gather_trace(const Trace& trace, Communicator& world,
                                   const ClockOffset& offset, const std::string& path);

// One rank's part by itself, for a group that has ended.
SHERD_API void write_trace_part(const Trace& trace, const Communicator& world,
                                const ClockOffset& offset, const std::string& path,
                                const std::string& reason);

// Where a rank puts such a part: rank 0 at `path`, rank 2 at "trace-rank2.json" beside
// "trace.json".
SHERD_API std::string trace_part_path(const std::string& path, int rank);

}  // namespace sherd
