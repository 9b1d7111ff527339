// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <sherd/runtime/error.h>
#include <sherd/runtime/io/trace_file.h>
#include <sherd/tools/planner/traced_step.h>

#include <string>

#include "io_support.h"
#include "trace_support.h"

using namespace sherd;
using test::TraceText;

namespace {

void refuses(const std::string& text, const std::string& piece) {
  CAPTURE(text);
  CHECK_THROWS_WITH_AS(read_trace_text(text, "t.json"), doctest::Contains("'t.json'"), Error);
  CHECK_THROWS_WITH_AS(read_trace_text(text, "t.json"), doctest::Contains(piece.c_str()), Error);
}

// A trace of one event.
std::string with(const std::string& event, const std::string& other = "{\"parts\":[]}") {
  return "{\"traceEvents\":[" + event + "],\"otherData\":" + other + "}";
}

}  // namespace

TEST_CASE("trace reader: what a trace of one rank has") {
  const test::TempDirectory folder;
  Trace trace(3, 5);
  trace.enable();
  const int stream = trace.track("communication stream");
  trace.complete("unshard blocks.0", "communication", stream, 12.5, 3.25);
  trace.complete("step", "step", 0, 10.0, 100.0);
  trace.counter("memory: total", 9007199254740991.0);
  trace.instant("dropped x", "sharding", 0);
  trace.counter("loss", 0.5);
  trace.counter("loss", 0.25);
  write_trace(trace, folder.path("t.json"));
  const TraceFile file = read_trace(folder.path("t.json"));
  CHECK(file.path == folder.path("t.json"));
  REQUIRE(file.ranks.size() == 1);
  const TraceFile::Rank& rank = file.ranks[0];
  CHECK(rank.rank == 3);
  CHECK(rank.tracks == std::vector<std::string>{"main", "communication stream"});
  REQUIRE(rank.events.size() == 2);
  CHECK(file.text(rank.events[0].name) == "unshard blocks.0");
  CHECK(file.text(rank.events[0].category) == "communication");
  CHECK(rank.events[0].track == 1);
  CHECK(rank.events[0].start == 12.5);
  CHECK(rank.events[0].duration == 3.25);
  CHECK(rank.events[1].track == 0);
  REQUIRE(rank.counters.size() == 2);
  CHECK(rank.counters[0].value == 9007199254740991.0);
  CHECK(rank.instants.size() == 1);
  CHECK(rank.dropped == 1);
}

TEST_CASE("trace reader: what is no trace of ours, or not all of it, is refused with the reason") {
  const std::string whole = TraceText().event("a", "b", 1, 2).counter("c", 3, 4).text();
  CHECK_NOTHROW(read_trace_text(whole, "t.json"));
  for (std::size_t size = 1; size < whole.size(); ++size) {
    refuses(whole.substr(0, size), fmt::format("it ends after {} bytes", size));
  }
  refuses("", "empty");
  refuses(" \n", "empty");
  refuses("not JSON", "no JSON, at byte");
  refuses("{} {}", "no JSON, at byte");
  refuses("[]", "not a trace of sherd's");
  refuses("[{\"name\":\"a\",\"ph\":\"B\",\"pid\":1,\"tid\":1,\"ts\":0}]", "not a trace of sherd's");
  refuses("{\"traceEvents\":[]}", "not a trace of sherd's");
  refuses("{\"otherData\":{\"parts\":[]}}", "not a trace of sherd's");
  refuses(with("", "{\"version\":\"My Application v1.0\"}"), "not a trace of sherd's");
  refuses(with("", "{\"parts\":[{}]}"), "otherData");
  refuses(with("", "{\"parts\":3}"), "otherData");

  const auto name_track = [](int track) {
    return fmt::format(
        "{{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":0,\"tid\":{},\"args\":{{\"name\":\"x\"}}}"
        "}",
        track);
  };
  const std::string head = "{\"name\":\"a\",\"pid\":0,\"tid\":0,\"cat\":\"c\",";
  CHECK_NOTHROW(read_trace_text(with(name_track(0)), "t.json"));
  CHECK_NOTHROW(read_trace_text(
      with(name_track(0) + "," + head + "\"ph\":\"X\",\"ts\":1,\"dur\":2}"), "t.json"));
  refuses(with(head + "\"ph\":\"X\",\"ts\":1,\"dur\":2}"), "track 0, which has no name");
  refuses(with(name_track(1)), "event 1 names track 1 out of order");
  refuses(with(name_track(0) + "," + head + "\"ph\":\"B\",\"ts\":1}"), "event 2 is of phase 'B'");
  refuses(with(head + "\"ph\":\"X\",\"ts\":1}"), "event 1 has no 'dur'");
  refuses(with(head + "\"ph\":\"X\",\"ts\":1,\"dur\":-2}"), "lasts -2");
  refuses(with(head + "\"ph\":\"X\",\"ts\":\"1\",\"dur\":2}"), "\"1\" for 'ts', not a number");
  refuses(with(head + "\"ph\":\"C\",\"ts\":1}"), "has no 'args'");
  refuses(with(head + "\"ph\":\"C\",\"ts\":1,\"args\":3}"), "has no 'value'");
  refuses(with("{\"name\":\"a\",\"ph\":\"i\",\"pid\":-1,\"ts\":0,\"cat\":\"\"}"), "-1 for 'pid'");
  refuses(with("{\"name\":3,\"ph\":\"i\",\"pid\":1,\"ts\":0,\"cat\":\"\"}"), "3 for 'name'");
  refuses(with("3"), "event 1 is no object");
  refuses(with("[]"), "event 1 is no object");
  refuses(with("", "{\"parts\":[{\"rank\":0,\"recorded_events\":1}]}"), "has 0 events, expected 1");
  CHECK_THROWS_WITH_AS(read_trace("/nonexistent/t.json"), doctest::Contains("/nonexistent/t.json"),
                       Error);
}

