// SPDX-License-Identifier: Apache-2.0
#include <sherd/comm/mpi_group.h>
#include <sherd/runtime/error.h>

#include <algorithm>
#include <cstring>

namespace sherd {
namespace {

constexpr std::size_t kReason = 4096;  // bytes of a reason that others are told

}  // namespace

MessageGroup::MessageGroup(int number, int rank, std::vector<int> processes,
                           std::shared_ptr<MessageGroup> parent)
    : number_(number),
      rank_(rank),
      processes_(std::move(processes)),
      parent_(std::move(parent)),
      left_(processes_.size()) {
  const int last = tag(Traffic::notice);
  SHERD_CHECK(last <= MpiWorld::get().largest_tag(),
              "a group needs the tag {} and MPI has tags up to {}: too many groups of ranks", last,
              MpiWorld::get().largest_tag());
}

int MessageGroup::rank_of(int process) const {
  return static_cast<int>(std::ranges::find(processes_, process) - processes_.begin());
}

void MessageGroup::end(const std::string& reason) {
  {
    const std::lock_guard lock(mutex_);
    if (!reason_.empty()) return;  // the first reason is the cause
    reason_ = reason;
  }
  MpiWorld::get().expect_trouble();
  for (int r = 0; r < size(); ++r) {
    if (r != rank_) tell(r, {.kind = Notice::Kind::ended}, reason.substr(0, kReason));
  }
}

void MessageGroup::tell(int rank, const Notice& notice, const std::string& reason) const {
  std::vector<std::byte> memory(sizeof notice + reason.size());
  std::memcpy(memory.data(), &notice, sizeof notice);
  if (!reason.empty()) std::memcpy(memory.data() + sizeof notice, reason.data(), reason.size());
  const MpiWorld::Request request =
      MpiWorld::get().send(memory.data(), memory.size(), process(rank), tag(Traffic::notice));
  MpiWorld::get().keep(std::move(memory), {request});
}

std::string MessageGroup::end_reason() {
  read_notices();
  {
    const std::lock_guard lock(mutex_);
    if (!reason_.empty()) return reason_;
  }
  return parent_ ? parent_->end_reason() : std::string();
}

void MessageGroup::throw_if_ended() {
  const std::string reason = end_reason();
  if (!reason.empty()) fail("{}", reason);
}

std::optional<Notice> MessageGroup::left(int rank) {
  const std::lock_guard lock(mutex_);
  return left_[static_cast<std::size_t>(rank)];
}

void MessageGroup::read_notices() {
  const std::lock_guard lock(mutex_);
  std::vector<std::byte> data;
  int from = 0;
  while (MpiWorld::get().take(tag(Traffic::notice), data, from)) {
    Notice notice;
    std::memcpy(&notice, data.data(), sizeof notice);
    if (notice.kind == Notice::Kind::ended) {
      MpiWorld::get().expect_trouble();
      if (reason_.empty())
        reason_.assign(reinterpret_cast<const char*>(data.data()) + sizeof notice,
                       data.size() - sizeof notice);
    } else {
      left_[static_cast<std::size_t>(rank_of(from))] = notice;
    }
  }
}

}  // namespace sherd
