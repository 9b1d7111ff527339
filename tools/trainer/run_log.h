// SPDX-License-Identifier: Apache-2.0
// log.jsonl of a run: one JSON object a line, told apart by "event".
#pragma once

#include <sherd/runtime/io/file.h>
#include <sherd/tools/trainer/train.h>

#include <string>

namespace sherd {

class RunLog {
 public:
  explicit RunLog(const std::string& path) : file_(path, JsonLinesLog::Mode::truncate) {}

  void start(const RunInfo& info, const TrainSettings& settings);
  void step(const StepInfo& now, const Ledger& ledger, double exposed_seconds);
  void epoch(const EpochInfo& info);
  void end(const TrainOutcome& outcome);
  void error(std::int64_t steps, const std::string& reason);  // never throws: it may be the cause

 private:
  JsonLinesLog file_;
};

}  // namespace sherd
