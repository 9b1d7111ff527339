// SPDX-License-Identifier: Apache-2.0
// Ranks that meet in memory they share; Note [Shared memory] is in shared_region.h.
#include <sherd/comm/backoff.h>
#include <sherd/comm/disagreement.h>
#include <sherd/comm/shared_communicator.h>
#include <sherd/comm/shared_region.h>
#include <sherd/comm/staged_communicator.h>
#include <sherd/runtime/error.h>

#include <algorithm>
#include <cstring>

namespace sherd {
namespace {

class SharedCommunicator final : public StagedCommunicator {
 public:
  SharedCommunicator(std::shared_ptr<Region> region, int rank)
      : StagedCommunicator(rank, region->size()),
        region_(std::move(region)),
        done_(static_cast<std::size_t>(size()) * 2) {}
  ~SharedCommunicator() override { my_slot().left.store(true, std::memory_order_release); }

  std::string_view backend() const override { return "shared memory"; }
  void abort(const std::string& reason) override { region_->end(reason); }
  std::string end_reason() const override { return region_->end_reason(); }

 private:
  Slot& my_slot() const { return region_->slot(rank()); }

  std::unique_ptr<Communicator> make_group(std::span<const int> members,
                                           std::string_view label) override {
    check_partition(members, label);
    const auto place = std::ranges::find(members, rank()) - members.begin();
    return std::make_unique<SharedCommunicator>(
        make_region(*this, members, region_, region_->on_end(), label), static_cast<int>(place));
  }

  static void describe(const Call& call, Described& to) {
    to.fingerprint = call.fingerprint();
    put_text(to.text, kText, call.describe());
  }

  void begin(const Call& call) override {
    region_->throw_if_ended();
    describe(call, my_slot().calls[call.sequence % 2]);
    to_compare_ = true;
  }

  std::size_t capacity() const override { return kHalf; }
  std::byte* outbox() override { return region_->outbox(rank(), meeting_ + 1); }
  const std::byte* inbox(int from) const override {
    return region_->outbox(from, meeting_) + my_piece_;
  }

  void swap(const Call& call, const Round& round) override {
    ++meeting_;
    my_slot().meeting.store(meeting_, std::memory_order_release);
    for (int r = 0; r < size(); ++r) {
      if (r == rank()) continue;
      const Slot& other = region_->slot(r);
      wait([&] { return other.meeting.load(std::memory_order_acquire) >= meeting_; },
           [&] { end_if_hopeless(call); });
    }
    my_piece_ = round.pieces ? static_cast<std::size_t>(rank()) * round.bytes : 0;
    if (to_compare_) compare(call);
    to_compare_ = false;
  }

  // Every rank sees the same calls and comes to the same answer.
  void compare(const Call& call) {
    const auto described = [&](int r) -> const Described& {
      return region_->slot(r).calls[call.sequence % 2];
    };
    const std::uint64_t mine = described(rank()).fingerprint;
    bool equal = true;
    for (int r = 0; r < size(); ++r) equal = equal && described(r).fingerprint == mine;
    if (equal) return;
    std::vector<std::string> calls;
    for (int r = 0; r < size(); ++r) calls.emplace_back(described(r).text);
    const std::string reason = disagreement(call.sequence, calls);
    abort(reason);
    fail("{}", reason);
  }

  // Waits for `ready`. Now and then `check` ends the group when that cannot come any more.
  template <typename Ready, typename Check>
  void wait(const Ready& ready, const Check& check) const {
    for (Backoff backoff(region_->crowded()); !ready(); backoff.pause()) {
      if (!backoff.time_for_a_check()) continue;
      check();
      if (!ready()) region_->throw_if_ended();
    }
  }

  // Ends the group when a rank that this meeting waits for has left it, or waits for this rank.
  void end_if_hopeless(const Call& call) const {
    for (int r = 0; r < size(); ++r) {
      const Slot& other = region_->slot(r);
      const bool left = other.left.load(std::memory_order_acquire);
      const std::uint64_t talk = other.talk.load(std::memory_order_acquire);
      if (r == rank() || other.meeting.load(std::memory_order_acquire) >= meeting_) continue;
      if (left) end_without(r, call);
      if (waits_for_me(r, talk))
        region_->end(stuck_message(r, other.message.text, rank(), call.describe()));
    }
  }

  // A rank has left. Perhaps because something larger has ended, which is then the cause.
  void end_without(int left, const Call& call) const {
    region_->throw_if_ended();
    region_->end(left_message(left, rank(), call.describe()));
  }

  // Messages passed on with another rank, in the direction in which this rank sends or not.
  std::int64_t& done(int peer, bool sends) {
    return done_[static_cast<std::size_t>(peer) * 2 + static_cast<std::size_t>(sends)];
  }

