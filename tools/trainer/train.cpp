// SPDX-License-Identifier: Apache-2.0
#include <sherd/tools/trainer/train.h>

#include <sherd/models/weights.h>
#include <sherd/runtime/io/file.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <ctime>
#include <filesystem>
#include <nlohmann/json.hpp>

namespace sherd {
namespace {

using Clock = std::chrono::steady_clock;
using json = nlohmann::ordered_json;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::string default_out(const TrainSettings& settings) {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  char stamp[32];
  std::strftime(stamp, sizeof stamp, "%Y%m%d-%H%M%S", &local);
  const std::string name = fmt::format("runs/{}-{}", settings.dataset, stamp);
  std::string free_name = name;
  for (int i = 2; std::filesystem::exists(free_name); ++i) free_name = fmt::format("{}-{}", name, i);
  return free_name;
}

void create_out(const std::string& out) {
  std::error_code error;
  std::filesystem::create_directories(out, error);
  SHERD_CHECK(!error, "--out {}: cannot make the folder: {}", out, error.message());
  for (const char* name : {"config.toml", "log.jsonl", "model.safetensors"}) {
    const auto path = std::filesystem::path(out) / name;
    SHERD_CHECK(!std::filesystem::exists(path, error),
                "--out {}: {} is there already; choose another folder, nothing was changed", out,
                name);
  }
}

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

class Run {
 public:
  Run(const TrainSettings& settings, TrainObserver& observer)
      : settings_(settings),
        observer_(observer),
        data_(open_data(settings)),
        model_(model_settings(settings, data_.train->channels(), data_.train->height(),
                              data_.train->width(), data_.train->classes())),
        context_(context_options(settings)),
        optimizer_(make_optimizer(settings)) {}

  TrainOutcome run() {
    plan();
    make_weights(settings_, context_, model_);
    create_out(info_.out);
    const auto path = [&](const char* name) {
      return (std::filesystem::path(info_.out) / name).string();
    };
    outcome_.config_path = path("config.toml");
    outcome_.log_path = path("log.jsonl");
    outcome_.weights_path = path("model.safetensors");
    settings_.out = info_.out;
    write_file_atomically(outcome_.config_path, settings_to_toml(settings_));
    JsonLinesLog log(outcome_.log_path, JsonLinesLog::Mode::truncate);
    log_ = &log;
    if (!settings_.trace.empty()) context_.trace().enable();

    log_start();
    observer_.on_start(info_);
    train_epochs();
    finish();
    return outcome_;
  }

 private:
  void plan() {
    SHERD_CHECK(!context_.is_meta(),
                "--device meta computes no numbers, so it cannot train; see sherd bench step");
    SHERD_CHECK(settings_.batch_size > 0, "--batch-size: must be positive, got {}",
                settings_.batch_size);
    SHERD_CHECK(settings_.micro_batch >= 0 && settings_.micro_batch <= settings_.batch_size,
                "--micro-batch: expected 0 to the batch size of {}, got {}", settings_.batch_size,
                settings_.micro_batch);
    SHERD_CHECK(settings_.epochs > 0 && settings_.max_steps >= 0 && settings_.log_every > 0 &&
                    settings_.eval_every >= 0,
                "--epochs and --log-every must be positive, --max-steps and --eval-every not "
                "negative; got {}, {}, {}, {}",
                settings_.epochs, settings_.log_every, settings_.max_steps, settings_.eval_every);
    const std::int64_t images = data_.train->size();
    info_.train_images = images;
    info_.test_images = data_.test->size();
    info_.steps_per_epoch = (images + settings_.batch_size - 1) / settings_.batch_size;
    info_.total_steps = info_.steps_per_epoch * settings_.epochs;
    if (settings_.max_steps > 0) {
      info_.total_steps = std::min(info_.total_steps, settings_.max_steps);
    }
    info_.epochs = (info_.total_steps + info_.steps_per_epoch - 1) / info_.steps_per_epoch;
    info_.parameters = model_.parameter_count();
    info_.threads = context_.threads();
    info_.out = settings_.out.empty() ? default_out(settings_) : settings_.out;
  }

