// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <sherd/runtime/error.h>
#include <sherd/runtime/io/trace_file.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "io_support.h"

namespace fs = std::filesystem;
using nlohmann::json;
using sherd::Trace;
using sherd::TraceScope;

namespace {

json write_and_read(const Trace& trace) {
  const sherd::test::TempDirectory folder;
  const fs::path path = fs::path(folder.path()) / "trace.json";
  write_trace(trace, path.string());
  CHECK(std::distance(fs::directory_iterator(folder.path()), fs::directory_iterator()) == 1);
  std::ifstream file(path);
  return json::parse(file);
}

// The events of one phase letter.
std::vector<json> events_of(const json& root, const std::string& phase) {
  std::vector<json> found;
  for (const json& event : root.at("traceEvents")) {
    if (event.at("ph") == phase) found.push_back(event);
  }
  return found;
}

// A stream that does its first piece of work a second late, and each in 10 us.
struct LateStream final : Trace::StreamTimes {
  explicit LateStream(std::vector<bool>* seen) : inside(seen) {}
  Trace::Mark mark(bool is_inside) override {
    if (captures) return {};
    inside->push_back(is_inside);
    return {{}, marks++};
  }
  double microseconds(const Trace::Mark& mark) override {
    SHERD_CHECK(mark.base < fails_at, "the device has failed");
    return 1e6 + 10.0 * mark.base;
  }
  std::vector<bool>* inside;
  bool captures = false;
  int marks = 0, fails_at = 1000;
};

}  // namespace

TEST_CASE("a trace records nothing until it is enabled") {
  Trace trace;
  CHECK_FALSE(trace.enabled());
  trace.complete("a", "b", 0, 0.0, 1.0);
  trace.instant("a", "b", 99);  // not even looked at
  trace.counter("a", 1.0);
  { const TraceScope scope(trace, "a", "b"); }
  CHECK(trace.event_count() == 0);
  {
    const TraceScope started_before(trace, "a", "b");
    trace.enable();
  }
  CHECK(trace.event_count() == 0);
  trace.instant("a", "b", 0);
  trace.enable(false);
  trace.instant("a", "b", 0);
  CHECK(trace.event_count() == 1);
}

