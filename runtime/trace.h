// SPDX-License-Identifier: Apache-2.0
// Trace: what happened when, written as a Chrome trace ("Trace Event Format", JSON object form),
// for chrome://tracing and ui.perfetto.dev.
//
//   trace.enable();
//   const int gather = trace.track("gather stream");
//   { TraceScope scope(trace, "unshard block 3", "sharding", gather); ... }
//   write_trace(trace, "out/trace-rank0.json");   // runtime/io/trace_file.h
//
// The process id in the file is the rank, the thread id the track. Times are microseconds on the
// steady clock since `origin`; ranks given one origin on one machine share a time line. With a
// schedule, which has no clock, scopes are entries there and nothing is kept here.
//
// Disabled, which is how it starts, a call costs one load of an atomic flag. Safe to use from
// several threads at once. Memory is bounded: from max_events on, events are dropped, counted, and
// the file says so in otherData.dropped_events. Repeated names are stored once. With times of
// streams each scope there also holds two events of the device, which writing waits for.
#pragma once

#include <sherd/runtime/api.h>
#include <sherd/runtime/ledger.h>
#include <sherd/runtime/out_of_memory.h>
#include <sherd/runtime/stream.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace sherd {

class Schedule;

class SHERD_API Trace {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::size_t kDefaultMaxEvents = 1'000'000;  // about 40 MB

  explicit Trace(int rank = 0, std::size_t max_events = kDefaultMaxEvents,
                 Clock::time_point origin = Clock::now(), Schedule* schedule = nullptr);
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  void enable(bool on = true) { enabled_.store(on, std::memory_order_relaxed); }
  bool enabled() const { return enabled_.load(std::memory_order_relaxed); }

  // The number of the track of this name, made where there is none. Track 0, "main", always exists.
  int track(std::string_view name);

  double now() const;  // microseconds since the origin

  // A place in a stream's work, and when the stream was there.
  struct Mark {
    sherd::Event event;
    int base = kUntimed;  // of StreamTimes
    static constexpr int kUntimed = -1;
  };
  class StreamTimes {
   public:
    virtual ~StreamTimes() = default;
    // Behind the work so far. `inside`: between the marks of another scope.
    virtual Mark mark(bool inside) = 0;
    virtual double microseconds(const Mark& mark) = 0;  // since the origin; waits for it
  };
  // What a TraceScope records on `track` is from now on also recorded on the track of this name,
  // with the times at which a stream did the work; the host's start is its args.issued in the file.
  // Does nothing where `times` is null.
  void add_stream_times(int track, std::string_view name, std::unique_ptr<StreamTimes> times);

  // Something that took `duration` microseconds from `start`. Below, an unknown track throws.
  void complete(std::string_view name, std::string_view category, int track, double start,
                double duration) {
    if (enabled()) record(Kind::complete, name, category, track, start, duration);
  }
  // Something that happens now.
  void instant(std::string_view name, std::string_view category, int track) {
    if (enabled()) instant(name, category, track, now());
  }
  void instant(std::string_view name, std::string_view category, int track, double time) {
    if (enabled()) record(Kind::instant, name, category, track, time, 0.0);
  }
  // A quantity's value from now on. The viewers cannot plot an infinity or a NaN: such a value is
  // written as an instant event that tells it.
  void counter(std::string_view name, double value) {
    if (enabled()) counter(name, value, now());
  }
  void counter(std::string_view name, double value, double time) {
    if (enabled()) record(Kind::counter, name, {}, 0, time, value);
  }

  std::size_t event_count() const;
  std::size_t dropped_events() const;

  // Hands everything recorded so far to `sink` as JSON, piece by piece. The events are kept.
  // runtime/io/trace_file.h writes it to a file.
  void write_json(const std::function<void(std::string_view)>& sink) const;

 private:
  friend class TraceScope;
  enum class Kind : std::uint8_t { complete, instant, counter };
  struct Event {
    Kind kind = Kind::complete;
    int track = 0;
    std::uint32_t name = 0;
    std::uint32_t category = 0;
    double start = 0.0;
    double value = 0.0;       // duration of a complete event, value of a counter
    std::int64_t marks = -1;  // place in marks_; -1: no stream's times are taken
  };
  struct TimedTrack {
    int of = 0, track = 0;  // the host's, the stream's
    std::unique_ptr<StreamTimes> times;
    int open = 0;  // scopes that have not ended
  };
  struct Marks {
    TimedTrack* on = nullptr;
    Mark begin, end;
  };
  // Of marks: on the stream's track; on none where a mark has no time.
  struct Span {
    int track = -1;
    double start = 0.0, duration = 0.0;
  };

  void record(Kind kind, std::string_view name, std::string_view category, int track, double start,
              double value);
  Event begin(std::string_view name, std::string_view category, int track);
  void end(Event event) noexcept;
  // With the mutex held:
  TimedTrack* timed(int track);
  std::vector<Span> spans_of_streams() const;
  std::uint32_t intern(std::string_view text);
  void check_track(int track) const;
  bool full() const { return events_.size() >= max_events_; }

  const int rank_;
  const std::size_t max_events_;
  const Clock::time_point origin_;
  Schedule* const schedule_;
  std::atomic<bool> enabled_{false};

  mutable std::mutex mutex_;
  std::deque<Event> events_;
  std::size_t dropped_ = 0;
  std::vector<std::string> tracks_;
  std::deque<TimedTrack> timed_;  // of two with one track of the host the later one counts
  std::deque<Marks> marks_;
  std::deque<std::string> texts_;  // a deque does not move them, so that text_index_ may refer
  std::unordered_map<std::string_view, std::uint32_t> text_index_;
};

// The name of a trace's counter of what a category holds: "memory: activations".
SHERD_API std::string memory_counter(MemoryPool pool, MemoryCategory category);

// Records the time from its construction to its destruction as one complete event. The trace must
// outlive it; the strings need not.
class SHERD_API TraceScope {
 public:
  TraceScope(Trace& trace, std::string_view name, std::string_view category, int track = 0) {
    if (!trace.enabled()) return;
    event_ = trace.begin(name, category, track);
    trace_ = &trace;
  }
  ~TraceScope() {
    if (trace_ != nullptr) trace_->end(event_);
  }
  TraceScope(const TraceScope&) = delete;
  TraceScope& operator=(const TraceScope&) = delete;

 private:
  Trace* trace_ = nullptr;  // null while the trace is disabled
  Trace::Event event_;
};

}  // namespace sherd
