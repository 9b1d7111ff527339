// SPDX-License-Identifier: Apache-2.0
#include "command.h"
#include "stop_signal.h"

#include <sherd/runtime/ledger.h>
#include <sherd/tools/planner/choose.h>
#include <sherd/tools/trainer/golden.h>
#include <sherd/tools/trainer/ranks.h>
#include <sherd/tools/trainer/train.h>

#include <cmath>
#include <csignal>
#include <filesystem>

namespace sherd::cli {
namespace {

// "16,412", "7.3"
std::string speed(double images_per_second) {
  return images_per_second < 100.0 ? fmt::format("{:.1f}", images_per_second)
                                   : group_digits(static_cast<std::int64_t>(images_per_second));
}

class Reporter final : public TrainObserver {
 public:
  void on_start(const RunInfo& info) override {
    info_ = info;
    fmt::print("{} parameters; {} training and {} test images; {} epochs of {} steps\n",
               group_digits(info.parameters), group_digits(info.train_images),
               group_digits(info.test_images), info.epochs, info.steps_per_epoch);
    fmt::print("{}; {} thread{} a rank; {}\n", info.sharding, info.threads,
               info.threads == 1 ? "" : "s", info.precision);
    for (const std::string& note : info.weights_notes) fmt::print("--weights: {}\n", note);
    if (!info.resumed_from.empty()) {
      fmt::print("goes on from {} after {} steps\n", info.resumed_from,
                 group_digits(info.resumed_steps));
    }
    fmt::print("epoch   train loss   test loss   top-1     images/s   seconds\n");
    std::fflush(stdout);
  }

  void on_step(const StepInfo& now) override {
    if (images_per_second_ == 0.0 || now.result.step % 16 == 0) {
      images_per_second_ = now.images_per_second;
    }
    const auto done = static_cast<double>(now.step_in_epoch + 1);
    const std::string scale = info_.scales_loss ? fmt::format("  scale {} ({} skipped)",
                                                              now.result.loss_scale, now.skipped)
                                                : "";
    line_.show(
        fmt::format("{:>5}   {} step {}/{}  loss {:.4f}  lr {:.2e}  norm {:.2f}{}  {:.0f} images/s",
                    now.epoch + 1, bar(done / static_cast<double>(info_.steps_per_epoch), 20),
                    now.step_in_epoch + 1, info_.steps_per_epoch, now.result.loss, now.result.lr,
                    now.result.grad_norm, scale, images_per_second_));
  }

  void on_evaluate(std::int64_t done, std::int64_t of) override {
    line_.show(fmt::format("        {} evaluating {}/{}",
                           bar(static_cast<double>(done) / static_cast<double>(of), 20), done, of));
  }

  void on_epoch(const EpochInfo& e) override {
    line_.clear();
    const std::string train_loss =  // none where every step was skipped
        std::isnan(e.train_loss) ? "-" : fmt::format("{:.4f}", e.train_loss);
    const std::string test_loss = e.evaluated ? fmt::format("{:.4f}", e.test.loss) : "-";
    const std::string top_1 = e.evaluated ? fmt::format("{:.2f}%", 100.0 * e.test.accuracy()) : "-";
    fmt::print("{:>5}   {:>10}   {:>9}   {:>6}   {:>8}   {:>7.1f}\n", e.epoch + 1, train_loss,
               test_loss, top_1, speed(e.images_per_second), e.seconds);
    std::fflush(stdout);
  }

  void on_warning(const std::string& message) override {
    line_.clear();
    fmt::print(stderr, "sherd: warning: {}\n", message);
  }

  bool should_stop() override { return stop_requested(); }