  void train_epochs() {
    const LrSchedule schedule = lr_schedule(settings_, info_.steps_per_epoch, info_.total_steps);
    TrainingStep step(context_, model_, *optimizer_, step_settings(settings_, schedule));
    BatchLoader loader(data_.train, loader_options(settings_, data_, settings_.batch_size,
                                                   settings_.shuffle));
    const std::int64_t capacity =
        settings_.micro_batch > 0 ? settings_.micro_batch
                                  : std::min(settings_.batch_size, info_.train_images);
    InputBuffers inputs(context_, *data_.train, capacity, dtype_from_name(settings_.dtype));
    std::int64_t images_done = 0;
    for (std::int64_t epoch = 0; epoch < info_.epochs && !outcome_.stopped; ++epoch) {
      EpochInfo info;
      info.epoch = epoch;
      const std::int64_t samples = train_epoch(epoch, loader, inputs, step, &info);
      images_done += samples;
      outcome_.train_seconds += info.seconds;
      const bool last = epoch + 1 == info_.epochs || outcome_.stopped;
      if (last || (settings_.eval_every > 0 && (epoch + 1) % settings_.eval_every == 0)) {
        info.evaluated = true;
        info.test = evaluate_now();
        outcome_.test = info.test;
      }
      log_epoch(info);
      observer_.on_epoch(info);
    }
    outcome_.steps = step.steps_done();
    outcome_.images_per_second = static_cast<double>(images_done) / outcome_.train_seconds;
  }

  std::int64_t train_epoch(std::int64_t epoch, BatchLoader& loader, InputBuffers& inputs,
                           TrainingStep& step, EpochInfo* info) {
    const auto epoch_start = Clock::now();
    auto window_start = epoch_start;
    double loss_sum = 0.0, wait = 0.0;
    std::int64_t samples = 0, window_samples = 0, in_epoch = 0;
    loader.start_epoch(epoch);
    while (step.steps_done() < info_.total_steps && !outcome_.stopped) {
      const auto wait_start = Clock::now();
      const Batch* batch = loader.next();
      wait += seconds_since(wait_start);
      if (batch == nullptr) break;
      StepInfo now;
      now.result = step.run(inputs, *batch);
      now.epoch = epoch;
      now.step_in_epoch = in_epoch++;
      samples += batch->size;
      window_samples += batch->size;
      loss_sum += now.result.loss * static_cast<double>(batch->size);
      now.images_per_second = static_cast<double>(window_samples) / seconds_since(window_start);
      now.data_wait = wait;
      const std::int64_t done = step.steps_done();
      if (done == kTracedSteps || done == info_.total_steps) write_trace();
      if (done % settings_.log_every == 0 || done == info_.total_steps) {
        log_step(now);
        window_start = Clock::now();
        window_samples = 0;
        wait = 0.0;
      }
      observer_.on_step(now);
      outcome_.stopped = observer_.should_stop();
    }
    info->seconds = seconds_since(epoch_start);
    info->train_loss = samples > 0 ? loss_sum / static_cast<double>(samples) : 0.0;
    info->images_per_second = static_cast<double>(samples) / info->seconds;
    return samples;
  }

  EvaluationResult evaluate_now() {
    const std::int64_t batch = std::min<std::int64_t>(settings_.batch_size, data_.test->size());
    return evaluate(context_, model_, data_.test, loader_options(settings_, data_, batch, false),
                    [&](std::int64_t done) {
                      observer_.on_evaluate(done, info_.test_images);
                      return true;
                    });
  }

