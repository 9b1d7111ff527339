// SPDX-License-Identifier: Apache-2.0
// Note [NCCL beside a host communicator] is in nccl_communicator.h.
#include <sherd/comm/nccl_communicator.h>
#include <sherd/comm/nccl_handle.h>
#include <sherd/comm/nccl_reduce.h>
#include <sherd/comm/nccl_registration.h>
#include <sherd/runtime/cuda/device.h>
#include <sherd/runtime/error.h>

#include <algorithm>

namespace sherd {
namespace {

constexpr std::int64_t kSmall = 4096;  // bytes of an all-reduce in which every rank adds everything

ncclDataType_t type_of(DType dtype) {
  switch (dtype) {
    case DType::f64: return ncclFloat64;
    case DType::f32: return ncclFloat32;
    case DType::f16: return ncclFloat16;
    case DType::bf16: return ncclBfloat16;
    case DType::i64: return ncclInt64;
    case DType::i32: return ncclInt32;
    case DType::u8: return ncclUint8;
  }
  fail("NCCL: unknown type {}", static_cast<int>(dtype));
}

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(Communicator& host, std::unique_ptr<Communicator> owned_host,
                   std::unique_ptr<NcclHandle> nccl, Stream& stream, const NcclOptions& options)
      : Communicator(host.rank(), host.size()),
        host_(host),
        owned_host_(std::move(owned_host)),
        nccl_(std::move(nccl)),
        stream_(stream),
        options_(options) {
    registration_ = std::make_unique<NcclRegistration>(*nccl_, host_, options_.allocator, stream_);
    if (size() > 1)
      staging_ =
          options_.allocator->allocate(options_.staging_bytes, MemoryCategory::communication);
    watch_ = stream_.watch([this](bool done) { nccl_->look(done); });
  }

  ~NcclCommunicator() override {
    // NCCL waits for calls under way, which may never end where another rank has failed.
    try {
      stream_.synchronize();
    } catch (const Error&) {
      // For those who wait for results.
    }
    watch_.reset();
    registration_.reset();
    nccl_.reset();
    if (staging_.data != nullptr)
      options_.allocator->release(staging_, MemoryCategory::communication, {});
  }

  std::string_view backend() const override { return "NCCL"; }
  void abort(const std::string& reason) override { host_.abort(reason); }
  std::string end_reason() const override { return host_.end_reason(); }

 private:
  std::unique_ptr<Communicator> make_group(std::span<const int> members,
                                           std::string_view label) override {
    auto host = host_.split(members, label);  // and checks that they are a partition
    auto nccl = nccl_->split(*host, members.front());
    Communicator& group = *host;
    return std::make_unique<NcclCommunicator>(group, std::move(host), std::move(nccl), stream_,
                                              options_);
  }

  void run(const Call& call, const void* input, void* output) override {
    SHERD_CHECK(call.op != ReduceOp::average || is_floating(call.dtype),
                "{}: an average of {} is not defined", call.describe(), name_of(call.dtype));
    nccl_->look();
    host_.compare(call);
    if (call.count == 0 || call.collective == Collective::barrier) return;
    for (const void* buffer : {input, static_cast<const void*>(output)})
      registration_->prepare(buffer);
    const auto* in = static_cast<const std::byte*>(input);
    auto* out = static_cast<std::byte*>(output);
    const auto count = static_cast<std::size_t>(call.count);
    const ncclDataType_t type = type_of(call.dtype);
    const cudaStream_t stream = native();
    const ncclRedOp_t op = call.op == ReduceOp::sum       ? ncclSum
                           : call.op == ReduceOp::average ? ncclAvg
                                                          : ncclMax;
    switch (call.collective) {
      case Collective::all_reduce:
        if (in_tree(call)) return reduce_all(call, out);
        return SHERD_NCCL_CHECK(*nccl_, ncclAllReduce(in, out, count, type, op, comm, stream));
      case Collective::reduce_scatter:
        if (in_tree(call)) return reduce_pieces(call, in, out);
        return SHERD_NCCL_CHECK(*nccl_, ncclReduceScatter(in, out, count, type, op, comm, stream));
      case Collective::all_gather:
        return SHERD_NCCL_CHECK(*nccl_, ncclAllGather(in, out, count, type, comm, stream));
      case Collective::broadcast:
        return SHERD_NCCL_CHECK(*nccl_,
                                ncclBroadcast(in, out, count, type, call.root, comm, stream));
      case Collective::all_to_all: return exchange(call, in, out);
      case Collective::send:
        return SHERD_NCCL_CHECK(*nccl_, ncclSend(in, count, type, call.root, comm, stream));
      case Collective::recv:
        return SHERD_NCCL_CHECK(*nccl_, ncclRecv(out, count, type, call.root, comm, stream));
      case Collective::barrier: break;
    }
  }

  cudaStream_t native() const { return static_cast<cudaStream_t>(stream_.native()); }

  // Whether our kernel adds. NCCL has no sum of 16-bit numbers in fp32, and its largest number
  // forgets NaNs; whole numbers have the same sums in any order.
  bool in_tree(const Call& call) const {
    if (!is_floating(call.dtype)) return false;
    return options_.exact_sums || call.result() != call.dtype || call.op == ReduceOp::max;
  }

  using Messages = std::vector<NcclHandle::Message>;
  static NcclHandle::Message to(const void* data, std::int64_t count, int rank) {
    return {data, nullptr, count, rank};
  }
  static NcclHandle::Message from(void* data, std::int64_t count, int rank) {
    return {nullptr, data, count, rank};
  }

