// SPDX-License-Identifier: Apache-2.0
// Note [Shared memory]
// A group has one region: why it ended, and for every rank a slot, an outbox in two halves and a
// buffer for messages. Ranks meet by counting: a rank that comes to meeting m stores m in its slot
// and waits until every slot has it. What is written before meeting m goes to half m % 2, so it is
// read after m and overwritten only after m + 1, where every reader has been.
//
// The region is a memfd that the first rank makes and the others open through /proc. Unlike an MPI
// window it is let go by each rank for itself: freeing a window is a meeting of all ranks, which
// never comes about when one has failed or lets its groups go in another order. It has no name to
// be left behind, and MPI is not called while ranks meet.
#pragma once

#include <sherd/comm/communicator.h>

#include <atomic>
#include <functional>

namespace sherd {

inline constexpr std::size_t kHalf = 1 << 20;          // of an outbox, in bytes
inline constexpr std::size_t kMessageHalf = 64 << 10;  // of the buffer for messages
inline constexpr std::size_t kText = 240, kReason = 16 << 10;

// Copies what fits, and ends it with a zero.
void put_text(char* to, std::size_t size, std::string_view text);

struct Described {
  std::uint64_t fingerprint;
  char text[kText];
};

struct alignas(64) Slot {
  std::atomic<std::uint64_t> meeting;  // the last one this rank came to
  std::atomic<bool> left;
  // The message this rank is in: see talk_of(). 0: none.
  alignas(64) std::atomic<std::uint64_t> talk;
  std::atomic<std::uint64_t> posted, taken;  // pieces of messages this rank sent, in all
  std::uint64_t first_piece;                 // of the message it sends
  Described message;
  Described calls[2];  // by collective number % 2
};

// A message by its number among those of the two ranks, its other rank, and who sends.
inline std::uint64_t talk_of(std::int64_t sequence, int peer, bool sends) {
  return (static_cast<std::uint64_t>(sequence) + 1) << 21 | static_cast<std::uint64_t>(peer) << 1 |
         static_cast<std::uint64_t>(sends);
}

struct Front {
  std::uint64_t token;         // proves that a rank opened the right memory
  std::atomic<int> end_state;  // 0: alive, 1: the reason is being written, 2: ended
  char reason[kReason];
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

inline constexpr std::size_t kFrontBytes = (sizeof(Front) + 4095) / 4096 * 4096;

class Region {
 public:
  Region(int fd, int ranks, std::shared_ptr<Region> parent, std::function<void()> on_end);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  static std::size_t slots_bytes(std::size_t ranks) {
    return (ranks * sizeof(Slot) + 4095) / 4096 * 4096;
  }
  static std::size_t bytes_for(int ranks) {
    const auto n = static_cast<std::size_t>(ranks);
    return kFrontBytes + slots_bytes(n) + n * 2 * (kHalf + kMessageHalf);
  }

  int size() const { return static_cast<int>(ranks_); }
  const std::function<void()>& on_end() const { return on_end_; }
  bool crowded() const { return crowded_; }  // see Backoff
  Front& front() const { return *reinterpret_cast<Front*>(base_); }
  Slot& slot(int rank) const {
    return reinterpret_cast<Slot*>(base_ + kFrontBytes)[static_cast<std::size_t>(rank)];
  }
  std::byte* outbox(int rank, std::uint64_t meeting) const {
    return buffers() + (static_cast<std::size_t>(rank) * 2 + meeting % 2) * kHalf;
  }
  std::byte* message(int rank, std::uint64_t piece) const {
    return buffers() + ranks_ * 2 * kHalf +
           (static_cast<std::size_t>(rank) * 2 + piece % 2) * kMessageHalf;
  }

  void end(const std::string& reason) const;
  std::string end_reason() const;  // a group ends with the one it was split from
  void throw_if_ended() const;

 private:
  std::byte* buffers() const { return base_ + kFrontBytes + slots_bytes(ranks_); }

  std::shared_ptr<Region> parent_;
  std::function<void()> on_end_;
  std::size_t ranks_, bytes_;
  bool crowded_;
  std::byte* base_ = nullptr;
};

// The region of these ranks of `others`, all of whom call this together, each with its own group.
// Throws the same on every rank where one of them cannot have it.
std::shared_ptr<Region> make_region(Communicator& others, std::span<const int> members,
                                    std::shared_ptr<Region> parent,
                                    const std::function<void()>& on_end, std::string_view label);

}  // namespace sherd
