// SPDX-License-Identifier: Apache-2.0
#include <sherd/tools/planner/simulate.h>

#include <sherd/comm/communicator.h>
#include <sherd/runtime/error.h>

#include <algorithm>
#include <deque>

namespace sherd {
namespace {

using Kind = Schedule::Kind;
using Entry = Schedule::Entry;

class Simulator {
 public:
  Simulator(const Schedule& schedule, const SimulationRules& rules)
      : schedule_(schedule), rules_(rules), streams_(schedule.streams().size()) {
    placed_.assign(schedule.entries().size(), -1);
    done_.assign(schedule.entries().size(), {});
    scope_of_.assign(schedule.entries().size(), -1);
  }

  Simulation run() {
    const std::vector<Entry>& entries = schedule_.entries();
    for (std::size_t i = 0; i < entries.size(); ++i) place(i, entries[i]);
    for (std::size_t s = 0; s < streams_.size(); ++s) finish_stream(s, entries.size());
    result_.seconds = host_;
    for (const StreamState& stream : streams_) {
      result_.seconds = std::max(result_.seconds, stream.ready);
    }
    return std::move(result_);
  }

 private:
  // Of a GPU's stream: when it has done what it was given so far, and the work that took so long,
  // which may be another's that it waited for.
  struct Done {
    double time = 0.0;
    std::int32_t work = -1;  // of result_.works
  };
  // Where a CPU's other streams have work, it is waiting or going on while the host computes.
  struct Item {
    std::size_t entry;
    double earliest;   // asked for, and what it waits for is done
    double remaining;  // seconds of work
    bool takes_core = false;
    bool started = false;
  };
  struct StreamState {
    double ready = 0.0;  // when all that it was given and that is not in the queue is done
    std::deque<Item> queue;
    Done done;
  };

  bool is_in_place(int stream) const { return rules_.host_computes && stream == 0; }
  bool is_queued(int stream) const { return rules_.host_computes && stream > 0; }
  StreamState& state(int stream) { return streams_.at(static_cast<std::size_t>(stream)); }

  void place(std::size_t index, const Entry& entry) {
    switch (entry.kind) {
      case Kind::work: return place_work(index, entry);
      case Kind::wait: return place_wait(index, entry);
      case Kind::host_wait: return place_host_wait(entry);
      case Kind::scope_begin: return begin_scope(index, entry);
      case Kind::scope_end: return end_scope(index, entry);
      case Kind::memory:
        result_.memory.push_back(
            {now(), entry.pool, static_cast<MemoryCategory>(entry.index), entry.value});
        return;
    }
  }

  // The time that a reader of the plan follows: a GPU's host is ahead of it.
  double now() { return rules_.host_computes ? host_ : std::max(host_, state(0).ready); }

  void place_work(std::size_t index, const Entry& entry) {
    const Work& work = schedule_.works()[static_cast<std::size_t>(entry.index)];
    const double seconds = rules_.seconds(work);
    SHERD_CHECK(seconds >= 0.0 && seconds < 1e12, "simulate: {} of {} bytes takes {} s", work.name,
                work.bytes, seconds);
    placed_[index] = static_cast<std::int32_t>(result_.works.size());
    result_.works.push_back({.work = entry.index, .stream = entry.stream});
    if (is_queued(entry.stream)) {
      const bool takes_core = work.kind != Work::Kind::file;  // the disk moves the bytes
      state(entry.stream).queue.push_back({index, host_, seconds, takes_core});
      return;
    }
    Simulation::PlacedWork& placed = result_.works.back();
    if (is_in_place(entry.stream)) {
      placed.start = host_;
      compute(seconds);
      placed.end = state(0).ready = host_;
      return;
    }
    // The host beside a GPU: its own work, after what it needs of the device.
    if (work.kind == Work::Kind::host) {
      host_ = std::max(host_, state(entry.stream).ready);
      placed.start = host_;
      placed.end = host_ += seconds;
      state(entry.stream).ready = host_;
      state(entry.stream).done = done_[index] = {host_, placed_[index]};
      return;
    }
    // Ranks of a GPU meet in their hosts (comm/sharding/groups.h).
    if (work.name == name_of(Collective::barrier)) {
      placed.start = host_;
      placed.end = host_ += seconds;
      return;
    }
    host_ += rules_.launch_seconds;
    StreamState& stream = state(entry.stream);
    if (entry.stream == 0 && host_ > stream.ready) result_.launch_bound += host_ - stream.ready;
    placed.start = std::max(stream.ready, host_);
    placed.end = stream.ready = entry.stream == 0
                                    ? end_beside_collectives(work, placed.start, seconds)
                                    : placed.start + seconds;
    stream.done = done_[index] = {placed.end, placed_[index]};
    if (work.kind == Work::Kind::collective) collectives_.push_back({placed.start, placed.end});
  }

