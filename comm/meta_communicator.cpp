// SPDX-License-Identifier: Apache-2.0
// A communicator that only counts.
#include <sherd/comm/communicator.h>
#include <sherd/runtime/error.h>

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
  MetaCommunicator(int rank, int size, std::shared_ptr<PaperGroup> parent)
      : Communicator(rank, size), group_(std::make_shared<PaperGroup>()) {
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
  void run(const Call&, const void*, void*) override {
    const std::string reason = end_reason();
    if (!reason.empty()) fail("{}", reason);
  }

  std::unique_ptr<Communicator> make_group(std::span<const int> members,
                                           std::string_view label) override {
    all_gather(nullptr, nullptr, 2, DType::i64, label);  // as where there are other ranks to ask
    const auto place = std::ranges::find(members, rank()) - members.begin();
    return std::make_unique<MetaCommunicator>(static_cast<int>(place),
                                              static_cast<int>(members.size()), group_);
  }

  std::shared_ptr<PaperGroup> group_;
};

}  // namespace

std::unique_ptr<Communicator> make_meta_communicator(int rank, int size) {
  return std::make_unique<MetaCommunicator>(rank, size, nullptr);
}

}  // namespace sherd
