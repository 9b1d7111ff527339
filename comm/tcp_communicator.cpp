// SPDX-License-Identifier: Apache-2.0
// Rounds of collectives over TCP. A call begins with a description to and from every other rank;
// when they agree, both sides know what bytes follow on each connection, and these go without
// heads.
#include <sherd/comm/disagreement.h>
#include <sherd/comm/staged_communicator.h>
#include <sherd/comm/tcp_communicator.h>
#include <sherd/comm/tcp_world.h>
#include <sherd/runtime/error.h>

#include <algorithm>
#include <cmath>
#include <cstring>

namespace sherd {
namespace {

constexpr std::size_t kMemory = 4 << 20;  // of all inboxes of a group, in bytes
constexpr std::size_t kText = 240;

struct Described {
  std::uint64_t fingerprint = 0;
  std::uint64_t message = 0;  // or a collective
  char text[kText] = {};
};

struct TcpGroup {
  std::shared_ptr<TcpWorld> world;
  std::shared_ptr<TcpGroup> parent;
  std::uint64_t number = 0;
  std::vector<int> processes;  // by rank
  TcpLinks links;

  void end(const std::string& reason) const { world->end(number, processes, reason); }
  std::string end_reason() const {  // a group ends with the one it was split from
    const std::string mine = world->end_reason(number);
    return mine.empty() && parent ? parent->end_reason() : mine;
  }
  void throw_if_ended() const {
    const std::string reason = end_reason();
    if (!reason.empty()) fail("{}", reason);
  }
};

class TcpCommunicator final : public StagedCommunicator {
 public:
  TcpCommunicator(std::shared_ptr<TcpGroup> group, int rank)
      : StagedCommunicator(rank, static_cast<int>(group->processes.size())),
        group_(std::move(group)),
        capacity_(std::clamp<std::size_t>(kMemory / ranks(), 64 << 10, 1 << 20)),
        memory_((1 + ranks()) * capacity_),
        described_(ranks()) {}

  ~TcpCommunicator() override {
    group_->world->leave(group_->number, group_->processes);
    group_->links.clear();  // after the word: Note [TCP connections]
  }

  std::string_view backend() const override { return "TCP"; }
  void abort(const std::string& reason) override { group_->end(reason); }
  std::string end_reason() const override { return group_->end_reason(); }

 private:
  static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }
  std::size_t ranks() const { return index(size()); }

  // Bytes to and from one rank.
  struct Transfer {
    int rank;
    const std::byte* out = nullptr;
    std::size_t out_bytes = 0;
    std::byte* in = nullptr;
    std::size_t in_bytes = 0;
    bool done() const { return out_bytes == 0 && in_bytes == 0; }
  };
  using Transfers = std::vector<Transfer>;

  std::unique_ptr<Communicator> make_group(std::span<const int> members,
                                           std::string_view label) override {
    check_partition(members, label);
    try {
      return connect_group(members, label);
    } catch (const Error& error) {
      group_->end(error.what());  // where the others wait for this one
      group_->throw_if_ended();
      throw;
    }
  }

  std::unique_ptr<Communicator> connect_group(std::span<const int> members,
                                              std::string_view label) {
    TcpWorld& world = *group_->world;
    TcpSocket listener;
    std::int64_t mine[2] = {};  // the number of the group, of its first member; where I listen
    if (rank() == members.front()) mine[0] = static_cast<std::int64_t>(world.next_group());
    if (members.size() > 1) {
      listener = tcp_listen(world.listen_at());
      mine[1] = listener.here().port;
    }
    std::vector<std::int64_t> all(2 * ranks());
    all_gather(mine, all.data(), 2, DType::i64, label);
    auto group = std::make_shared<TcpGroup>();
    group->world = group_->world;
    group->parent = group_;
    group->number = static_cast<std::uint64_t>(all[2 * index(members.front())]);
    TcpMesh mesh;
    mesh.group = group->number;
    mesh.token = world.options().token;
    mesh.silence_seconds = world.options().silence_seconds;
    mesh.rank = static_cast<int>(std::ranges::find(members, rank()) - members.begin());
    for (const int r : members) {
      const int process = group_->processes[index(r)];
      group->processes.push_back(process);
      mesh.places.push_back({world.host(process), static_cast<int>(all[2 * index(r) + 1])});
    }
    if (members.size() > 1)
      group->links = std::move(
          connect_mesh(mesh, listener, 1, tcp_deadline(world.options().join_seconds), [&] {
            group_->throw_if_ended();
          }).front());
    return std::make_unique<TcpCommunicator>(std::move(group), mesh.rank);
  }

