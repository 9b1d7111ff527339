// SPDX-License-Identifier: Apache-2.0
// The memory of a planned step over its time, as a picture.
#pragma once

#include <sherd/tools/planner/planned_step.h>

#include <string>

namespace sherd::cli {

// A whole SVG file: what is held of each category, stacked; a line where the system's memory ends
// (0: none). timed: the times mean something; else they only order the step.
std::string memory_timeline(const RecordedStep& step, const Simulation& simulation, bool timed,
                            std::int64_t limit_bytes);

}  // namespace sherd::cli
