// SPDX-License-Identifier: Apache-2.0
// What the processes of a group know of each other: whether it has ended and why, and who has left.
#pragma once

#include <sherd/comm/mpi_world.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace sherd {

struct Notice {
  enum class Kind : std::int32_t { ended, left };
  Kind kind = Kind::left;
  // Of a rank that left: the collectives it began, and the messages it passed on with the receiver.
  std::int64_t collectives = 0, sent = 0, received = 0;
};

enum class Traffic { compare, data, talk, talk_data, notice };
inline constexpr int kTraffics = 5;

// What the ranks of one group know of each other; groups split from it look at it too.
class MessageGroup {
 public:
  MessageGroup(int number, int rank, std::vector<int> processes,
               std::shared_ptr<MessageGroup> parent);

  int size() const { return static_cast<int>(processes_.size()); }
  int process(int rank) const { return processes_[static_cast<std::size_t>(rank)]; }
  int rank_of(int process) const;
  int tag(Traffic traffic) const { return number_ * kTraffics + static_cast<int>(traffic); }

  // Tells the others; the first reason is the cause.
  void end(const std::string& reason);
  void tell(int rank, const Notice& notice, const std::string& reason) const;
  std::string end_reason();  // a group ends with the one it was split from
  void throw_if_ended();
  std::optional<Notice> left(int rank);

 private:
  void read_notices();

  const int number_, rank_;
  const std::vector<int> processes_;
  const std::shared_ptr<MessageGroup> parent_;
  std::mutex mutex_;
  std::string reason_;
  std::vector<std::optional<Notice>> left_;
};

}  // namespace sherd
