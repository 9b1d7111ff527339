// SPDX-License-Identifier: Apache-2.0
// log.jsonl of a run: one JSON object a line, told apart by "event": start, step, epoch, end,
// error. A number that is not finite is null. Where something is in fp16, a step has its
// "loss_scale", one that overflowed "skipped": true (such a step always has a line), an epoch the
// number of those; its "train_loss" is the mean of the others.
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
  bool scales_loss_ = false;
};

}  // namespace sherd
