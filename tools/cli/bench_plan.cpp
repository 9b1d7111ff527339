// SPDX-License-Identifier: Apache-2.0
// `sherd bench plan`: how well does a plan foretell this machine?
#include "command.h"
#include "quantile.h"

#include <sherd/tools/planner/planned_step.h>
#include <sherd/tools/trainer/ranks.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>

namespace sherd::cli {
namespace {

using Clock = std::chrono::steady_clock;

struct PlanBenchOptions {
  std::string system;
  std::int64_t steps = 5;
  bool quick = false, json = false;
};

// Changes of the settings of a step on synthetic images. None of them is a case of calibration.
struct Configuration {
  const char* group;  // whose members' order is compared; "" for none
  Assignments settings;
};

std::vector<Configuration> configurations(bool quick) {
  const int cores = default_threads();
  const std::string all = std::to_string(cores);
  std::vector<Configuration> list;
  const auto add = [&](const char* group, const char* preset, const char* batch, Assignments more) {
    Assignments settings{{"model.preset", preset}, {"run.batch_size", batch}};
    settings.insert(settings.end(), more.begin(), more.end());
    list.push_back({group, std::move(settings)});
  };
  const Assignments one{{"run.threads", all}};
  const auto with = [](Assignments base, const Assignments& more) {
    base.insert(base.end(), more.begin(), more.end());
    return base;
  };
  add("", "vit_tiny_patch16_224", "12", one);
  add("recompute", "vit_small_patch16_224", "6", one);
  add("recompute", "vit_small_patch16_224", "6", with(one, {{"memory.recompute", "selective"}}));
  add("recompute", "vit_small_patch16_224", "6", with(one, {{"memory.recompute", "block"}}));
  add("", "vit_small_patch16_224", "12", with(one, {{"precision.precision", "bf16"}}));
  if (!quick) {
    add("", "vit_base_patch16_224", "6", one);
    add("", "vit_base_patch16_224", "6", with(one, {{"run.micro_batch", "3"}}));
    add("", "vit_base_patch16_224", "6", with(one, {{"precision.precision", "bf16"}}));
  }
  if (cores == 1) return list;
  for (const char* policy : {"none", "zero1", "zero2", "grad_op", "zero3"}) {
    const Assignments ranks{
        {"sharding.ranks", all}, {"run.threads", "1"}, {"sharding.shard", policy}};
    add("policies", "vit_small_patch16_224", "6", ranks);
    if (!quick) add("policies of ViT-B", "vit_base_patch16_224", "4", ranks);
  }
  const Assignments zero3{
      {"sharding.ranks", all}, {"run.threads", "1"}, {"sharding.shard", "zero3"}};
  add("", "vit_tiny_patch16_224", "2", zero3);
  add("", "vit_small_patch16_224", "6", with(zero3, {{"precision.precision", "bf16"}}));
  add("", "vit_small_patch16_224", "6", with(zero3, {{"sharding.prefetch", "0"}}));
  return list;
}

struct Outcome {
  std::string name, group;
  double planned = 0.0, measured = 0.0, fastest = 0.0, slowest = 0.0;
  double error() const { return planned / measured - 1.0; }
};

std::string name_of_configuration(const Assignments& settings) {
  std::string text;
  for (const auto& [key, value] : settings) {
    const auto setting = std::ranges::find(setting_table(), key, &Setting::key);
    text += text.empty() ? value : fmt::format(" {} {}", setting->flag(), value);
  }
  return text;
}

TrainSettings settings_of(const Configuration& configuration) {
  Assignments all{{"data.dataset", "synthetic"}};
  all.insert(all.end(), configuration.settings.begin(), configuration.settings.end());
  return resolve_settings(all, {});
}

void measure(const TrainSettings& settings, const PlanBenchOptions& options, Outcome& outcome) {
  run_on_ranks(settings, [&](Communicator& world) {
    Context context(rank_context_options(settings, world));
    Rehearsal test(settings, context, world);
    std::vector<double> seconds;
    for (std::int64_t i = -2; i < options.steps; ++i) {
      const auto start = Clock::now();
      test.step->run_shape(*test.inputs, settings.batch_size);
      context.compute_stream().synchronize();
      if (i >= 0) seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
    }
    if (world.rank() != 0) return;
    outcome.measured = quantile(seconds, 0.5);
    outcome.fastest = quantile(seconds, 0.0);
    outcome.slowest = quantile(seconds, 1.0);
  });
}

// Of pairs in one group whose measured times are further apart than both spreads.
std::pair<int, int> order_right(const std::vector<Outcome>& outcomes) {
  int right = 0, pairs = 0;
  for (const Outcome& a : outcomes) {
    for (const Outcome& b : outcomes) {
      if (a.group.empty() || a.group != b.group || a.slowest >= b.fastest) continue;
      ++pairs;
      if (a.planned < b.planned) ++right;
    }
  }
  return {right, pairs};
}

int bench_plan(const PlanBenchOptions& options) {
  check_range("--steps", options.steps, 3, 1000);
  SHERD_CHECK(!options.system.empty(),
              "bench plan: needs --system FILE, which `sherd bench calibrate` makes");
  const System system = read_system(options.system);
  SHERD_CHECK(!system.cuda,
              "bench plan: --system {} is of device cuda; measure a GPU by `sherd "
              "bench step` and plan it by `sherd plan`",
              system.name);
  std::vector<Outcome> outcomes;
  if (!options.json) {
    fmt::print("{:>9} {:>9} {:>8} {:>19}  {}\n", "planned", "measured", "error", "of",
               "configuration");
  }
  for (const Configuration& configuration : configurations(options.quick)) {
    const TrainSettings settings = settings_of(configuration);
    const int ranks = planned_ranks(settings);
    Outcome outcome{.name = name_of_configuration(configuration.settings),
                    .group = configuration.group};
    const auto step = record_step(settings, ranks);
    outcome.planned = time_step(*step, settings, system, ranks).seconds;
    measure(settings, options, outcome);
    if (!options.json) {
      fmt::print("{:>7.4f} s {:>7.4f} s {:>+7.1f}% {:>8.4f} to {:.4f} s  {}\n", outcome.planned,
                 outcome.measured, 100.0 * outcome.error(), outcome.fastest, outcome.slowest,
                 outcome.name);
      std::fflush(stdout);
    }
    outcomes.push_back(std::move(outcome));
  }
  double mean = 0.0, worst = 0.0;
  for (const Outcome& outcome : outcomes) {
    mean += std::abs(outcome.error()) / static_cast<double>(outcomes.size());
    worst = std::max(worst, std::abs(outcome.error()));
  }
  const auto [right, pairs] = order_right(outcomes);
  if (options.json) {
    nlohmann::ordered_json rows = nlohmann::ordered_json::array();
    for (const Outcome& o : outcomes) {
      rows.push_back({{"configuration", o.name},
                      {"planned_seconds", o.planned},
                      {"measured_seconds", o.measured},
                      {"fastest_seconds", o.fastest},
                      {"slowest_seconds", o.slowest}});
    }
    const nlohmann::ordered_json line{{"program", "sherd"},    {"system", system.name},
                                      {"mean_error", mean},    {"largest_error", worst},
                                      {"pairs", pairs},        {"pairs_right", right},
                                      {"configurations", rows}};
    fmt::print("{}\n", line.dump());
    return 0;
  }
  fmt::print(
      "\nmean error {:.1f}%, largest {:.1f}%; of {} pairs that differ beyond their spread {} "
      "are in the planned order\n",
      100.0 * mean, 100.0 * worst, pairs, right);
  return 0;
}

}  // namespace

Command add_bench_plan(CLI::App& bench) {
  CLI::App* app = bench.add_subcommand(
      "plan",
      "Plans and runs a list of steps that calibration has not seen, and says how far the plan is "
      "off.\nLet nothing else run meanwhile.\n\n"
      "  sherd bench calibrate && sherd bench plan --system this-machine.json\n");
  auto options = std::make_shared<PlanBenchOptions>();
  app->add_option("--system", options->system, "the file of this machine")->type_name("FILE");
  app->add_option("--steps", options->steps, "of each, of which the median counts [5]")
      ->type_name("INT");
  app->add_flag("--quick", options->quick, "leave ViT-B out")->disable_flag_override();
  app->add_flag("--json", options->json, "print one JSON object")->disable_flag_override();
  return {app, [options] {
            check_one_process("bench plan");
            return bench_plan(*options);
          }};
}

}  // namespace sherd::cli
