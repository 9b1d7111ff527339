// SPDX-License-Identifier: Apache-2.0
// The schedule of a step: what the engine asks for, and in which order.
#include <doctest/doctest.h>

#include "sharding_support.h"

#include <algorithm>
#include <set>
#include <sstream>

using namespace sherd;
using namespace sherd::test;

namespace {

using P = ShardingPolicy;
using Kind = ShardingEvent::Kind;

// Three blocks around which "(root)" has the embedding, norm and head.
Workload small_vit() {
  return {[]() -> std::unique_ptr<Module> {
            return std::make_unique<VisionTransformer>(ViTSettings{.image_height = 4,
                                                                   .image_width = 4,
                                                                   .channels = 1,
                                                                   .patch = 2,
                                                                   .dim = 8,
                                                                   .depth = 3,
                                                                   .heads = 2,
                                                                   .classes = 3});
          },
          {1, 4, 4},
          3,
          {}};
}

RunOptions vit_run(P policy, int prefetch = 1) {
  RunOptions run;
  run.sharding.policy = policy;
  run.sharding.prefetch = prefetch;
  run.batch = 4;
  if (policy == P::hybrid) run.sharding.mesh = ProcessMesh::parse("replicate=2,shard=2");
  return run;
}

RunOptions odd_run(P policy, int prefetch) {
  RunOptions run = vit_run(policy, prefetch);
  run.sharding.units = cells();
  return run;
}

// The events of each of the first steps.
std::vector<std::vector<ShardingEvent>> record_steps(RankTrainer& rank, int steps) {
  std::vector<std::vector<ShardingEvent>> all;
  rank.engine.record_events(true);
  for (int step = 0; step < steps; ++step) {
    rank.step(step);
    all.push_back(rank.engine.events());
    rank.engine.clear_events();
  }
  return all;
}

std::vector<std::vector<ShardingEvent>> events_on_meta(int ranks, const Workload& work,
                                                       const RunOptions& run, int steps) {
  std::vector<std::vector<ShardingEvent>> all;
  on_meta(0, ranks, work, run, [&](RankTrainer& rank) { all = record_steps(rank, steps); });
  return all;
}

std::string text_of(const std::vector<ShardingEvent>& events) {
  std::string text;
  for (const ShardingEvent& event : events) text += event.to_string() + "\n";
  return text;
}

// A list as written below: events separated by commas or new lines.
std::string lines(const std::string& list) {
  std::string text;
  std::stringstream stream(list);
  for (std::string line; std::getline(stream, line);) {
    std::stringstream events(line);
    for (std::string event; std::getline(events, event, ',');) {
      const std::size_t begin = event.find_first_not_of(' ');
      if (begin != std::string::npos) text += event.substr(begin) + "\n";
    }
  }
  return text;
}

void check_schedule(const RunOptions& run, const std::string& expected) {
  for (const auto& step : events_on_meta(4, small_vit(), run, 2)) {
    CHECK(text_of(step) == lines(expected));
  }
  std::mutex mutex;
  on_threads(4, small_vit(), run, [&](RankTrainer& rank) {
    const auto steps = record_steps(rank, 2);
    const std::lock_guard lock(mutex);
    for (const auto& step : steps) CHECK(text_of(step) == lines(expected));
  });
}

constexpr const char* kComputed = R"(
  forward (root), forward blocks.0, forward blocks.1, forward blocks.2
  backward (root), backward blocks.2,)";

std::ptrdiff_t find(const std::vector<ShardingEvent>& events, Kind kind, const std::string& unit,
                    std::ptrdiff_t from = 0) {
  const auto found = std::find(events.begin() + from, events.end(), ShardingEvent{kind, unit});
  return found == events.end() ? -1 : found - events.begin();
}

}  // namespace

TEST_CASE("schedule: none reduces each unit when its backward is done") {
  check_schedule(vit_run(P::none), std::string(kComputed) + R"(
    reduce blocks.2, backward blocks.1
    wait_reduce blocks.2, reduce blocks.1, backward blocks.0
    wait_reduce blocks.1, reduce blocks.0
    wait_reduce blocks.0, reduce (root)
    wait_reduce (root))");
}

TEST_CASE("schedule: zero1 reduces after backward and gathers what was updated") {
  check_schedule(vit_run(P::zero1), std::string(kComputed) + R"(
    backward blocks.1, backward blocks.0
    reduce blocks.2
    wait_reduce blocks.2, reduce blocks.1
    wait_reduce blocks.1, reduce blocks.0
    wait_reduce blocks.0, reduce (root)
    wait_reduce (root)
    gather_update (root), gather_update blocks.0, gather_update blocks.1, gather_update blocks.2)");
}

