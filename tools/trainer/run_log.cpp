// SPDX-License-Identifier: Apache-2.0
#include <sherd/tools/trainer/run_log.h>

#include <cmath>
#include <nlohmann/json.hpp>

namespace sherd {
namespace {

using json = nlohmann::ordered_json;

json memory_json(const MemoryBreakdown& bytes) {
  json object;
  for (std::size_t i = 0; i < kMemoryCategories; ++i) {
    object[std::string(name_of(static_cast<MemoryCategory>(i)))] = bytes[i];
  }
  return object;
}

// JSON has no infinity or NaN.
json number(double value) {
  return std::isfinite(value) ? json(value) : json(nullptr);
}

}  // namespace

void RunLog::start(const RunInfo& info, const TrainSettings& settings) {
  scales_loss_ = info.scales_loss;
  file_.write(json{{"event", "start"},
                   {"version", version()},
                   {"build", build_description()},
                   {"ranks", info.ranks},
                   {"sharding", info.sharding},
                   {"precision", info.precision},
                   {"threads", info.threads},
                   {"parameters", info.parameters},
                   {"train_images", info.train_images},
                   {"test_images", info.test_images},
                   {"total_steps", info.total_steps},
                   {"steps_per_epoch", info.steps_per_epoch},
                   {"seed", settings.seed}}
                  .dump());
}

void RunLog::resume(const std::string& checkpoint, const RunProgress& progress) {
  file_.write(json{{"event", "resume"},
                   {"checkpoint", checkpoint},
                   {"steps", progress.step.steps},
                   {"epoch", progress.epoch},
                   {"samples", progress.samples}}
                  .dump());
}

void RunLog::checkpoint(const RunCheckpoints::Saved& saved) {
  file_.write(json{{"event", "checkpoint"},
                   {"steps", saved.step},
                   {"path", saved.path},
                   {"best", saved.best},
                   {"seconds", saved.seconds}}
                  .dump());
}

void RunLog::step(const StepInfo& now, const Ledger& ledger, double exposed_seconds) {
  json line{{"event", "step"},
            {"epoch", now.epoch},
            {"step", now.result.step},
            {"loss", number(now.result.loss)},
            {"lr", now.result.lr},
            {"grad_norm", number(now.result.grad_norm)},
            {"images_per_second", number(now.images_per_second)},
            {"data_wait", now.data_wait},
            {"exposed_communication", exposed_seconds},
            {"live_bytes", ledger.live_total()},
            {"peak_bytes", ledger.peak_total()}};
  if (scales_loss_) line["loss_scale"] = now.result.loss_scale;
  if (now.result.skipped) line["skipped"] = true;
  file_.write(line.dump());
}

void RunLog::epoch(const EpochInfo& info) {
  json line{{"event", "epoch"},
            {"epoch", info.epoch},
            {"train_loss", number(info.train_loss)},
            {"seconds", info.seconds},
            {"images_per_second", number(info.images_per_second)}};
  if (scales_loss_) line["skipped"] = info.skipped;
  if (info.evaluated) {
    line["test_accuracy"] = info.test.accuracy();
    line["test_loss"] = number(info.test.loss);
  }
  file_.write(line.dump());
}

void RunLog::end(const TrainOutcome& outcome) {
  json line{{"event", "end"},
            {"stopped", outcome.stopped},
            {"steps", outcome.steps},
            {"images_per_second", number(outcome.images_per_second)},
            {"test_accuracy", outcome.test.accuracy()},
            {"test_loss", number(outcome.test.loss)},
            {"peak_bytes", outcome.peak_bytes},
            {"at_peak", memory_json(outcome.at_peak)},
            {"host_peak_bytes", outcome.host_peak_bytes},
            {"weights", outcome.weights_path}};
  if (scales_loss_) {
    line["skipped"] = outcome.skipped;
    line["loss_scale"] = outcome.loss_scale;
  }
  file_.write(line.dump());
}

void RunLog::error(std::int64_t steps, const std::string& reason) {
  try {
    file_.write(json{{"event", "error"}, {"steps", steps}, {"error", reason}}.dump());
  } catch (const Error&) {
  }
}

}  // namespace sherd
