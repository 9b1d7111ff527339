// SPDX-License-Identifier: Apache-2.0
#include <sherd/tools/trainer/train.h>

#include <sherd/tools/trainer/plan.h>
#include <sherd/tools/trainer/ranks.h>
#include <sherd/tools/trainer/run_files.h>
#include <sherd/tools/trainer/run_log.h>
#include <sherd/tools/trainer/run_trace.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <optional>

namespace sherd {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

class Run {
 public:
  Run(const TrainSettings& settings, const ResumePoint& resume, const DataSource& data,
      Communicator& world, TrainObserver& observer)
      : settings_(settings),
        resume_(resume),
        files_(settings_, resume_, world),
        observer_(observer),
        world_(world),
        data_(data),
        model_(model_settings(settings, data_.train->channels(), data_.train->height(),
                              data_.train->width(), data_.train->classes())),
        trace_(settings_.trace, world),
        context_(trace_.with_origin(rank_context_options(settings_, world))),
        engine_(model_, context_, world, training_precision(settings),
                sharding_options(settings, world.size())),
        optimizer_(make_optimizer(settings)) {
    apply_recompute(settings, model_);
  }

  // Everything that can be refused is refused before the first file is made.
  TrainOutcome run() {
    try {
      plan();
      prepare();
      agree_on_errors(world_, is_first() ? message_of([&] { files_.choose(); }) : std::string());
      files_.share();
      info_.out = files_.out();
      outcome_.config_path = files_.config_path();
      outcome_.log_path = files_.log_path();
      outcome_.weights_path = files_.weights_path();
      if (checkpoints_) {
        checkpoints_->open(world_, files_.out(), files_.config(), started_at_,
                           [&](const auto& s) { tell_saved(s); });
      }
      agree_on_errors(world_, message_of([&] { claim_files(); }));
      trace_.start(context_);
      agree_on_errors(world_, is_first() ? message_of([&] { start_log(); }) : std::string());
      train_epochs();
      finish();
    } catch (const AgreedError& error) {
      give_up_together(error.what());
    } catch (const OutOfMemory& error) {
      give_up_alone(error.what() + memory_advice(settings_, world_.size(), error));
    } catch (const std::exception& error) {
      give_up_alone(error.what());
    }
    return outcome_;
  }

 private:
  bool is_first() const { return world_.rank() == 0; }

  // What went wrong on this rank alone, for the others to hear of.
  static std::string message_of(const std::function<void()>& work) {
    try {
      work();
    } catch (const std::bad_alloc&) {
      return "the system has no memory left";
    } catch (const std::exception& error) {
      return error.what();
    }
    return {};
  }

  void plan() {
    check_range("--epochs", settings_.epochs, 1, 1'000'000);
    check_range("--max-steps", settings_.max_steps, 0, std::int64_t{1} << 40);
    check_range("--log-every", settings_.log_every, 1, std::int64_t{1} << 40);
    check_range("--eval-every", settings_.eval_every, 0, 1'000'000);
    check_range("--save-every", settings_.save_every, 0, std::int64_t{1} << 40);
    check_range("--keep", settings_.keep, 1, 1'000'000);
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
    info_.ranks = world_.size();
    info_.sharding = describe_ranks(settings_, world_);
    info_.precision = describe(engine_.precision());
    info_.scales_loss = loss_scale_settings(settings_).has_value();
  }

  void prepare() {
    const LrSchedule schedule = lr_schedule(settings_, info_.steps_per_epoch, info_.total_steps);
    std::optional<CheckpointReader> from;
    if (!resume_.checkpoint.empty()) {
      from.emplace(resume_.checkpoint);
      check_checkpoint(*from, model_, optimizer_.get());
      load_weights(*from, engine_);
    } else {
      info_.weights_notes = make_weights(settings_, model_, engine_);
    }
    step_ = std::make_unique<TrainingStep>(context_, model_, engine_, *optimizer_,
                                           step_settings(settings_, schedule));
    if (from) go_on_from(*from);
    if (settings_.save_every > 0) {
      checkpoints_ =
          std::make_unique<RunCheckpoints>(settings_, context_, model_, engine_, *optimizer_);
    }
    make_loader();
    const std::int64_t largest = std::min(settings_.batch_size, info_.train_images);
    const std::int64_t capacity =
        settings_.micro_batch > 0
            ? settings_.micro_batch
            : std::max<std::int64_t>(1, rank_slice(largest, world_.rank(), world_.size()).size);
    inputs_ = std::make_unique<InputBuffers>(context_, *data_.train, capacity,
                                             engine_.precision().master);
  }