TEST_CASE("traced steps: what belongs to which, and what is inside what") {
  TraceText text;
  text.event("before", "forward", 0, 5);
  text.counter("memory: total", 1, 100).counter("memory: activations", 2, 60);
  for (int i = 0; i < 2; ++i) {
    const double t = 10 + 100.0 * i;
    text.event("layer", "forward", t + 1, 5).event("other layer", "forward", t + 7, 3);
    text.event("model", "forward", t + 1, 20).event("write", "checkpoint", t - 3, 50);
    text.counter("memory: total", t + 3, 110).counter("loss", t + 4, 3);
    text.on("stream").event("gather", "communication", t + 2, 10);
    text.event("reduce", "communication", t + 15, 100).on("main");
    text.event("step", "step", t, 80);
    text.note({.step = 7 + i, .samples = 16, .first = i == 0}, t + 81);
    text.event("between", "forward", t + 85, 5).counter("memory: total", t + 90, 120.0 + i);
  }
  const TraceFile file = text.read("t.json");
  const std::vector<TracedStep> steps = steps_of(file, file.ranks.at(0));
  REQUIRE(steps.size() == 2);
  for (std::size_t i = 0; i < 2; ++i) {
    CAPTURE(i);
    const TracedStep& step = steps[i];
    CHECK(step.number == static_cast<std::int64_t>(7 + i));
    CHECK(step.duration == 80.0);
    REQUIRE(step.note.has_value());
    CHECK(step.note->first == (i == 0));
    REQUIRE(step.tracks.size() == 2);
    const TracedTrack& main = step.tracks.at("main");
    REQUIRE(main.events.size() == 4);
    CHECK(main.parents == std::vector<int>{2, 2, 3, TracedTrack::kNone});
    CHECK(main.own == std::vector<double>{5, 3, 12, 60});
    CHECK(step.tracks.at("stream").events.size() == 2);
    REQUIRE(step.counters.size() == 1);
    CHECK(step.counters[0].value == 110.0);
    std::map<std::string, double> before;
    for (const auto& [name, value] : step.before) before[file.text(name)] = value;
    CHECK(before == std::map<std::string, double>{{"memory: total", i == 0 ? 100.0 : 120.0},
                                                  {"memory: activations", 60.0}});
  }
}

TEST_CASE(
    "traced steps: events that take no time stay in their order; where they lie is not sure") {
  TraceText text;
  text.event("a", "forward", 10, 0).event("b", "forward", 10, 0).event("c", "forward", 10, 5);
  text.event("d", "forward", 15, 0).event("model", "forward", 10, 5).event("step", "step", 10, 5);
  const TraceFile file = text.read("t.json");
  const std::vector<TracedStep> steps = steps_of(file, file.ranks.at(0));
  REQUIRE(steps.size() == 1);
  const TracedTrack& main = steps[0].tracks.at("main");
  REQUIRE(main.events.size() == 6);
  CHECK_FALSE(main.sure[0]);
  CHECK_FALSE(main.sure[1]);
  CHECK(main.sure[2]);
  CHECK(main.parents[2] == 4);
  CHECK(main.sure[3]);
  CHECK(main.parents[3] == 4);
  CHECK(main.parents[4] == 5);
}
