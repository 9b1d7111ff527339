// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <sherd/runtime/error.h>
#include <sherd/runtime/schedule.h>
#include <sherd/runtime/trace.h>

#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

namespace sherd {
namespace {

using Json = nlohmann::ordered_json;

// Names may hold any bytes; what is not UTF-8 becomes U+FFFD, as JSON must be UTF-8.
std::string dump(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

Json metadata(const char* what, int rank, std::size_t track, Json args) {
  return {{"name", what}, {"ph", "M"}, {"pid", rank}, {"tid", track}, {"args", std::move(args)}};
}

}  // namespace

Trace::Trace(int rank, std::size_t max_events, Clock::time_point origin, Schedule* schedule)
    : rank_(rank), max_events_(max_events), origin_(origin), schedule_(schedule), tracks_{"main"} {}

double Trace::now() const {
  return std::chrono::duration<double, std::micro>(Clock::now() - origin_).count();
}

int Trace::track(std::string_view name) {
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < tracks_.size(); ++i) {
    if (tracks_[i] == name) return static_cast<int>(i);
  }
  tracks_.emplace_back(name);
  return static_cast<int>(tracks_.size()) - 1;
}

void Trace::add_stream_times(int track, std::string_view name, std::unique_ptr<StreamTimes> times) {
  if (times == nullptr) return;
  const int on = this->track(name);
  const std::lock_guard lock(mutex_);
  check_track(track);
  timed_.push_back({.of = track, .track = on, .times = std::move(times)});
}

Trace::TimedTrack* Trace::timed(int track) {
  for (auto it = timed_.rbegin(); it != timed_.rend(); ++it) {
    if (it->of == track) return &*it;
  }
  return nullptr;
}

std::uint32_t Trace::intern(std::string_view text) {
  const auto found = text_index_.find(text);
  if (found != text_index_.end()) return found->second;
  const auto index = static_cast<std::uint32_t>(texts_.size());
  texts_.emplace_back(text);
  text_index_.emplace(texts_.back(), index);
  return index;
}

void Trace::check_track(int track) const {
  SHERD_CHECK(track >= 0 && static_cast<std::size_t>(track) < tracks_.size(),
              "trace: track is {}, expected one that Trace::track gave, in [0, {})", track,
              tracks_.size());
}

void Trace::record(Kind kind, std::string_view name, std::string_view category, int track,
                   double start, double value) {
  const std::lock_guard lock(mutex_);
  check_track(track);
  if (schedule_ != nullptr) return;
  if (full()) {
    ++dropped_;
    return;
  }
  events_.push_back({kind, track, intern(name), intern(category), start, value});
}

Trace::Event Trace::begin(std::string_view name, std::string_view category, int track) {
  const std::lock_guard lock(mutex_);
  check_track(track);
  Event event{.kind = Kind::complete, .track = track};
  if (schedule_ != nullptr) {
    event.name = static_cast<std::uint32_t>(
        schedule_->begin_scope(name, category, tracks_[static_cast<std::size_t>(track)]));
    return event;
  }
  // A full trace will drop the event, and must not keep its name.
  if (!full()) {
    event.name = intern(name);
    event.category = intern(category);
  }
  event.start = now();
  if (TimedTrack* on = timed(track); on != nullptr && !full()) {
    marks_.push_back({on, on->times->mark(on->open > 0), {}});
    event.marks = static_cast<std::int64_t>(marks_.size()) - 1;
    ++on->open;
  }
  return event;
}

void Trace::end(Event event) noexcept {
  if (schedule_ != nullptr) {
    schedule_->end_scope(static_cast<std::int32_t>(event.name));
    return;
  }
  event.value = now() - event.start;
  const std::lock_guard lock(mutex_);
  // A destructor calls this: running out of memory loses the event, not the program.
  try {
    if (event.marks >= 0) {
      Marks& marks = marks_[static_cast<std::size_t>(event.marks)];
      --marks.on->open;
      marks.end = marks.on->times->mark(true);
    }
    if (!full()) {
      events_.push_back(event);
      return;
    }
  } catch (const std::exception&) {
  }
  ++dropped_;
}

std::string memory_counter(MemoryPool pool, MemoryCategory category) {
  return fmt::format("{}: {}", pool == MemoryPool::device ? "memory" : "host memory",
                     name_of(category));
}

std::size_t Trace::event_count() const {
  const std::lock_guard lock(mutex_);
  return events_.size();
}

std::size_t Trace::dropped_events() const {
  const std::lock_guard lock(mutex_);
  return dropped_;
}

std::vector<Trace::Span> Trace::spans_of_streams() const {
  std::vector<Span> spans(marks_.size());
  const TimedTrack* failed = nullptr;
  for (std::size_t i = 0; i < spans.size(); ++i) {
    const auto& [on, begin, end] = marks_[i];
    if (on == failed || begin.base == Mark::kUntimed || end.base == Mark::kUntimed) continue;
    // The trace of a run that failed on its device is written too, with what the host saw.
    try {
      const double start = on->times->microseconds(begin);
      spans[i] = {on->track, start, on->times->microseconds(end) - start};
    } catch (const std::exception&) {
      failed = on;
    }
  }
  return spans;
}

void Trace::write_json(const std::function<void(std::string_view)>& sink) const {
  // Copies, so that other threads are held up while streams are waited for, but not while the text
  // is written.
  std::unique_lock lock(mutex_);
  const auto events = events_;
  const auto texts = texts_;
  const auto tracks = tracks_;
  const auto spans = spans_of_streams();
  const std::size_t dropped = dropped_;
  lock.unlock();

  const auto span_of = [&](const Event& event) {
    return event.marks < 0 ? Span{} : spans[static_cast<std::size_t>(event.marks)];
  };
  std::size_t recorded = events.size();
  for (const Event& event : events) recorded += span_of(event).track >= 0 ? 1 : 0;
  const Json summary = {{"rank", rank_},
                        {"recorded_events", recorded},
                        {"dropped_events", dropped},
                        {"max_events", max_events_}};
  sink("{\"displayTimeUnit\":\"ms\",\"otherData\":" + dump(summary) + ",\"traceEvents\":[\n");
  sink(dump(metadata("process_name", rank_, 0, {{"name", fmt::format("rank {}", rank_)}})));
  for (std::size_t i = 0; i < tracks.size(); ++i) {
    sink(",\n" + dump(metadata("thread_name", rank_, i, {{"name", tracks[i]}})));
    sink(",\n" + dump(metadata("thread_sort_index", rank_, i, {{"sort_index", i}})));
  }
  for (const Event& event : events) {
    Json json = {{"name", texts[event.name]}, {"ph", "X"},
                 {"ts", event.start},         {"pid", rank_},
                 {"tid", event.track},        {"cat", texts[event.category]}};
    if (event.kind == Kind::complete) {
      json["dur"] = event.value;
    } else if (event.kind == Kind::counter && std::isfinite(event.value)) {
      json["ph"] = "C";
      json["args"] = {{"value", event.value}};
    } else {
      json["ph"] = "i";
      json["s"] = "t";
      if (event.kind == Kind::counter) {
        json["name"] = fmt::format("{} = {}", texts[event.name], event.value);
      }
    }
    sink(",\n" + dump(json));
    const Span span = span_of(event);
    if (span.track < 0) continue;
    json["ts"] = span.start;
    json["dur"] = span.duration;
    json["tid"] = span.track;
    json["args"] = {{"issued", event.start}};
    sink(",\n" + dump(json));
  }
  sink("\n]}\n");
}

}  // namespace sherd