  // Collectives that are asked for later begin later, after what they need of the device.
  double end_beside_collectives(const Work& work, double start, double seconds) {
    if (!rules_.seconds_beside_collective || seconds <= 0.0) return start + seconds;
    const double rate = seconds / rules_.seconds_beside_collective(work);
    double time = start;
    for (; past_ < collectives_.size() && collectives_[past_].end <= start; ++past_) {
    }
    for (std::size_t i = past_; i < collectives_.size() && seconds > 0.0; ++i) {
      const auto& [begin, end] = collectives_[i];
      const double alone = std::min(seconds, std::max(0.0, begin - time));
      time += alone;
      seconds -= alone;
      if (seconds <= 0.0 || time >= end) continue;
      const double beside = std::min(seconds / rate, end - time);
      time += beside;
      seconds -= beside * rate;
    }
    return time + std::max(0.0, seconds);
  }

  // Note [Shared cores]
  // Where every core has a thread that computes, one that moves data beside it gets half of a core:
  // both go on at half speed while it has something to do, as the operating system shares.
  void compute(double seconds) {
    while (seconds > 0.0) {
      const double rate = active_streams() == 0 || !rules_.shared_cores
                              ? 1.0
                              : 1.0 / (1.0 + static_cast<double>(active_streams()));
      const double step = std::min(seconds / rate, next_change());
      pass_time(step);
      seconds -= step * rate;
      if (seconds < 1e-15) return;
    }
  }

  bool is_active(const StreamState& stream) const {
    return !stream.queue.empty() && stream.queue.front().earliest <= host_ &&
           !is_blocked(stream.queue.front());
  }

  // A wait of this stream for another whose queue has not come so far.
  bool is_blocked(const Item& item) const {
    const Entry& entry = schedule_.entries()[item.entry];
    if (entry.kind != Kind::wait) return false;
    const std::deque<Item>& other = streams_[static_cast<std::size_t>(entry.index)].queue;
    return !other.empty() && other.front().entry < static_cast<std::size_t>(entry.value);
  }

  std::size_t active_streams() const {
    return static_cast<std::size_t>(std::ranges::count_if(streams_, [&](const StreamState& s) {
      return is_active(s) && s.queue.front().takes_core;
    }));
  }

  double rate_of_others(bool computing) const {
    return rules_.shared_cores && computing ? 1.0 / (1.0 + static_cast<double>(active_streams()))
                                            : 1.0;
  }

  // Until a queue's first item begins or ends.
  double next_change(bool computing = true) const {
    double next = 1e300;
    const double rate = rate_of_others(computing);
    for (const StreamState& stream : streams_) {
      if (stream.queue.empty() || is_blocked(stream.queue.front())) continue;
      const Item& item = stream.queue.front();
      next = std::min(next, item.earliest > host_ ? item.earliest - host_
                                                  : item.remaining / (item.takes_core ? rate : 1));
    }
    return next;
  }

  void pass_time(double seconds, bool computing = true) {
    const double rate = rate_of_others(computing);
    const double end = host_ + seconds;
    for (StreamState& stream : streams_) {
      if (!is_active(stream)) continue;
      Item& item = stream.queue.front();
      begin_item(item, host_);
      item.remaining -= seconds * (item.takes_core ? rate : 1.0);
    }
    host_ = end;
    settle_all();
  }

  // What one stream has done may be what another waits for.
  void settle_all() {
    std::size_t left = 0, before = 1;
    while (left != before) {
      before = left;
      left = 0;
      for (StreamState& stream : streams_) {
        settle(stream);
        left += stream.queue.size();
      }
    }
  }

  void begin_item(Item& item, double time) {
    if (std::exchange(item.started, true)) return;
    if (placed_[item.entry] >= 0) {
      result_.works[static_cast<std::size_t>(placed_[item.entry])].start = time;
    }
  }

  // Takes away what is done; what comes next may be done at once, as a mark of a scope is.
  void settle(StreamState& stream) {
    while (!stream.queue.empty()) {
      Item& item = stream.queue.front();
      const double begin = std::max(item.earliest, stream.ready);
      if (is_blocked(item) || (!item.started && begin > host_)) return;
      begin_item(item, begin);
      if (item.remaining > 1e-15) return;
      const double end = std::max(begin, host_);
      const Entry& entry = schedule_.entries()[item.entry];
      if (entry.kind == Kind::work) {
        result_.works[static_cast<std::size_t>(placed_[item.entry])].end = end;
      } else if (entry.kind != Kind::wait) {
        mark_scope(item.entry, entry, end);
      }
      stream.ready = end;
      stream.queue.pop_front();
    }
  }

  // Lets time pass until the stream has done what it was given before this entry.
  void finish_stream(std::size_t index, std::size_t until) {
    StreamState& stream = streams_[index];
    settle_all();
    while (!stream.queue.empty() && stream.queue.front().entry < until) {
      pass_time(next_change(false), false);
    }
  }