  void go_on_from(const CheckpointReader& checkpoint) {
    const RunProgress then = progress_of(checkpoint);
    const bool to_finish = then.step.steps == info_.total_steps && lacks_weights(checkpoint);
    SHERD_CHECK(then.step.steps < info_.total_steps || to_finish,
                "--resume: checkpoint '{}' is of step {} of {}, so there is nothing left to train; "
                "raise --epochs or --max-steps, or use its weights: sherd eval {}",
                checkpoint.directory(), then.step.steps, info_.total_steps, checkpoint.directory());
    load_state(checkpoint, engine_, *optimizer_, then);
    step_->restore(then.step);
    progress_ = then;
    started_at_ = then;
    fill_in(progress_);
    for (const std::string& difference : differences(then, progress_)) {
      warnings_.push_back("--resume: " + difference);
    }
    outcome_.skipped = then.skipped;
    info_.resumed_from = checkpoint.directory();
    info_.resumed_steps = then.step.steps;
    if (progress_.samples < info_.train_images) return;
    ++progress_.epoch;  // a smaller data set, or an epoch that had ended
    begin_epoch();
  }

  // A run may end between its last checkpoint and its weights, which are then there of none, or of
  // an earlier end.
  bool lacks_weights(const CheckpointReader& checkpoint) const {
    namespace fs = std::filesystem;
    if (!resume_.same_run) return false;
    std::error_code missing;
    const auto written = fs::last_write_time(fs::path(resume_.out) / RunFiles::kWeights, missing);
    return missing ||
           written < fs::last_write_time(fs::path(checkpoint.directory()) / "index.json");
  }

  // What does not change during a run.
  void fill_in(RunProgress& progress) const {
    progress.batch_size = settings_.batch_size;
    progress.micro_batch = settings_.micro_batch;
    progress.seed = settings_.seed;
    progress.ranks = world_.size();
    progress.threads = context_.threads();
    progress.dataset = settings_.dataset;
    progress.sharding = name_of(engine_.options().policy);
    progress.precision = info_.precision;
  }

  void begin_epoch() {
    progress_.samples = progress_.learnt = progress_.epoch_skipped = 0;
    progress_.loss_sum = 0.0;
  }

  // All ranks together, between steps.
  void save_checkpoint(bool best) {
    fill_in(progress_);
    progress_.step = step_->state();
    progress_.optimizer_steps = optimizer_->steps_done();
    progress_.skipped = outcome_.skipped;
    checkpoints_->save(progress_, best);
  }

  void tell_saved(const RunCheckpoints::Saved& saved) {
    by_itself([&] {
      if (log_) log_->checkpoint(saved);
      observer_.on_checkpoint(saved);
    });
  }

  void make_loader() {
    BatchLoaderOptions options = loader_options(settings_, data_, settings_.batch_size,
                                                settings_.shuffle, world_.rank(), world_.size());
    place_batches(options, context_);
    loader_ = std::make_unique<BatchLoader>(data_.train, options);
  }

  void claim_files() {
    std::int64_t bytes = 1 << 20;
    std::string what = "the weights and the log";
    if (checkpoints_) {  // those that stay, and the one that is being written
      bytes += (settings_.keep + 1) * checkpoints_->bytes() * world_.size();
      what = fmt::format("the weights, {} checkpoints and the log", settings_.keep + 1);
    }
    for (const Parameter* parameter : model_.parameters()) {
      bytes += parameter->numel() * static_cast<std::int64_t>(size_of(engine_.precision().master));
    }
    files_.claim(bytes, what);
  }

