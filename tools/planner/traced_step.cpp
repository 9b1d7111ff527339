// SPDX-License-Identifier: Apache-2.0
#include <sherd/tools/planner/traced_step.h>

#include <algorithm>

namespace sherd {
namespace {

// A start and a duration add up to an end that is rounded.
constexpr double kRounding = 1e-3;

bool is_memory(std::string_view counter) {
  return counter.starts_with("memory: ") || counter.starts_with("host memory: ");
}

// Each event takes those before it that lie in it and that no other has taken.
void nest(TracedTrack& track) {
  const std::size_t count = track.events.size();
  track.parents.assign(count, TracedTrack::kNone);
  track.sure.assign(count, true);
  std::vector<std::size_t> open;  // those that nothing lies around yet
  for (std::size_t i = 0; i < count; ++i) {
    const TraceFile::Event& event = track.events[i];
    track.own.push_back(event.duration);
    while (!open.empty() && track.events[open.back()].start >= event.start) {
      const TraceFile::Event& inner = track.events[open.back()];
      track.parents[open.back()] = static_cast<int>(i);
      track.sure[open.back()] = inner.start > event.start || inner.duration > 0.0;
      track.own.back() -= inner.duration;
      open.pop_back();
    }
    track.own.back() = std::max(0.0, track.own.back());
    open.push_back(i);
  }
}

class Steps {
 public:
  Steps(const TraceFile& file, const TraceFile::Rank& rank) : file_(file), rank_(rank) {}

  std::vector<TracedStep> take() {
    const auto main = std::ranges::find(rank_.tracks, "main") - rank_.tracks.begin();
    for (const TraceFile::Event& event : rank_.events) {
      if (event.track != main || file_.text(event.name) != "step" ||
          file_.text(event.category) != "step") {
        continue;
      }
      TracedStep step;
      step.number = static_cast<std::int64_t>(steps_.size());
      step.start = event.start;
      step.duration = event.duration;
      steps_.push_back(std::move(step));
    }
    std::ranges::sort(steps_, {}, &TracedStep::start);
    take_notes();
    take_events();
    take_counters();
    return std::move(steps_);
  }

 private:
  // The last step that has started by then; null before the first.
  TracedStep* last_before(double time) {
    const auto after = std::ranges::upper_bound(steps_, time, {}, &TracedStep::start);
    return after == steps_.begin() ? nullptr : &*std::prev(after);
  }
  static bool within(const TracedStep& step, double time) {
    return time <= step.start + step.duration + kRounding;
  }

  void take_notes() {
    for (const TraceFile::Instant& instant : rank_.instants) {
      if (file_.text(instant.category) != StepNote::kCategory) continue;
      TracedStep* step = last_before(instant.time);
      if (step == nullptr) continue;
      step->note = step_note_from_text(file_.text(instant.name));
      if (step->note) step->number = step->note->step;
    }
  }

  void take_events() {
    for (const TraceFile::Event& event : rank_.events) {
      if (file_.text(event.category) == "checkpoint") continue;
      TracedStep* step = last_before(event.issued);
      if (step == nullptr || !within(*step, event.issued)) continue;
      step->tracks[rank_.tracks[static_cast<std::size_t>(event.track)]].events.push_back(event);
    }
    for (TracedStep& step : steps_) {
      for (auto& [name, track] : step.tracks) nest(track);
    }
  }

  void take_counters() {
    std::map<std::uint32_t, double> now;
    std::size_t next = 0;
    for (const TraceFile::Counter& counter : rank_.counters) {
      if (!is_memory(file_.text(counter.name))) continue;
      for (; next < steps_.size() && steps_[next].start <= counter.time; ++next) {
        steps_[next].before = now;
      }
      now[counter.name] = counter.value;
      TracedStep* step = last_before(counter.time);
      if (step != nullptr && within(*step, counter.time)) step->counters.push_back(counter);
    }
    for (; next < steps_.size(); ++next) steps_[next].before = now;
  }

  const TraceFile& file_;
  const TraceFile::Rank& rank_;
  std::vector<TracedStep> steps_;
};

}  // namespace

std::vector<TracedStep> steps_of(const TraceFile& file, const TraceFile::Rank& rank) {
  return Steps(file, rank).take();
}

}  // namespace sherd
