// SPDX-License-Identifier: Apache-2.0
// The plan of a step against real runs, and what is done where it does not fit.
#include <doctest/doctest.h>
#include <sherd/tools/trainer/plan.h>
#include <sherd/tools/trainer/ranks.h>
#include <sherd/tools/trainer/train.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "io_support.h"

using namespace sherd;

namespace {

// Activations of about 20 MiB, parameters of 2.
TrainSettings plan_run(const test::TempDirectory& folder, const char* name = "run") {
  TrainSettings s;
  s.dataset = "synthetic";
  s.image_size = "3x32x32";
  s.images = 96;
  s.classes = 4;
  s.patch = 4;
  s.dim = 128;
  s.depth = 3;
  s.heads = 2;
  s.batch_size = 24;
  s.max_steps = 2;
  s.threads = 1;
  s.workers = 0;
  s.out = folder.path(name);
  return s;
}

TrainOutcome run(const TrainSettings& settings) {
  TrainObserver quiet;
  return train(settings, quiet);
}

std::string error_of(const TrainSettings& settings) {
  try {
    run(settings);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

bool contains(const std::string& text, const std::string& piece) {
  return text.find(piece) != std::string::npos;
}

// "--micro-batch 8 --shard zero3", applied as a user would.
TrainSettings with_flags(const TrainSettings& settings, const std::string& flags) {
  TrainSettings changed = settings;
  Assignments given;
  std::istringstream words(flags);
  for (std::string flag, value; words >> flag >> value;) {
    const auto setting = std::ranges::find(setting_table(), flag, &Setting::flag);
    REQUIRE(setting != setting_table().end());
    given.emplace_back(setting->key, value);
    assign(changed, setting->key, value, flag);
  }
  check_used(changed, given);
  return changed;
}

}  // namespace

TEST_CASE("plan: the peaks of a step are those of a run, on one rank and two") {
  const test::TempDirectory folder;
  int count = 0;
  for (const int ranks : {1, 2}) {
    for (const char* flags : {"", "--micro-batch 5", "--shard zero1", "--unit params:20000",
                              "--micro-batch 4 --reduce-every micro --shard zero2"}) {
      CAPTURE(ranks);
      CAPTURE(flags);
      TrainSettings s = with_flags(plan_run(folder), flags);
      s.ranks = ranks;
      s.max_steps = 3;
      s.threads = 0;  // scratch memory of a kernel may depend on the threads that a rank gets
      s.out = folder.path("run" + std::to_string(count++));
      const StepPlan plan = plan_step(s, ranks);
      const TrainOutcome outcome = run(s);
      CHECK(plan.device.peak_bytes == outcome.peak_bytes);
      CHECK(plan.device.at_peak == outcome.at_peak);
      CHECK(plan.device.peaks == outcome.peaks);
      CHECK(plan.parameters == outcome.info.parameters);
      CHECK(plan.host.peak_bytes == 0);
      CHECK(plan.flops > 6 * plan.parameters);
    }
  }
}

TEST_CASE("plan: the copy of a checkpoint that is written beside training is counted") {
  const test::TempDirectory folder;
  for (const int ranks : {1, 2}) {
    TrainSettings s = plan_run(folder, ranks == 1 ? "one" : "two");
    s.ranks = ranks;
    s.save_every = 1;
    s.checkpoint_async = true;
    const MemoryPlan planned = plan_step(s, ranks).host;
    const TrainOutcome outcome = run(s);
    CHECK(outcome.host_peak_bytes == planned.peak_bytes);
    CHECK(outcome.host_at_peak == planned.at_peak);
    const auto copied = planned.peaks[static_cast<std::size_t>(MemoryCategory::checkpoint)];
    CHECK(copied >= 3 * 4 * outcome.info.parameters / ranks);  // weights and two moments
    s.checkpoint_async = false;
    CHECK(plan_step(s, ranks).host.peak_bytes == 0);
  }
}

TEST_CASE("plan: what is said to fit runs under that limit, and no change does without one") {
  const test::TempDirectory folder;
  int count = 0;
  for (const int ranks : {1, 2}) {
    TrainSettings s = plan_run(folder);
    s.ranks = ranks;
    if (ranks == 2) s.shard = "none";
    const StepPlan base = plan_step(s, ranks);
    for (const double part : {0.9, 0.6, 0.45}) {
      const auto limit =
          static_cast<std::size_t>(static_cast<double>(base.device.peak_bytes) * part);
      const std::vector<PlanOption> options = options_that_fit(s, ranks, limit);
      CAPTURE(ranks);
      CAPTURE(part);
      CHECK(!options.empty());
      CHECK(options.size() <= 4);
      for (const PlanOption& option : options) {
        CAPTURE(option.change);
        CHECK(fits(option.plan.device.peak_bytes, limit));
        TrainSettings changed = with_flags(s, option.change);
        CHECK(plan_step(changed, ranks).device.peak_bytes == option.plan.device.peak_bytes);
        changed.memory_limit = std::to_string(limit);
        changed.out = folder.path("fits" + std::to_string(count++));
        const TrainOutcome outcome = run(changed);
        CHECK(outcome.peak_reserved_bytes <= static_cast<std::int64_t>(limit));
      }
    }
  }
  CHECK(options_that_fit(plan_run(folder), 1, 1 << 20).empty());
}

TEST_CASE("plan: a step runs under its planned peak and the slack of fits()") {
  const test::TempDirectory folder;
  int count = 0;
  // The last one's evaluation would hold more than its steps, all of the batch at once.
  for (const char* flags : {"", "--ranks 2", "--ranks 2 --shard zero1", "--ranks 2 --micro-batch 3",
                            "--ranks 2 --unit params:1000 --prefetch 3", "--ranks 3 --dim 32",
                            "--images 384 --batch-size 384 --micro-batch 1"}) {
    CAPTURE(flags);
    TrainSettings s = with_flags(plan_run(folder), flags);
    s.out = folder.path("run" + std::to_string(count++));
    const std::int64_t peak = plan_step(s, static_cast<int>(s.ranks)).device.peak_bytes;
    std::size_t limit = static_cast<std::size_t>(peak);
    while (!fits(peak, limit)) limit += 4096;
    s.memory_limit = std::to_string(limit);
    CHECK(error_of(s) == "");
    CHECK(std::filesystem::exists(s.out + "/model.safetensors"));
  }
}

TEST_CASE("plan: pairs of changes, where one is not enough") {
  const test::TempDirectory folder;
  TrainSettings s = plan_run(folder);
  s.ranks = 2;
  s.shard = "none";
  s.dim = 256;
  const auto peak_of = [&](const char* flags) {
    return plan_step(with_flags(s, flags), 2).device.peak_bytes;
  };
  constexpr std::int64_t kLimit = 28'500'000;
  for (const char* one : {"--shard zero2", "--shard zero3", "--micro-batch 1"})
    REQUIRE(peak_of(one) > kLimit);
  REQUIRE(fits(peak_of("--shard zero3 --micro-batch 1"), kLimit));
  const auto options = options_that_fit(s, 2, kLimit);
  REQUIRE(!options.empty());
  for (const PlanOption& option : options) CHECK(std::ranges::count(option.change, ' ') == 3);
}

TEST_CASE("plan: a run that cannot fit is refused, with what would fit, before a file is made") {
  const test::TempDirectory folder;
  for (const int ranks : {1, 2}) {
    TrainSettings s = plan_run(folder);
    s.ranks = ranks;
    s.memory_limit = "10MiB";
    const std::string error = error_of(s);
    CAPTURE(error);
    CHECK(
        error.starts_with("out of memory before the start: --memory-limit is 10.0 MiB, and the "
                          "peak of a step is planned to be "));
    CHECK(contains(error, format_breakdown(plan_step(s, ranks).device.at_peak)));
    CHECK(contains(error, "most of it activations. What would fit, with the peak of each: "));
    CHECK(contains(error, "--micro-batch "));
    CHECK(contains(error, " on each rank") == (ranks == 2));
    s.memory_limit = "100KiB";
    CHECK(contains(error_of(s), "offloading that was tried would fit: lower --batch-size"));
  }
  CHECK(std::filesystem::is_empty(folder.path()));
  // The batch is no larger than the data.
  TrainSettings s = plan_run(folder);
  s.batch_size = 1'000'000;
  s.images = 4;
  s.memory_limit = "30MiB";
  CHECK(run(s).steps == 2);
}

TEST_CASE("plan: where an allocator refuses after all, one message says what would fit") {
  const test::TempDirectory folder;
  for (const int ranks : {1, 2}) {
    TrainSettings s = plan_run(folder);
    s.ranks = ranks;
    s.batch_size = 23;  // rank 0 has the most, and fails alone
    // No room for the parts of pages between pieces.
    s.memory_limit = std::to_string(plan_step(s, ranks).device.peak_bytes);
    const std::string error = error_of(s);
    CAPTURE(error);
    // Rank 1 may say where it was when it heard.
    CHECK(contains(error, ranks == 1
                              ? "backward of bias_activation: out of memory: 24.0 KiB more "
                              : "rank 0: backward of linear: out of memory: 780.0 KiB more "));
    CHECK(contains(error, "would exceed the limit of "));
    CHECK(contains(error, "in use: parameters "));
    CHECK(contains(error, "lower the batch size. What would fit, with the peak of each: "));
    CHECK(error.find("out of memory") == error.rfind("out of memory"));
  }
  CHECK(!std::filesystem::exists(folder.path("run/config.toml")));
}

TEST_CASE("plan: --recompute auto is the least that fits, and the run has the weights of any") {
  const test::TempDirectory folder;
  const TrainSettings base = plan_run(folder);
  const char* modes[] = {"none", "selective", "block"};
  std::vector<std::int64_t> peaks;
  for (const char* mode : modes) {
    TrainSettings s = base;
    s.recompute = mode;
    peaks.push_back(plan_step(s, 1).device.peak_bytes);
  }
  REQUIRE(peaks[0] > peaks[1]);
  REQUIRE(peaks[1] > peaks[2]);
  std::vector<std::string> weights;
  for (std::size_t i = 0; i < 3; ++i) {
    CAPTURE(modes[i]);
    TrainSettings s = base;
    s.recompute = "auto";
    s.memory_limit = std::to_string(peaks[i] + peaks[i] / 50 + (std::int64_t{2} << 20));
    CHECK(chosen_recompute(s, 1) == modes[i]);
    s.out = folder.path(modes[i]);
    std::ifstream file(run(s).weights_path, std::ios::binary);
    weights.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    CHECK(!weights.back().empty());
    CHECK(weights.back() == weights.front());
    // The configuration says what was chosen.
    const TrainSettings again = resolve_settings(read_toml_settings(s.out + "/config.toml"), {});
    CHECK(again.recompute == modes[i]);
  }
  TrainSettings s = base;
  s.recompute = "auto";
  CHECK(error_of(s) == "--recompute auto: chooses by --memory-limit; give one");
  s.recompute = "all";
  CHECK(error_of(s) == "--recompute: expected none, selective, block or auto, got 'all'");
}

TEST_CASE("plan: offloaded activations are counted on the host, and change no weight") {
  const test::TempDirectory folder;
  const TrainSettings base = plan_run(folder);
  const std::int64_t input = 24 * 65 * 128 * 4;  // batch, tokens, features, f32
  const auto weights_of = [&](const std::string& flags, const char* name) {
    TrainSettings s = with_flags(base, flags);
    s.out = folder.path(name);
    std::ifstream file(run(s).weights_path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  const StepPlan kept = plan_step(with_flags(base, "--recompute block"), 1);
  const std::string offload = "--recompute block --offload-activations cpu";
  const StepPlan away = plan_step(with_flags(base, offload), 1);
  CHECK(kept.host.peak_bytes == 0);
  CHECK(away.host.peak_bytes == base.depth * input);
  CHECK(away.device.peak_bytes < kept.device.peak_bytes);
  const std::string expected = weights_of("", "plain");
  CHECK(!expected.empty());
  CHECK(weights_of(offload, "offloaded") == expected);
  CHECK(weights_of(offload + " --ranks 1 --micro-batch 12 --recompute selective", "micro") ==
        weights_of("--micro-batch 12", "plain-micro"));

  TrainSettings s = with_flags(base, "--recompute auto --offload-activations cpu");
  s.memory_limit = "1GiB";
  CHECK(chosen_recompute(s, 1) == "selective");
  s.recompute = "none";
  CHECK(error_of(s) ==
        "--offload-activations cpu: moves the inputs of what runs again in backward, and "
        "--recompute is none; add --recompute block (or selective, or auto)");
  s.offload_activations = "disk";
  CHECK(error_of(s) == "--offload-activations: expected none or cpu, got 'disk'");
}
