// SPDX-License-Identifier: Apache-2.0
// Ranks that are threads of one process. A call has two meetings: at the first every rank has
// published its buffers and the calls are compared; between them each rank reads what it needs
// straight from the others' memory and writes only what nobody else reads; after the second the
// buffers are free again.
#include <sherd/comm/backoff.h>
#include <sherd/comm/communicator.h>
#include <sherd/comm/disagreement.h>
#include <sherd/comm/reduce.h>
#include <sherd/runtime/error.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>

namespace sherd {
namespace {

// What a rank brings to a meeting.
struct Arrival {
  std::uint64_t fingerprint = 0;
  std::string call;
  const void* input = nullptr;
  void* output = nullptr;
};

// A message that a rank wants to pass to another, or to get.
struct Talk {
  bool open = false;  // the rank waits
  bool sends = false, copying = false;
  int peer = -1;
  std::uint64_t fingerprint = 0;
  std::string call;
  const void* data = nullptr;
};

class Group {
 public:
  explicit Group(int size)
      : arrivals_(static_cast<std::size_t>(size)),
        talks_(arrivals_.size()),
        left_(arrivals_.size()),
        waits_(arrivals_.size()) {
    ++alive;
  }
  ~Group() { --alive; }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  static inline std::atomic<int> alive = 0;

  int size() const { return static_cast<int>(arrivals_.size()); }

  // Waits until all ranks are here. Throws the reason when the group ends instead. After a meeting
  // that opens the buffers every rank reads those of the others, until it calls done_reading().
  void meet(int rank, bool opens_buffers = false) {
    std::unique_lock lock(mutex_);
    throw_if_ended();
    waits_[index(rank)] = true;
    if (++waiting_ == arrivals_.size()) {
      waiting_ = 0;
      ++meeting_;
      waits_.assign(waits_.size(), false);
      if (opens_buffers) reading_ = arrivals_.size();
      changed_.notify_all();
      return;
    }
    end_if_stuck();
    const std::uint64_t mine = meeting_;
    const auto over = [&] { return meeting_ != mine || ended_; };
    // Ranks that compute the same arrive at nearly the same time: to look a while is faster than to
    // be woken.
    lock.unlock();
    for (Backoff backoff(crowded_); backoff.awake() && !over();) backoff.pause();
    lock.lock();
    changed_.wait(lock, over);
    if (meeting_ == mine) throw_if_ended();
  }

  void done_reading() {
    const std::lock_guard lock(mutex_);
    --reading_;
    changed_.notify_all();
  }

