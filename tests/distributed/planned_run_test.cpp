// SPDX-License-Identifier: Apache-2.0
// A plan against the run it is of: every byte at every moment, and every event in its order.
//
// SHERD_FULL_PRODUCT=1 in the environment: all combinations, not a part in which every pair occurs.
#include <doctest/doctest.h>
#include <sherd/comm/rank_threads.h>
#include <sherd/tools/planner/planned_step.h>
#include <sherd/tools/trainer/ranks.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

using namespace sherd;

namespace {

TrainSettings small_run() {
  TrainSettings s;
  s.dataset = "synthetic";
  s.image_size = "3x8x8";
  s.classes = 4;
  s.patch = 4;
  s.dim = 16;
  s.depth = 3;
  s.heads = 2;
  s.drop_path = 0.1;
  s.threads = 1;
  return s;
}

// What is recorded, by track, each in its order; of the host's own with every change of memory.
using Events = std::map<std::string, std::vector<std::string>>;

Events events_of(const Trace& trace) {
  std::string text;
  trace.write_json([&](std::string_view piece) { text += piece; });
  std::map<int, std::string> tracks;
  Events events;
  const nlohmann::json parsed = nlohmann::json::parse(text);
  for (const auto& event : parsed["traceEvents"]) {
    const std::string kind = event["ph"], name = event["name"];
    if (kind == "M" && name == "thread_name") tracks[event["tid"]] = event["args"]["name"];
    if (kind == "X")
      events[tracks.at(event["tid"])].push_back(name + ", " + std::string(event["cat"]));
    if (kind == "C")
      events["main"].push_back(fmt::format("{} = {:.0f}", name, double(event["args"]["value"])));
  }
  return events;
}

struct Seen {
  std::int64_t peak = 0, host_peak = 0;
  Events events;
};

Seen run_step(const TrainSettings& settings, Communicator& world) {
  Context context(rank_context_options(settings, world));
  Rehearsal test(settings, context, world);
  test.step->run_shape(*test.inputs, settings.batch_size);
  context.start_trace();
  test.step->run_shape(*test.inputs, settings.batch_size);
  test.engine.groups().synchronize();
  context.trace().enable(false);
  return {context.ledger().peak_total(), context.host_ledger().peak_total(),
          events_of(context.trace())};
}

// The same on paper.
Seen plan_rank(const TrainSettings& settings, int ranks, int rank) {
  const auto step = record_step(settings, ranks, rank);
  const SimulationRules rules{.seconds = [](const Work&) { return 1e-3; }};
  const auto trace = planned_trace(*step, simulate(step->schedule, rules));
  return {step->plan.device.peak_bytes, step->plan.host.peak_bytes, events_of(*trace)};
}

// Where two lists differ first, for people; empty where nowhere.
std::string difference(const Events& plan, const Events& run) {
  for (const Events* all : {&plan, &run}) {
    for (const auto& entry : *all) {
      const std::string& track = entry.first;
      const auto of = [&](const Events& events) {
        const auto found = events.find(track);
        return found == events.end() ? std::vector<std::string>() : found->second;
      };
      const std::vector<std::string> a = of(plan), b = of(run);
      for (std::size_t i = 0; i < std::max(a.size(), b.size()); ++i) {
        const std::string x = i < a.size() ? a[i] : "(end)", y = i < b.size() ? b[i] : "(end)";
        if (x != y)
          return fmt::format("{}, event {} of {}: planned '{}', seen '{}'", track, i, a.size(), x,
                             y);
      }
    }
  }
  return {};
}

void check_plan(const TrainSettings& settings, int ranks) {
  std::mutex mutex;
  std::vector<Seen> seen(static_cast<std::size_t>(ranks));
  run_rank_threads(ranks, [&](Communicator& world) {
    Seen mine = run_step(settings, world);
    const std::lock_guard lock(mutex);
    seen[static_cast<std::size_t>(world.rank())] = std::move(mine);
  });
  for (int rank = 0; rank < ranks; ++rank) {
    const Seen plan = plan_rank(settings, ranks, rank);
    const Seen& run = seen[static_cast<std::size_t>(rank)];
    CAPTURE(rank);
    CHECK(plan.peak == run.peak);
    CHECK(plan.host_peak == run.host_peak);
    CHECK(run.events.at("main").size() > 50);
    CHECK(difference(plan.events, run.events) == "");
  }
}

const char* const kPolicies[] = {"none", "zero1", "zero2", "grad_op", "zero3", "hybrid"};
const char* const kPrecisions[] = {"fp32", "bf16", "fp16"};
const char* const kRecompute[] = {"none", "selective", "block"};
constexpr int kAccumulations = 3;  // none, one sum a step, one a micro-batch
constexpr int kOffloads = 5;  // none, optimizer, parameters too, both in files, activations too

struct Choice {
  int ranks, policy, precision, recompute, accumulation, offload;
};

// Empty where these cannot be combined.
std::optional<TrainSettings> settings_of(const Choice& c, const std::string& folder) {
  TrainSettings s = small_run();
  s.ranks = c.ranks;
  s.shard = kPolicies[c.policy];
  if (s.shard == "hybrid") s.mesh = fmt::format("replicate=2,shard={}", c.ranks / 2);
  s.precision = kPrecisions[c.precision];
  s.recompute = kRecompute[c.recompute];
  s.batch_size = c.ranks * 4 + (c.ranks > 1 ? 1 : 0);  // uneven
  if (c.accumulation > 0) s.micro_batch = 2;
  if (c.accumulation == 2) s.reduce_every = "micro";
  const std::string nvme = "nvme:" + folder;
  if (c.offload > 0) s.offload_optimizer = c.offload == 3 ? nvme : "cpu";
  if (c.offload > 1) s.offload_parameters = c.offload == 3 ? nvme : "cpu";
  if (c.offload == 4) s.offload_activations = "cpu";
  if (s.shard == "hybrid" && (c.ranks < 4 || c.ranks % 2 != 0)) return {};
  try {
    sharding_options(s, c.ranks);
    offloads_activations(s);
  } catch (const Error&) {
    return {};
  }
  return s;
}

struct Folder {
  std::filesystem::path path;
  Folder() {
    std::string name = (std::filesystem::temp_directory_path() / "sherd-plan-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp");
    path = name;
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
};

std::vector<Choice> product(std::vector<int> ranks) {
  std::vector<Choice> all;
  for (const int r : ranks)
    for (int p = 0; p < 6; ++p)
      for (int d = 0; d < 3; ++d)
        for (int e = 0; e < 3; ++e)
          for (int a = 0; a < kAccumulations; ++a)
            for (int o = 0; o < kOffloads; ++o) all.push_back({r, p, d, e, a, o});
  return all;
}

std::array<int, 6> values_of(const Choice& c) {
  return {c.ranks, c.policy, c.precision, c.recompute, c.accumulation, c.offload};
}

// Takes what has a pair of values that did not occur yet, so that all pairs do that can.
std::vector<Choice> pairwise(const std::vector<Choice>& all, const std::string& folder) {
  std::set<std::array<int, 4>> seen;  // option, its value, another, its value
  std::vector<Choice> taken;
  for (const Choice& c : all) {
    if (!settings_of(c, folder)) continue;
    const auto values = values_of(c);
    bool is_new = false;
    for (int i = 0; i < 6; ++i)
      for (int j = 0; j < i; ++j)
        is_new =
            seen.insert({i, values[std::size_t(i)], j, values[std::size_t(j)]}).second || is_new;
    if (is_new) taken.push_back(c);
  }
  return taken;
}

TEST_CASE("a plan has every byte and every event of the run") {
  const Folder folder;
  std::vector<Choice> all = product({1, 2, 3, 4, 5, 6, 7, 8});
  if (std::getenv("SHERD_FULL_PRODUCT") == nullptr) all = pairwise(all, folder.path.string());
  int checked = 0;
  for (const Choice& c : all) {
    const auto settings = settings_of(c, folder.path.string());
    if (!settings) continue;
    CAPTURE(c.ranks);
    CAPTURE(settings->shard);
    CAPTURE(settings->precision);
    CAPTURE(settings->recompute);
    CAPTURE(c.accumulation);
    CAPTURE(c.offload);
    check_plan(*settings, c.ranks);
    ++checked;
  }
  MESSAGE(checked, " combinations");
  CHECK(checked > 60);
}

}  // namespace