TEST_CASE("a trace file has the events, with rank, track and times") {
  Trace trace(3);
  trace.enable();
  const int gather = trace.track("gather stream");
  CHECK(gather == 1);
  CHECK(trace.track("gather stream") == gather);
  CHECK(trace.track("main") == 0);
  const double before = trace.now();
  {
    const TraceScope scope(trace, std::string("unshard") + " block", "sharding", gather);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  const double after = trace.now();
  trace.complete("kernel", "compute", 0, 12.5, 3.25);
  trace.instant("mismatch", "tape", gather);
  trace.counter("bytes", 4096.0);
  trace.counter("loss", std::numeric_limits<double>::quiet_NaN());
  CHECK(trace.event_count() == 5);

  const json root = write_and_read(trace);
  CHECK(root.at("otherData") == json{{"rank", 3},
                                     {"recorded_events", 5},
                                     {"dropped_events", 0},
                                     {"max_events", Trace::kDefaultMaxEvents}});
  for (const json& event : root.at("traceEvents")) CHECK(event.at("pid") == 3);

  const auto complete = events_of(root, "X");
  REQUIRE(complete.size() == 2);
  CHECK(complete[0].at("name") == "unshard block");
  CHECK(complete[0].at("cat") == "sharding");
  CHECK(complete[0].at("tid") == gather);
  const double start = complete[0].at("ts");
  const double duration = complete[0].at("dur");
  CHECK(start >= before);
  CHECK(duration >= 5000.0);
  CHECK(start + duration <= after);
  CHECK(complete[1].at("ts") == 12.5);
  CHECK(complete[1].at("dur") == 3.25);
  CHECK(complete[1].at("tid") == 0);

  const auto instants = events_of(root, "i");
  REQUIRE(instants.size() == 2);
  CHECK(instants[0].at("name") == "mismatch");
  CHECK(instants[0].at("s") == "t");
  CHECK(instants[0].at("ts") >= after);
  CHECK(instants[1].at("name") == "loss = nan");

  const auto counters = events_of(root, "C");
  REQUIRE(counters.size() == 1);
  CHECK(counters[0].at("name") == "bytes");
  CHECK(counters[0].at("args") == json{{"value", 4096.0}});

  std::set<json> names;
  for (const json& event : events_of(root, "M")) {
    if (event.at("name") != "thread_sort_index") {
      names.insert(json::array({event.at("name"), event.at("tid"), event.at("args").at("name")}));
    }
  }
  CHECK(names == std::set<json>{json::array({"process_name", 0, "rank 3"}),
                                json::array({"thread_name", 0, "main"}),
                                json::array({"thread_name", 1, "gather stream"})});
}

TEST_CASE("a trace has the times of a stream beside the host's") {
  Trace trace;
  trace.enable();
  std::vector<bool> inside;
  auto made = std::make_unique<LateStream>(&inside);
  LateStream& stream = *made;
  trace.add_stream_times(0, "stream", std::move(made));
  trace.add_stream_times(0, "no stream", nullptr);
  const int other = trace.track("other");
  const auto record = [&](const char* name) {
    const TraceScope outer(trace, name, "outer");
    const TraceScope inner(trace, name, "inner");
    const TraceScope untimed(trace, name, "other", other);
  };
  record("a");
  stream.captures = true;
  record("captured");
  stream.captures = false;
  record("b");
  CHECK(inside == std::vector<bool>{false, true, true, true, false, true, true, true});

  const json root = write_and_read(trace);
  CHECK(root.at("otherData").at("recorded_events") == 13);
  std::map<std::string, int> tracks;
  for (const json& event : events_of(root, "M")) {
    if (event.at("name") == "thread_name") tracks[event.at("args").at("name")] = event.at("tid");
  }
  CHECK(!tracks.contains("no stream"));
  struct Expected {
    const char *name, *category;
    double start, duration;
  };
  std::vector<Expected> expected{{"a", "inner", 1e6 + 10, 10},
                                 {"a", "outer", 1e6, 30},
                                 {"b", "inner", 1e6 + 50, 10},
                                 {"b", "outer", 1e6 + 40, 30}};
  std::size_t found = 0;
  std::map<std::string, double> starts;  // the host's
  for (const json& event : events_of(root, "X")) {
    const std::string name = event.at("name"), category = event.at("cat");
    if (event.at("tid") == 0) starts[name + category] = event.at("ts");
    if (event.at("tid") != tracks.at("stream")) continue;
    REQUIRE(found < expected.size());
    CHECK(name == expected[found].name);
    CHECK(category == expected[found].category);
    CHECK(event.at("ts") == expected[found].start);
    CHECK(event.at("dur") == expected[found].duration);
    CHECK(event.at("args").at("issued") == starts.at(name + category));
    ++found;
  }
  CHECK(found == expected.size());

  // A stream that takes the other's place leaves what is recorded as it was.
  std::vector<bool> second_inside;
  trace.add_stream_times(0, "stream", std::make_unique<LateStream>(&second_inside));
  record("c");
  CHECK(inside.size() == 8);
  CHECK(second_inside.size() == 4);
  CHECK(write_and_read(trace).at("otherData").at("recorded_events") == 18);
  // Where the device has failed, what the host saw is written.
  stream.fails_at = 5;
  const json failed = write_and_read(trace);
  CHECK(failed.at("otherData").at("recorded_events") == 16);
  CHECK(events_of(failed, "X").size() == 16);
}

TEST_CASE("names of any bytes give valid JSON") {
  Trace trace;
  trace.enable();
  const std::string odd = "quote \" backslash \\ newline \n tab \t bell \a";
  const std::string utf8 = "Σ∂ß";
  const std::string with_nul("a\0b", 3);
  for (const std::string& name : {odd, utf8, with_nul, std::string()}) {
    trace.instant(name, name, trace.track(name));
  }
  trace.instant("bad \xff utf-8 \xc3", "", 0);
  const auto instants = events_of(write_and_read(trace), "i");
  REQUIRE(instants.size() == 5);
  CHECK(instants[0].at("name") == odd);
  CHECK(instants[0].at("cat") == odd);
  CHECK(instants[1].at("name") == utf8);
  CHECK(instants[2].at("name") == with_nul);
  CHECK(instants[3].at("name") == "");
  CHECK(instants[4].at("name") == "bad \xef\xbf\xbd utf-8 \xef\xbf\xbd");
}

TEST_CASE("a full trace drops events, counts them and says so in the file") {
  Trace trace(0, 10);
  trace.enable();
  {
    const TraceScope outlasts(trace, "scope that ends after the trace is full", "");
    for (int i = 0; i < 25; ++i) trace.instant(fmt::format("event {}", i), "", 0);
    const TraceScope begins_full(trace, "scope", "");
  }
  CHECK(trace.event_count() == 10);
  CHECK(trace.dropped_events() == 17);
  const json root = write_and_read(trace);
  CHECK(root.at("otherData").at("dropped_events") == 17);
  CHECK(root.at("otherData").at("recorded_events") == 10);
  CHECK(events_of(root, "i").back().at("name") == "event 9");

  Trace none(0, 0);
  none.enable();
  { const TraceScope scope(none, "scope", ""); }
  CHECK(none.dropped_events() == 1);
  CHECK(events_of(write_and_read(none), "X").empty());
}

TEST_CASE("traces of ranks in one process share a time line") {
  const auto origin = Trace::Clock::now();
  const Trace first(0, 10, origin);
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  const Trace second(1, 10, origin);
  const double earlier = first.now();
  const double later = second.now();
  CHECK(earlier >= 2000.0);
  CHECK(later >= earlier);
  CHECK(later < earlier + 1e6);
}

TEST_CASE("threads may record, and one may write, at once") {
  constexpr int kThreads = 4;
  constexpr int kEvents = 2000;
  Trace trace;
  trace.enable();
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&trace, t] {
      const int track = trace.track(fmt::format("thread {}", t));
      for (int i = 0; i < kEvents; ++i) {
        const TraceScope scope(trace, fmt::format("name {}", i % 50), "category", track);
        trace.counter("count", i);
      }
    });
  }
  const json half = write_and_read(trace);
  for (std::thread& thread : threads) thread.join();
  CHECK(half.at("traceEvents").is_array());
  CHECK(trace.event_count() == 2 * kThreads * kEvents);
  CHECK(trace.dropped_events() == 0);
  const json root = write_and_read(trace);
  std::map<int, int> per_track;
  for (const json& event : events_of(root, "X")) ++per_track[event.at("tid")];
  CHECK(per_track == std::map<int, int>{{1, kEvents}, {2, kEvents}, {3, kEvents}, {4, kEvents}});
}

