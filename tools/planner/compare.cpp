// SPDX-License-Identifier: Apache-2.0
#include <sherd/tools/planner/compare.h>

#include <fmt/format.h>
#include <sherd/runtime/cuda/stream_times.h>
#include <sherd/runtime/error.h>
#include <sherd/tools/planner/traced_step.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <set>
#include <utility>

namespace sherd {
namespace {

constexpr const char* kPools[] = {"memory", "host memory"};
constexpr std::size_t kContext = 3;  // events before and after a difference

Comparison::Range range_of(std::vector<double> values) {
  if (values.empty()) return {};
  std::ranges::sort(values);
  const std::size_t middle = values.size() / 2;
  const double median =
      values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2.0;
  return {median, values.front(), values.back()};
}

double seconds(double microseconds) {
  return microseconds / 1e6;
}

std::string kind_of(const std::string& name, const std::string& category) {
  if (category == "step") return "other";  // what is in no event
  return name.starts_with("wait for ") ? "waiting" : category;
}

// What a list is compared by, and shown as.
using Lines = std::vector<std::string>;

Lines lines_of(const TraceFile& file, const TracedTrack& track) {
  Lines lines;
  lines.reserve(track.events.size());
  for (const TraceFile::Event& event : track.events) {
    lines.push_back(fmt::format("{} \"{}\"", file.text(event.category), file.text(event.name)));
  }
  return lines;
}

bool in_pool(const std::string& counter, const std::string& pool) {
  return counter.starts_with(pool + ": ");
}

Lines lines_of(const TraceFile& file, const TracedStep& step, const std::string& pool) {
  Lines lines;
  for (const TraceFile::Counter& counter : step.counters) {
    const std::string& name = file.text(counter.name);
    if (in_pool(name, pool)) lines.push_back(fmt::format("{} = {:.0f}", name, counter.value));
  }
  return lines;
}

// In which event of "main" a change of a pool came, for people.
std::string place_of(const TraceFile& file, const TracedStep& step, const std::string& pool,
                     std::size_t position) {
  const auto found = std::ranges::find_if(step.counters, [&](const auto& counter) {
    return in_pool(file.text(counter.name), pool) && position-- == 0;
  });
  const auto main = step.tracks.find("main");
  if (found == step.counters.end() || main == step.tracks.end()) return {};
  const TraceFile::Event* inner = nullptr;  // those inside come first
  for (const TraceFile::Event& event : main->second.events) {
    const bool around = event.start <= found->time && found->time <= event.end();
    if (around && (inner == nullptr || event.start > inner->start)) inner = &event;
  }
  if (inner == nullptr) return {};
  return fmt::format(", in {} \"{}\"", file.text(inner->category), file.text(inner->name));
}

// The highest total of the step, what there was at its start included.
double peak_of(const TraceFile& file, const TracedStep& step, const std::string& pool) {
  const std::string prefix = pool + ": ";
  std::map<std::uint32_t, double> live;  // by category
  double total = 0.0;
  for (const auto& [name, value] : step.before) {
    if (file.text(name).starts_with(prefix)) total += live[name] = value;
  }
  double peak = total;
  for (const TraceFile::Counter& counter : step.counters) {
    if (!file.text(counter.name).starts_with(prefix)) continue;
    total += counter.value - std::exchange(live[counter.name], counter.value);
    peak = std::max(peak, total);
  }
  return peak;
}

class Comparer {
 public:
  Comparer(const TraceFile& plan, const TraceFile& run) : plan_(plan), run_(run) {}

  Comparison compare() {
    result_.plan = plan_.path;
    result_.run = run_.path;
    std::vector<TracedStep> steps;
    if (!plan_.ranks.empty()) steps = steps_of(plan_, plan_.ranks.front());
    SHERD_CHECK(!steps.empty(), "'{}': there is no event \"step\"; expected the trace of a plan",
                plan_.path);
    planned_ = std::move(steps.back());
    if (!run_.incomplete.empty()) {
      result_.notes.push_back("parts of the run are missing: " + run_.incomplete);
    }
    for (const TraceFile::Rank& rank : run_.ranks) {
      if (rank.dropped > 0) {
        result_.notes.push_back(fmt::format("rank {}: its trace was full, {} events are missing",
                                            rank.rank, rank.dropped));
      }
      compare_rank(rank);
    }
    SHERD_CHECK(!result_.steps.empty(),
                "'{}': there is no event \"step\"; expected the trace of a run, from sherd train "
                "--trace or sherd bench step --trace",
                run_.path);
    SHERD_CHECK(result_.compared_steps() > 0,
                "'{}': none of its {} steps can be compared with the plan (step {}: {}); trace a "
                "run with the plan's settings for a few steps more",
                run_.path, result_.steps.size(), result_.steps.back().step,
                result_.steps.back().left_out);
    finish();
    return std::move(result_);
  }