  // The last work a stream was given before an entry, and when it is done.
  std::int32_t last_work(int stream, std::int64_t until) const {
    for (std::int64_t i = until - 1; i >= 0; --i) {
      const auto at = static_cast<std::size_t>(i);
      if (schedule_.entries()[at].kind == Kind::work && schedule_.entries()[at].stream == stream)
        return placed_[at];
    }
    return -1;
  }

  // The same on a GPU.
  Done done_before(int stream, std::int64_t until) const {
    for (std::int64_t i = until - 1; i >= 0; --i) {
      const auto at = static_cast<std::size_t>(i);
      const Kind kind = schedule_.entries()[at].kind;
      if ((kind == Kind::work || kind == Kind::wait) && schedule_.entries()[at].stream == stream &&
          done_[at].work >= 0) {
        return done_[at];
      }
    }
    return {};
  }

  void note_wait(double seconds, std::int32_t placed) {
    if (seconds <= 0.0 || placed < 0) return;
    const Simulation::PlacedWork& for_work = result_.works[static_cast<std::size_t>(placed)];
    const Work& work = schedule_.works()[static_cast<std::size_t>(for_work.work)];
    if (work.kind == Work::Kind::collective) result_.exposed += seconds;
  }

  void place_wait(std::size_t index, const Entry& entry) {
    if (is_queued(entry.stream)) {
      // For the host itself there is no waiting: it has come here.
      if (!is_queued(entry.index)) return;
      state(entry.stream).queue.push_back({index, host_, 0.0});
      return settle_all();
    }
    if (rules_.host_computes) return finish_awaited(entry);
    const Done awaited = done_before(entry.index, entry.value);
    StreamState& stream = state(entry.stream);
    const double idle_from = std::max(stream.ready, host_);
    if (entry.stream == 0 && awaited.time > idle_from)
      note_wait(awaited.time - idle_from, awaited.work);
    stream.ready = std::max(stream.ready, awaited.time);
    if (awaited.time > stream.done.time) stream.done = awaited;
    done_[index] = stream.done;
  }

  void finish_awaited(const Entry& entry) {
    const std::int32_t work = last_work(entry.index, entry.value);
    const double before = host_;
    finish_stream(static_cast<std::size_t>(entry.index), static_cast<std::size_t>(entry.value));
    note_wait(host_ - before, work);
  }

  void place_host_wait(const Entry& entry) {
    if (rules_.host_computes) {
      if (entry.index != 0) finish_awaited(entry);
      return;
    }
    const Done awaited = done_before(entry.index, entry.value);
    const double computed = std::max(host_, state(0).ready);
    if (entry.index > 0 && awaited.time > computed)
      note_wait(awaited.time - computed, awaited.work);
    host_ = std::max(host_, awaited.time);
  }

  // --- scopes -----------------------------------------------------------------------------------

  void begin_scope(std::size_t index, const Entry& entry) {
    scope_of_[index] = static_cast<std::int32_t>(result_.scopes.size());
    result_.scopes.push_back({entry.index, static_cast<std::int32_t>(entry.value), entry.track});
    mark(index, entry);
  }

  void end_scope(std::size_t index, const Entry& entry) {
    scope_of_[index] = scope_of_[static_cast<std::size_t>(entry.index)];
    mark(index, entry);
  }

  void mark(std::size_t index, const Entry& entry) {
    if (entry.stream == Schedule::kHost || entry.stream == 0) {
      mark_scope(index, entry, now());
    } else if (is_queued(entry.stream)) {
      state(entry.stream).queue.push_back({index, host_, 0.0});
      settle(state(entry.stream));
    } else {
      mark_scope(
          index, entry,
          std::max(state(entry.stream).ready, entry.kind == Kind::scope_begin ? host_ : 0.0));
    }
  }

  void mark_scope(std::size_t index, const Entry& entry, double time) {
    Simulation::Scope& scope = result_.scopes[static_cast<std::size_t>(scope_of_[index])];
    (entry.kind == Kind::scope_begin ? scope.start : scope.end) = time;
  }

  const Schedule& schedule_;
  const SimulationRules& rules_;
  std::vector<StreamState> streams_;
  double host_ = 0.0;
  std::vector<std::int32_t> placed_;    // by entry: of result_.works
  std::vector<Done> done_;              // by entry: of a GPU's work and waits
  std::vector<std::int32_t> scope_of_;  // by entry: of result_.scopes
  struct Interval {
    double begin, end;
  };
  std::vector<Interval> collectives_;  // of a GPU, in the order in which they begin
  std::size_t past_ = 0;               // those that ended before what is computed now
  Simulation result_;
};

}  // namespace

Simulation simulate(const Schedule& schedule, const SimulationRules& rules) {
  return Simulator(schedule, rules).run();
}

}  // namespace sherd
