// SPDX-License-Identifier: Apache-2.0
// A plan beside a run: equal in all and equal but for one thing at a time.
#include <doctest/doctest.h>
#include <sherd/runtime/error.h>
#include <sherd/tools/planner/compare.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "trace_support.h"

using namespace sherd;
using test::TraceText;

namespace {

// What a step is made of, and what may be otherwise in it.
struct Made {
  double scale = 1.0;  // of all times
  std::string second = "blocks.1", gather = "unshard blocks.1";
  bool update = true, gathers = true;
  bool flat = false;  // blocks.0 is before the model, not inside
  double held = 4096.0, peak = 8192.0;
  std::int64_t samples = 16;
};

void add_step(TraceText& text, double t, std::int64_t number, const Made& made, StepNote note = {},
              bool noted = true) {
  const auto at = [&](double after) { return t + made.scale * after; };
  const auto event = [&](const std::string& name, const std::string& category, double start,
                         double duration) {
    text.event(name, category, at(start), made.scale * duration);
  };
  text.counter("memory: activations", at(5), 4096).counter("memory: parameters", at(5), 1000);
  event("blocks.0", "forward", 10, 100);
  if (made.gathers) {
    text.on("communication stream");
    event(made.gather, "communication", 20, 60);
    text.on("main");
  }
  text.counter("memory: activations", at(115), made.held);
  text.counter("memory: parameters", at(115), made.peak - made.held);
  event(made.second, "forward", 120, 90);
  event("model", "forward", made.flat ? 115 : 10, made.flat ? 185 : 290);
  event("gelu", "backward", 420, 200);
  event("wait for blocks.0", "optimizer", 650, 50);
  if (made.update) event("update blocks.0", "optimizer", 700, 100);
  event("optimizer", "optimizer", 640, 200);
  text.counter("host memory: parameters", at(800), 64);
  text.counter("memory: parameters", at(900), 1000);
  event("step", "step", 0, 1000);
  if (!noted) return;
  note.step = number;
  note.samples = made.samples;
  text.note(note, at(1001));
}

TraceFile plan() {
  TraceText text;
  text.counter("memory: parameters", 0, 1000);
  add_step(text, 50, 0, {});
  return text.read("plan.json");
}

// Two ranks of four steps: the first, two as given, and one of 2 samples.
TraceFile run(const Made& made, const Made& other = {.scale = 1.5}) {
  TraceText text;
  for (int rank = 0; rank < 2; ++rank) {
    text.on_rank(rank).counter("memory: parameters", 0, 1000);
    add_step(text, 1e4, 0, {.second = "as it likes"}, {.first = true});
    add_step(text, 2e4, 1, rank == 1 ? made : other);
    add_step(text, 3e4, 2, other);
    add_step(text, 4e4, 3, {.second = "as it likes", .samples = 2});
  }
  return text.read("run.json");
}

const Comparison::Difference& only(const Comparison& comparison) {
  REQUIRE(comparison.differences.size() == 1);
  CHECK_FALSE(comparison.same());
  return comparison.differences[0];
}

std::int64_t same_events(const Comparison& comparison) {
  return std::ranges::count_if(comparison.steps, &Comparison::Step::same_events);
}

}  // namespace