 private:
  // The plan's size, or the most frequent one.
  std::int64_t samples_of(const std::vector<TracedStep>& steps) const {
    if (planned_.note) return planned_.note->samples;
    std::map<std::int64_t, int> counts;
    for (const TracedStep& step : steps) {
      if (step.note) ++counts[step.note->samples];
    }
    const auto most = std::ranges::max_element(
        counts, {}, [](const auto& count) { return std::pair(count.second, count.first); });
    return most == counts.end() ? 0 : most->first;
  }

  static std::string left_out(const TracedStep& step, std::size_t place, std::size_t count,
                              std::int64_t samples) {
    if (!step.note) return place == 0 && count > 1 ? "the first" : "";
    if (step.note->first) return "the first";
    if (step.note->graph) return "of a graph";
    if (step.note->skipped) return "skipped, its gradients overflowed";
    if (step.note->samples != samples) {
      return fmt::format("of {} samples, not {}", step.note->samples, samples);
    }
    return {};
  }

  void compare_rank(const TraceFile::Rank& rank) {
    const std::vector<TracedStep> steps = steps_of(run_, rank);
    const std::int64_t samples = samples_of(steps);
    for (std::size_t i = 0; i < steps.size(); ++i) {
      Comparison::Step step;
      step.rank = rank.rank;
      step.step = steps[i].number;
      step.left_out = left_out(steps[i], i, steps.size(), samples);
      step.seconds = seconds(steps[i].duration);
      if (step.left_out.empty()) {
        step.same_events = compare_events(step, steps[i]);
        step.same_memory = compare_memory(step, steps[i]);
        take_times(step, steps[i]);
      }
      result_.steps.push_back(step);
    }
  }

  bool compare_events(const Comparison::Step& at, const TracedStep& traced) {
    std::set<std::string> tracks;
    for (const auto& [name, track] : planned_.tracks) tracks.insert(name);
    for (const auto& [name, track] : traced.tracks) tracks.insert(name);
    bool same = true;
    static const TracedTrack kNone;
    for (const std::string& name : tracks) {
      const auto p = planned_.tracks.find(name);
      const auto t = traced.tracks.find(name);
      const TracedTrack& plan = p != planned_.tracks.end() ? p->second : kNone;
      const TracedTrack& run = t != traced.tracks.end() ? t->second : kNone;
      const Lines expected = lines_of(plan_, plan), came = lines_of(run_, run);
      same &= compare_lines(at, name, expected, came) && compare_nesting(at, name, plan, run, came);
    }
    return same;
  }

  bool compare_memory(const Comparison::Step& at, const TracedStep& traced) {
    bool same = true;
    for (const char* pool : kPools) {
      const Lines expected = lines_of(plan_, planned_, pool), came = lines_of(run_, traced, pool);
      same &= compare_lines(at, pool, expected, came, [&](Comparison::Difference& difference) {
        const auto position = static_cast<std::size_t>(difference.position);
        difference.expected += place_of(plan_, planned_, pool, position);
        difference.came += place_of(run_, traced, pool, position);
      });
    }
    return same;
  }

  // complete: adds to what is told of a difference.
  bool compare_lines(const Comparison::Step& at, const std::string& where, const Lines& expected,
                     const Lines& came,
                     const std::function<void(Comparison::Difference&)>& complete = {}) {
    const auto [p, t] = std::ranges::mismatch(expected, came);
    if (p == expected.end() && t == came.end()) return true;
    const auto position = static_cast<std::size_t>(p - expected.begin());
    const auto piece = [](const Lines& lines, std::size_t begin, std::size_t end) {
      end = std::min(end, lines.size());
      begin = std::min(begin, end);
      return Lines(lines.begin() + static_cast<std::ptrdiff_t>(begin),
                   lines.begin() + static_cast<std::ptrdiff_t>(end));
    };
    Comparison::Difference difference = difference_at(at, where, position);
    difference.expected = p == expected.end() ? "nothing more" : *p;
    difference.came = t == came.end() ? "nothing more" : *t;
    difference.before = piece(expected, position < kContext ? 0 : position - kContext, position);
    difference.planned_next = piece(expected, position, position + kContext);
    difference.traced_next = piece(came, position, position + kContext);
    if (complete) complete(difference);
    add(std::move(difference));
    return false;
  }

  bool compare_nesting(const Comparison::Step& at, const std::string& where,
                       const TracedTrack& plan, const TracedTrack& run, const Lines& lines) {
    const auto around = [&](int parent) {
      return parent == TracedTrack::kNone ? std::string("nothing")
                                          : lines[static_cast<std::size_t>(parent)];
    };
    for (std::size_t i = 0; i < lines.size(); ++i) {
      if (!plan.sure[i] || !run.sure[i] || plan.parents[i] == run.parents[i]) continue;
      Comparison::Difference difference = difference_at(at, where, i);
      difference.expected = lines[i] + " inside " + around(plan.parents[i]);
      difference.came = lines[i] + " inside " + around(run.parents[i]);
      add(std::move(difference));
      return false;
    }
    return true;
  }

  static Comparison::Difference difference_at(const Comparison::Step& at, const std::string& where,
                                              std::size_t position) {
    Comparison::Difference difference;
    difference.rank = at.rank;
    difference.step = at.step;
    difference.where = where;
    difference.position = static_cast<std::int64_t>(position);
    return difference;
  }

