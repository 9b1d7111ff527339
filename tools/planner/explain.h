// SPDX-License-Identifier: Apache-2.0
// explain: a page of text that walks through one step of a configuration, with its numbers, for
// people who study sharding.
#pragma once

#include <sherd/tools/planner/step_report.h>

#include <string>

namespace sherd {

// The last part runs the step on paper with one option changed at a time. system and times may be
// null: then nothing is said of time.
SHERD_API std::string explain(const RecordedStep& step, const TrainSettings& settings, int ranks,
                              const System* system, const StepTimes* times);

}  // namespace sherd
