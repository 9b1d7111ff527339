// SPDX-License-Identifier: Apache-2.0
// Traces made by hand, for the tests of what reads them.
#pragma once

#include <sherd/tools/planner/trace_reader.h>
#include <sherd/tools/trainer/step_note.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace sherd::test {

// As gather_trace writes it. Times are microseconds.
class TraceText {
 public:
  TraceText& on_rank(int rank) {
    rank_ = rank;
    return *this;
  }
  TraceText& on(const std::string& track) {
    track_ = track;
    return *this;
  }
  TraceText& event(const std::string& name, const std::string& category, double start,
                   double duration) {
    return add({{"name", name}, {"ph", "X"}, {"cat", category}, {"ts", start}, {"dur", duration}});
  }
  TraceText& counter(const std::string& name, double time, double value) {
    return add({{"name", name}, {"ph", "C"}, {"ts", time}, {"args", {{"value", value}}}});
  }
  TraceText& note(const StepNote& note, double time) {
    return add({{"name", to_text(note)},
                {"ph", "i"},
                {"cat", std::string(StepNote::kCategory)},
                {"ts", time},
                {"s", "t"}});
  }

  std::string text() const {
    nlohmann::json parts = nlohmann::json::array(), events = nlohmann::json::array();
    for (const auto& [rank, part] : parts_) {
      parts.push_back(
          {{"rank", rank}, {"recorded_events", part.events.size()}, {"dropped_events", 0}});
      for (std::size_t i = 0; i < part.tracks.size(); ++i) {
        events.push_back({{"name", "thread_name"},
                          {"ph", "M"},
                          {"pid", rank},
                          {"tid", i},
                          {"args", {{"name", part.tracks[i]}}}});
      }
      for (const auto& event : part.events) events.push_back(event);
    }
    return nlohmann::json{{"traceEvents", events}, {"otherData", {{"parts", parts}}}}.dump();
  }
  TraceFile read(const std::string& path) const { return read_trace_text(text(), path); }

 private:
  struct Part {
    std::vector<std::string> tracks{"main"};
    std::vector<nlohmann::json> events;
  };

  TraceText& add(nlohmann::json event) {
    Part& part = parts_[rank_];
    auto at = std::ranges::find(part.tracks, track_);
    if (at == part.tracks.end()) at = part.tracks.insert(at, track_);
    event["pid"] = rank_;
    event["tid"] = at - part.tracks.begin();
    part.events.push_back(std::move(event));
    return *this;
  }

  std::map<int, Part> parts_;
  int rank_ = 0;
  std::string track_ = "main";
};

}  // namespace sherd::test