  void start_log() {
    const bool goes_on = files_.log_goes_on();
    log_ = std::make_unique<RunLog>(files_.log_path(), goes_on);
    if (!goes_on) files_.add(files_.log_path());
    log_->start(info_, settings_);
    if (!resume_.checkpoint.empty()) log_->resume(resume_.checkpoint, progress_);
    observer_.on_start(info_);
    for (const std::string& warning : warnings_) observer_.on_warning(warning);
  }

  // A run that fails keeps what it has learnt; one that has learnt nothing, because its first step
  // failed or all were skipped, leaves no trace, so that the corrected command can be repeated.
  void remove_files() {
    log_.reset();
    if (checkpoints_) checkpoints_->close();
    files_.remove();
  }

  static constexpr const char* kTorn =
      " (it came in the middle of an update, after which weights of two steps are mixed: they were "
      "not saved)";

  // All ranks have come here for the same reason, so they can save the weights together.
  [[noreturn]] void give_up_together(const std::string& reason) {
    if (nothing_learnt()) {
      remove_files();
      throw AgreedError(reason);
    }
    engine_.abandon_step();
    if (checkpoints_ && checkpoints_->pending()) {
      try {
        checkpoints_->finish();
      } catch (const Error&) {  // the reason matters more
      }
    }
    if (log_) log_->error(step_->steps_done(), reason);
    try {
      write_trace();
    } catch (const std::exception&) {  // the same here
    }
    if (engine_.torn()) throw AgreedError(reason + kTorn + resume_advice());
    throw AgreedError(
        reason + rescue([&](const std::string& path) { save_sharded(model_, engine_, path); }) +
        resume_advice());
  }

  bool nothing_learnt() const { return optimizer_->steps_done() == started_at_.optimizer_steps; }

  std::string resume_advice() const {
    const std::string last = checkpoints_ ? checkpoints_->last_path() : std::string();
    if (last.empty()) return {};
    return fmt::format("; --resume {} goes on from the last checkpoint", last);
  }

  // This rank has failed, or heard that another has. What is spread over the ranks is lost.
  [[noreturn]] void give_up_alone(const std::string& reason) {
    if (world_.size() == 1) give_up_together(reason);
    world_.abort(fmt::format("rank {}: {}", world_.rank(), reason));
    if (checkpoints_) checkpoints_->abandon();
    if (nothing_learnt()) {
      remove_files();
      fail("{}", reason);
    }
    trace_.write_alone(context_, reason);
    if (!is_first()) fail("{}", reason);
    if (log_) log_->error(step_->steps_done(), reason);
    if (engine_.holds_whole_model()) {
      fail("{}{}{}", reason, rescue([&](const std::string& path) {
             const std::string failure = write_weights(model_, engine_, path);
             if (!failure.empty()) fail("{}", failure);
           }),
           resume_advice());
    }
    if (engine_.torn()) fail("{}{}{}", reason, kTorn, resume_advice());
    fail("{} (the weights of {} step{} are lost, they were spread over ranks that have stopped){}",
         reason, step_->steps_done(), step_->steps_done() == 1 ? "" : "s", resume_advice());
  }

  std::string rescue(const std::function<void(const std::string&)>& save) {
    const std::string path = files_.path("model-before-error.safetensors");
    try {
      save(path);
      return fmt::format(" (the weights after {} step{} are in {})", step_->steps_done(),
                         step_->steps_done() == 1 ? "" : "s", path);
    } catch (const Error& error) {
      return fmt::format(" (and the weights could not be saved: {})", error.what());
    }
  }

  // What a rank does by itself between steps may fail without leaving the others waiting: they hear
  // of it at the next step.
  void by_itself(const std::function<void()>& work) {
    if (failure_.empty()) failure_ = message_of(work);
  }