  void exchange(const Call& call, const std::byte* in, std::byte* out) {
    const auto place = [&](int r) { return static_cast<std::size_t>(r) * call.bytes(); };
    Messages messages;
    for (int r = 0; r < size(); ++r) {
      if (r == rank()) continue;
      messages.push_back(to(in + place(r), call.count, r));
      messages.push_back(from(out + place(r), call.count, r));
    }
    nccl_->exchange(messages, type_of(call.dtype), native());
    cuda::copy(stream_, out + place(rank()), in + place(rank()), call.bytes());
  }

  // Elements of a piece of which the staging memory holds one of every other rank, each at an
  // address that vectors may begin at.
  std::int64_t most(const Call& call) const {
    if (size() == 1) return call.count;
    const std::size_t piece = options_.staging_bytes / static_cast<std::size_t>(size() - 1);
    return static_cast<std::int64_t>(piece / 16 * 16 / call.element_bytes());
  }
  std::byte* slot(const Call& call, int from, std::int64_t stride) const {
    const auto place = static_cast<std::size_t>(from < rank() ? from : from - 1);
    return static_cast<std::byte*>(staging_.data) +
           place * static_cast<std::size_t>(stride) * call.element_bytes();
  }
  // How far apart the pieces of so many elements lie.
  static std::int64_t stride_of(const Call& call, std::int64_t count) {
    const auto vector = static_cast<std::int64_t>(16 / call.element_bytes());
    return (count + vector - 1) / vector * vector;
  }

  void add(const Call& call, const std::byte* own, std::int64_t stride, std::byte* to,
           std::int64_t count) {
    reduce_in_tree(stream_, {own, staging_.data, stride, rank(), size()}, to, count, call.dtype,
                   call.result(), call.op);
  }

  void reduce_pieces(const Call& call, const std::byte* in, std::byte* out) {
    registration_->prepare(staging_.data);
    const std::size_t width = call.element_bytes(), result_width = size_of(call.result());
    const std::int64_t at_once = most(call);
    for (std::int64_t begin = 0; begin < call.count; begin += at_once) {
      const std::int64_t count = std::min(at_once, call.count - begin);
      const std::int64_t stride = stride_of(call, count);
      const auto piece = [&](int r) {
        return in + static_cast<std::size_t>(r) * call.bytes() +
               static_cast<std::size_t>(begin) * width;
      };
      Messages messages;
      for (int r = 0; r < size(); ++r) {
        if (r == rank()) continue;
        messages.push_back(to(piece(r), count, r));
        messages.push_back(from(slot(call, r, stride), count, r));
      }
      nccl_->exchange(messages, type_of(call.dtype), native());
      add(call, piece(rank()), stride, out + static_cast<std::size_t>(begin) * result_width, count);
    }
  }

  // Rank r adds range r of what is at hand, then all pass on their results; what is small everybody
  // adds.
  void reduce_all(const Call& call, std::byte* data) {
    registration_->prepare(staging_.data);
    const std::size_t width = call.element_bytes();
    const bool small = static_cast<std::int64_t>(call.bytes()) <= kSmall;
    const std::int64_t at_once = small ? most(call) : most(call) * size();
    for (std::int64_t begin = 0; begin < call.count; begin += at_once) {
      const std::int64_t count = std::min(at_once, call.count - begin);
      std::byte* at = data + static_cast<std::size_t>(begin) * width;
      const std::int64_t range = small ? count : stride_of(call, (count + size() - 1) / size());
      const auto start = [&](int r) { return small ? 0 : std::min(count, range * r); };
      const auto length = [&](int r) { return small ? count : start(r + 1) - start(r); };
      const auto place = [&](int r) { return at + static_cast<std::size_t>(start(r)) * width; };
      const std::int64_t stride = stride_of(call, range);
      Messages pieces;
      for (int r = 0; r < size(); ++r) {
        if (r == rank()) continue;
        pieces.push_back(to(place(r), length(r), r));
        pieces.push_back(from(slot(call, r, stride), length(rank()), r));
      }
      nccl_->exchange(pieces, type_of(call.dtype), native());
      add(call, place(rank()), stride, place(rank()), length(rank()));
      if (small) continue;
      Messages results;
      for (int r = 0; r < size(); ++r) {
        if (r == rank()) continue;
        results.push_back(to(place(rank()), length(rank()), r));
        results.push_back(from(place(r), length(r), r));
      }
      nccl_->exchange(results, type_of(call.dtype), native());
    }
  }

  Communicator& host_;
  const std::unique_ptr<Communicator> owned_host_;  // of a group made by split
  std::unique_ptr<NcclHandle> nccl_;
  Stream& stream_;
  const NcclOptions options_;
  std::unique_ptr<NcclRegistration> registration_;
  MemoryBlock staging_;
  std::shared_ptr<void> watch_;
};

}  // namespace

bool nccl_built() {
  return true;
}

std::unique_ptr<Communicator> make_nccl_communicator(Communicator& host, int device, Stream& stream,
                                                     const NcclOptions& options) {
  SHERD_CHECK(options.allocator != nullptr, "NCCL: needs an allocator for its staging memory");
  const auto least = static_cast<std::size_t>(host.size()) * 64;
  SHERD_CHECK(options.staging_bytes >= least,
              "NCCL: {} bytes of staging memory are too few for {} ranks, expected {}",
              options.staging_bytes, host.size(), least);
  (void)stream.native();  // makes its device the current one
  return std::make_unique<NcclCommunicator>(host, nullptr, NcclHandle::make(host, device), stream,
                                            options);
}

}  // namespace sherd