TEST_CASE("a trace's errors name the track, the path and the reason") {
  Trace trace;
  trace.enable();
  using doctest::Contains;
  CHECK_THROWS_WITH_AS(trace.instant("a", "b", 1), Contains("track is 1"), sherd::Error);
  CHECK_THROWS_WITH_AS(trace.complete("a", "b", -1, 0.0, 0.0), Contains("track is -1"),
                       sherd::Error);
  CHECK_THROWS_AS(TraceScope(trace, "a", "b", 7), sherd::Error);
  CHECK(trace.event_count() == 0);

  const sherd::test::TempDirectory folder;
  const fs::path missing = fs::path(folder.path()) / "missing" / "trace.json";
  CHECK_THROWS_WITH_AS(write_trace(trace, missing.string()), Contains(missing.c_str()),
                       sherd::Error);
  CHECK_THROWS_WITH_AS(write_trace(trace, missing.string()), Contains("No such file or directory"),
                       sherd::Error);

  // A folder is in the way: the rename fails, and leaves no temporary file.
  const fs::path taken = fs::path(folder.path()) / "taken";
  fs::create_directories(taken / "inside");
  CHECK_THROWS_WITH_AS(write_trace(trace, taken.string()), Contains("irectory"), sherd::Error);
  CHECK(std::distance(fs::directory_iterator(folder.path()), fs::directory_iterator()) == 1);

  // What a killed writer left does not stop the next one, and an old trace is replaced.
  const fs::path path = fs::path(folder.path()) / "trace.json";
  std::ofstream(path.string() + ".tmp-" + std::to_string(::getpid()) + "-0") << "half a trace";
  std::ofstream(path) << "old";
  write_trace(trace, path.string());
  std::ifstream file(path);
  CHECK(json::parse(file).contains("traceEvents"));
}
