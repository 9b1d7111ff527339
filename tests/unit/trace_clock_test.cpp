// SPDX-License-Identifier: Apache-2.0
// Clocks of ranks beside each other, the traces of all ranks as one file, and what a trace says of
// a step.
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <sherd/comm/rank_threads.h>
#include <sherd/runtime/error.h>
#include <sherd/tools/planner/trace_reader.h>
#include <sherd/tools/trainer/step_note.h>
#include <sherd/tools/trainer/trace_gather.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <vector>

#include "io_support.h"

using namespace sherd;

namespace {

std::string text_at(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

TEST_CASE("clock offset: the shortest round trip counts, and bounds the error") {
  // A world of one time, in which messages take as long as they are told to.
  double time = 100.0;
  const double offset = 37.5;  // ours minus theirs
  struct Trip {
    double there, back;
  };
  const std::vector<Trip> trips{{0.5, 0.1}, {0.003, 0.001}, {0.01, 0.2}, {0.004, 0.004}};
  std::size_t next = 0;
  const auto own = [&] { return time + offset; };
  const auto ask = [&] {
    const Trip trip = trips.at(next++);
    time += trip.there;
    const double answer = time;
    time += trip.back;
    return answer;
  };
  const ClockOffset found = estimate_clock_offset(own, ask, 4);
  CHECK(next == 4);
  CHECK(found.uncertainty == doctest::Approx(0.002));
  // The way there took 1 ms more than half of the round trip.
  CHECK(found.seconds == doctest::Approx(offset - 0.001));
  CHECK(std::abs(found.seconds - offset) <= found.uncertainty);
  CHECK_THROWS_WITH_AS(estimate_clock_offset(own, ask, 0), doctest::Contains("at least 1 round"),
                       Error);
}

TEST_CASE("clock offset: ranks find the difference of their clocks, and that one clock is one") {
  std::vector<ClockOffset> apart(3), together(3);
  run_rank_threads(3, [&](Communicator& world) {
    const auto rank = static_cast<std::size_t>(world.rank());
    apart[rank] =
        measure_clock_offset(world, [&] { return steady_seconds() - 1000.0 * world.rank(); });
    together[rank] = measure_clock_offset(world, steady_seconds);
  });
  for (std::size_t rank = 0; rank < 3; ++rank) {
    CAPTURE(rank);
    CHECK(std::abs(apart[rank].seconds + 1000.0 * static_cast<double>(rank)) <=
          apart[rank].uncertainty + 1e-9);
    CHECK(together[rank].seconds == 0.0);
    CHECK((together[rank].uncertainty > 0.0) == (rank > 0));
    CHECK(together[rank].uncertainty < 1.0);
  }
}

TEST_CASE("trace origin: one moment on all ranks of a machine") {
  std::vector<TraceOrigin> origins(3);
  run_rank_threads(3, [&](Communicator& world) {
    origins[static_cast<std::size_t>(world.rank())] = common_trace_origin(world);
  });
  CHECK(origins[1].time == origins[0].time);
  CHECK(origins[2].time == origins[0].time);
}

TEST_CASE("gathered trace: every rank's events, tracks and counters, in pieces, whole or not") {
  const test::TempDirectory folder;
  const std::string path = folder.path("trace.json");
  // Rank r has so many events that its part takes several pieces.
  const auto events_of = [](int rank) { return 3000 + 1000 * rank; };
  run_rank_threads(3, [&](Communicator& world) {
    const int rank = world.rank();
    Trace trace(rank, static_cast<std::size_t>(events_of(rank)) + 3);
    trace.enable();
    const int track = trace.track(fmt::format("stream {}", rank));
    for (int i = 0; i < events_of(rank); ++i) {
      trace.complete(fmt::format("event {}\n\"]}}", i), "test", track, i, 0.5);
    }
    trace.counter("memory: total", 123456789.0 + rank);
    trace.counter("loss", NAN);
    trace.instant("now", "test", 0);
    trace.instant("one too many", "test", 0);
    const ClockOffset offset{.seconds = rank * 0.25, .uncertainty = rank * 0.125};
    CHECK(gather_trace(trace, world, offset, path) == "");
  });
  const TraceFile file = read_trace(path);
  CHECK(file.incomplete.empty());
  REQUIRE(file.ranks.size() == 3);
  for (int rank = 0; rank < 3; ++rank) {
    CAPTURE(rank);
    const TraceFile::Rank& part = file.ranks[static_cast<std::size_t>(rank)];
    CHECK(part.rank == rank);
    CHECK(part.tracks == std::vector<std::string>{"main", fmt::format("stream {}", rank)});
    REQUIRE(part.events.size() == static_cast<std::size_t>(events_of(rank)));
    for (int i = 0; i < events_of(rank); ++i) {
      const TraceFile::Event& event = part.events[static_cast<std::size_t>(i)];
      const bool right = file.text(event.name) == fmt::format("event {}\n\"]}}", i) &&
                         event.start == i && event.duration == 0.5 && event.track == 1;
      if (!right) FAIL("event ", i);
    }
    REQUIRE(part.counters.size() == 1);
    CHECK(part.counters[0].value == 123456789.0 + rank);
    CHECK(part.instants.size() == 2);
    CHECK(part.dropped == 1);
    CHECK(part.clock_offset == rank * 0.25);
    CHECK(part.clock_uncertainty == rank * 0.125);
  }
  CHECK(std::distance(std::filesystem::directory_iterator(folder.path()),
                      std::filesystem::directory_iterator()) == 1);
}

TEST_CASE(
    "gathered trace: a file that cannot be written stops no rank, a rank that stops no file") {
  const test::TempDirectory folder;
  const std::string nowhere = folder.path("none/trace.json");
  run_rank_threads(2, [&](Communicator& world) {
    Trace trace(world.rank());
    trace.enable();
    trace.instant("now", "test", 0);
    const std::string problem = gather_trace(trace, world, {}, nowhere);
    CHECK((problem.find(nowhere) != std::string::npos) == (world.rank() == 0));
    CHECK(problem.empty() == (world.rank() == 1));
    world.barrier("all go on");
  });

  const std::string path = folder.path("trace.json");
  CHECK_THROWS_WITH_AS(run_rank_threads(3,
                                        [&](Communicator& world) {
                                          if (world.rank() == 2) fail("rank 2 has had enough");
                                          Trace trace(world.rank());
                                          trace.enable();
                                          trace.instant(fmt::format("of rank {}", world.rank()),
                                                        "test", 0);
                                          gather_trace(trace, world, {}, path);
                                        }),
                       doctest::Contains("rank 2 has had enough"), Error);
  const TraceFile file = read_trace(path);
  CHECK(file.incomplete.find("rank 2 has had enough") != std::string::npos);
  REQUIRE_FALSE(file.ranks.empty());
  CHECK(file.text(file.ranks[0].instants.at(0).name) == "of rank 0");
}

TEST_CASE("gathered trace: a part by itself") {
  const test::TempDirectory folder;
  CHECK(trace_part_path("a/trace.json", 0) == "a/trace.json");
  CHECK(trace_part_path("a/trace.json", 12) == "a/trace-rank12.json");
  CHECK(trace_part_path("trace", 1) == "trace-rank1");
  run_rank_threads(2, [&](Communicator& world) {
    if (world.rank() == 0) return;
    Trace trace(1);
    trace.enable();
    trace.instant("now", "test", 0);
    write_trace_part(trace, world, {}, folder.path("part.json"), "rank 0 has died");
    CHECK_THROWS_AS(write_trace_part(trace, world, {}, folder.path("no/part.json"), ""), Error);
  });
  const TraceFile file = read_trace(folder.path("part.json"));
  CHECK(file.incomplete == "rank 0 has died");
  REQUIRE(file.ranks.size() == 1);
  CHECK(file.ranks[0].rank == 1);
  CHECK(text_at(folder.path("part.json")).find("\"ranks\":2") != std::string::npos);
}

TEST_CASE("step note: a text and back") {
  for (int marks = 0; marks < 8; ++marks) {
    const StepNote note{.step = 12,
                        .samples = 64,
                        .first = (marks & 1) != 0,
                        .graph = (marks & 2) != 0,
                        .skipped = (marks & 4) != 0};
    CHECK(step_note_from_text(to_text(note)) == note);
  }
  CHECK(to_text(StepNote{.step = 3, .samples = 16}) == "step 3: 16 samples");
  for (const char* text : {"", "step", "step 3", "step 3: 16", "step x: 16 samples",
                           "step 3: 16 samples, more", "step 3: 16 samples, skipped, first"}) {
    CHECK_FALSE(step_note_from_text(text).has_value());
  }
}
