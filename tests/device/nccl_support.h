// SPDX-License-Identifier: Apache-2.0
// Ranks that are threads with a device and a context each, and collectives of host memory by way of
// the device, so that the checks of all backends run over NCCL too.
#pragma once

#include <sherd/comm/nccl_communicator.h>
#include <sherd/comm/rank_threads.h>
#include <sherd/runtime/context.h>
#include <sherd/runtime/cuda/device.h>

#include <functional>
#include <memory>

namespace sherd::test {

// Copies what a call reads to the device, makes the call there, and copies the result back. What
// lies in another buffer lies so on the device; addresses are not always multiples of 16.
class OnDevice final : public Communicator {
 public:
  OnDevice(Communicator& inner, Context& context, Stream& stream)
      : Communicator(inner.rank(), inner.size()),
        inner_(inner),
        context_(context),
        stream_(stream) {}
  std::string_view backend() const override { return inner_.backend(); }
  void abort(const std::string& reason) override { inner_.abort(reason); }
  std::string end_reason() const override { return inner_.end_reason(); }

 private:
  struct Buffer {
    Buffer(OnDevice& all, std::size_t bytes, std::size_t offset)
        : all_(all),
          block_(all.context_.allocator().allocate(bytes + offset + 1, MemoryCategory::workspace)),
          data(static_cast<std::byte*>(block_.data) + offset) {}
    ~Buffer() { all_.context_.allocator().release(block_, MemoryCategory::workspace, {}); }
    OnDevice& all_;
    MemoryBlock block_;
    std::byte* data;
  };

  std::unique_ptr<Communicator> make_group(std::span<const int> members,
                                           std::string_view label) override {
    groups_.push_back(inner_.split(members, label));
    return std::make_unique<OnDevice>(*groups_.back(), context_, stream_);
  }

  void run(const Call& call, const void* input, void* output) override {
    const auto ranks = static_cast<std::size_t>(size());
    const std::size_t piece = call.bytes();
    const std::size_t result = static_cast<std::size_t>(call.count) * size_of(call.result());
    std::size_t in = piece, out = result;
    switch (call.collective) {
      case Collective::reduce_scatter: in = ranks * piece; break;
      case Collective::all_gather: out = ranks * piece; break;
      case Collective::all_to_all: in = out = ranks * piece; break;
      case Collective::barrier: in = out = 0; break;
      case Collective::send: out = 0; break;
      case Collective::recv: in = 0; break;
      case Collective::all_reduce:
      case Collective::broadcast: break;
    }
    const auto *from = static_cast<const std::byte*>(input),
               *to = static_cast<const std::byte*>(output);
    const std::size_t offset = static_cast<std::size_t>(call.sequence % 3) * call.element_bytes();
    const bool out_in_in = in > 0 && out > 0 && to >= from && to + out <= from + in;
    const bool in_in_out = !out_in_in && in > 0 && out > 0 && from >= to && from + in <= to + out;
    Buffer first(*this, in_in_out ? out : in, offset), second(*this, out, offset);
    std::byte* const device_in = in_in_out ? first.data + (from - to) : first.data;
    std::byte* const device_out = out_in_in   ? first.data + (to - from)
                                  : in_in_out ? first.data
                                              : second.data;
    cuda::copy(stream_, device_in, input, in);
    call_on_device(call, device_in, device_out);
    cuda::copy(stream_, output, device_out, out);
    stream_.synchronize();
  }

  void call_on_device(const Call& call, const void* in, void* out) {
    switch (call.collective) {
      case Collective::all_reduce:
        return inner_.all_reduce(out, call.count, call.dtype, call.op, call.label);
      case Collective::reduce_scatter:
        if (call.wide)
          return inner_.reduce_scatter_wide(in, out, call.count, call.dtype, call.op, call.label);
        return inner_.reduce_scatter(in, out, call.count, call.dtype, call.op, call.label);
      case Collective::all_gather:
        return inner_.all_gather(in, out, call.count, call.dtype, call.label);
      case Collective::broadcast:
        return inner_.broadcast(out, call.count, call.dtype, call.root, call.label);
      case Collective::all_to_all:
        return inner_.all_to_all(in, out, call.count, call.dtype, call.label);
      case Collective::barrier: return inner_.barrier(call.label);
      case Collective::send: return inner_.send(in, call.count, call.dtype, call.root, call.label);
      case Collective::recv: return inner_.recv(out, call.count, call.dtype, call.root, call.label);
    }
  }

  Communicator& inner_;
  Context& context_;
  Stream& stream_;
  std::vector<std::unique_ptr<Communicator>> groups_;
};

struct DeviceRank {
  Communicator& host;
  Context& context;
  Stream& stream;
  Communicator& nccl;  // of memory of the device
  Communicator& comm;  // of the host's, by way of the device
};

// Runs body on so many ranks; what the run failed with ("" for nothing).
inline std::string error_on_devices(int size, NcclOptions options,
                                    const std::function<void(DeviceRank&)>& body) {
  try {
    run_rank_threads(size, [&](Communicator& host) {
      ContextOptions of_rank;
      of_rank.device = Device::cuda;
      of_rank.device_index = host.rank();
      Context context(of_rank);
      const std::unique_ptr<Stream> stream = context.make_stream("communication");
      NcclOptions mine = options;
      mine.allocator = context.shared_allocator(MemoryPool::device);
      const auto nccl = make_nccl_communicator(host, host.rank(), *stream, mine);
      OnDevice comm(*nccl, context, *stream);
      DeviceRank rank{host, context, *stream, *nccl, comm};
      try {
        body(rank);
      } catch (const Error& error) {
        host.abort(error.what());
        throw;
      }
    });
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

inline void on_devices(int size, const NcclOptions& options,
                       const std::function<void(DeviceRank&)>& body) {
  CHECK(error_on_devices(size, options, body) == "");
}

}  // namespace sherd::test