 private:
  RunInfo info_;
  ProgressLine line_;
  double images_per_second_ = 0.0;
};

int run_training(const TrainSettings& settings) {
  watch_stop_signals();
  std::signal(SIGPIPE, SIG_IGN);  // a reader that went away is no reason to lose the weights
  Reporter reporter;
  const TrainOutcome outcome = train(settings, reporter);
  if (!is_first_process()) return 0;
  if (outcome.stopped) {
    fmt::print("\nstopped by a signal after {} steps; the weights so far are saved\n",
               outcome.steps);
  }
  if (outcome.test.samples > 0) {
    fmt::print("\ntest accuracy   {:.2f}% of {} images (loss {:.4f})\n",
               100.0 * outcome.test.accuracy(), group_digits(outcome.test.samples),
               outcome.test.loss);
  }
  if (outcome.info.scales_loss) {
    fmt::print("loss scale      {} at the end; {} of {} steps overflowed and were skipped\n",
               outcome.loss_scale, outcome.skipped, outcome.steps);
  }
  const bool trained = outcome.train_seconds > 0.0;
  if (trained) {
    fmt::print("speed           {} images/s in training\n", speed(outcome.images_per_second));
  }
  if (trained && outcome.info.ranks > 1) {
    fmt::print("communication   rank 0 waited for other ranks in {:.1f}% of the training time\n",
               100.0 * outcome.exposed_seconds / outcome.train_seconds);
  }
  fmt::print("peak memory     {}{} ({})\n", format_bytes(outcome.peak_bytes),
             outcome.info.ranks > 1 ? " of rank 0" : "", format_breakdown(outcome.at_peak));
  fmt::print("                {} reserved by the allocator, {} held by the process\n",
             format_bytes(outcome.peak_reserved_bytes), format_bytes(peak_resident_bytes()));
  if (outcome.host_peak_bytes > 0) {
    fmt::print("host memory     {} at most in the host's memory ({})\n",
               format_bytes(outcome.host_peak_bytes), format_breakdown(outcome.host_at_peak));
  }
  if (!outcome.checkpoint_path.empty()) {
    fmt::print("checkpoint      {}\n", outcome.checkpoint_path);
  }
  fmt::print("weights         {}\nlog             {}\nconfiguration   {}\n", outcome.weights_path,
             outcome.log_path, outcome.config_path);
  return outcome.stopped ? 130 : 0;
}

// A run that goes on takes the settings of its checkpoint, or of its folder where it had none yet,
// but for the number of ranks where a launcher gives that.
TrainSettings resolve_resumed(const SettingFlags& flags) {
  const std::optional<ResumePoint> point =
      find_resume_point(flags.value("checkpoint.resume"), flags.value("run.out"));
  if (!point) return flags.resolve(std::nullopt);
  const bool starts = point->checkpoint.empty();
  const std::filesystem::path folder = starts ? point->out : point->checkpoint;
  const std::string config = (folder / "config.toml").string();
  const bool there = std::filesystem::exists(config);
  if (starts && !there) return flags.resolve(std::nullopt);
  SHERD_CHECK(
      there,
      "--resume {}: '{}' has weights but no run to go on from (no config.toml); start a new "
      "run from them by --weights {}",
      flags.value("checkpoint.resume"), point->checkpoint, point->checkpoint);
  if (!starts) CheckpointReader(point->checkpoint).config();  // throws where it is damaged
  Assignments file = read_toml_settings(config);
  if (under_launcher()) {
    std::erase_if(file, [](const auto& setting) { return setting.first == "sharding.ranks"; });
  }
  return flags.resolve_over(file);
}

int run_golden_command(const GoldenOptions& options) {
  if (is_first_process()) {
    fmt::print("golden run {} in {}\n", options.directory, name_of(options.dtype));
    fmt::print("step   {:<22}{:<22}{:<22}{:<22}error\n", "loss", "given", "norm", "given");
  }
  const GoldenResult result = run_golden(options, [&](const GoldenStep& s) {
    fmt::print("{:>4}   {:<20.16g}  {:<20.16g}  {:<20.16g}  {:<20.16g}  {:.1e}\n", s.step, s.loss,
               s.given_loss, s.grad_norm, s.given_grad_norm, s.error);
    std::fflush(stdout);
  });
  if (!is_first_process()) return 0;
  fmt::print(
      "\nlosses, norms and rates: largest relative error {:.2e}, {} {:g}\n", result.worst_error,
      result.worst_error <= result.tolerance ? "within the tolerance of" : "past the tolerance of",
      result.tolerance);
  if (result.weights_compared) {
    fmt::print("final weights: largest difference {:.2e} at {}{}\n", result.worst_weight_error,
               result.worst_weight,
               result.weight_tolerance < 0.0
                   ? " (not checked in fp32; --weight-tolerance checks it)"
                   : fmt::format(", tolerance {:g}", result.weight_tolerance));
  }
  fmt::print("{}\n", result.passed ? "passed" : "FAILED");
  return result.passed ? 0 : 1;
}

// --auto: with what is not given chosen by a plan.
TrainSettings chosen_settings(const TrainSettings& settings, const std::vector<std::string>& fixed,
                              const std::string& system_name) {
  SHERD_CHECK(!system_name.empty(),
              "--auto: chooses by the time of a step; give a --system, a name of tools/systems or "
              "the file that `sherd bench calibrate` makes");
  const System system = read_system(system_name);
  SHERD_CHECK(system.cuda == (settings.device == "cuda"),
              "--system {} is of device {}, this run of --device {}; change one of them",
              system.name, system.cuda ? "cuda" : "cpu", settings.device);
  const Choices choices = choose(settings, fixed, system, planned_ranks(settings));
  if (is_first_process()) {
    fmt::print("{}the first of {} combinations is taken\n\n", choices_text(choices, 5),
               choices.tried);
  }
  return choices.ranked.front().settings;
}

}  // namespace

Command add_train(CLI::App& parent) {
  CLI::App* app = parent.add_subcommand(
      "train",
      "Trains a Vision Transformer and writes OUT/model.safetensors (timm's keys), OUT/log.jsonl "
      "and\n"
      "OUT/config.toml. Settings: defaults, then --preset, then the TOML file, then flags.\n\n"
      "  sherd train --epochs 3 --out runs/try\n"
      "  sherd train runs/try/config.toml --seed 1 --out runs/again\n"
      "  sherd train --save-every 500 --out runs/long\n"
      "  sherd train --resume auto --out runs/long       goes on with it, by its settings\n"
      "  sherd train --ranks 4 --shard zero3             four ranks as threads of one process\n"
      "  mpiexec -n 4 sherd train --shard zero3          four processes\n"
      "  SHERD_RENDEZVOUS=10.0.0.1:29400 SHERD_TOKEN=s3cret SHERD_WORLD_SIZE=2 SHERD_RANK=0 \\\n"
      "      sherd train --shard zero3                   one of two that meet over TCP, without "
      "MPI\n"
      "  sherd train --golden DIR --precision fp64 --tolerance 1e-9\n");
  struct State {
    std::string toml, golden, system;
    bool choose = false;
    double tolerance = 0.0, weight_tolerance = -1.0;
  };
  auto state = std::make_shared<State>();
  CLI::Option* toml =
      app->add_option(
             "file", state->toml,
             "TOML file of settings: the sections below, names with _ for -, texts in quotes")
          ->type_name("FILE");
  SettingFlags flags(app, {"model", "data", "optimizer", "schedule", "sharding", "precision",
                           "memory", "run", "checkpoint"});
  const std::string planning = "planning";
  CLI::Option* choose_flag =
      app->add_flag("--auto", state->choose,
                    "choose policy, mesh, unit, prefetch, recomputation, micro-batch and "
                    "offloading: the fastest by a plan of what fits; what is given stays")
          ->group(planning)
          ->disable_flag_override();
  app->add_option("--system", state->system,
                  "for --auto, what it runs on: a name of tools/systems, or a file of that form")
      ->type_name("NAME|FILE")
      ->group(planning)
      ->needs(choose_flag);
  const std::string group = "golden runs";
  CLI::Option* golden =
      app->add_option(
             "--golden", state->golden,
             "repeat the run described in DIR/golden.json and compare every loss and norm; "
             "uses --precision, --data-dir, --threads and the flags of [sharding], ignores no "
             "field "
             "of golden.json")
          ->type_name("DIR")
          ->group(group);
  app->add_option("--tolerance", state->tolerance,
                  "largest relative error of a golden run [1e-09 in fp64, 1e-04 in fp32]")
      ->type_name("NUMBER")
      ->group(group)
      ->needs(golden);
  app->add_option("--weight-tolerance", state->weight_tolerance,
                  "largest difference of a final weight [1e-08 in fp64, not checked in fp32]")
      ->type_name("NUMBER")
      ->group(group)
      ->needs(golden);
  return {app, [app, state, flags, toml, golden] {
            check_tolerance("--tolerance", *app, state->tolerance);
            check_tolerance("--weight-tolerance", *app, state->weight_tolerance, true);
            const TrainSettings settings =
                toml->count() > 0 ? flags.resolve(state->toml) : resolve_resumed(flags);
            if (state->choose) {
              SHERD_CHECK(golden->count() == 0 && !flags.gives("checkpoint.resume"),
                          "--auto: a golden run and one that goes on have their settings already");
              std::vector<std::string> fixed = flags.given();
              if (toml->count() > 0) {
                for (const auto& [key, value] : read_toml_settings(state->toml))
                  fixed.push_back(key);
              }
              return run_training(chosen_settings(settings, fixed, state->system));
            }
            if (golden->count() == 0) return run_training(settings);
            std::vector<std::string> used{"precision.precision", "data.data_dir", "run.threads"};
            for (const Setting& setting : setting_table()) {
              if (setting.section() == "sharding") used.push_back(setting.key);
            }
            const std::string given = flags.other_than(used);
            SHERD_CHECK(given.empty() && toml->count() == 0,
                        "--golden: {} cannot be combined with it; golden.json has every setting",
                        given.empty() ? state->toml : given);
            GoldenOptions options;
            options.directory = state->golden;
            options.data_dir = settings.data_dir;
            options.dtype = training_precision(settings).parameters;
            options.tolerance = state->tolerance;
            options.weight_tolerance = state->weight_tolerance;
            options.ranks = settings;
            return run_golden_command(options);
          }};
}

}  // namespace sherd::cli