  void finish() {
    write_trace();
    save_weights(model_, outcome_.weights_path,
                 {{"format", "pt"}, {"producer", "sherd " + version()}});
    const Ledger& ledger = context_.ledger();
    outcome_.info = info_;
    outcome_.at_peak = ledger.at_peak();
    outcome_.peaks = ledger.peaks();
    outcome_.peak_bytes = ledger.peak_total();
    outcome_.peak_reserved_bytes = static_cast<std::int64_t>(context_.allocator().peak_reserved_bytes());
    log_->write(json{{"event", "end"},
                     {"stopped", outcome_.stopped},
                     {"steps", outcome_.steps},
                     {"images_per_second", number(outcome_.images_per_second)},
                     {"test_accuracy", outcome_.test.accuracy()},
                     {"test_loss", number(outcome_.test.loss)},
                     {"peak_bytes", outcome_.peak_bytes},
                     {"at_peak", memory_json(outcome_.at_peak)},
                     {"weights", outcome_.weights_path}}
                    .dump());
  }

  void write_trace() {
    if (!context_.trace().enabled()) return;
    context_.trace().enable(false);
    context_.trace().write(settings_.trace);
  }

  void log_start() {
    log_->write(json{{"event", "start"},
                     {"version", version()},
                     {"build", build_description()},
                     {"threads", info_.threads},
                     {"parameters", info_.parameters},
                     {"train_images", info_.train_images},
                     {"test_images", info_.test_images},
                     {"total_steps", info_.total_steps},
                     {"steps_per_epoch", info_.steps_per_epoch},
                     {"seed", settings_.seed}}
                    .dump());
  }

  void log_step(const StepInfo& now) {
    log_->write(json{{"event", "step"},
                     {"epoch", now.epoch},
                     {"step", now.result.step},
                     {"loss", number(now.result.loss)},
                     {"lr", now.result.lr},
                     {"grad_norm", number(now.result.grad_norm)},
                     {"images_per_second", number(now.images_per_second)},
                     {"data_wait", now.data_wait},
                     {"live_bytes", context_.ledger().live_total()},
                     {"peak_bytes", context_.ledger().peak_total()}}
                    .dump());
  }

  void log_epoch(const EpochInfo& info) {
    json line{{"event", "epoch"},
              {"epoch", info.epoch},
              {"train_loss", number(info.train_loss)},
              {"seconds", info.seconds},
              {"images_per_second", number(info.images_per_second)}};
    if (info.evaluated) {
      line["test_accuracy"] = info.test.accuracy();
      line["test_loss"] = number(info.test.loss);
    }
    log_->write(line.dump());
  }

  static constexpr std::int64_t kTracedSteps = 10;

  TrainSettings settings_;
  TrainObserver& observer_;
  DataSource data_;
  VisionTransformer model_;
  Context context_;
  std::unique_ptr<Optimizer> optimizer_;
  RunInfo info_;
  TrainOutcome outcome_;
  JsonLinesLog* log_ = nullptr;
};

}  // namespace

TrainObserver::~TrainObserver() = default;

TrainOutcome train(const TrainSettings& settings, TrainObserver& observer) {
  return Run(settings, observer).run();
}

std::unique_ptr<Optimizer> make_optimizer(const TrainSettings& s) {
  if (s.optimizer == "adamw") return make_adamw({s.beta1, s.beta2, s.eps, s.weight_decay});
  if (s.optimizer == "sgd") return make_sgd({s.momentum, s.nesterov, s.weight_decay});
  fail("unknown optimizer '{}': expected adamw or sgd", s.optimizer);
}

StepSettings step_settings(const TrainSettings& settings, const LrSchedule& schedule) {
  return {schedule, settings.clip_grad_norm, settings.label_smoothing, settings.micro_batch};
}

void make_weights(const TrainSettings& settings, Context& context, Module& model) {
  const DType dtype = dtype_from_name(settings.dtype);
  SHERD_CHECK(dtype == DType::f32 || dtype == DType::f64,
              "--dtype {}: training computes in f32 or f64", settings.dtype);
  if (settings.weights.empty()) {
    model.initialize(context, dtype);
  } else {
    load_weights(model, context, dtype, settings.weights);
  }
}

std::string version() {
  return SHERD_VERSION;
}

std::string build_description() {
  return SHERD_BUILD;
}

}  // namespace sherd
