// SPDX-License-Identifier: Apache-2.0
// When a GPU did what is on a stream, on the clock of a trace.
#pragma once

#include <sherd/runtime/context.h>
#include <sherd/runtime/trace.h>

#include <memory>
#include <string_view>

namespace sherd::cuda {

// Note [Device times in a trace]
// The host puts work on a stream and goes on, so what a scope lasts on the host says nothing about
// the work. An event of CUDA before it and one behind it do; they are read when the trace is
// written, and make a second event in it, on a track of the stream. CUDA tells the time between two
// events alone, as a float of milliseconds. So one event is set against the host's clock, when the
// stream is idle, and the others are told from that one; every few seconds another takes its place,
// lest the float be too coarse.

inline constexpr std::string_view kComputeTrack = "compute stream";
inline constexpr std::string_view kCommunicationTrack = "communication stream of the device";

// Null where the stream is not one of a GPU. Of work that is captured there are no times. The
// trace must not record on the track once the context or the stream is gone; it may be written.
std::unique_ptr<Trace::StreamTimes> make_stream_times(const Context& context, Stream& stream,
                                                      const Trace& trace);

}  // namespace sherd::cuda