TEST_CASE("schedule: zero2 reduces in backward and gathers what was updated") {
  check_schedule(vit_run(P::zero2), std::string(kComputed) + R"(
    reduce blocks.2, backward blocks.1
    wait_reduce blocks.2, reduce blocks.1, backward blocks.0
    wait_reduce blocks.1, reduce blocks.0
    wait_reduce blocks.0, reduce (root)
    wait_reduce (root)
    gather_update (root), gather_update blocks.0, gather_update blocks.1, gather_update blocks.2)");
}

TEST_CASE("schedule: grad_op gathers once and keeps until backward") {
  check_schedule(vit_run(P::grad_op), R"(
    unshard (root), prefetch blocks.0, wait (root), forward (root)
    prefetch blocks.1, wait blocks.0, forward blocks.0
    prefetch blocks.2, wait blocks.1, forward blocks.1
    wait blocks.2, forward blocks.2
    backward (root)
    backward blocks.2, reshard blocks.2, reduce blocks.2
    backward blocks.1, reshard blocks.1, wait_reduce blocks.2, reduce blocks.1
    backward blocks.0, reshard blocks.0, wait_reduce blocks.1, reduce blocks.0
    reshard (root), wait_reduce blocks.0, reduce (root)
    wait_reduce (root))");
}

TEST_CASE("schedule: zero3 without prefetch gathers each unit when it is needed") {
  check_schedule(vit_run(P::zero3, 0), R"(
    unshard (root), wait (root), forward (root)
    unshard blocks.0, wait blocks.0, forward blocks.0, reshard blocks.0
    unshard blocks.1, wait blocks.1, forward blocks.1, reshard blocks.1
    unshard blocks.2, wait blocks.2, forward blocks.2, reshard blocks.2
    reshard (root)
    unshard (root), wait (root), backward (root)
    unshard blocks.2, wait blocks.2, backward blocks.2, reshard blocks.2, reduce blocks.2
    unshard blocks.1, wait blocks.1, backward blocks.1, reshard blocks.1
    wait_reduce blocks.2, reduce blocks.1
    unshard blocks.0, wait blocks.0, backward blocks.0, reshard blocks.0
    wait_reduce blocks.1, reduce blocks.0
    reshard (root), wait_reduce blocks.0, reduce (root)
    wait_reduce (root))");
}

constexpr const char* kOneAhead = R"(
    unshard (root), prefetch blocks.0, wait (root), forward (root)
    prefetch blocks.1, wait blocks.0, forward blocks.0, reshard blocks.0
    prefetch blocks.2, wait blocks.1, forward blocks.1, reshard blocks.1
    wait blocks.2, forward blocks.2, reshard blocks.2
    reshard (root)
    unshard (root), prefetch blocks.2, wait (root), backward (root)
    prefetch blocks.1, wait blocks.2, backward blocks.2, reshard blocks.2, reduce blocks.2
    prefetch blocks.0, wait blocks.1, backward blocks.1, reshard blocks.1
    wait_reduce blocks.2, reduce blocks.1
    wait blocks.0, backward blocks.0, reshard blocks.0
    wait_reduce blocks.1, reduce blocks.0
    reshard (root), wait_reduce blocks.0, reduce (root)
    wait_reduce (root))";

TEST_CASE("schedule: zero3 and hybrid gather one unit ahead in both directions") {
  check_schedule(vit_run(P::zero3), kOneAhead);
  check_schedule(vit_run(P::hybrid), kOneAhead);
}

TEST_CASE("schedule: zero3 with prefetch 2 keeps two units ahead") {
  check_schedule(vit_run(P::zero3, 2), R"(
    unshard (root), prefetch blocks.0, prefetch blocks.1, wait (root), forward (root)
    prefetch blocks.2, wait blocks.0, forward blocks.0, reshard blocks.0
    wait blocks.1, forward blocks.1, reshard blocks.1
    wait blocks.2, forward blocks.2, reshard blocks.2
    reshard (root)
    unshard (root), prefetch blocks.2, prefetch blocks.1, wait (root), backward (root)
    prefetch blocks.0, wait blocks.2, backward blocks.2, reshard blocks.2, reduce blocks.2
    wait blocks.1, backward blocks.1, reshard blocks.1
    wait_reduce blocks.2, reduce blocks.1
    wait blocks.0, backward blocks.0, reshard blocks.0
    wait_reduce blocks.1, reduce blocks.0
    reshard (root), wait_reduce blocks.0, reduce (root)
    wait_reduce (root))");
}

