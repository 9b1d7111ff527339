// SPDX-License-Identifier: Apache-2.0
// Ranks that are threads of one process. A call has two meetings: at the first every rank has
// published its buffers and the calls are compared; between them each rank reads what it needs
// straight from the others' memory and writes only what nobody else reads; after the second the
// buffers are free again.
#include <sherd/comm/communicator.h>
#include <sherd/comm/reduce.h>
#include <sherd/runtime/error.h>

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

class Group {
 public:
  explicit Group(int size) : arrivals_(static_cast<std::size_t>(size)), left_(arrivals_.size()) {}

  int size() const { return static_cast<int>(arrivals_.size()); }

  // Waits until all ranks are here. Throws the reason when the group ends instead. After a meeting
  // that opens the buffers every rank reads those of the others, until it calls done_reading().
  void meet(bool opens_buffers = false) {
    std::unique_lock lock(mutex_);
    throw_if_ended();
    if (++waiting_ == arrivals_.size()) {
      waiting_ = 0;
      ++meeting_;
      if (opens_buffers) reading_ = arrivals_.size();
      changed_.notify_all();
      return;
    }
    const std::uint64_t mine = meeting_;
    changed_.wait(lock, [&] { return meeting_ != mine || ended_; });
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
    for (std::size_t other = 0; other < left_.size() && !ended_; ++other) {
      if (left_[other]) end(left_message(other, rank, arrival.call));
    }
    arrivals_[static_cast<std::size_t>(rank)] = std::move(arrival);
  }

  // Between the meetings of a call nobody publishes, so these can be read without the lock.
  const Arrival& arrival(int rank) const { return arrivals_[static_cast<std::size_t>(rank)]; }

  void abort(const std::string& reason) {
    const std::lock_guard lock(mutex_);
    end(reason);
  }

  // The child group of this number and color, made by whichever of its ranks comes first.
  std::shared_ptr<Group> child(std::int64_t number, int color, int size) {
    const std::lock_guard lock(mutex_);
    std::shared_ptr<Group>& group = children_[{number, color}];
    if (!group) group = std::make_shared<Group>(size);
    if (ended_) group->abort(reason_);
    return group;
  }

  void leave(int rank) {
    const std::lock_guard lock(mutex_);
    const auto index = static_cast<std::size_t>(rank);
    left_[index] = true;
    if (waiting_ == 0) return;
    for (std::size_t other = 0; other < arrivals_.size(); ++other) {
      if (other == index || left_[other] || arrivals_[other].call.empty()) continue;
      end(left_message(index, static_cast<int>(other), arrivals_[other].call));
      return;
    }
  }

 private:
  static std::string left_message(std::size_t left, int rank, const std::string& call) {
    return fmt::format("rank {} has left the group, so rank {} waits in vain in {}", left, rank,
                       call);
  }

  void end(const std::string& reason) {
    if (ended_) return;  // the first reason is the cause
    ended_ = true;
    reason_ = reason;
    changed_.notify_all();
    for (const auto& [key, group] : children_) group->abort(reason);
  }

  void throw_if_ended() const {
    if (ended_) fail("{}", reason_);
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Arrival> arrivals_;
  std::vector<bool> left_;
  std::size_t waiting_ = 0, reading_ = 0;
  std::uint64_t meeting_ = 0;
  bool ended_ = false;
  std::string reason_;
  std::map<std::pair<std::int64_t, int>, std::shared_ptr<Group>> children_;
};

class ThreadCommunicator final : public Communicator {
 public:
  ThreadCommunicator(std::shared_ptr<Group> group, int rank)
      : Communicator(rank, group->size()), group_(std::move(group)) {}
  ~ThreadCommunicator() override { group_->leave(rank()); }

  void abort(const std::string& reason) override { group_->abort(reason); }

  std::unique_ptr<Communicator> split(int color, std::string_view label) override {
    std::vector<std::int32_t> colors(static_cast<std::size_t>(size()));
    const std::int32_t mine = color;
    all_gather(&mine, colors.data(), 1, DType::i32, label);
    int members = 0, index = 0;
    for (int r = 0; r < size(); ++r) {
      if (colors[static_cast<std::size_t>(r)] != color) continue;
      if (r == rank()) index = members;
      ++members;
    }
    return std::make_unique<ThreadCommunicator>(group_->child(sequence_, color, members), index);
  }

 private:
  void run(const Call& call, const void* input, void* output) override {
    try {
      group_->publish(rank(), {call.fingerprint(sequence_++), call.describe(), input, output});
      group_->meet(true);
      move_data(call, output);
      group_->meet();
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
    compare();
    switch (call.collective) {
      case Collective::all_reduce: all_reduce_parts(call, output); break;
      case Collective::reduce_scatter: reduce_part(call, call.count, output); break;
      case Collective::all_gather: gather(call, output); break;
      case Collective::broadcast:
        if (rank() != call.root) copy(output, group_->arrival(call.root).output, bytes(call));
        break;
      case Collective::all_to_all: exchange(call, output); break;
      case Collective::barrier: break;
    }
  }

  // Every rank sees the same arrivals and comes to the same answer.
  void compare() const {
    for (int other = 1; other < size(); ++other) {
      if (group_->arrival(other).fingerprint == group_->arrival(0).fingerprint) continue;
      std::string calls;
      for (int r = 0; r < size(); ++r) {
        calls += fmt::format("{}rank {}: {}", r == 0 ? "" : "; ", r, group_->arrival(r).call);
      }
      const std::string reason = fmt::format(
          "ranks disagree at collective number {}: {}. All ranks must make the same calls in the "
          "same "
          "order; do they run the same model on the same number of batches?",
          sequence_ - 1, calls);
      group_->abort(reason);
      fail("{}", reason);
    }
  }

  static std::size_t bytes(const Call& call) {
    return static_cast<std::size_t>(call.count) * call.element_bytes();
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
    reduce_in_tree(sources, to, count, call.dtype, call.op);
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
    group_->meet();
    for (int r = 0; r < size(); ++r) {
      const auto offset = static_cast<std::size_t>(begin_of(r)) * width;
      const auto size_of_range = static_cast<std::size_t>(begin_of(r + 1) - begin_of(r)) * width;
      if (r != rank())
        copy(bytes_of_data + offset, at(group_->arrival(r).output, offset), size_of_range);
    }
  }

  void gather(const Call& call, void* output) const {
    for (int r = 0; r < size(); ++r) {
      copy(static_cast<std::byte*>(output) + static_cast<std::size_t>(r) * bytes(call),
           group_->arrival(r).input, bytes(call));
    }
  }

  void exchange(const Call& call, void* output) const {
    for (int r = 0; r < size(); ++r) {
      copy(static_cast<std::byte*>(output) + static_cast<std::size_t>(r) * bytes(call),
           at(group_->arrival(r).input, static_cast<std::size_t>(rank()) * bytes(call)),
           bytes(call));
    }
  }

  std::shared_ptr<Group> group_;
  std::int64_t sequence_ = 0;
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

std::unique_ptr<Communicator> make_self_communicator() {
  return std::move(make_thread_communicators(1).front());
}

}  // namespace sherd