  // A rank that gives up must not free its buffers under a rank that still copies from them.
  void wait_for_readers() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return reading_ == 0; });
  }

  void publish(int rank, Arrival arrival) {
    const std::lock_guard lock(mutex_);
    // A rank that has left will never come to the meeting.
    for (int other = 0; other < size(); ++other) {
      if (left_[index(other)]) end(left_message(other, rank, arrival.call));
    }
    arrivals_[index(rank)] = std::move(arrival);
  }

  // Between the meetings of a call nobody publishes, so these can be read without the lock.
  const Arrival& arrival(int rank) const { return arrivals_[index(rank)]; }

  // Returns when the receiver has copied the data.
  void send(int rank, Talk talk) {
    std::unique_lock lock(mutex_);
    Talk& mine = begin_talk(rank, std::move(talk));
    changed_.wait(lock, [&] { return !mine.open || (ended_ && !mine.copying); });
    if (!mine.open) return;
    mine.open = false;
    throw_if_ended();
  }

  void receive(int rank, Talk talk, std::int64_t sequence, void* data, std::size_t bytes) {
    std::unique_lock lock(mutex_);
    Talk& mine = begin_talk(rank, std::move(talk));
    Talk& theirs = talks_[index(mine.peer)];
    changed_.wait(lock, [&] { return ended_ || matches(theirs, rank, true); });
    mine.open = false;
    throw_if_ended();
    if (theirs.fingerprint != mine.fingerprint) {
      end(message_disagreement(sequence, mine.peer, theirs.call, rank, mine.call));
      throw_if_ended();
    }
    theirs.copying = true;
    lock.unlock();
    if (bytes > 0) std::memcpy(data, theirs.data, bytes);
    lock.lock();
    theirs.copying = theirs.open = false;
    changed_.notify_all();
  }

  void abort(const std::string& reason) {
    const std::lock_guard lock(mutex_);
    end(reason);
  }

  std::string end_reason() const {
    const std::lock_guard lock(mutex_);
    return reason_;
  }

  // The group made by the split of this number whose first member is this one, made by whichever of
  // its ranks comes first. It lives as long as one of its ranks.
  std::shared_ptr<Group> child(std::int64_t number, int first, int size) {
    const std::lock_guard lock(mutex_);
    std::erase_if(children_, [](const auto& entry) {
      return entry.second.to_come == nullptr && entry.second.group.expired();
    });
    SplitGroup& split = children_[{number, first}];
    if (split.came == 0) split.group = split.to_come = std::make_shared<Group>(size);
    std::shared_ptr<Group> group = split.to_come;
    if (++split.came == size) split.to_come = nullptr;
    if (ended_) group->abort(reason_);
    return group;
  }

  void leave(int rank) {
    const std::lock_guard lock(mutex_);
    left_[index(rank)] = true;
    for (int other = 0; other < size(); ++other) {
      const Talk& talk = talks_[index(other)];
      const bool to_me = talk.open && talk.peer == rank;
      if (!waits_[index(other)] && !to_me) continue;
      end(left_message(rank, other, to_me ? talk.call : arrivals_[index(other)].call));
      return;
    }
  }

 private:
  struct SplitGroup {
    std::shared_ptr<Group> to_come;  // for those of its ranks that have not come for it yet
    std::weak_ptr<Group> group;
    int came = 0;
  };

  static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }

  static bool matches(const Talk& talk, int peer, bool sends) {
    return talk.open && talk.peer == peer && talk.sends == sends;
  }

  Talk& begin_talk(int rank, Talk talk) {
    throw_if_ended();
    Talk& mine = talks_[index(rank)];
    mine = std::move(talk);
    if (left_[index(mine.peer)]) end(left_message(mine.peer, rank, mine.call));
    end_if_stuck();
    throw_if_ended();
    changed_.notify_all();
    return mine;
  }

  // Ends the group when a message can never be passed on: its other rank waits in a collective for
  // everybody, or in a message of its own for a rank of which the same holds.
  void end_if_stuck() {
    for (int first = 0; first < size(); ++first) {
      int rank = first;
      for (int steps = 0; talks_[index(rank)].open; ++steps) {
        const Talk& talk = talks_[index(rank)];
        if (matches(talks_[index(talk.peer)], rank, !talk.sends)) break;
        if (waits_[index(talk.peer)] || steps == size()) {
          const std::string& other = waits_[index(talk.peer)] ? arrivals_[index(talk.peer)].call
                                                              : talks_[index(talk.peer)].call;
          end(stuck_message(rank, talk.call, talk.peer, other));
          return;
        }
        rank = talk.peer;
      }
    }
  }

  void end(const std::string& reason) {
    if (ended_) return;  // the first reason is the cause
    ended_ = true;
    reason_ = reason;
    changed_.notify_all();
    for (const auto& [key, split] : children_) {
      if (const auto group = split.group.lock()) group->abort(reason);
    }
  }

  void throw_if_ended() const {
    if (ended_) fail("{}", reason_);
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Arrival> arrivals_;
  std::vector<Talk> talks_;
  std::vector<bool> left_, waits_;  // waits_: in a meeting
  std::size_t waiting_ = 0, reading_ = 0;
  // Changed under the mutex; looked at without it by ranks that wait.
  std::atomic<std::uint64_t> meeting_ = 0;
  std::atomic<bool> ended_ = false;
  bool crowded_ = is_crowded(size());
  std::string reason_;
  std::map<std::pair<std::int64_t, int>, SplitGroup> children_;  // by split and first member
};

class ThreadCommunicator final : public Communicator {
 public:
  ThreadCommunicator(std::shared_ptr<Group> group, int rank)
      : Communicator(rank, group->size()), group_(std::move(group)) {}
  ~ThreadCommunicator() override { group_->leave(rank()); }

  std::string_view backend() const override { return "threads"; }
  void abort(const std::string& reason) override { group_->abort(reason); }
  std::string end_reason() const override { return group_->end_reason(); }

 private:
  std::unique_ptr<Communicator> make_group(std::span<const int> members,
                                           std::string_view label) override {
    check_partition(members, label);
    const auto place = std::ranges::find(members, rank()) - members.begin();
    return std::make_unique<ThreadCommunicator>(
        group_->child(splits_++, members.front(), static_cast<int>(members.size())),
        static_cast<int>(place));
  }

  void run(const Call& call, const void* input, void* output) override {
    if (call.is_message()) {
      const bool sends = call.collective == Collective::send;
      Talk talk{true, sends, false, call.root, call.fingerprint(), call.describe(), input};
      if (sends) return group_->send(rank(), std::move(talk));
      return group_->receive(rank(), std::move(talk), call.sequence, output, call.bytes());
    }
    try {
      group_->publish(rank(), {call.fingerprint(), call.describe(), input, output});
      group_->meet(rank(), true);
      move_data(call, output);
      group_->meet(rank());
    } catch (...) {
      group_->wait_for_readers();
      throw;
    }
  }

