// SPDX-License-Identifier: Apache-2.0
#include <sherd/tools/trainer/train.h>

#include <sherd/models/weights.h>
#include <sherd/runtime/io/file.h>
#include <sherd/runtime/io/trace_file.h>

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

// Makes a folder of its own for a run that was given none; runs started in the same second get
// different ones.
std::string make_default_out(const TrainSettings& settings) {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  char stamp[32];
  std::strftime(stamp, sizeof stamp, "%Y%m%d-%H%M%S", &local);
  const std::string name = fmt::format("runs/{}-{}", settings.dataset, stamp);
  std::error_code error;
  std::filesystem::create_directories("runs", error);
  for (int i = 1; !error; ++i) {
    const std::string candidate = i == 1 ? name : fmt::format("{}-{}", name, i);
    if (std::filesystem::create_directory(candidate, error)) return candidate;
  }
  fail("cannot make the folder {}: {}; choose one with --out", name, error.message());
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

  // Everything that can be refused is refused before the first file is made.
  TrainOutcome run() {
    plan();
    prepare();
    claim_files();
    try {
      log_ = std::make_unique<JsonLinesLog>(outcome_.log_path, JsonLinesLog::Mode::truncate);
      log_start();
      observer_.on_start(info_);
      train_epochs();
      finish();
    } catch (const std::exception& error) {
      give_up(error.what());
    }
    return outcome_;
  }

 private:
  void plan() {
    SHERD_CHECK(!context_.is_meta(),
                "--device meta computes no numbers, so it cannot train; see sherd bench step");
    check_range("--batch-size", settings_.batch_size, 1, 1 << 24);
    check_range("--micro-batch", settings_.micro_batch, 0, settings_.batch_size);
    check_range("--epochs", settings_.epochs, 1, 1'000'000);
    check_range("--max-steps", settings_.max_steps, 0, std::int64_t{1} << 40);
    check_range("--log-every", settings_.log_every, 1, std::int64_t{1} << 40);
    check_range("--eval-every", settings_.eval_every, 0, 1'000'000);
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
  }

  void prepare() {
    const LrSchedule schedule = lr_schedule(settings_, info_.steps_per_epoch, info_.total_steps);
    make_weights(settings_, context_, model_);
    step_ = std::make_unique<TrainingStep>(context_, model_, *optimizer_,
                                           step_settings(settings_, schedule));
    loader_ = std::make_unique<BatchLoader>(
        data_.train, loader_options(settings_, data_, settings_.batch_size, settings_.shuffle));
    const std::int64_t capacity = settings_.micro_batch > 0
                                      ? settings_.micro_batch
                                      : std::min(settings_.batch_size, info_.train_images);
    inputs_ = std::make_unique<InputBuffers>(context_, *data_.train, capacity,
                                             dtype_from_name(settings_.dtype));
  }

  std::string in_out(const char* name) const {
    return (std::filesystem::path(info_.out) / name).string();
  }

  void claim_files() {
    if (settings_.out.empty()) {
      info_.out = make_default_out(settings_);
    } else {
      info_.out = settings_.out;
      std::error_code error;
      std::filesystem::create_directories(info_.out, error);
      SHERD_CHECK(!error, "--out {}: cannot make the folder: {}", info_.out, error.message());
    }
    outcome_.config_path = in_out("config.toml");
    outcome_.log_path = in_out("log.jsonl");
    outcome_.weights_path = in_out("model.safetensors");
    for (const std::string& path : {outcome_.log_path, outcome_.weights_path}) {
      SHERD_CHECK(!std::filesystem::exists(path),
                  "--out: '{}' is there already; choose another folder, nothing was changed", path);
      SHERD_CHECK(settings_.trace.empty() || !same_path(settings_.trace, path),
                  "--trace {}: that is where the run's own file goes; choose another name",
                  settings_.trace);
    }
    check_space();
    // Paths that hold from wherever the configuration is used later.
    TrainSettings resolved = settings_;
    for (std::string* path : {&resolved.data_dir, &resolved.weights}) {
      if (!path->empty()) *path = std::filesystem::absolute(*path).string();
    }
    create_new_file(outcome_.config_path, settings_to_toml(resolved));
    if (!settings_.trace.empty()) {
      try {
        create_new_file(settings_.trace, "");
      } catch (...) {
        std::filesystem::remove(outcome_.config_path);
        throw;
      }
      context_.trace().enable();
    }
  }

  static bool same_path(const std::string& a, const std::string& b) {
    return std::filesystem::weakly_canonical(a) == std::filesystem::weakly_canonical(b);
  }

  // The weights are written at the very end, when it would be late to find the disk full.
  void check_space() const {
    std::int64_t bytes = 1 << 20;
    for (const Parameter* parameter : model_.parameters()) {
      bytes += parameter->numel() * static_cast<std::int64_t>(size_of(parameter->data().dtype()));
    }
    std::error_code error;
    const std::filesystem::space_info space = std::filesystem::space(info_.out, error);
    SHERD_CHECK(error || space.available >= static_cast<std::uintmax_t>(bytes),
                "--out {}: {} free, but the weights and the log need {}; free some space or choose "
                "another folder",
                info_.out, format_bytes(static_cast<std::int64_t>(space.available)),
                format_bytes(bytes));
  }

  // A run that fails keeps what it has learnt; one that fails before its first step leaves no
  // trace, so that the corrected command can be repeated.
  [[noreturn]] void give_up(const std::string& reason) {
    if (step_->steps_done() == 0) {
      log_.reset();
      for (const std::string& path : {outcome_.config_path, outcome_.log_path, settings_.trace}) {
        std::error_code ignored;
        if (!path.empty()) std::filesystem::remove(path, ignored);
      }
      fail("{}", reason);
    }
    const std::string rescue = in_out("model-before-error.safetensors");
    std::string saved;
    try {
      save(rescue);
      saved = fmt::format(" (the weights after {} steps are in {})", step_->steps_done(), rescue);
    } catch (const Error& error) {
      saved = fmt::format(" (and the weights could not be saved: {})", error.what());
    }
    try {
      log_->write(
          json{{"event", "error"}, {"steps", step_->steps_done()}, {"error", reason}}.dump());
    } catch (const Error&) {  // the log may be what failed
    }
    fail("{}{}", reason, saved);
  }

  void train_epochs() {
    std::int64_t images_done = 0;
    for (std::int64_t epoch = 0; epoch < info_.epochs && !outcome_.stopped; ++epoch) {
      EpochInfo info;
      info.epoch = epoch;
      const std::int64_t samples = train_epoch(epoch, &info);
      images_done += samples;
      outcome_.train_seconds += info.seconds;
      const bool last = epoch + 1 == info_.epochs;
      const bool due =
          last || (settings_.eval_every > 0 && (epoch + 1) % settings_.eval_every == 0);
      if (due && !outcome_.stopped) {
        info.test = evaluate_now();
        info.evaluated = !outcome_.stopped;
        if (info.evaluated) outcome_.test = info.test;
      }
      log_epoch(info);
      observer_.on_epoch(info);
    }
    outcome_.steps = step_->steps_done();
    outcome_.images_per_second = static_cast<double>(images_done) / outcome_.train_seconds;
  }

  std::int64_t train_epoch(std::int64_t epoch, EpochInfo* info) {
    const auto epoch_start = Clock::now();
    auto window_start = epoch_start;
    double loss_sum = 0.0, wait = 0.0;
    std::int64_t samples = 0, window_samples = 0, in_epoch = 0;
    loader_->start_epoch(epoch);
    while (step_->steps_done() < info_.total_steps && !outcome_.stopped) {
      const auto wait_start = Clock::now();
      const Batch* batch = loader_->next();
      wait += seconds_since(wait_start);
      if (batch == nullptr) break;
      StepInfo now;
      now.result = step_->run(*inputs_, *batch);
      now.epoch = epoch;
      now.step_in_epoch = in_epoch++;
      samples += batch->size;
      window_samples += batch->size;
      loss_sum += now.result.loss * static_cast<double>(batch->size);
      now.images_per_second = static_cast<double>(window_samples) / seconds_since(window_start);
      now.data_wait = wait;
      const std::int64_t done = step_->steps_done();
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
                      outcome_.stopped = outcome_.stopped || observer_.should_stop();
                      return !outcome_.stopped;
                    });
  }

  void finish() {
    save(outcome_.weights_path);
    write_trace();
    const Ledger& ledger = context_.ledger();
    outcome_.info = info_;
    outcome_.at_peak = ledger.at_peak();
    outcome_.peaks = ledger.peaks();
    outcome_.peak_bytes = ledger.peak_total();
    outcome_.peak_reserved_bytes =
        static_cast<std::int64_t>(context_.allocator().peak_reserved_bytes());
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

  void save(const std::string& path) const {
    save_weights(model_, path, {{"format", "pt"}, {"producer", "sherd " + version()}});
  }

  // A trace that cannot be written is no reason to stop training.
  void write_trace() {
    if (!context_.trace().enabled()) return;
    context_.trace().enable(false);
    try {
      sherd::write_trace(context_.trace(), settings_.trace);
    } catch (const Error& error) {
      observer_.on_warning(error.what());
    }
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
  std::unique_ptr<TrainingStep> step_;
  std::unique_ptr<BatchLoader> loader_;
  std::unique_ptr<InputBuffers> inputs_;
  RunInfo info_;
  TrainOutcome outcome_;
  std::unique_ptr<JsonLinesLog> log_;
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