  // Moves all of it, or throws when the group has ended.
  void finish(const Call& call, Transfers transfers) {
    finish(call, std::move(transfers), [](int) {});
  }
  // ... and calls done(rank) for each as it comes to its end.
  template <typename Done>
  void finish(const Call& call, Transfers transfers, const Done& done) {
    std::vector<pollfd> sockets;
    while (true) {
      bool moved = false;
      for (Transfer& one : transfers) {
        moved = move_some(call, one) || moved;
        if (one.done()) done(one.rank);
      }
      std::erase_if(transfers, [](const Transfer& one) { return one.done(); });
      if (transfers.empty()) return;
      if (moved) continue;
      sockets.clear();
      for (const Transfer& one : transfers) {
        const int events = (one.in_bytes > 0 ? POLLIN : 0) | (one.out_bytes > 0 ? POLLOUT : 0);
        sockets.push_back({link(one.rank).fd(), static_cast<short>(events), 0});
      }
      const auto data = static_cast<std::ptrdiff_t>(sockets.size());
      group_->world->add_to(sockets);
      tcp_poll(sockets);
      // Data that came goes before notices: of a call that all have made the results are whole.
      if (std::none_of(sockets.begin(), sockets.begin() + data,
                       [](const pollfd& one) { return one.revents != 0; }))
        group_->throw_if_ended();
    }
  }

  const TcpSocket& link(int rank) const { return group_->links[index(rank)]; }

  bool move_some(const Call& call, Transfer& one) {
    std::ptrdiff_t in = 0, out = 0;
    if (one.in_bytes > 0) in = link(one.rank).receive_some(one.in, one.in_bytes);
    if (in == TcpSocket::kClosed) end_without(one.rank, call);
    one.in += in;
    one.in_bytes -= static_cast<std::size_t>(in);
    if (one.out_bytes > 0) out = link(one.rank).send_some(one.out, one.out_bytes);
    if (out == TcpSocket::kClosed) end_without(one.rank, call);
    one.out += out;
    one.out_bytes -= static_cast<std::size_t>(out);
    return in > 0 || out > 0;
  }

  // A rank's connection has ended: it has said why on the other one, or it is dead.
  [[noreturn]] void end_without(int left, const Call& call) {
    TcpWorld& world = *group_->world;
    const TcpDeadline patience = tcp_deadline(world.options().silence_seconds);
    while (!world.has_left(group_->number, group_->processes[index(left)]) &&
           std::chrono::steady_clock::now() < patience) {
      group_->throw_if_ended();
      std::vector<pollfd> sockets;
      world.add_to(sockets);
      tcp_poll(sockets);
    }
    group_->throw_if_ended();  // perhaps it left because something larger has ended
    group_->end(left_message(left, rank(), call.describe()));
    group_->throw_if_ended();
    fail("{}", call.describe());
  }

  Described describe(const Call& call) const {
    Described mine;
    mine.fingerprint = call.fingerprint();
    mine.message = call.is_message() ? 1 : 0;
    const std::string text = call.describe();
    std::memcpy(mine.text, text.data(), std::min(text.size(), kText - 1));
    return mine;
  }

  void begin(const Call& call) override {
    group_->throw_if_ended();
    const Described mine = describe(call);
    Transfers transfers;
    for (int i = 1; i < size(); ++i) {
      const int r = (rank() + i) % size();
      described_[index(r)] = {};
      transfers.push_back({r, reinterpret_cast<const std::byte*>(&mine), sizeof mine,
                           reinterpret_cast<std::byte*>(&described_[index(r)]), sizeof mine});
    }
    described_[index(rank())] = mine;
    // A rank that waits for this one in a message does not come to the collective.
    finish(call, std::move(transfers), [&](int r) {
      if (described_[index(r)].message != 0) end_stuck(r, described_[index(r)], call);
    });
    bool equal = true;
    for (const Described& other : described_)
      equal = equal && other.fingerprint == mine.fingerprint;
    if (equal) return;
    std::vector<std::string> calls;
    for (const Described& other : described_) calls.emplace_back(other.text);
    group_->end(disagreement(call.sequence, calls));
    group_->throw_if_ended();
  }

