// SPDX-License-Identifier: Apache-2.0
#include <sherd/runtime/error.h>
#include <sherd/tools/trainer/trace_clock.h>

#include <chrono>
#include <cmath>

namespace sherd {
namespace {

constexpr int kRounds = 8;
constexpr const char* kQuestion = "traces: what is your time?";
constexpr const char* kAnswer = "traces: my time";

double steady_seconds() {
  return std::chrono::duration<double>(Trace::Clock::now().time_since_epoch()).count();
}

}  // namespace

ClockOffset estimate_clock_offset(const std::function<double()>& own,
                                  const std::function<double()>& ask, int rounds) {
  SHERD_CHECK(rounds > 0, "estimate_clock_offset: expected at least 1 round, got {}", rounds);
  ClockOffset best;
  for (int i = 0; i < rounds; ++i) {
    const double before = own();
    const double there = ask();
    const double half = (own() - before) / 2.0;
    if (i == 0 || half < best.uncertainty) best = {before + half - there, half};
  }
  return best;
}

ClockOffset measure_clock_offset(Communicator& world, const std::function<double()>& clock) {
  char question = 0;
  if (world.rank() == 0) {
    for (int rank = 1; rank < world.size(); ++rank) {
      for (int i = 0; i < kRounds; ++i) {
        world.recv(&question, 1, DType::u8, rank, kQuestion);
        const double now = clock();
        world.send(&now, 1, DType::f64, rank, kAnswer);
      }
    }
    return {};
  }
  const auto ask = [&] {
    double there = 0.0;
    world.send(&question, 1, DType::u8, 0, kQuestion);
    world.recv(&there, 1, DType::f64, 0, kAnswer);
    return there;
  };
  ClockOffset offset = estimate_clock_offset(clock, ask, kRounds);
  if (std::abs(offset.seconds) <= offset.uncertainty) offset.seconds = 0.0;
  return offset;
}

TraceOrigin common_trace_origin(Communicator& world) {
  using Clock = Trace::Clock;
  std::int64_t first = Clock::now().time_since_epoch().count();
  world.broadcast(&first, 1, DType::i64, 0, "the origin of traces");
  const ClockOffset offset = measure_clock_offset(world, steady_seconds);
  const auto shift =
      std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(offset.seconds));
  return {Clock::time_point(Clock::duration(first)) + shift, offset};
}

}  // namespace sherd