  // Whether this is a message with this rank that is not passed on yet.
  bool waits_for_me(int peer, std::uint64_t talk) const {
    if (talk == 0 || static_cast<int>(talk >> 1 & 0xfffff) != rank()) return false;
    const bool i_send = (talk & 1) == 0;
    return static_cast<std::int64_t>(talk >> 21) >
           done_[static_cast<std::size_t>(peer) * 2 + static_cast<std::size_t>(i_send)];
  }

  // In a message: waits for something the other rank does.
  template <typename Ready>
  void wait_for_peer(const Call& call, const Ready& ready) const {
    const Slot& peer = region_->slot(call.root);
    const bool sends = call.collective == Collective::send;
    wait(ready, [&] {
      const bool left = peer.left.load(std::memory_order_acquire);
      const std::uint64_t talk = peer.talk.load(std::memory_order_acquire);
      if (ready()) return;
      if (left) end_without(call.root, call);
      const bool same_side = (talk & 1) == static_cast<std::uint64_t>(sends);
      if (same_side && waits_for_me(call.root, talk))
        region_->end(stuck_message(call.root, peer.message.text, rank(), call.describe()));
    });
  }

  void pass_message(const Call& call, const void* input, void* output) override {
    region_->throw_if_ended();
    const bool sends = call.collective == Collective::send;
    Slot& mine = my_slot();
    describe(call, mine.message);
    mine.first_piece = mine.posted.load(std::memory_order_relaxed);
    mine.talk.store(talk_of(call.sequence, call.root, sends), std::memory_order_release);
    if (sends) {
      send_pieces(call, static_cast<const std::byte*>(input), mine);
    } else {
      receive_pieces(call, static_cast<std::byte*>(output), region_->slot(call.root));
    }
    ++done(call.root, sends);
    mine.talk.store(0, std::memory_order_release);
  }

  static std::uint64_t pieces_of(const Call& call) {
    return std::max<std::uint64_t>(1, (call.bytes() + kMessageHalf - 1) / kMessageHalf);
  }
  static std::size_t piece_bytes(const Call& call, std::uint64_t piece) {
    return std::min(kMessageHalf, call.bytes() - piece * kMessageHalf);
  }

  void send_pieces(const Call& call, const std::byte* data, Slot& mine) {
    const std::uint64_t first = mine.first_piece, pieces = pieces_of(call);
    const auto wait_for_taken = [&](std::uint64_t count) {
      wait_for_peer(call, [&] { return mine.taken.load(std::memory_order_acquire) >= count; });
    };
    for (std::uint64_t piece = 0; piece < pieces; ++piece) {
      if (piece >= 1) wait_for_taken(first + piece - 1);
      const std::size_t bytes = piece_bytes(call, piece);
      if (bytes > 0)
        std::memcpy(region_->message(rank(), first + piece), data + piece * kMessageHalf, bytes);
      mine.posted.store(first + piece + 1, std::memory_order_release);
    }
    wait_for_taken(first + pieces);
  }

  void receive_pieces(const Call& call, std::byte* data, Slot& theirs) {
    const std::uint64_t offer = talk_of(call.sequence, rank(), true);
    wait_for_peer(call, [&] { return theirs.talk.load(std::memory_order_acquire) == offer; });
    if (theirs.message.fingerprint != my_slot().message.fingerprint) {
      abort(message_disagreement(call.sequence, call.root, theirs.message.text, rank(),
                                 my_slot().message.text));
      region_->throw_if_ended();
    }
    const std::uint64_t first = theirs.first_piece;
    for (std::uint64_t piece = 0; piece < pieces_of(call); ++piece) {
      wait_for_peer(call,
                    [&] { return theirs.posted.load(std::memory_order_acquire) > first + piece; });
      const std::size_t bytes = piece_bytes(call, piece);
      if (bytes > 0)
        std::memcpy(data + piece * kMessageHalf, region_->message(call.root, first + piece), bytes);
      theirs.taken.store(first + piece + 1, std::memory_order_release);
    }
  }

  std::shared_ptr<Region> region_;
  std::uint64_t meeting_ = 0;
  std::size_t my_piece_ = 0;  // where this rank's block starts in the others' outboxes
  bool to_compare_ = false;
  std::vector<std::int64_t> done_;
};

}  // namespace

std::unique_ptr<Communicator> make_shared_communicator(Communicator& others,
                                                       std::function<void()> on_end) {
  std::vector<int> members;
  for (int r = 0; r < others.size(); ++r) members.push_back(r);
  return std::make_unique<SharedCommunicator>(
      make_region(others, members, nullptr, on_end, "shared memory"), others.rank());
}

}  // namespace sherd
