// SPDX-License-Identifier: Apache-2.0
// Note [MPI messages]
// A group is a list of processes and a number of its own, from which its tags come; no MPI
// communicator is made for it, because making and freeing one is a meeting of all its ranks, and
// Sherd's groups may be let go by each rank for itself. Data goes through buffers of bounded size
// that belong to the group: a rank that gives up may free its own memory at once, and what MPI
// still moves goes on in memory that is kept (MpiWorld::keep).
//
// A rank that fails, or leaves, says so to the others in a notice. Whoever waits looks for notices
// now and then, those of the groups its own was split from too.
#include <sherd/comm/backoff.h>
#include <sherd/comm/disagreement.h>
#include <sherd/comm/mpi.h>
#include <sherd/comm/mpi_group.h>
#include <sherd/comm/mpi_world.h>
#include <sherd/comm/shared_communicator.h>
#include <sherd/comm/staged_communicator.h>
#include <sherd/runtime/error.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>

namespace sherd {
namespace {

constexpr std::size_t kMemory = 4 << 20;          // of all inboxes of a group, in bytes
constexpr std::size_t kMessagePiece = 256 << 10;  // of a message from one rank to another
constexpr std::size_t kText = 240;

struct Described {
  std::uint64_t fingerprint = 0;
  std::int64_t collectives = 0;  // this rank has begun
  char text[kText] = {};
};

// Numbers of groups: those of all ranks come in order on every rank; a split takes one of its first
// member, which no other process gives.
constexpr int kGroupsOfOneProcess = 4096;
std::atomic<int> groups_of_all{0}, groups_made_here{0};

int next_number(std::atomic<int>& counter) {
  const int number = counter++;
  SHERD_CHECK(number < kGroupsOfOneProcess,
              "more than {} groups of ranks from one process: make them once and keep them",
              kGroupsOfOneProcess);
  return number;
}

class MessageCommunicator final : public StagedCommunicator {
 public:
  MessageCommunicator(std::shared_ptr<MessageGroup> group, int rank)
      : StagedCommunicator(rank, group->size()),
        group_(std::move(group)),
        capacity_(std::clamp<std::size_t>(kMemory / ranks(), 64 << 10, 1 << 20)),
        memory_(inbox_place(size()) + kMessagePiece + (ranks() + 1) * sizeof(Described)),
        sent_(ranks()),
        received_(ranks()),
        talks_(ranks()) {}

  ~MessageCommunicator() override {
    try {
      for (int r = 0; r < size(); ++r) {
        if (r != rank())
          group_->tell(r, {Notice::Kind::left, collectives_, sent_[index(r)], received_[index(r)]},
                       "");
      }
    } catch (const Error&) {
      // MPI fails; the end of the process tells the others.
    }
  }

  std::string_view backend() const override { return "MPI messages"; }
  void abort(const std::string& reason) override { group_->end(reason); }
  std::string end_reason() const override { return group_->end_reason(); }

 private:
  using Requests = std::vector<MpiWorld::Request>;
  static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }
  std::size_t ranks() const { return index(size()); }
  static MpiWorld& world() { return MpiWorld::get(); }

  std::unique_ptr<Communicator> make_group(std::span<const int> members,
                                           std::string_view label) override {
    check_partition(members, label);
    const std::int64_t mine =
        rank() == members.front()
            ? (1 + world().rank()) * kGroupsOfOneProcess + next_number(groups_made_here)
            : 0;
    std::vector<std::int64_t> numbers(ranks());
    all_gather(&mine, numbers.data(), 1, DType::i64, label);
    std::vector<int> processes;
    for (const int r : members) processes.push_back(group_->process(r));
    const auto place = std::ranges::find(members, rank()) - members.begin();
    return std::make_unique<MessageCommunicator>(
        std::make_shared<MessageGroup>(static_cast<int>(numbers[index(members.front())]),
                                       static_cast<int>(place), std::move(processes), group_),
        static_cast<int>(place));
  }

  // The memory: outbox, inboxes, a piece of a message, and descriptions: of every rank, mine.
  std::size_t inbox_place(int rank) const { return (1 + index(rank)) * capacity_; }
  std::byte* message_piece() { return memory_.data() + inbox_place(size()); }
  std::byte* described(int rank) {  // size(): mine
    return message_piece() + kMessagePiece + index(rank) * sizeof(Described);
  }
  Described description(int rank) {
    Described result;
    std::memcpy(&result, described(rank), sizeof result);
    return result;
  }
  Described describe_mine(const Call& call) {
    Described mine;
    mine.fingerprint = call.fingerprint();
    mine.collectives = collectives_;
    const std::string text = call.describe();
    std::memcpy(mine.text, text.data(), std::min(text.size(), kText - 1));
    std::memcpy(described(size()), &mine, sizeof mine);
    return mine;
  }