  std::size_t capacity() const override { return capacity_; }
  std::byte* outbox() override { return memory_.data(); }
  const std::byte* inbox(int from) const override {
    return memory_.data() + (1 + index(from)) * capacity_;
  }

  void swap(const Call& call, const Round& round) override {
    if (call.collective == Collective::barrier) return;  // who has all descriptions has met all
    Transfers transfers;
    for (int i = 1; i < size(); ++i) {
      Transfer one{.rank = (rank() + i) % size()};
      if (round.only_from < 0 || round.only_from == one.rank) {
        one.in = memory_.data() + (1 + index(one.rank)) * capacity_;
        one.in_bytes = round.bytes;
      }
      if (round.only_from < 0 || round.only_from == rank()) {
        one.out = memory_.data() + (round.pieces ? index(one.rank) * round.bytes : 0);
        one.out_bytes = round.bytes;
      }
      transfers.push_back(one);
    }
    finish(call, std::move(transfers));
  }

  void pass_message(const Call& call, const void* input, void* output) override {
    group_->throw_if_ended();
    const bool sends = call.collective == Collective::send;
    const Described mine = describe(call);
    Described& theirs = described_[index(call.root)];
    finish(call, {{call.root, reinterpret_cast<const std::byte*>(&mine), sizeof mine,
                   reinterpret_cast<std::byte*>(&theirs), sizeof mine}});
    const bool they_send = std::string_view(theirs.text).starts_with(name_of(Collective::send));
    if (theirs.message == 0 || they_send == sends) end_stuck(call.root, theirs, call);
    if (theirs.fingerprint != mine.fingerprint) {
      const int from = sends ? rank() : call.root, to = sends ? call.root : rank();
      const auto text = [&](int r) { return std::string(r == rank() ? mine.text : theirs.text); };
      group_->end(message_disagreement(call.sequence, from, text(from), to, text(to)));
      group_->throw_if_ended();
    }
    Transfer data{.rank = call.root};
    (sends ? data.out_bytes : data.in_bytes) = call.bytes();
    data.out = static_cast<const std::byte*>(input);
    data.in = static_cast<std::byte*>(output);
    finish(call, {data});
  }

  void end_stuck(int other, const Described& theirs, const Call& call) {
    group_->end(stuck_message(other, theirs.text, rank(), call.describe()));
    group_->throw_if_ended();
  }

  std::shared_ptr<TcpGroup> group_;
  std::size_t capacity_;
  std::vector<std::byte> memory_;     // the outbox, and an inbox of every rank
  std::vector<Described> described_;  // what every rank calls
};

}  // namespace

std::unique_ptr<Communicator> make_tcp_communicator(const TcpOptions& options) {
  SHERD_CHECK(options.size >= 1 && options.rank >= 0 && options.rank < options.size,
              "TCP: rank {} of {} ranks: expected 0 to size - 1", options.rank, options.size);
  SHERD_CHECK(options.token.size() < static_cast<std::size_t>(kTcpToken),
              "TCP: a token of {} bytes; it may have {}", options.token.size(), kTcpToken - 1);
  SHERD_CHECK(options.join_seconds > 0.0 && options.silence_seconds >= 1.0,
              "TCP: to wait {} s for the others, and {} s for a silent one: expected more than 0, "
              "and at least 1",
              options.join_seconds, options.silence_seconds);
  SHERD_CHECK(options.address.empty() != options.file.empty(),
              "TCP: the ranks need a place to meet: an address or a file, {}",
              options.file.empty() ? "and neither is given" : "not both");
  auto group = std::make_shared<TcpGroup>();
  for (int r = 0; r < options.size; ++r) group->processes.push_back(r);
  TcpMeeting meeting;
  meeting.hosts.resize(1);
  for (int layer = 0; layer < 2; ++layer) meeting.layers.emplace_back(1);
  if (options.size > 1) meeting = meet(options);
  group->links = std::move(meeting.layers[1]);
  group->world = std::make_shared<TcpWorld>(options, std::move(meeting.listen_at),
                                            std::move(meeting.hosts), std::move(meeting.layers[0]));
  return std::make_unique<TcpCommunicator>(std::move(group), options.rank);
}

}  // namespace sherd
