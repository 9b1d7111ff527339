// SPDX-License-Identifier: Apache-2.0
#include <sherd/tools/trainer/run_checkpoints.h>

#include <sherd/runtime/error.h>
#include <sherd/tools/trainer/setup.h>

#include <chrono>
#include <filesystem>

namespace sherd {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr const char* kFolder = "checkpoints";

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

bool same_folder(const fs::path& a, const fs::path& b) {
  std::error_code error;
  return fs::equivalent(a, b, error);
}

}  // namespace

std::optional<ResumePoint> find_resume_point(const std::string& resume, const std::string& out) {
  if (resume.empty()) return {};
  if (resume == "auto") {
    SHERD_CHECK(!out.empty(), "--resume auto: goes on with the run in OUT; give it with --out");
    const std::vector<FoundCheckpoint> found = find_checkpoints((fs::path(out) / kFolder).string());
    return ResumePoint{found.empty() ? "" : found.back().path, out, true};
  }
  ResumePoint point{resolve_checkpoint(resume), out, false};
  // RUN/checkpoints/step-00001000, perhaps by a link
  const fs::path folder = fs::weakly_canonical(point.checkpoint).parent_path();
  if (folder.filename() != kFolder) return point;
  const fs::path run = folder.parent_path();
  if (point.out.empty()) point.out = run.string();
  point.same_run = same_folder(point.out, run);
  if (!point.same_run) return point;
  const std::vector<FoundCheckpoint> found = find_checkpoints(folder.string());
  SHERD_CHECK(found.empty() || same_folder(found.back().path, point.checkpoint),
              "--resume {}: its run has a later checkpoint, {}; resume from that (--resume auto), "
              "give another --out, or remove the later ones",
              resume, found.back().path);
  return point;
}

std::vector<std::string> differences(const RunProgress& then, const RunProgress& now) {
  std::vector<std::string> all;
  const auto compare = [&](const char* what, const auto& before, const auto& after,
                           const char* effect) {
    if (before == after) return;
    all.push_back(fmt::format("{} is {} now and was {}: {}", what, after, before, effect));
  };
  const char* rounding = "results go on within rounding, not bit for bit";
  compare("the number of ranks", then.ranks, now.ranks, rounding);
  compare("the number of threads a rank", then.threads, now.threads, rounding);
  compare("--micro-batch", then.micro_batch, now.micro_batch, rounding);
  compare("the precision", then.precision, now.precision, "results go on in that");
  compare("--batch-size", then.batch_size, now.batch_size,
          "the schedule goes on by steps, the epoch by samples");
  compare("--seed", then.seed, now.seed, "the rest of the epoch is drawn anew");
  compare("--dataset", then.dataset, now.dataset, "the epoch goes on at the same position");
  return all;
}

RunCheckpoints::RunCheckpoints(const TrainSettings& settings, Context& context, const Module& model,
                               ShardingEngine& engine, const Optimizer& optimizer)
    : every_(settings.save_every),
      keep_(static_cast<int>(settings.keep)),
      async_(settings.checkpoint_async),
      saver_(context, model, engine, optimizer, settings.checkpoint_async) {}

void RunCheckpoints::open(Communicator& world, const std::string& out, std::string config,
                          const RunProgress& progress,
                          const std::function<void(const Saved&)>& saved) {
  store_ = std::make_unique<CheckpointStore>(world, (fs::path(out) / kFolder).string(), keep_);
  store_->tidy_up(progress.best_step);
  config_ = std::move(config);
  saved_ = saved;
}

std::string RunCheckpoints::last_path() const {
  if (!store_) return {};
  const std::vector<FoundCheckpoint> found = find_checkpoints(store_->directory());
  return found.empty() ? std::string() : found.back().path;
}

void RunCheckpoints::save(const RunProgress& progress, bool best) {
  const auto start = Clock::now();
  if (saver_.pending()) finish();
  under_way_ = {"", progress.step.steps, seconds_since(start), best};
  saver_.save(*store_, progress.step.steps,
              {"sherd " + version(), progress.to_json(), config_, best});
  last_step_ = progress.step.steps;
  under_way_.seconds = seconds_since(start);
  if (!async_) finish();
}

void RunCheckpoints::finish() {
  const auto start = Clock::now();
  under_way_.path = saver_.finish(*store_);
  under_way_.seconds += seconds_since(start);
  saved_(under_way_);
}

void RunCheckpoints::close() {
  if (!store_) return;
  const fs::path folder = store_->directory();
  store_.reset();
  std::error_code ignored;
  if (!find_checkpoints(folder.string()).empty()) return;
  fs::remove(folder / ".lock", ignored);
  fs::remove(folder, ignored);  // refused where it is not empty
}

void RunCheckpoints::abandon() {
  if (saver_.pending()) store_->abandon();
}

}  // namespace sherd