  void send(Requests& requests, const std::byte* data, std::size_t bytes, int to, Traffic traffic) {
    requests.push_back(world().send(data, bytes, group_->process(to), group_->tag(traffic)));
  }
  void receive(Requests& requests, std::byte* data, std::size_t bytes, int from, Traffic traffic) {
    requests.push_back(world().receive(data, bytes, group_->process(from), group_->tag(traffic)));
  }

  // Waits until these messages are done, or the group has ended.
  void finish(const Call& call, Requests requests) {
    finish(call, requests, [] { return true; });
  }
  // ... and `ready`.
  template <typename Ready>
  void finish(const Call& call, Requests& requests, const Ready& ready) {
    try {
      for (Backoff backoff(world().crowded()); !(done(requests) && ready()); backoff.pause()) {
        if (!backoff.time_for_a_check()) continue;
        group_->throw_if_ended();
        end_if_left(call);
        if (!call.is_message()) end_if_stuck(call);
      }
    } catch (const Error& error) {
      group_->end(error.what());  // where MPI itself failed
      for (MpiWorld::Request& request : requests) request.cancel();
      world().keep(std::move(memory_), std::move(requests));  // nothing is started any more
      throw;
    }
  }

  static bool done(Requests& requests) {
    std::erase_if(requests, [](MpiWorld::Request& request) { return request.done(); });
    return requests.empty();
  }

  // A rank that left before it came to this call will never come.
  void end_if_left(const Call& call) {
    for (int r = 0; r < size(); ++r) {
      if (call.is_message() && r != call.root) continue;
      const std::optional<Notice> left = group_->left(r);
      if (!left) continue;
      const std::int64_t reached = call.collective == Collective::send   ? left->received
                                   : call.collective == Collective::recv ? left->sent
                                                                         : left->collectives;
      if (reached > call.sequence) continue;
      group_->throw_if_ended();  // perhaps it left because something larger has ended
      group_->end(left_message(r, rank(), call.describe()));
      group_->throw_if_ended();
    }
  }

  // Takes what others say of the messages they are in.
  void take_talks() {
    std::vector<std::byte> data;
    int from = 0;
    while (world().take(group_->tag(Traffic::talk), data, from)) {
      Described talk;
      std::memcpy(&talk, data.data(), sizeof talk);
      talks_[index(group_->rank_of(from))].push_back(talk);
    }
  }

  // A rank that waits for this one in a message does not come to the collective this one waits in.
  void end_if_stuck(const Call& call) {
    take_talks();
    for (int r = 0; r < size(); ++r) {
      const auto& talks = talks_[index(r)];
      if (talks.empty() || talks.front().collectives > call.sequence) continue;
      group_->end(stuck_message(r, talks.front().text, rank(), call.describe()));
      group_->throw_if_ended();
    }
  }

  // All fingerprints to all; where they differ, the descriptions follow for the message.
  void begin(const Call& call) override {
    group_->throw_if_ended();
    collectives_ = call.sequence + 1;
    const Described mine = describe_mine(call);
    const auto pass_on = [&](std::size_t bytes) {
      Requests requests;
      for (int i = 1; i < size(); ++i) {
        const int to = (rank() + i) % size(), from = (rank() + size() - i) % size();
        receive(requests, described(from), bytes, from, Traffic::compare);
        send(requests, described(size()), bytes, to, Traffic::compare);
      }
      finish(call, std::move(requests));
      std::memcpy(described(rank()), described(size()), bytes);
    };
    pass_on(sizeof mine.fingerprint);
    bool equal = true;
    for (int r = 0; r < size(); ++r) {
      equal = equal && description(r).fingerprint == mine.fingerprint;
    }
    if (equal) return;
    pass_on(sizeof mine);
    std::vector<std::string> calls;
    for (int r = 0; r < size(); ++r) calls.emplace_back(description(r).text);
    group_->end(disagreement(call.sequence, calls));
    group_->throw_if_ended();
  }

  std::size_t capacity() const override { return capacity_; }
  std::byte* outbox() override { return memory_.data(); }
  const std::byte* inbox(int from) const override { return memory_.data() + inbox_place(from); }

