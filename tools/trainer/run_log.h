// SPDX-License-Identifier: Apache-2.0
// log.jsonl of a run: one JSON object a line, told apart by "event": start, resume, step,
// epoch, checkpoint, end, error. A number that is not finite is null. Where something is in fp16, a
// step has its "loss_scale", one that overflowed "skipped": true (such a step always has a line),
// an epoch the number of those; its "train_loss" is the mean of the others.
#pragma once

#include <sherd/runtime/io/file.h>
#include <sherd/tools/trainer/run_checkpoints.h>
#include <sherd/tools/trainer/train.h>

#include <string>

namespace sherd {

class RunLog {
 public:
  // `goes_on`: the file is that of a run that is resumed.
  RunLog(const std::string& path, bool goes_on)
      : file_(path, goes_on ? JsonLinesLog::Mode::append : JsonLinesLog::Mode::truncate) {}

  void start(const RunInfo& info, const TrainSettings& settings);
  void resume(const std::string& checkpoint, const RunProgress& progress);
  void checkpoint(const RunCheckpoints::Saved& saved);
  void step(const StepInfo& now, const Ledger& ledger, double exposed_seconds);
  void epoch(const EpochInfo& info);
  void end(const TrainOutcome& outcome);
  void error(std::int64_t steps, const std::string& reason);  // never throws: it may be the cause

 private:
  JsonLinesLog file_;
  bool scales_loss_ = false;
};

}  // namespace sherd
