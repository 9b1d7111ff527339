// SPDX-License-Identifier: Apache-2.0
#include <sherd/comm/device_communicator.h>
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
  void run(const Call& call, const void* input, void* output) override {
    if (call.collective == Collective::barrier || input == output) return;
    SHERD_INTERNAL_CHECK(call.result() == call.dtype, "{}: not yet", call.describe());
    cuda::copy(stream_, output, input, call.bytes());
  }

  Communicator& host_;
  Stream& stream_;
};

}  // namespace

std::unique_ptr<Communicator> make_device_communicator(Communicator& host, Context& context,
                                                       Stream& stream, bool) {
  SHERD_CHECK(host.size() == 1, "device {}: several ranks need NCCL", name_of(context.device()));
  return std::make_unique<LoneCommunicator>(host, stream);
}

}  // namespace sherd