  // Before each step: shall all go on? Throws an AgreedError where a rank has failed. A checkpoint
  // that all have written meanwhile appears.
  bool all_go_on() {
    std::array<std::int32_t, 2> worst{!failure_.empty() ? 2
                                      : stop_wanted_    ? 1
                                                        : 0,
                                      checkpoints_ && checkpoints_->writing() ? 1 : 0};
    const auto start = Clock::now();
    world_.all_reduce(worst.data(), 2, DType::i32, ReduceOp::max, "shall the run go on");
    waited_ += seconds_since(start);
    if (worst[0] == 2) agree_on_errors(world_, failure_);
    if (checkpoints_ && checkpoints_->pending() && worst[1] == 0) checkpoints_->finish();
    outcome_.stopped = worst[0] == 1;
    return worst[0] == 0;
  }

  void train_epochs() {
    std::int64_t images_done = 0;
    // Of a run that was killed before its weights were written.
    if (step_->steps_done() == info_.total_steps) outcome_.test = evaluate_now();
    while (progress_.epoch < info_.epochs && step_->steps_done() < info_.total_steps &&
           !outcome_.stopped) {
      const std::int64_t epoch = progress_.epoch;
      EpochInfo info;
      info.epoch = epoch;
      const std::int64_t samples = train_epoch(&info);
      images_done += samples;
      outcome_.train_seconds += info.seconds;
      if (samples == 0) break;  // stopped before its first step
      const bool last = step_->steps_done() == info_.total_steps;
      const bool due =
          last || (settings_.eval_every > 0 && (epoch + 1) % settings_.eval_every == 0);
      if (due && !outcome_.stopped) {
        info.test = evaluate_now();
        info.evaluated = !outcome_.stopped;
        if (info.evaluated) outcome_.test = info.test;
      }
      if (progress_.samples >= info_.train_images) {
        ++progress_.epoch;
        begin_epoch();
      }
      if (checkpoints_) save_after_epoch(info);
      by_itself([&] {
        if (log_) log_->epoch(info);
        observer_.on_epoch(info);
      });
    }
    if (checkpoints_) {
      if (!nothing_learnt() && checkpoints_->last_step() != step_->steps_done()) {
        save_checkpoint(false);
      }
      if (checkpoints_->pending()) checkpoints_->finish();
    }
    agree_on_errors(world_, failure_);
    outcome_.steps = step_->steps_done();
    outcome_.loss_scale = step_->loss_scale();
    if (images_done == 0) return;
    outcome_.images_per_second = static_cast<double>(images_done) / outcome_.train_seconds;
  }

  void save_after_epoch(const EpochInfo& info) {
    const bool best = info.evaluated && info.test.accuracy() > progress_.best_accuracy;
    if (best) {
      progress_.best_accuracy = info.test.accuracy();
      progress_.best_step = step_->steps_done();
    }
    if (best || checkpoints_->due(step_->steps_done())) save_checkpoint(best);
  }

