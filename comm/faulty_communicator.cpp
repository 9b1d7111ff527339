// SPDX-License-Identifier: Apache-2.0
#include <sherd/comm/faulty_communicator.h>
#include <sherd/runtime/error.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <optional>
#include <thread>

namespace sherd {
namespace {

class FaultyCommunicator final : public Communicator {
 public:
  FaultyCommunicator(std::unique_ptr<Communicator> inner, std::vector<Fault> faults)
      : Communicator(inner->rank(), inner->size()),
        inner_(std::move(inner)),
        faults_(std::move(faults)),
        matched_(faults_.size()) {}
  std::string_view backend() const override { return inner_->backend(); }
  bool on_paper() const override { return inner_->on_paper(); }
  void abort(const std::string& reason) override { inner_->abort(reason); }
  std::string end_reason() const override { return inner_->end_reason(); }

 private:
  // A call that is done after the next one.
  struct Held {
    Call call;
    std::string label;
    const void* input;
    void* output;
  };

  std::unique_ptr<Communicator> make_group(std::span<const int> members,
                                           std::string_view label) override {
    std::vector<Fault> inherited;
    std::ranges::copy_if(faults_, std::back_inserter(inherited),
                         [](const Fault& fault) { return fault.call < 0 || !fault.label.empty(); });
    auto group = inner_->split(members, label);
    if (inherited.empty()) return group;
    return std::make_unique<FaultyCommunicator>(std::move(group), std::move(inherited));
  }

  void run(const Call& call, const void* input, void* output) override {
    std::string label(call.label);
    bool drops = false, holds = false;
    for (std::size_t i = 0; i < faults_.size(); ++i) {
      const Fault& fault = faults_[i];
      if (call.label.find(fault.label) == std::string_view::npos) continue;
      const std::int64_t number = matched_[i]++;
      if (fault.call >= 0 && fault.call != number) continue;
      switch (fault.kind) {
        case Fault::Kind::delay:
          std::this_thread::sleep_for(std::chrono::duration<double>(fault.delay_seconds));
          break;
        case Fault::Kind::fail: fail("rank {}: {}", rank(), fault.reason);
        case Fault::Kind::different_label: label += " (other)"; break;
        case Fault::Kind::drop: drops = true; break;
        case Fault::Kind::reorder: holds = true; break;
      }
    }
    if (drops) return;
    std::optional<Held> before = std::move(held_);
    held_.reset();
    if (holds) {
      held_ = Held{call, label, input, output};
    } else {
      pass_on(call, label, input, output);
    }
    if (before) pass_on(before->call, before->label, before->input, before->output);
  }

  void pass_on(const Call& call, const std::string& label, const void* input, void* output) {
    if (call.about != nullptr) {
      Call about = *call.about;
      about.label = label;
      return inner_->compare(about);
    }
    switch (call.collective) {
      case Collective::all_reduce:
        inner_->all_reduce(output, call.count, call.dtype, call.op, label);
        break;
      case Collective::reduce_scatter:
        if (call.wide) {
          inner_->reduce_scatter_wide(input, output, call.count, call.dtype, call.op, label);
        } else {
          inner_->reduce_scatter(input, output, call.count, call.dtype, call.op, label);
        }
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
      case Collective::send: inner_->send(input, call.count, call.dtype, call.root, label); break;
      case Collective::recv: inner_->recv(output, call.count, call.dtype, call.root, label); break;
    }
  }

  std::unique_ptr<Communicator> inner_;
  std::vector<Fault> faults_;
  std::vector<std::int64_t> matched_;  // by fault: calls so far whose label it matches
  std::optional<Held> held_;
};

}  // namespace

std::unique_ptr<Communicator> make_faulty_communicator(std::unique_ptr<Communicator> inner,
                                                       std::vector<Fault> faults) {
  return std::make_unique<FaultyCommunicator>(std::move(inner), std::move(faults));
}

}  // namespace sherd