  void add(Comparison::Difference difference) {
    for (Comparison::Difference& other : result_.differences) {
      if (other.where == difference.where && other.position == difference.position &&
          other.expected == difference.expected && other.came == difference.came) {
        ++other.more;
        return;
      }
    }
    result_.differences.push_back(std::move(difference));
  }

  // What a track lasts where the host only asks a GPU for the work says nothing of it.
  static bool is_of_asking(const TracedStep& step, const std::string& track) {
    return step.tracks.contains(std::string(cuda::kComputeTrack)) &&
           (track == "main" || track == "communication stream");
  }

  // Of each track: seconds of each kind.
  using Kinds = std::map<std::pair<std::string, std::string>, double>;
  static Kinds kinds_of(const TraceFile& file, const TracedStep& step) {
    Kinds kinds;
    for (const auto& [name, track] : step.tracks) {
      if (is_of_asking(step, name)) continue;
      for (std::size_t i = 0; i < track.events.size(); ++i) {
        const TraceFile::Event& event = track.events[i];
        kinds[{name, kind_of(file.text(event.name), file.text(event.category))}] +=
            seconds(track.own[i]);
      }
    }
    return kinds;
  }

  void take_times(const Comparison::Step& at, const TracedStep& traced) {
    step_seconds_.push_back(at.seconds);
    kinds_.push_back(kinds_of(run_, traced));
    for (const char* pool : kPools) {
      double& peak = peaks_[pool];
      peak = std::max(peak, peak_of(run_, traced, pool));
    }
    if (!at.same_events) return;
    for (const auto& [name, track] : traced.tracks) {
      if (is_of_asking(traced, name)) continue;
      std::vector<Samples>& samples = samples_[name];
      samples.resize(track.events.size());
      const TracedTrack& plan = planned_.tracks.at(name);
      for (std::size_t i = 0; i < track.events.size(); ++i) {
        samples[i].take(seconds(track.events[i].duration), at.rank);
        samples[i].planned = &plan.events[i];
      }
    }
  }

  void finish() {
    result_.planned_seconds = seconds(planned_.duration);
    result_.traced_seconds = range_of(step_seconds_);
    finish_kinds(kinds_of(plan_, planned_));
    for (const auto& [track, samples] : samples_) {
      for (std::size_t i = 0; i < samples.size(); ++i) {
        const TraceFile::Event& event = *samples[i].planned;
        result_.events.push_back({.track = track,
                                  .category = plan_.text(event.category),
                                  .name = plan_.text(event.name),
                                  .position = static_cast<std::int64_t>(i),
                                  .planned = seconds(event.duration),
                                  .traced = range_of(samples[i].seconds),
                                  .slowest_rank = samples[i].slowest_rank});
      }
    }
    std::ranges::stable_sort(result_.events, std::greater<>(), [](const Comparison::Event& event) {
      return std::abs(event.traced.median - event.planned);
    });
    for (const char* pool : kPools) {
      const auto changes = static_cast<std::int64_t>(lines_of(plan_, planned_, pool).size());
      const double peak = peak_of(plan_, planned_, pool);
      if (changes == 0 && peak == 0.0 && peaks_[pool] == 0.0) continue;
      result_.memory.push_back({pool, changes, peak, peaks_[pool]});
    }
  }

  void finish_kinds(const Kinds& planned) {
    std::set<std::pair<std::string, std::string>> all;
    for (const auto& [kind, time] : planned) all.insert(kind);
    for (const Kinds& kinds : kinds_) {
      for (const auto& [kind, time] : kinds) all.insert(kind);
    }
    for (const auto& kind : all) {
      std::vector<double> values;
      for (const Kinds& kinds : kinds_) {
        const auto found = kinds.find(kind);
        values.push_back(found == kinds.end() ? 0.0 : found->second);
      }
      const auto found = planned.find(kind);
      result_.kinds.push_back({kind.first, kind.second,
                               found == planned.end() ? 0.0 : found->second,
                               range_of(std::move(values))});
    }
  }

  struct Samples {
    const TraceFile::Event* planned = nullptr;
    std::vector<double> seconds;
    double slowest = -1.0;
    int slowest_rank = 0;
    void take(double value, int rank) {
      seconds.push_back(value);
      if (value <= slowest) return;
      slowest = value;
      slowest_rank = rank;
    }
  };

  const TraceFile& plan_;
  const TraceFile& run_;
  Comparison result_;
  TracedStep planned_;
  std::vector<double> step_seconds_;
  std::vector<Kinds> kinds_;                             // of each step
  std::map<std::string, double> peaks_;                  // by pool
  std::map<std::string, std::vector<Samples>> samples_;  // by track, of each event
};

}  // namespace

std::int64_t Comparison::compared_steps() const {
  return std::ranges::count_if(steps, [](const Step& step) { return step.left_out.empty(); });
}

Comparison compare(const TraceFile& plan, const TraceFile& run) {
  return Comparer(plan, run).compare();
}

}  // namespace sherd