  void swap(const Call& call, const Round& round) override {
    if (call.collective == Collective::barrier) return;  // who has all fingerprints has met all
    Requests requests;
    for (int i = 1; i < size(); ++i) {
      const int to = (rank() + i) % size(), from = (rank() + size() - i) % size();
      if (round.only_from < 0 || round.only_from == from)
        receive(requests, memory_.data() + inbox_place(from), round.bytes, from, Traffic::data);
      if (round.only_from >= 0 && round.only_from != rank()) continue;
      const std::size_t offset = round.pieces ? index(to) * round.bytes : 0;
      send(requests, memory_.data() + offset, round.bytes, to, Traffic::data);
    }
    finish(call, std::move(requests));
  }

  void pass_message(const Call& call, const void* input, void* output) override {
    group_->throw_if_ended();
    const bool sends = call.collective == Collective::send;
    compare_message(call, sends);
    const std::size_t bytes = call.bytes();
    for (std::size_t offset = 0; offset < bytes; offset += kMessagePiece) {
      const std::size_t length = std::min(kMessagePiece, bytes - offset);
      Requests requests;
      if (sends) {
        std::memcpy(message_piece(), static_cast<const std::byte*>(input) + offset, length);
        send(requests, message_piece(), length, call.root, Traffic::talk_data);
      } else {
        receive(requests, message_piece(), length, call.root, Traffic::talk_data);
      }
      finish(call, std::move(requests));
      if (!sends) std::memcpy(static_cast<std::byte*>(output) + offset, message_piece(), length);
    }
    ++(sends ? sent_ : received_)[index(call.root)];
  }

  void compare_message(const Call& call, bool sends) {
    const Described mine = describe_mine(call);
    Requests requests;
    send(requests, described(size()), sizeof mine, call.root, Traffic::talk);
    std::deque<Described>& talks = talks_[index(call.root)];
    finish(call, requests, [&] {
      take_talks();
      return !talks.empty();
    });
    const Described theirs = talks.front();
    talks.pop_front();
    const bool they_send = std::string_view(theirs.text).starts_with(name_of(Collective::send));
    const int low = std::min(rank(), call.root), high = std::max(rank(), call.root);
    const auto text = [&](int r) { return r == rank() ? mine.text : theirs.text; };
    if (they_send == sends) group_->end(stuck_message(low, text(low), high, text(high)));
    if (theirs.fingerprint != mine.fingerprint) {
      const int from = sends ? rank() : call.root, to = sends ? call.root : rank();
      group_->end(message_disagreement(call.sequence, from, text(from), to, text(to)));
    }
    if (they_send == sends || theirs.fingerprint != mine.fingerprint) group_->throw_if_ended();
  }

  std::shared_ptr<MessageGroup> group_;
  std::size_t capacity_;
  std::vector<std::byte> memory_;
  std::int64_t collectives_ = 0;
  std::vector<std::int64_t> sent_, received_;  // messages, by other rank
  std::vector<std::deque<Described>> talks_;   // by other rank: what it waits in, not answered yet
};

std::unique_ptr<Communicator> make_message_communicator() {
  const MpiWorld& world = MpiWorld::get();
  std::vector<int> processes;
  for (int r = 0; r < world.size(); ++r) processes.push_back(r);
  auto group = std::make_shared<MessageGroup>(next_number(groups_of_all), world.rank(),
                                              std::move(processes), nullptr);
  return std::make_unique<MessageCommunicator>(std::move(group), world.rank());
}

}  // namespace

bool mpi_built() {
  return true;
}

bool mpi_started() {
  return MpiWorld::started();
}

MpiTransport mpi_automatic_transport() {
  return MpiWorld::get().one_machine() ? MpiTransport::shared : MpiTransport::messages;
}

std::unique_ptr<Communicator> make_mpi_communicator(MpiTransport transport) {
  const bool automatic = transport == MpiTransport::automatic;
  if (automatic) transport = mpi_automatic_transport();
  auto messages = make_message_communicator();
  if (transport == MpiTransport::messages) return messages;
  if (automatic) {
    // Containers of one machine may not see each other's memory; all ranks come to know it
    // together.
    try {
      return make_shared_communicator(*messages, [] { MpiWorld::get().expect_trouble(); });
    } catch (const Error&) {
      if (!messages->end_reason().empty()) throw;
      return messages;
    }
  }
  SHERD_CHECK(MpiWorld::get().one_machine(),
              "the transport `shared` is for ranks on one machine, and these {} are on several: "
              "use `messages`",
              messages->size());
  return make_shared_communicator(*messages, [] { MpiWorld::get().expect_trouble(); });
}

}  // namespace sherd
