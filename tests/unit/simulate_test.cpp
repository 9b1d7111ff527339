// SPDX-License-Identifier: Apache-2.0
// Schedules written by hand, whose times can be said without a computer.
#include <sherd/tools/planner/simulate.h>

#include <doctest/doctest.h>
#include <sherd/comm/communicator.h>
#include <sherd/runtime/context.h>
#include <sherd/runtime/error.h>

#include <algorithm>

namespace {

using namespace sherd;

// A piece of work of so many bytes takes so many seconds.
Work seconds(std::int64_t bytes, Work::Kind kind = Work::Kind::kernel) {
  return {.kind = kind, .name = "work", .bytes = bytes};
}

SimulationRules rules(bool host_computes, bool shared_cores = false, double launch = 0.0) {
  return {[](const Work& work) { return static_cast<double>(work.bytes); }, host_computes,
          shared_cores, launch};
}

struct TwoStreams {
  Schedule schedule;
  int compute = schedule.add_stream("compute"), other = schedule.add_stream("communication");

  void compute_for(std::int64_t time) { schedule.add(seconds(time)); }
  void send_for(std::int64_t time) {
    schedule.enter(other);
    schedule.add(seconds(time, Work::Kind::collective));
    schedule.leave();
  }
  void wait_for_other() { schedule.wait(compute, other, schedule.position()); }
  void other_waits() { schedule.wait(other, compute, schedule.position()); }
};

TEST_CASE("simulate: work of one stream comes one after the other") {
  for (const bool cpu : {true, false}) {
    TwoStreams streams;
    streams.compute_for(2);
    streams.compute_for(3);
    const Simulation result = simulate(streams.schedule, rules(cpu));
    CHECK(result.seconds == doctest::Approx(5.0));
    CHECK(result.works[1].start == doctest::Approx(2.0));
    CHECK(result.works[1].end == doctest::Approx(5.0));
    CHECK(result.exposed == 0.0);
  }
}

TEST_CASE("simulate: streams overlap, and what is waited for is exposed") {
  for (const bool cpu : {true, false}) {
    TwoStreams streams;
    streams.send_for(5);
    streams.compute_for(3);
    streams.wait_for_other();
    streams.compute_for(1);
    const Simulation result = simulate(streams.schedule, rules(cpu));
    CHECK(result.seconds == doctest::Approx(6.0));
    CHECK(result.exposed == doctest::Approx(2.0));
    CHECK(result.works[2].start == doctest::Approx(5.0));
  }
}

TEST_CASE("simulate: a stream waits for what it needs of another") {
  for (const bool cpu : {true, false}) {
    TwoStreams streams;
    streams.compute_for(3);
    streams.other_waits();
    streams.send_for(2);
    streams.compute_for(4);
    const Simulation result = simulate(streams.schedule, rules(cpu));
    CHECK(result.works[1].start == doctest::Approx(3.0));
    CHECK(result.works[1].end == doctest::Approx(5.0));
    CHECK(result.seconds == doctest::Approx(7.0));
  }
}

TEST_CASE("simulate: who waits for a stream waits for what that waits for") {
  for (const bool cpu : {true, false}) {
    TwoStreams streams;
    const int third = streams.schedule.add_stream("third");
    streams.send_for(5);
    streams.schedule.wait(third, streams.other, streams.schedule.position());
    streams.schedule.wait(streams.compute, third, streams.schedule.position());
    streams.compute_for(1);
    const Simulation result = simulate(streams.schedule, rules(cpu));
    CHECK(result.works[1].start == doctest::Approx(5.0));
    CHECK(result.seconds == doctest::Approx(6.0));
    if (!cpu) CHECK(result.exposed == doctest::Approx(5.0));
  }
}

TEST_CASE("simulate: ranks of GPUs meet in their hosts") {
  TwoStreams streams;
  streams.schedule.enter(streams.other);
  streams.schedule.add(
      {.kind = Work::Kind::collective, .name = name_of(Collective::barrier), .bytes = 2});
  streams.schedule.leave();
  streams.compute_for(3);
  streams.wait_for_other();
  streams.compute_for(1);
  const Simulation result = simulate(streams.schedule, rules(false));
  CHECK(result.works[1].start == doctest::Approx(2.0));  // when the host could ask for it
  CHECK(result.seconds == doctest::Approx(6.0));
  CHECK(result.exposed == 0.0);
}

TEST_CASE("simulate: a wait is for what was asked for before it, not after") {
  for (const bool cpu : {true, false}) {
    TwoStreams streams;
    streams.send_for(1);
    const std::int64_t first = streams.schedule.position();
    streams.send_for(10);
    streams.schedule.wait(streams.compute, streams.other, first);
    streams.compute_for(1);
    const Simulation result = simulate(streams.schedule, rules(cpu));
    CHECK(result.works[2].start == doctest::Approx(1.0));
    CHECK(result.seconds == doctest::Approx(11.0));
  }
}

TEST_CASE("simulate: threads beside those that compute on all cores take half of one") {
  TwoStreams streams;
  streams.send_for(2);
  streams.compute_for(3);
  streams.wait_for_other();
  // Both at half speed for 4 s, in which 2 s of each are done; then 1 s is left.
  const Simulation shared = simulate(streams.schedule, rules(true, true));
  CHECK(shared.works[0].end == doctest::Approx(4.0));
  CHECK(shared.seconds == doctest::Approx(5.0));
  CHECK(shared.exposed == 0.0);
  const Simulation free = simulate(streams.schedule, rules(true, false));
  CHECK(free.works[0].end == doctest::Approx(2.0));
  CHECK(free.seconds == doctest::Approx(3.0));
}

TEST_CASE("simulate: alone, a thread that moves data has its core") {
  TwoStreams streams;
  streams.send_for(6);
  streams.compute_for(1);
  streams.wait_for_other();
  const Simulation result = simulate(streams.schedule, rules(true, true));
  CHECK(result.seconds == doctest::Approx(7.0));  // 2 s shared, 5 s alone
  CHECK(result.exposed == doctest::Approx(5.0));
}

TEST_CASE("simulate: a disk takes no core") {
  TwoStreams streams;
  streams.schedule.enter(streams.other);
  streams.schedule.add(seconds(2, Work::Kind::file));
  streams.schedule.leave();
  streams.compute_for(3);
  CHECK(simulate(streams.schedule, rules(true, true)).seconds == doctest::Approx(3.0));
}

TEST_CASE("simulate: a GPU's host issues ahead, and its device may wait for it") {
  TwoStreams streams;
  for (int i = 0; i < 4; ++i) streams.compute_for(3);
  const Simulation ahead = simulate(streams.schedule, rules(false, false, 1.0));
  CHECK(ahead.seconds == doctest::Approx(13.0));
  CHECK(ahead.launch_bound == doctest::Approx(1.0));
  const Simulation bound = simulate(streams.schedule, rules(false, false, 4.0));
  CHECK(bound.seconds == doctest::Approx(19.0));  // 4 launches, and the last kernel
  CHECK(bound.launch_bound == doctest::Approx(7.0));
}

TEST_CASE("simulate: a GPU's kernels take longer beside a collective") {
  TwoStreams streams;
  streams.compute_for(1);
  streams.other_waits();
  streams.send_for(3);
  streams.compute_for(4);
  streams.compute_for(1);
  SimulationRules slowed = rules(false);
  slowed.seconds_beside_collective = [](const Work& work) {
    return 1.5 * static_cast<double>(work.bytes);
  };
  const Simulation result = simulate(streams.schedule, slowed);
  CHECK(result.works[1].end == doctest::Approx(4.0));
  CHECK(result.works[2].end == doctest::Approx(6.0));  // 2 s of it in 3 s, 2 s alone
  CHECK(result.seconds == doctest::Approx(7.0));
}

TEST_CASE("simulate: the host beside a GPU waits, and then has to issue again") {
  TwoStreams streams;
  streams.compute_for(10);
  streams.schedule.host_wait(streams.compute, streams.schedule.position());
  streams.compute_for(1);
  const Simulation result = simulate(streams.schedule, rules(false, false, 0.5));
  CHECK(result.works[1].start == doctest::Approx(11.0));  // 0.5 + 10 + 0.5
}

TEST_CASE("simulate: streams that wait for each other's threads") {
  Schedule schedule;
  schedule.add_stream("compute");
  const int disk = schedule.add_stream("disk"), sender = schedule.add_stream("communication");
  const auto on = [&](int stream, const Work& work) {
    schedule.enter(stream);
    schedule.add(work);
    schedule.leave();
  };
  on(disk, seconds(4, Work::Kind::file));
  schedule.wait(sender, disk, schedule.position());
  on(sender, seconds(2, Work::Kind::collective));
  schedule.add(seconds(1));
  schedule.wait(0, sender, schedule.position());
  const Simulation result = simulate(schedule, rules(true));
  CHECK(result.works[1].start == doctest::Approx(4.0));
  CHECK(result.seconds == doctest::Approx(6.0));
  CHECK(result.exposed == doctest::Approx(5.0));
}

TEST_CASE("simulate: scopes and memory have the times of what is around them") {
  TwoStreams streams;
  Schedule& schedule = streams.schedule;
  const std::int32_t outer = schedule.begin_scope("step", "step", "main");
  streams.compute_for(2);
  schedule.memory(MemoryPool::device, MemoryCategory::activations, 100);
  const std::int32_t inner = schedule.begin_scope("layer", "forward", "main");
  streams.compute_for(3);
  schedule.end_scope(inner);
  schedule.enter(streams.other);
  const std::int32_t sent = schedule.begin_scope("unit reduce", "communication", "stream");
  schedule.add(seconds(4, Work::Kind::collective));
  schedule.end_scope(sent);
  schedule.leave();
  streams.compute_for(1);
  schedule.end_scope(outer);
  const Simulation result = simulate(schedule, rules(true));
  REQUIRE(result.scopes.size() == 3);
  CHECK(result.scopes[0].start == 0.0);
  CHECK(result.scopes[0].end == doctest::Approx(6.0));
  CHECK(result.scopes[1].start == doctest::Approx(2.0));
  CHECK(result.scopes[1].end == doctest::Approx(5.0));
  CHECK(result.scopes[2].start == doctest::Approx(5.0));
  CHECK(result.scopes[2].end == doctest::Approx(9.0));
  CHECK(result.memory.at(0).time == doctest::Approx(2.0));
}

TEST_CASE("schedule: a context on paper records kernels, streams and scopes") {
  Schedule schedule;
  Context context({.device = Device::meta, .schedule = &schedule});
  context.trace().enable();
  const auto stream = context.make_stream("beside");
  int runs = 0;
  {
    const TraceScope scope(context.trace(), "outer", "test");
    stream->enqueue([&] { ++runs; });
    context.compute_stream().wait(stream->record());
  }
  CHECK(runs == 1);
  CHECK(schedule.streams() == std::vector<std::string>{"compute", "beside"});
  REQUIRE(schedule.entries().size() == 3);
  CHECK(schedule.entries()[0].kind == Schedule::Kind::scope_begin);
  CHECK(schedule.entries()[1].kind == Schedule::Kind::wait);
  CHECK(schedule.entries()[2].kind == Schedule::Kind::scope_end);
  // What came before clear() is done.
  const Event before = stream->record();
  schedule.clear();
  context.compute_stream().wait(before);
  CHECK(schedule.entries().empty());
  CHECK_THROWS_WITH_AS(Context({.device = Device::cpu, .schedule = &schedule}),
                       doctest::Contains("a schedule is recorded on meta"), Error);
}

}  // namespace
