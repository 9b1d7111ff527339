// SPDX-License-Identifier: Apache-2.0
// A training run from settings to weights. It reports through an observer and never prints.
#pragma once

#include <sherd/comm/sharding/engine.h>
#include <sherd/models/vit.h>
#include <sherd/tools/trainer/evaluate.h>
#include <sherd/tools/trainer/run_checkpoints.h>
#include <sherd/tools/trainer/settings.h>
#include <sherd/tools/trainer/setup.h>
#include <sherd/tools/trainer/training_step.h>

#include <memory>
#include <string>
#include <vector>

namespace sherd {

struct RunInfo {
  std::string out;
  std::int64_t parameters = 0, train_images = 0, test_images = 0;
  std::int64_t epochs = 0, steps_per_epoch = 0, total_steps = 0;
  int threads = 0;  // of a rank
  int ranks = 1;
  std::string sharding;      // "4 ranks as threads, zero3"
  std::string precision;     // see describe(Precision)
  bool scales_loss = false;  // something is in fp16: steps may overflow and be skipped
  std::vector<std::string> weights_notes;  // of --weights, see make_weights
  std::string resumed_from;                // a checkpoint, or empty
  std::int64_t resumed_steps = 0;
};

struct StepInfo {
  StepResult result;
  std::int64_t epoch = 0, step_in_epoch = 0;
  double images_per_second = 0.0;  // since the last log line
  double data_wait = 0.0;          // seconds waited for batches since then; a GPU computes on
  std::int64_t skipped = 0;        // steps of the run so far
};

struct EpochInfo {
  std::int64_t epoch = 0;
  double train_loss = 0.0;   // mean over the epoch's samples, of steps that were not skipped;
                             // NaN where all were
  std::int64_t skipped = 0;  // steps
  double seconds = 0.0;
  double images_per_second = 0.0;
  bool evaluated = false;
  EvaluationResult test;
};

class SHERD_API TrainObserver {
 public:
  virtual ~TrainObserver();
  virtual void on_start(const RunInfo&) {}
  virtual void on_step(const StepInfo&) {}
  virtual void on_evaluate(std::int64_t /*done*/, std::int64_t /*of*/) {}
  virtual void on_epoch(const EpochInfo&) {}
  virtual void on_checkpoint(const RunCheckpoints::Saved&) {}
  virtual void on_warning(const std::string&) {}
  virtual bool should_stop() { return false; }  // asked after each step and while evaluating
};

struct TrainOutcome {
  RunInfo info;
  std::int64_t steps = 0, skipped = 0;
  double loss_scale = 1.0;  // at the end
  bool stopped = false;     // by the observer; the weights are saved all the same
  EvaluationResult test;
  double train_seconds = 0.0;    // of the steps alone, data waits included
  double exposed_seconds = 0.0;  // of those, spent waiting for other ranks
  double images_per_second = 0.0;
  MemoryBreakdown at_peak{}, peaks{};
  std::int64_t peak_bytes = 0, peak_reserved_bytes = 0;
  std::int64_t host_peak_bytes = 0;  // of what is offloaded
  MemoryBreakdown host_at_peak{};
  std::string weights_path, log_path, config_path;
  std::string checkpoint_path;  // the newest; empty without --save-every
};

// Trains on the ranks of the settings, or of the launcher; the observer hears of rank 0 alone (but
// of a launcher's processes each is asked whether to stop), and under a launcher only the first
// process gets an outcome.
//
// Creates `settings.out` (it must not hold a run already, but for --resume) with config.toml,
// log.jsonl, checkpoints and, at the end, model.safetensors. Settings that cannot be honoured throw
// before anything is created. A failure after the first step saves what was learnt as
// model-before-error.safetensors, and says so.
SHERD_API TrainOutcome train(const TrainSettings& settings, TrainObserver& observer);

}  // namespace sherd