TEST_CASE("compare: a run of the plan's events, with its times, sums and memory") {
  const Comparison found = compare(plan(), run({.scale = 2.0}));
  CHECK(found.same());
  CHECK(found.plan == "plan.json");
  CHECK(found.run == "run.json");
  CHECK(found.notes.empty());
  REQUIRE(found.steps.size() == 8);
  CHECK(found.compared_steps() == 4);
  CHECK(found.steps[0].left_out == "the first");
  CHECK(found.steps[1].left_out == "");
  CHECK(found.steps[1].step == 1);
  CHECK(found.steps[3].left_out == "of 2 samples, not 16");
  CHECK(found.planned_seconds == doctest::Approx(1e-3));
  CHECK(found.traced_seconds.median == doctest::Approx(1.5e-3));
  CHECK(found.traced_seconds.lowest == doctest::Approx(1.5e-3));
  CHECK(found.traced_seconds.highest == doctest::Approx(2e-3));

  // 8 events on main and one beside; the step differs most, then the model.
  REQUIRE(found.events.size() == 9);
  CHECK(found.events[0].name == "step");
  CHECK(found.events[0].slowest_rank == 1);
  CHECK(found.events[1].name == "model");
  CHECK(found.events[1].category == "forward");
  CHECK(found.events[1].planned == doctest::Approx(290e-6));
  CHECK(found.events[1].traced.median == doctest::Approx(435e-6));
  CHECK(found.events[1].traced.highest == doctest::Approx(580e-6));

  // Without what is inside: the model has 100 us of its own.
  std::map<std::pair<std::string, std::string>, Comparison::Kind> kinds;
  double sum = 0.0;
  for (const Comparison::Kind& kind : found.kinds) {
    kinds[{kind.track, kind.kind}] = kind;
    if (kind.track == "main") sum += kind.planned;
  }
  CHECK(sum == doctest::Approx(1e-3));
  CHECK(kinds.size() == 6);
  CHECK(kinds[{"main", "forward"}].planned == doctest::Approx(290e-6));
  CHECK(kinds[{"main", "forward"}].traced.median == doctest::Approx(435e-6));
  CHECK(kinds[{"main", "backward"}].planned == doctest::Approx(200e-6));
  CHECK(kinds[{"main", "optimizer"}].planned == doctest::Approx(150e-6));
  CHECK(kinds[{"main", "waiting"}].planned == doctest::Approx(50e-6));
  CHECK(kinds[{"main", "other"}].planned == doctest::Approx(310e-6));
  CHECK(kinds[{"communication stream", "communication"}].planned == doctest::Approx(60e-6));

  REQUIRE(found.memory.size() == 2);
  CHECK(found.memory[0].pool == "memory");
  CHECK(found.memory[0].changes == 5);
  CHECK(found.memory[0].planned_peak == 8192.0);
  CHECK(found.memory[0].traced_peak == 8192.0);
  CHECK(found.memory[1].pool == "host memory");
  CHECK(found.memory[1].traced_peak == 64.0);
}

TEST_CASE("compare: the first event that is another, and what is around it") {
  const Comparison found = compare(plan(), run({.second = "blocks.2"}));
  const Comparison::Difference& difference = only(found);
  CHECK(difference.rank == 1);
  CHECK(difference.step == 1);
  CHECK(difference.where == "main");
  CHECK(difference.position == 1);
  CHECK(difference.expected == "forward \"blocks.1\"");
  CHECK(difference.came == "forward \"blocks.2\"");
  CHECK(difference.before == std::vector<std::string>{"forward \"blocks.0\""});
  CHECK(difference.planned_next ==
        std::vector<std::string>{"forward \"blocks.1\"", "forward \"model\"", "backward \"gelu\""});
  CHECK(difference.traced_next.at(0) == "forward \"blocks.2\"");
  CHECK(difference.more == 0);
  CHECK(found.compared_steps() == 4);
  CHECK(same_events(found) == 3);
}

TEST_CASE("compare: what differs alike in several steps is said once") {
  const Comparison found = compare(plan(), run({.second = "x"}, {.second = "x"}));
  CHECK(only(found).more == 3);
  CHECK(found.events.empty());
  CHECK(found.traced_seconds.median == doctest::Approx(1e-3));
}

TEST_CASE("compare: missing events, events of other tracks, other nesting") {
  const Comparison less = compare(plan(), run({.update = false}));
  CHECK(only(less).expected == "optimizer \"update blocks.0\"");
  CHECK(only(less).came == "optimizer \"optimizer\"");

  const Comparison gather = compare(plan(), run({.gather = "unshard blocks.3"}));
  CHECK(only(gather).where == "communication stream");
  CHECK(only(gather).came == "communication \"unshard blocks.3\"");

  const Comparison none = compare(plan(), run({.gathers = false}));
  CHECK(only(none).where == "communication stream");
  CHECK(only(none).came == "nothing more");
  CHECK(same_events(none) == 3);

  const Comparison flat = compare(plan(), run({.flat = true}));
  CHECK(only(flat).expected == "forward \"blocks.0\" inside forward \"model\"");
  CHECK(only(flat).came == "forward \"blocks.0\" inside step \"step\"");
}

TEST_CASE("compare: memory to the byte, and its peak") {
  const Comparison found = compare(plan(), run({.held = 4097.0, .peak = 9000.0}));
  const Comparison::Difference& difference = only(found);
  CHECK(difference.where == "memory");
  CHECK(difference.position == 2);
  CHECK(difference.expected == "memory: activations = 4096, in forward \"model\"");
  CHECK(difference.came == "memory: activations = 4097, in forward \"model\"");
  CHECK(same_events(found) == 4);
  CHECK(std::ranges::count_if(found.steps, &Comparison::Step::same_memory) == 3);
  CHECK(found.memory.at(0).traced_peak == 9000.0);

  // A pool that was not planned for.
  TraceText without;
  without.counter("memory: parameters", 0, 1000).event("step", "step", 1, 10);
  TraceText with;
  with.counter("memory: parameters", 0, 1000).event("zeros", "forward", 20, 5);
  with.counter("host memory: parameters", 30, 64).event("step", "step", 10, 30);
  const Comparison more = compare(without.read("plan.json"), with.read("run.json"));
  REQUIRE(more.differences.size() == 2);
  CHECK(more.differences[1].where == "host memory");
  CHECK(more.differences[1].expected == "nothing more");
  CHECK(more.differences[1].came == "host memory: parameters = 64, in step \"step\"");

  // What was there before counts as well.
  TraceText text;
  text.counter("memory: parameters", 0, 70000);
  add_step(text, 50, 0, {});
  CHECK(compare(text.read("plan.json"), run({})).memory.at(0).planned_peak == 74096.0);
}

