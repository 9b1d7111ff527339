// SPDX-License-Identifier: Apache-2.0
#include <sherd/comm/device_communicator.h>
#include <sherd/comm/nccl_communicator.h>
#include <sherd/comm/nccl_reduce.h>
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
    if (call.result() != call.dtype)
      return reduce_in_tree(stream_, {input, nullptr, 0, 0, 1}, output, call.count, call.dtype,
                            call.result(), call.op);
    cuda::copy(stream_, output, input, call.bytes());
  }

  Communicator& host_;
  Stream& stream_;
};

}  // namespace

std::size_t device_staging_bytes(int ranks) {
  return ranks > 1 ? NcclOptions().staging_bytes : 0;
}

std::unique_ptr<Communicator> make_device_communicator(Communicator& host, Context& context,
                                                       Stream& stream, bool exact_sums) {
  if (host.size() == 1) return std::make_unique<LoneCommunicator>(host, stream);
  return make_nccl_communicator(
      host, context.device_index(), stream,
      {.exact_sums = exact_sums, .allocator = context.shared_allocator(MemoryPool::device)});
}

}  // namespace sherd