  // Returns how many samples it took, from where the epoch stands.
  std::int64_t train_epoch(EpochInfo* info) {
    const std::int64_t epoch = progress_.epoch, per_step = settings_.batch_size;
    const auto epoch_start = Clock::now();
    Window window{epoch_start, 0.0, exposed()};
    const double exposed_before = window.exposed;
    std::int64_t samples = 0;
    by_itself([&] {
      if (!loader_) make_loader();
      loader_->start_epoch(epoch, progress_.samples);
    });
    const auto next_batch = [&] {
      const auto wait_start = Clock::now();
      BatchPtr next;
      by_itself([&] { next = loader_->next(); });
      window.wait += seconds_since(wait_start);
      return next;
    };
    BatchPtr batch, following;  // this step's; the next one's, where it is fetched ahead
    // All ranks take as many batches: the count follows from the settings alone.
    while (step_->steps_done() < info_.total_steps && progress_.samples < info_.train_images) {
      batch = following ? std::move(following) : next_batch();
      if (!all_go_on()) break;
      SHERD_INTERNAL_CHECK(batch != nullptr, "epoch {} ended after {} samples", epoch,
                           progress_.samples);
      const std::int64_t size = batch->global_size;
      StepInfo now;
      const bool more = step_->steps_done() + 1 < info_.total_steps &&
                        progress_.samples + size < info_.train_images;
      now.result =
          step_->run(*inputs_, batch, [&] { return more ? following = next_batch() : nullptr; });
      batch.reset();
      now.epoch = epoch;
      now.step_in_epoch = progress_.samples / per_step;
      samples += size;
      progress_.samples += size;
      window.samples += size;
      if (now.result.skipped) {
        ++progress_.epoch_skipped;
        ++outcome_.skipped;
      } else {
        progress_.learnt += size;
        progress_.loss_sum += now.result.loss * static_cast<double>(size);
      }
      now.skipped = outcome_.skipped;
      by_itself([&] { after_step(now, window); });
      RunTrace::note(context_, {.step = now.result.step,
                                .samples = now.result.samples,
                                .first = steps_of_this_run() == 1,
                                .graph = step_->replays(),
                                .skipped = now.result.skipped});
      if (steps_of_this_run() == kTracedSteps || step_->steps_done() == info_.total_steps) {
        write_trace();
      }
      // At the end of an epoch the evaluation comes first.
      const bool goes_on =
          step_->steps_done() < info_.total_steps && progress_.samples < info_.train_images;
      if (checkpoints_ && goes_on && checkpoints_->due(step_->steps_done())) save_checkpoint(false);
    }
    info->seconds = seconds_since(epoch_start);
    outcome_.exposed_seconds += exposed() - exposed_before;
    info->skipped = progress_.epoch_skipped;
    info->train_loss =
        progress_.learnt > 0 ? progress_.loss_sum / static_cast<double>(progress_.learnt) : NAN;
    info->images_per_second = static_cast<double>(samples) / info->seconds;
    return samples;
  }

  // Since the last line of the log.
  struct Window {
    Clock::time_point start;
    double wait = 0.0;     // seconds for batches
    double exposed = 0.0;  // what exposed() was then
    std::int64_t samples = 0;
  };

  // Seconds since the start that this rank has waited for others.
  double exposed() const { return engine_.exposed_seconds() + waited_; }

  void after_step(StepInfo& now, Window& window) {
    now.images_per_second = static_cast<double>(window.samples) / seconds_since(window.start);
    now.data_wait = window.wait;
    const std::int64_t done = step_->steps_done();
    if (done % settings_.log_every == 0 || done == info_.total_steps || now.result.skipped) {
      if (log_) log_->step(now, context_.ledger(), exposed() - window.exposed);
      window = Window{Clock::now(), 0.0, exposed()};
    }
    if (!step_->graph_refusal().empty() && !std::exchange(told_of_graph_, true)) {
      observer_.on_warning("--graph: steps are not captured: " + step_->graph_refusal());
    }
    observer_.on_step(now);
    stop_wanted_ = observer_.should_stop();
  }

  EvaluationResult evaluate_now() {
    loader_.reset();  // its memory serves the other images
    // A rank holds no more samples at once than in training.
    const std::int64_t most =
        settings_.micro_batch > 0 ? settings_.micro_batch * world_.size() : info_.train_images;
    const std::int64_t batch = std::min({settings_.batch_size, most, data_.test->size()});
    std::int64_t seen = 0;
    const EvaluationResult result = evaluate(
        context_, model_, *inputs_, data_.test,
        loader_options(settings_, data_, batch, false, world_.rank(), world_.size()),
        [&](std::int64_t done) {
          seen = done;
          by_itself([&] {
            observer_.on_evaluate(done, info_.test_images);
            stop_wanted_ = stop_wanted_ || observer_.should_stop();
          });
          return !stop_wanted_ && failure_.empty();
        },
        &world_);
    if (seen < data_.test->size()) all_go_on();
    return result;
  }