  void move_data(const Call& call, void* output) {
    struct Reading {
      Group& group;
      ~Reading() { group.done_reading(); }
    } reading{*group_};
    compare(call);
    switch (call.collective) {
      case Collective::all_reduce: all_reduce_parts(call, output); break;
      case Collective::reduce_scatter: reduce_part(call, call.count, output); break;
      case Collective::all_gather: gather(call, output); break;
      case Collective::broadcast:
        if (rank() != call.root) copy(output, group_->arrival(call.root).output, call.bytes());
        break;
      case Collective::all_to_all: exchange(call, output); break;
      case Collective::barrier:
      case Collective::send:
      case Collective::recv: break;
    }
  }

  // Every rank sees the same arrivals and comes to the same answer.
  void compare(const Call& call) const {
    bool equal = true;
    for (int r = 1; r < size(); ++r) {
      equal = equal && group_->arrival(r).fingerprint == group_->arrival(0).fingerprint;
    }
    if (equal) return;
    std::vector<std::string> calls;
    for (int r = 0; r < size(); ++r) calls.push_back(group_->arrival(r).call);
    const std::string reason = disagreement(call.sequence, calls);
    group_->abort(reason);
    fail("{}", reason);
  }

  static void copy(void* to, const void* from, std::size_t size) {
    if (to != from && size > 0) std::memcpy(to, from, size);
  }

  static const std::byte* at(const void* data, std::size_t offset) {
    return static_cast<const std::byte*>(data) + offset;
  }

  // Everybody's elements [begin, begin + count) reduced into `to`.
  void reduce_range(const Call& call, std::int64_t begin, std::int64_t count, void* to) const {
    std::vector<const void*> sources;
    for (int r = 0; r < size(); ++r) {
      sources.push_back(
          at(group_->arrival(r).input, static_cast<std::size_t>(begin) * call.element_bytes()));
    }
    reduce_in_tree(sources, to, count, call.dtype, call.result(), call.op);
  }

  void reduce_part(const Call& call, std::int64_t count, void* to) const {
    reduce_range(call, rank() * count, count, to);
  }

  // Rank r reduces range r into its own data, where no other rank reads that range; then all copy
  // the ranges of the others.
  void all_reduce_parts(const Call& call, void* data) {
    const auto begin_of = [&](int r) { return call.count * r / size(); };
    const std::size_t width = call.element_bytes();
    auto* bytes_of_data = static_cast<std::byte*>(data);
    const std::int64_t begin = begin_of(rank());
    reduce_range(call, begin, begin_of(rank() + 1) - begin,
                 bytes_of_data + static_cast<std::size_t>(begin) * width);
    group_->meet(rank());
    for (int r = 0; r < size(); ++r) {
      const auto offset = static_cast<std::size_t>(begin_of(r)) * width;
      const auto size_of_range = static_cast<std::size_t>(begin_of(r + 1) - begin_of(r)) * width;
      if (r != rank())
        copy(bytes_of_data + offset, at(group_->arrival(r).output, offset), size_of_range);
    }
  }

  void gather(const Call& call, void* output) const {
    for (int r = 0; r < size(); ++r) {
      copy(static_cast<std::byte*>(output) + static_cast<std::size_t>(r) * call.bytes(),
           group_->arrival(r).input, call.bytes());
    }
  }

  void exchange(const Call& call, void* output) const {
    for (int r = 0; r < size(); ++r) {
      copy(static_cast<std::byte*>(output) + static_cast<std::size_t>(r) * call.bytes(),
           at(group_->arrival(r).input, static_cast<std::size_t>(rank()) * call.bytes()),
           call.bytes());
    }
  }

  std::shared_ptr<Group> group_;
  std::int64_t splits_ = 0;
};

}  // namespace

std::vector<std::unique_ptr<Communicator>> make_thread_communicators(int size) {
  SHERD_CHECK(size >= 1, "a group needs at least one rank, got {}", size);
  const auto group = std::make_shared<Group>(size);
  std::vector<std::unique_ptr<Communicator>> all;
  for (int rank = 0; rank < size; ++rank) {
    all.push_back(std::make_unique<ThreadCommunicator>(group, rank));
  }
  return all;
}

int thread_groups() {
  return Group::alive;
}

std::unique_ptr<Communicator> make_self_communicator() {
  return std::move(make_thread_communicators(1).front());
}

}  // namespace sherd
