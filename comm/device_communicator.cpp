// SPDX-License-Identifier: Apache-2.0
#include <sherd/comm/device_communicator.h>
#include <sherd/comm/nccl_communicator.h>
#include <sherd/runtime/cuda/device.h>
#include <sherd/runtime/error.h>

namespace sherd {
namespace {

// A rank alone: what it sends it gets.
class LoneCommunicator final : public Communicator {
 public:
  LoneCommunicator(Communicator& host, Stream& stream)
      : Communicator(0, 1), host_(host), stream_(stream) {}

  std::string_view backend() const override { return "one GPU"; }
  void abort(const std::string& reason) override { host_.abort(reason); }
  std::string end_reason() const override { return host_.end_reason(); }

 private:
  std::unique_ptr<Communicator> make_group(std::span<const int>, std::string_view) override {
    return std::make_unique<LoneCommunicator>(host_, stream_);
  }
