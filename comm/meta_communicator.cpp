// SPDX-License-Identifier: Apache-2.0
// A communicator that only counts.
#include <sherd/comm/communicator.h>
#include <sherd/runtime/error.h>
#include <sherd/runtime/schedule.h>

#include <algorithm>
#include <mutex>

namespace sherd {
namespace {

// Why a group on paper has ended; an abort reaches the groups made from it.
struct PaperGroup {
  std::shared_ptr<PaperGroup> parent;
  std::mutex mutex;
  std::string reason;

  std::string end_reason() {
    {
      const std::lock_guard lock(mutex);
      if (!reason.empty()) return reason;
    }
    return parent ? parent->end_reason() : std::string();
  }
};

class MetaCommunicator final : public Communicator {
 public:
  MetaCommunicator(int rank, const RankGroup& ranks, std::shared_ptr<PaperGroup> parent,
                   Schedule* schedule)
      : Communicator(rank, ranks.size),
        group_(std::make_shared<PaperGroup>()),
        ranks_(ranks),
        schedule_(schedule) {
    group_->parent = std::move(parent);
  }

  std::string_view backend() const override { return "paper"; }
  bool on_paper() const override { return true; }
  void abort(const std::string& reason) override {
    const std::lock_guard lock(group_->mutex);
    if (group_->reason.empty()) group_->reason = reason;
  }
  std::string end_reason() const override { return group_->end_reason(); }

 private:
  void run(const Call& call, const void*, void*) override {
    const std::string reason = end_reason();
    if (!reason.empty()) fail("{}", reason);
    if (schedule_ == nullptr) return;
    const bool whole = call.collective == Collective::all_gather ||
                       call.collective == Collective::reduce_scatter ||
                       call.collective == Collective::all_to_all;
    schedule_->add({.kind = Work::Kind::collective,
                    .name = name_of(call.collective),
                    .dtype = call.dtype,
                    .bytes = static_cast<std::int64_t>(call.bytes()) * (whole ? size() : 1),
                    .group = ranks_});
  }

  std::unique_ptr<Communicator> make_group(std::span<const int> members,
                                           std::string_view label) override {
    all_gather(nullptr, nullptr, 2, DType::i64, label);  // as where there are other ranks to ask
    const auto place = std::ranges::find(members, rank()) - members.begin();
    RankGroup ranks{.first = ranks_.first + members[0] * ranks_.stride,
                    .size = static_cast<int>(members.size())};
    if (ranks.size > 1) ranks.stride = (members[1] - members[0]) * ranks_.stride;
    return std::make_unique<MetaCommunicator>(static_cast<int>(place), ranks, group_, schedule_);
  }

  std::shared_ptr<PaperGroup> group_;
  RankGroup ranks_;
  Schedule* schedule_;
};

}  // namespace

std::unique_ptr<Communicator> make_meta_communicator(int rank, int size, Schedule* schedule) {
  return std::make_unique<MetaCommunicator>(rank, RankGroup{.size = size}, nullptr, schedule);
}

}  // namespace sherd
