// SPDX-License-Identifier: Apache-2.0
// Communicators that move nothing of their own: one that only counts, one that breaks another.
#include <sherd/comm/communicator.h>
#include <sherd/runtime/error.h>

#include <chrono>
#include <thread>

namespace sherd {
namespace {

class MetaCommunicator final : public Communicator {
 public:
  MetaCommunicator(int rank, int size) : Communicator(rank, size) {}
  void abort(const std::string& reason) override { reason_ = reason; }

  std::unique_ptr<Communicator> split(int, std::string_view label) override {
    fail(
        "split for '{}': a group on paper cannot ask other ranks for their colors; make a meta "
        "communicator of the size wanted",
        label);
  }

 private:
  void run(const Call&, const void*, void*) override {
    if (!reason_.empty()) fail("{}", reason_);
  }
  std::string reason_;
};

class FaultyCommunicator final : public Communicator {
 public:
  FaultyCommunicator(std::unique_ptr<Communicator> inner, std::vector<Fault> faults)
      : Communicator(inner->rank(), inner->size()),
        inner_(std::move(inner)),
        faults_(std::move(faults)) {}
  void abort(const std::string& reason) override { inner_->abort(reason); }

  // The new group has no faults; wrap it too where they are wanted.
  std::unique_ptr<Communicator> split(int color, std::string_view label) override {
    return inner_->split(color, label);
  }

 private:
  void run(const Call& call, const void* input, void* output) override {
    std::string label(call.label);
    for (const Fault& fault : faults_) {
      if (fault.call >= 0 && fault.call != next_) continue;
      switch (fault.kind) {
        case Fault::Kind::delay:
          std::this_thread::sleep_for(std::chrono::duration<double>(fault.delay_seconds));
          break;
        case Fault::Kind::fail: fail("rank {}: {}", rank(), fault.reason);
        case Fault::Kind::different_label: label += " (other)"; break;
      }
    }
    ++next_;
    switch (call.collective) {
      case Collective::all_reduce:
        inner_->all_reduce(output, call.count, call.dtype, call.op, label);
        break;
      case Collective::reduce_scatter:
        inner_->reduce_scatter(input, output, call.count, call.dtype, call.op, label);
        break;
      case Collective::all_gather:
        inner_->all_gather(input, output, call.count, call.dtype, label);
        break;
      case Collective::broadcast:
        inner_->broadcast(output, call.count, call.dtype, call.root, label);
        break;
      case Collective::all_to_all:
        inner_->all_to_all(input, output, call.count, call.dtype, label);
        break;
      case Collective::barrier: inner_->barrier(label); break;
    }
  }

  std::unique_ptr<Communicator> inner_;
  std::vector<Fault> faults_;
  std::int64_t next_ = 0;
};

}  // namespace

std::unique_ptr<Communicator> make_meta_communicator(int rank, int size) {
  return std::make_unique<MetaCommunicator>(rank, size);
}

std::unique_ptr<Communicator> make_faulty_communicator(std::unique_ptr<Communicator> inner,
                                                       std::vector<Fault> faults) {
  return std::make_unique<FaultyCommunicator>(std::move(inner), std::move(faults));
}

}  // namespace sherd
