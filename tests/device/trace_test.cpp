// SPDX-License-Identifier: Apache-2.0
// Times of a GPU's work in a trace.
#include "device_support.h"

#include <sherd/runtime/cuda/graph.h>
#include <sherd/runtime/cuda/stream_times.h>
#include <sherd/runtime/tensor.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

using namespace sherd;

namespace {

struct Seen {
  double start = 0.0, duration = 0.0, issued = 0.0;
};

std::optional<Seen> find(const Trace& trace, const std::string& track, const std::string& name) {
  std::string text;
  trace.write_json([&](std::string_view piece) { text += piece; });
  const nlohmann::json root = nlohmann::json::parse(text);
  std::optional<Seen> found;
  int tid = -1;
  for (const auto& event : root.at("traceEvents")) {
    if (event.at("name") == "thread_name" && event.at("args").at("name") == track)
      tid = event.at("tid");
    if (event.at("ph") != "X" || event.at("tid") != tid || event.at("name") != name) continue;
    CHECK(!found);
    found = Seen{event.at("ts"), event.at("dur"), event.at("ts")};
    if (event.contains("args")) found->issued = event.at("args").at("issued");
  }
  return found;
}

}  // namespace

TEST_CASE("device: a trace has the times at which a stream worked") {
  Context context({.device = Device::cuda});
  Stream& stream = context.compute_stream();
  Trace& trace = context.trace();
  const std::size_t bytes = std::size_t{1} << 24;
  const Tensor x = Tensor::zeros(context, {1 << 24}, DType::u8);
  context.start_trace();
  const Event before = cuda::record_time(stream);
  std::optional<Event> first, last;
  {
    const TraceScope outer(trace, "outer", "test");
    first = cuda::record_time(stream);
    {
      const TraceScope inner(trace, "inner", "test");
      for (int i = 0; i < 16; ++i) cuda::fill_zero(stream, x.raw_data(), bytes);
    }
    last = cuda::record_time(stream);
  }
  const Event after = cuda::record_time(stream);
  stream.synchronize();
  const auto captured = cuda::Graph::capture(stream, [&] {
    const TraceScope scope(trace, "captured", "test");
    cuda::fill_zero(stream, x.raw_data(), bytes);
  });
  trace.enable(false);

  const std::string track(cuda::kComputeTrack);
  const auto outer = find(trace, track, "outer"), inner = find(trace, track, "inner"),
             host = find(trace, "main", "outer");
  REQUIRE(outer.has_value());
  REQUIRE(inner.has_value());
  REQUIRE(host.has_value());
  CHECK(outer->issued == host->start);
  CHECK(outer->start >= host->start - 1e5);  // one clock, as good as the host can tell it
  CHECK(outer->start <= inner->start);
  CHECK(inner->start + inner->duration <= outer->start + outer->duration);
  constexpr double kResolution = 2.0;  // microseconds, of CUDA's events
  const auto seconds = [](const Event& a, const Event& b) {
    return 1e6 * cuda::seconds_between(a, b);
  };
  CHECK(inner->duration > 0.0);
  CHECK(inner->duration <= seconds(*first, *last) + kResolution);
  CHECK(outer->duration >= seconds(*first, *last) - kResolution);
  CHECK(outer->duration <= seconds(before, after) + kResolution);
  // Nothing ran while it was captured.
  CHECK(find(trace, "main", "captured").has_value());
  CHECK(!find(trace, track, "captured").has_value());
}