  void finish() {
    save_sharded(model_, engine_, outcome_.weights_path);
    write_trace();
    const Ledger& ledger = context_.ledger();
    outcome_.info = info_;
    if (checkpoints_) outcome_.checkpoint_path = checkpoints_->last_path();
    outcome_.at_peak = ledger.at_peak();
    outcome_.peaks = ledger.peaks();
    outcome_.peak_bytes = ledger.peak_total();
    outcome_.host_peak_bytes = context_.host_ledger().peak_total();
    outcome_.host_at_peak = context_.host_ledger().at_peak();
    outcome_.peak_reserved_bytes =
        static_cast<std::int64_t>(context_.allocator().peak_reserved_bytes());
    by_itself([&] {
      if (log_) log_->end(outcome_);
    });
    agree_on_errors(world_, failure_);
  }

  std::int64_t steps_of_this_run() const { return step_->steps_done() - started_at_.step.steps; }

  // All ranks together. A trace that cannot be written is no reason to stop training.
  void write_trace() {
    const std::string problem = trace_.write(context_);
    if (!problem.empty()) by_itself([&] { observer_.on_warning(problem); });
  }

  static constexpr std::int64_t kTracedSteps = 10;

  TrainSettings settings_;
  ResumePoint resume_;
  RunFiles files_;
  TrainObserver& observer_;
  Communicator& world_;
  DataSource data_;
  VisionTransformer model_;
  RunTrace trace_;
  Context context_;
  ShardingEngine engine_;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<TrainingStep> step_;
  std::unique_ptr<BatchLoader> loader_;
  std::unique_ptr<InputBuffers> inputs_;
  std::unique_ptr<RunCheckpoints> checkpoints_;  // with --save-every
  RunProgress progress_, started_at_;
  std::vector<std::string> warnings_;  // for the start
  RunInfo info_;
  TrainOutcome outcome_;
  std::unique_ptr<RunLog> log_;  // of rank 0
  std::string failure_;          // of this rank, which the others have not heard of yet
  bool stop_wanted_ = false;
  bool told_of_graph_ = false;
  double waited_ = 0.0;  // seconds, for others before steps
};

// Of a rank that is not the first: says nothing, but a signal may reach any process of a launcher.
class OtherRank final : public TrainObserver {
 public:
  explicit OtherRank(TrainObserver& observer) : observer_(observer) {}
  bool should_stop() override { return under_launcher() && observer_.should_stop(); }

 private:
  TrainObserver& observer_;
};

}  // namespace

TrainObserver::~TrainObserver() = default;

TrainOutcome train(const TrainSettings& given, TrainObserver& observer) {
  TrainSettings settings = given;
  // Refused before anything is read.
  SHERD_CHECK(device_from_name(settings.device) != Device::meta,
              "--device meta computes no numbers, so it cannot train; see sherd bench step");
  const int ranks = planned_ranks(settings);
  check_step(settings, ranks);
  // Threads share the images; processes read their own.
  const std::optional<ResumePoint> found = find_resume_point(settings.resume, settings.out);
  const ResumePoint resume = found.value_or(ResumePoint{});
  if (found) settings.out = resume.out;
  std::optional<DataSource> shared;
  if (!under_launcher()) shared = open_data(settings);
  const auto plan_memory = [&](const DataSource& data) {
    TrainSettings planned = settings;
    planned.batch_size = std::min(settings.batch_size, data.train->size());
    settings.recompute = planned.recompute = chosen_recompute(planned, ranks);
    check_memory_limit(planned, ranks);
  };
  if (shared) plan_memory(*shared);
  TrainOutcome outcome;
  run_on_ranks(settings, [&](Communicator& world) {
    OtherRank other(observer);
    const bool first = world.rank() == 0;
    const DataSource data = shared ? *shared : open_data(settings);
    check_same_start(
        world,
        {fmt::format("{} training and {} test images", data.train->size(), data.test->size()),
         "--resume from '" + resume.checkpoint + "'",
         settings.trace.empty() ? "no --trace" : "a --trace"},
        settings);
    if (!shared) plan_memory(data);
    with_memory_advice(settings, ranks, [&] {
      Run run(settings, resume, data, world, first ? observer : other);
      const TrainOutcome mine = run.run();
      if (first) outcome = mine;
    });
  });
  return outcome;
}

}  // namespace sherd