TEST_CASE("compare: steps that cannot be compared are named") {
  TraceText text;
  add_step(text, 1e4, 0, {}, {.first = true});
  add_step(text, 2e4, 1, {}, {.graph = true});
  add_step(text, 3e4, 2, {}, {.skipped = true});
  add_step(text, 4e4, 3, {.samples = 8});
  CHECK_THROWS_WITH_AS(compare(plan(), text.read("run.json")),
                       doctest::Contains("'run.json': none of its 4 steps"), Error);
  add_step(text, 5e4, 4, {});
  const Comparison found = compare(plan(), text.read("run.json"));
  CHECK(found.same());
  REQUIRE(found.steps.size() == 5);
  CHECK(found.steps[0].left_out == "the first");
  CHECK(found.steps[1].left_out == "of a graph");
  CHECK(found.steps[2].left_out == "skipped, its gradients overflowed");
  CHECK(found.steps[3].left_out == "of 8 samples, not 16");
  CHECK(found.compared_steps() == 1);

  // Without notes the first of several is left out, and a plan without one takes the usual size.
  TraceText bare;
  for (int i = 0; i < 3; ++i) add_step(bare, 1e4 * (i + 1), i, {}, {}, false);
  CHECK(compare(plan(), bare.read("run.json")).compared_steps() == 2);
  TraceText planned;
  planned.counter("memory: parameters", 0, 1000);
  add_step(planned, 1e4, 0, {}, {}, false);
  CHECK(compare(planned.read("plan.json"), run({})).compared_steps() == 4);
}

TEST_CASE("compare: files without steps are refused") {
  const TraceFile none = TraceText().event("a", "b", 0, 1).read("none.json");
  CHECK_THROWS_WITH_AS(compare(none, run({})), doctest::Contains("'none.json': there is no event"),
                       Error);
  CHECK_THROWS_WITH_AS(compare(plan(), none), doctest::Contains("'none.json': there is no event"),
                       Error);
}

TEST_CASE("compare: the text and the JSON say it all") {
  const Comparison found = compare(plan(), run({.scale = 2.0, .gather = "unshard blocks.3"}));
  const std::string text = to_text(found, 3);
  CAPTURE(text);
  for (const char* piece :
       {"compared        steps 1 to 2 of ranks 0 to 1\n",
        "left out        step 0 of ranks 0 to 1: the first\n",
        "left out        step 3 of ranks 0 to 1: of 2 samples, not 16\n",
        "events          as planned in 3 of 4\n", "memory          as planned in all 4\n",
        "5 changes; peak planned 8.0 KiB (8192 bytes), traced 8.0 KiB (8192 bytes)\n",
        "rank 1, step 1: communication stream, event 0:\n",
        "  planned: communication \"unshard blocks.1\"\n",
        "  traced:  communication \"unshard blocks.3\"\n",
        "       1.000        1.500  (1.500 to 2.000)              +50.0%  the step\n",
        "the 3 of 9 events that differ most:\n",
        "       0.290        0.435  (0.435 to 0.435)              +50.0%  forward \"model\"\n"}) {
    CHECK_MESSAGE(text.find(piece) != std::string::npos, piece);
  }
  const nlohmann::ordered_json json = to_json(found);
  CHECK(json.at("same") == false);
  CHECK(json.at("compared_steps") == 4);
  CHECK(json.at("steps").size() == 8);
  CHECK(json.at("steps")[0].at("left_out") == "the first");
  CHECK(json.at("differences").size() == 1);
  CHECK(json.at("differences")[0].at("traced") == "communication \"unshard blocks.3\"");
  CHECK(json.at("memory")[0].at("planned_peak_bytes") == 8192.0);
  CHECK(json.at("events")[0].at("name") == "step");
  CHECK(json.at("kinds").size() == 6);
  CHECK(to_json(compare(plan(), run({}))).at("same") == true);

  const TraceFile bare = TraceText().event("step", "step", 0, 1).read("bare.json");
  CHECK(to_text(compare(bare, bare)).find("memory          no counters") != std::string::npos);
}
