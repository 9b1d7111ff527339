// SPDX-License-Identifier: Apache-2.0
// `sherd plan`: what a step will hold, send and take, before it is run.
#include "command.h"
#include "memory_timeline.h"

#include <sherd/runtime/io/file.h>
#include <sherd/runtime/io/trace_file.h>
#include <sherd/tools/planner/choose.h>
#include <sherd/tools/planner/compare.h>
#include <sherd/tools/planner/explain.h>
#include <sherd/tools/planner/model_states.h>
#include <sherd/tools/planner/published_plan.h>
#include <sherd/tools/planner/step_report.h>
#include <sherd/tools/trainer/ranks.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

namespace sherd::cli {
namespace {

struct PlanOptions {
  std::string system, trace, timeline, compare, convention;
  std::int64_t rank = 0;
  double parameters = 0.0, largest_layer = 0.0;
  bool json = false, choose = false, explain = false, published = false;
};

using Clock = std::chrono::steady_clock;

// What would be without effect beside something else.
void check_modes(const CLI::App& app) {
  static const std::map<std::string, std::vector<std::string>> excluded{
      {"--published",
       {"--system", "--rank", "--trace", "--timeline", "--compare", "--auto", "--explain",
        "--convention", "--parameters", "--largest-layer", "--json", "--world"}},
      {"--convention",
       {"--system", "--rank", "--trace", "--timeline", "--compare", "--auto", "--explain",
        "--json"}},
      {"--compare", {"--trace", "--timeline", "--explain"}},
      {"--explain", {"--json"}}};
  for (const auto& [mode, others] : excluded) {
    if (app.count(mode) == 0) continue;
    for (const std::string& other : others) {
      SHERD_CHECK(app.count(other) == 0, "{}: {} would have no effect beside it; leave one out",
                  mode, other);
    }
  }
  for (const auto& [part, whole] :
       {std::pair{"--parameters", "--convention"}, std::pair{"--largest-layer", "--parameters"}}) {
    SHERD_CHECK(app.count(part) == 0 || app.count(whole) > 0, "{}: needs {}", part, whole);
  }
}

// Of a model of so many parameters, or of the one of the settings.
int plan_states(const TrainSettings& settings, const PlanOptions& options, int ranks) {
  const StateConvention convention =
      state_convention(options.convention, training_precision(settings));
  std::vector<std::int64_t> units;
  if (options.parameters != 0.0) {
    SHERD_CHECK(
        options.parameters >= 1.0 && options.parameters <= 1e15 &&
            (options.largest_layer == 0.0 || (options.largest_layer >= options.parameters / 1e6 &&
                                              options.largest_layer <= options.parameters)),
        "--parameters: expected 1 to 1e15, of which --largest-layer is a part and at least a "
        "millionth; got {} and "
        "{}",
        options.parameters, options.largest_layer);
    // As many layers as large as the largest as there can be, and the rest.
    auto rest = static_cast<std::int64_t>(options.parameters);
    const auto largest =
        options.largest_layer > 0.0 ? static_cast<std::int64_t>(options.largest_layer) : rest;
    for (; rest > 0; rest -= units.back()) units.push_back(std::min(rest, largest));
  } else {
    const auto step = record_step(settings, ranks);
    for (const PlannedUnit& unit : step->units) units.push_back(unit.parameters);
  }
  fmt::print("{}", model_states_text(convention, units, ranks));
  return 0;
}

// The plan beside the steps of a run. 1 where they are not alike.
int compare_with_run(const RecordedStep& step, const Simulation& simulation,
                     const PlanOptions& options) {
  std::string text;
  planned_trace(step, simulation)->write_json([&](std::string_view piece) { text += piece; });
  const Comparison comparison =
      compare(read_trace_text(text, "the plan"), read_trace(options.compare));
  if (options.json) {
    fmt::print("{}\n", to_json(comparison).dump());
  } else {
    fmt::print("{}", to_text(comparison));
  }
  return comparison.same() ? 0 : 1;
}

int plan(TrainSettings settings, const PlanOptions& options,
         const std::vector<std::string>& fixed) {
  check_range("--ranks", settings.ranks, 1, 1 << 20);
  const int ranks = static_cast<int>(settings.ranks);
  if (!options.convention.empty()) return plan_states(settings, options, ranks);
  check_range("--rank", options.rank, 0, ranks - 1);
  std::optional<System> system;
  if (!options.system.empty()) {
    system = read_system(options.system);
    const std::string device = system->cuda ? "cuda" : "cpu";
    const bool given = std::ranges::find(fixed, "run.device") != fixed.end();
    SHERD_CHECK(!given || settings.device == device,
                "--system {}: is of device {}, and --device says {}; leave --device out",
                system->name, device, settings.device);
    settings.device = device;
  }
  SHERD_CHECK(system || !options.choose, "--auto: chooses by the time of a step; give a --system");
  for (const auto& [flag, file] :
       {std::pair{"--trace", &options.trace}, std::pair{"--compare", &options.compare}}) {
    SHERD_CHECK(system || file->empty(), "{}: needs the times of a step; give a --system", flag);
  }
  if (!options.choose) check_step(settings, ranks);
  std::optional<ClaimedFile> timeline, trace;
  if (!options.timeline.empty()) timeline.emplace(options.timeline);
  if (!options.trace.empty()) trace.emplace(options.trace);
  const auto start = Clock::now();
  nlohmann::ordered_json choices_as_json;
  if (options.choose) {
    const Choices choices = choose(settings, fixed, *system, ranks);
    if (options.json) {
      choices_as_json = choices_json(choices);
    } else {
      fmt::print("{}", choices_text(choices, 10));
      fmt::print("{} combinations planned in {:.1f} s; what follows is the first\n\n",
                 choices.tried, std::chrono::duration<double>(Clock::now() - start).count());
    }
    settings = choices.ranked.front().settings;
  }
  settings.recompute = chosen_recompute(settings, ranks);
  const auto step = record_step(settings, ranks, static_cast<int>(options.rank));
  std::optional<StepTimes> times;
  if (system) times = time_step(*step, settings, *system, ranks);
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  if (!options.compare.empty()) {
    return compare_with_run(*step, times->simulation, options);
  }
  const System* const on = system ? &*system : nullptr;
  const StepTimes* const timed = times ? &*times : nullptr;
  if (options.json) {
    nlohmann::ordered_json json = plan_json(*step, settings, ranks, on, timed);
    json["planned_in_seconds"] = seconds;
    if (options.choose) json["choices"] = std::move(choices_as_json);
    fmt::print("{}\n", json.dump());
  } else if (options.explain) {
    fmt::print("{}", explain(*step, settings, ranks, on, timed));
  } else {
    fmt::print("{}", plan_text(*step, settings, ranks, on, timed));
    fmt::print("\nplanned in {:.3f} s with {} of memory; nothing was allocated or computed\n",
               seconds, format_bytes(peak_resident_bytes()));
  }
  if (!options.timeline.empty()) {
    const Simulation untimed =
        times ? Simulation()
              : simulate(step->schedule, {.seconds = [](const Work&) { return 1.0; }});
    AtomicFile file(options.timeline);
    file.write(memory_timeline(*step, times ? times->simulation : untimed, times.has_value(),
                               memory_limit_of(settings, on, ranks)));
    file.commit();
    if (!options.json) fmt::print("timeline        {}\n", options.timeline);
  }
  if (options.trace.empty()) return 0;
  write_trace(*planned_trace(*step, times->simulation), options.trace);
  if (!options.json) fmt::print("trace           {}\n", options.trace);
  return 0;
}

}  // namespace

Command add_plan(CLI::App& parent) {
  CLI::App* app = parent.add_subcommand(
      "plan",
      "What a rank will hold to the byte, what will travel and how long a step will take, before "
      "it "
      "is run:\nthe unchanged training step on paper, of any model and any number of ranks.\n\n"
      "  sherd plan --preset vit_huge_patch14_224 --world 64 --batch-size 1024 --shard zero3 "
      "--precision bf16\n"
      "  sherd plan --preset vit_huge_patch14_224 --world 64 --batch-size 1024 --system dgx-h100\n"
      "  sherd plan --preset vit_base_patch16_224 --system this-machine.json     after `sherd "
      "bench "
      "calibrate`\n\n"
      "Images are synthetic unless --dataset says otherwise. --batch-size is that of all ranks.\n");
  auto options = std::make_shared<PlanOptions>();
  const std::string group = "plan";
  app->add_option("--system", options->system,
                  "where it runs, for times: a name of tools/systems, or a file of that form")
      ->type_name("NAME|FILE")
      ->group(group);
  app->add_option("--rank", options->rank, "whose plan [0]")->type_name("INT")->group(group);
  app->add_option("--trace", options->trace,
                  "write the step as a Chrome trace, as `train --trace` would; needs --system")
      ->type_name("FILE")
      ->group(group);
  app->add_flag(
         "--auto", options->choose,
         "search policy, mesh, unit, prefetch, recomputation, micro-batch and offloading for "
         "the fastest step that fits --memory-limit or the system's memory; what is given as "
         "a flag stays. Needs --system")
      ->group(group)
      ->disable_flag_override();
  app->add_flag("--explain", options->explain,
                "a page that walks through this very step, for people who study sharding")
      ->group(group)
      ->disable_flag_override();
  app->add_flag("--published", options->published,
                "what the simulator says of published measurements, beside them")
      ->group(group)
      ->disable_flag_override();
  app->add_option("--convention", options->convention,
                  "only the model's states under every policy, as counted by sherd, zero-paper or "
                  "deepspeed")
      ->type_name("NAME")
      ->group(group);
  app->add_option("--parameters", options->parameters,
                  "with --convention: of a model of which only that is known, such as 7.5e9")
      ->type_name("NUMBER")
      ->group(group);
  app->add_option("--largest-layer", options->largest_layer,
                  "and how many of these its largest has")
      ->type_name("NUMBER")
      ->group(group);
  app->add_option("--timeline", options->timeline,
                  "write a picture of the memory over the step, SVG; with --system over its time")
      ->type_name("FILE")
      ->group(group);
  app->add_option("--compare", options->compare,
                  "put the plan beside this trace of a run, event for event, and say where they "
                  "differ; needs --system")
      ->type_name("FILE")
      ->group(group);
  app->add_flag("--json", options->json, "print one JSON object, with every event and unit")
      ->group(group)
      ->disable_flag_override();
  auto world = std::make_shared<std::int64_t>(0);
  app->add_option("--world", *world, "the same as --ranks")->type_name("INT")->group(group);
  SettingFlags flags(app, {"model", "optimizer", "sharding", "data.dataset", "data.data_dir",
                           "data.image_size", "data.classes", "run.batch_size", "run.micro_batch",
                           "run.device", "run.threads", "precision", "memory"});
  return {app, [app, options, world, flags] {
            check_one_process("plan");
            check_modes(*app);
            const std::vector<std::string> given = flags.given();
            if (options->published) {
              SHERD_CHECK(given.empty(), "--published: has settings of its own; leave yours out");
              fmt::print("{}", to_text(plan_published_cases()));
              return 0;
            }
            Assignments before;
            if (!flags.gives("data.dataset")) {
              before.emplace_back("data.dataset", "synthetic");
              // The default model's.
              if (!flags.gives("model.preset") && !flags.gives("data.image_size"))
                before.emplace_back("data.image_size", "1x28x28");
            }
            TrainSettings settings = flags.resolve_over(before);
            if (app->count("--world") > 0) {
              SHERD_CHECK(!flags.gives("sharding.ranks"),
                          "--world and --ranks are the same; give one of them");
              check_range("--world", *world, 1, 1 << 20);
              settings.ranks = *world;
            }
            flags.refuse("model.weights", "as a plan is the same for any weights");
            if (options->parameters != 0.0) {
              const bool model = std::ranges::any_of(
                  given, [](const std::string& key) { return key.starts_with("model."); });
              SHERD_CHECK(!model,
                          "--parameters: is all that is known of the model; leave flags of "
                          "[model] out");
            }
            return plan(settings, *options, given);
          }};
}

}  // namespace sherd::cli