TEST_CASE("schedule: the neighbour's gather runs while a unit computes") {
  const auto events = events_on_meta(4, small_vit(), vit_run(P::zero3), 1).front();
  for (const auto& [unit, next] : {std::pair{"blocks.0", "blocks.1"}, {"blocks.1", "blocks.2"}}) {
    const auto computes = find(events, Kind::forward, unit);
    REQUIRE(computes >= 0);
    CHECK(find(events, Kind::prefetch, next) < computes);
    CHECK(find(events, Kind::wait, next) > computes);
    const auto back = find(events, Kind::backward, next);
    CHECK(find(events, Kind::prefetch, unit, computes) < back);
    CHECK(find(events, Kind::wait, unit, computes) > back);
    // A unit's reduction waits for nobody's gather: that was asked for before.
    CHECK(find(events, Kind::reduce, next) > find(events, Kind::prefetch, unit, computes));
  }
}

TEST_CASE("schedule: what was prefetched for a branch not taken is dropped on all ranks") {
  for (const int prefetch : {1, 2}) {
    CAPTURE(prefetch);
    const RunOptions run = odd_run(P::zero3, prefetch);
    // Steps 0 and 2 take the branch, step 1 does not; step 2 has forgotten it.
    const auto expected = events_on_meta(3, odd_net(), run, 3);
    const auto& skipping = expected[1];
    const auto prefetched = find(skipping, Kind::prefetch, "branch");
    const auto dropped = find(skipping, Kind::drop, "branch");
    REQUIRE(prefetched >= 0);
    CHECK(dropped > prefetched);
    CHECK(dropped < find(skipping, Kind::forward, "last"));
    CHECK(find(skipping, Kind::wait, "branch") == -1);
    CHECK(find(skipping, Kind::reduce, "branch") == -1);
    CHECK(find(expected[2], Kind::unshard, "branch") >= 0);
    CHECK(find(expected[0], Kind::drop, "branch") == -1);
    std::mutex mutex;
    on_threads(3, odd_net(), run, [&](RankTrainer& rank) {
      const auto steps = record_steps(rank, 3);
      const std::lock_guard lock(mutex);
      for (std::size_t i = 0; i < 3; ++i) CHECK(text_of(steps[i]) == text_of(expected[i]));
    });
  }
}

TEST_CASE("schedule: few units are gathered and one is reduced at any moment") {
  struct Case {
    Workload work;
    RunOptions run;
    int enclosing;  // the most units around one that computes
  };
  std::vector<Case> cases;
  for (const int prefetch : {0, 1, 2, 4}) {
    cases.push_back({small_vit(), vit_run(P::zero3, prefetch), 1});
    cases.push_back({small_vit(), vit_run(P::hybrid, prefetch), 1});
    cases.push_back({odd_net(), odd_run(P::zero3, prefetch), 2});
    cases.push_back({odd_net(), odd_run(P::none, prefetch), 2});
    cases.push_back({odd_net(), odd_run(P::zero1, prefetch), 2});
  }
  for (const Case& c : cases) {
    CAPTURE(name_of(c.run.sharding.policy));
    CAPTURE(c.run.sharding.prefetch);
    std::set<std::string> gathered, waited;
    std::string reducing;
    std::size_t most = 0;
    for (const auto& step : events_on_meta(4, c.work, c.run, 4)) {
      for (const ShardingEvent& event : step) {
        CAPTURE(event.to_string());
        switch (event.kind) {
          case Kind::unshard:
          case Kind::prefetch: CHECK(gathered.insert(event.unit).second); break;
          case Kind::wait:
            CHECK(gathered.contains(event.unit));
            CHECK(waited.insert(event.unit).second);
            break;
          case Kind::reshard:
            CHECK(waited.erase(event.unit) == 1);
            CHECK(gathered.erase(event.unit) == 1);
            break;
          case Kind::drop:
            CHECK(gathered.erase(event.unit) == 1);
            waited.erase(event.unit);
            break;
          case Kind::reduce:
            CHECK(reducing.empty());
            reducing = event.unit;
            break;
          case Kind::wait_reduce:
            CHECK(reducing == event.unit);
            reducing.clear();
            break;
          case Kind::forward:
          case Kind::backward:
          case Kind::fetch:
          case Kind::update:
          case Kind::store:
          case Kind::gather_update: break;
        }
        most = std::max(most, gathered.size());
      }
      CHECK(gathered.empty());  // nothing stays behind a step
      CHECK(reducing.empty());
    }
    CHECK(most <= static_cast<std::size_t>(c.enclosing + 1 + c.run.sharding.prefetch));
    const bool gathers = c.run.sharding.policy == P::zero3 || c.run.sharding.policy == P::hybrid;
    CHECK((most > 0) == gathers);
  }
}
