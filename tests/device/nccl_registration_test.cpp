// SPDX-License-Identifier: Apache-2.0
// Memory that NCCL works on in place: which segments it is told of, and that it never keeps one
// that is gone. The emulated NCCL ends the process where one is freed, or a communicator ends, with
// a registration left; tests of that are at the end.
#include "device_support.h"

#include <emulator/emulator.h>
#include <nccl.h>
#include <sherd/comm/nccl_registration.h>
#include <sherd/runtime/cuda/graph.h>
#include <sherd/runtime/tensor.h>

#include <chrono>
#include <cstdlib>
#include <optional>
#include <set>

#include "../unit/collective_checks.h"
#include "nccl_emulated_support.h"
#include "nccl_support.h"

using namespace sherd;
using namespace sherd::test;

namespace {

class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  ~Variable() { unsetenv(name_); }

 private:
  const char* name_;
};
// Ranks of one machine register nothing without it.
struct Registering : Variable {
  Registering() : Variable("NCCL_LEGACY_CUDA_REGISTER", "1") {}
};

std::size_t registered() {
  return emulator::nccl_registrations().now;
}
std::size_t made_so_far() {
  return emulator::nccl_registrations().made;
}

constexpr std::int64_t kLarge = 3 << 20;  // of u8: more than small segments hold

Tensor bytes_of(Context& context, std::int64_t count) {
  return Tensor::zeros(context, {count}, DType::u8);
}

void sum(DeviceRank& rank, const Tensor& data, Communicator& comm) {
  rank.stream.wait(rank.context.compute_stream().record());
  comm.all_reduce(data.raw_data(), data.numel(), DType::u8, ReduceOp::sum, "sum");
}

}  // namespace

TEST_CASE("nccl registration: on machines of their own, or where the user insists") {
  using Facts = std::vector<RegistrationFacts>;
  CHECK(registers_segments(Facts{{11, 0}, {13, 0}, {17, 0}}));
  CHECK_FALSE(registers_segments(Facts{{11, 0}, {13, 0}, {11, 0}}));
  CHECK_FALSE(registers_segments(Facts{{11, 0}, {0, 0}}));
  CHECK(registers_segments(Facts{{11, 1}, {11, 1}}));
  CHECK_FALSE(registers_segments(Facts{{11, 1}, {11, 0}}));
  CHECK(registers_segments(Facts{{11, 1}, {13, 0}}));
  CHECK_FALSE(registers_segments(Facts{{11, 1}}));

  const std::size_t before = made_so_far();
  const auto use = [](DeviceRank& rank) {
    const Tensor data = bytes_of(rank.context, kLarge);
    sum(rank, data, rank.nccl);
    check_collectives(rank.comm, {5, 1030});
  };
  on_devices(2, small_options(), use);
  CHECK(made_so_far() == before);
  {
    const Registering on;
    const Variable off("NCCL_LOCAL_REGISTER", "0");  // NCCL's own switch
    on_devices(2, small_options(), use);
  }
  CHECK(made_so_far() == before);
}

TEST_CASE("nccl registration: every segment that calls touch, once, until the end") {
  const Registering on;
  for (const int size : {2, 3}) {
    const std::size_t before = made_so_far();
    std::atomic<std::size_t> segments{0}, bytes{0};
    on_devices(size, small_options(), [&](DeviceRank& rank) {
      const Tensor small = bytes_of(rank.context, 1000), large = bytes_of(rank.context, kLarge),
                   unused = bytes_of(rank.context, 100 << 20);
      Allocator& allocator = rank.context.allocator();
      for (int i = 0; i < 5; ++i) {
        sum(rank, small, rank.nccl);
        sum(rank, large, rank.nccl);
        check_collectives(rank.comm, {0, 1, 1030});  // of every kind, in small segments
      }
      const std::set<std::byte*> touched{allocator.segment_of(small.raw_data()).data(),
                                         allocator.segment_of(large.raw_data()).data()};
      CHECK(touched.size() == 2);
      CHECK_FALSE(touched.contains(allocator.segment_of(unused.raw_data()).data()));
      segments += touched.size();
      for (std::byte* segment : touched) bytes += allocator.segment_of(segment).size();
      rank.host.barrier("all have");
      CHECK(emulator::nccl_registrations().bytes == bytes);
      CHECK(registered() == 2 * static_cast<std::size_t>(size));
      rank.host.barrier("all have looked");
    });
    CHECK(segments == 2 * static_cast<std::size_t>(size));
    CHECK(made_so_far() - before == segments);
    CHECK(registered() == 0);
  }
}

TEST_CASE("nccl registration: the staging memory too") {
  const Registering on;
  const std::size_t before = made_so_far();
  NcclOptions options = small_options();
  options.staging_bytes = 1 << 20;  // in a large segment, where no tensor is
  on_devices(2, options, [&](DeviceRank& rank) {
    check_type<float>(rank.comm, DType::f32, 500);
    rank.host.barrier("all have");
    CHECK(made_so_far() - before == 2 * 2);
  });
  // One that adds nothing uses none.
  options.exact_sums = false;
  on_devices(2, options, [&](DeviceRank& rank) {
    check_type<std::int32_t>(rank.comm, DType::i32, 500);
    rank.host.barrier("all have");
    CHECK(made_so_far() - before == 2 * 2 + 2);
  });
}

TEST_CASE("nccl registration: each group registers for itself") {
  const Registering on;
  const std::size_t before = made_so_far();
  on_devices(4, small_options(), [](DeviceRank& rank) {
    const int me = rank.host.rank();
    const Tensor data = bytes_of(rank.context, kLarge);
    const auto pairs = rank.nccl.split(std::vector<int>{me % 2, me % 2 + 2}, "pairs");
    for (int i = 0; i < 3; ++i) {
      sum(rank, data, rank.nccl);
      sum(rank, data, *pairs);
    }
    const auto alone = pairs->split(std::vector<int>{pairs->rank()}, "alone");
    sum(rank, data, *alone);
    rank.stream.synchronize();
  });
  CHECK(made_so_far() - before == 8);
  CHECK(registered() == 0);
}

TEST_CASE("nccl registration: near the limit a segment is given up before it is freed") {
  const Registering on;
  const ThreadStreams threads(2'000);
  const std::size_t before = made_so_far();
  run_rank_threads(2, [&](Communicator& host) {
    Context context(
        {.device = Device::cuda, .device_index = host.rank(), .memory_limit = 80 << 20});
    const auto stream = context.make_stream("communication");
    NcclOptions options = small_options();
    options.allocator = context.shared_allocator(MemoryPool::device);
    const auto nccl = make_nccl_communicator(host, host.rank(), *stream, options);
    DeviceRank rank{host, context, *stream, *nccl, *nccl};
    {
      const Tensor data = bytes_of(context, kLarge);
      sum(rank, data, *nccl);
      data.storage().record_use(stream->record());
    }
    // Does not fit beside the first segment, whose call is still under way.
    const Tensor data = bytes_of(context, 70 << 20);
    host.barrier("the first is gone");
    CHECK(registered() == 0);
    host.barrier("all have looked");
    sum(rank, data, *nccl);
    stream->synchronize();
  });
  CHECK(made_so_far() - before == 2 * 2);
  CHECK(registered() == 0);
}

TEST_CASE("nccl registration: memory is not kept by an abort, nor is an abort waited for long") {
  const Registering on;
  const ThreadStreams threads;
  const auto start = Clock::now();
  const std::string error = error_on_devices(3, small_options(), [&](DeviceRank& rank) {
    {
      const Tensor data = bytes_of(rank.context, kLarge);
      sum(rank, data, rank.nccl);
      rank.stream.synchronize();
      std::optional<Held> held;
      if (rank.host.rank() == 0) held.emplace(rank.stream);
      sum(rank, data, rank.nccl);  // never begins on rank 0's device
      if (rank.host.rank() == 0) {
        std::this_thread::sleep_for(std::chrono::milliseconds(30));
        rank.host.abort("rank 0: the disk is full");
      }
      data.storage().record_use(rank.stream.record());
      if (rank.host.rank() == 0) held.reset();
    }
    rank.context.allocator().trim();  // frees what the aborted call has worked on
    CHECK(rank.context.allocator().segment_of(nullptr).empty());
    // What freed it did not take the reason from who waits for results.
    CHECK_THROWS_WITH_AS(rank.stream.synchronize(), "rank 0: the disk is full", Error);
    fail("rank 0: the disk is full");
  });
  CHECK(error == "rank 0: the disk is full");
  CHECK(seconds_since(start) < 5.0);
  CHECK(registered() == 0);
}

TEST_CASE("nccl registration: context and communicator end in either order") {
  const Registering on;
  for (const bool context_first : {false, true}) {
    CAPTURE(context_first);
    run_rank_threads(2, [&](Communicator& host) {
      std::optional<Context> context;
      context.emplace(ContextOptions{.device = Device::cuda, .device_index = host.rank()});
      const auto stream = context->make_stream("communication");
      NcclOptions options = small_options();
      options.allocator = context->shared_allocator(MemoryPool::device);
      auto nccl = make_nccl_communicator(host, host.rank(), *stream, options);
      options.allocator.reset();
      {
        DeviceRank rank{host, *context, *stream, *nccl, *nccl};
        const Tensor data = bytes_of(*context, kLarge);
        sum(rank, data, *nccl);
        stream->synchronize();
      }
      if (context_first) context.reset();
      nccl.reset();
      if (!context_first) {
        context->allocator().trim();
        CHECK(context->allocator().reserved_bytes() == 0);
      }
    });
    CHECK(registered() == 0);
  }
}

TEST_CASE("nccl registration: a capture leaves it to NCCL; host memory is never registered") {
  const Registering on;
  on_devices(2, small_options(), [](DeviceRank& rank) {
    Allocator& allocator = rank.context.allocator();
    rank.host.barrier("begin");
    const std::size_t before = made_so_far();
    rank.host.barrier("have looked");
    allocator.begin_private();
    std::optional<Tensor> data = bytes_of(rank.context, kLarge);
    rank.context.compute_stream().synchronize();
    auto graph = cuda::Graph::capture(rank.context.compute_stream(), [&] {
      sum(rank, *data, rank.nccl);
      rank.context.compute_stream().wait(rank.stream.record());
    });
    allocator.end_private();
    for (int i = 0; i < 3; ++i) graph->launch(rank.context.compute_stream());
    rank.context.compute_stream().synchronize();
    rank.host.barrier("captured");
    CHECK(made_so_far() == before);
    rank.host.barrier("have looked again");
    const MemoryBlock pinned =
        rank.context.host_allocator().allocate(4096, MemoryCategory::workspace);
    rank.nccl.broadcast(pinned.data, 4096, DType::u8, 0, "of the host");
    rank.stream.synchronize();
    rank.context.host_allocator().release(pinned, MemoryCategory::workspace, {});
    rank.host.barrier("done");
    CHECK(made_so_far() == before);
    rank.host.barrier("have looked once more");
    sum(rank, *data, rank.nccl);  // the same memory, not captured
    rank.stream.synchronize();
    rank.host.barrier("done again");
    CHECK(made_so_far() == before + 2);
    graph.reset();
    data.reset();
    allocator.free_private();
    allocator.trim();
    rank.host.barrier("freed");
    CHECK(registered() == 0);
  });
}

TEST_CASE("emulated nccl: memory and communicators do not end with registrations") {
  struct Throwing {
    Throwing() { emulator::throw_errors(true); }
    ~Throwing() { emulator::throw_errors(false); }
  } const throwing;
  on_ranks(1, [](int, ncclComm_t comm, cudaStream_t) {
    float* data = array_of(1024, 1.0f);
    void *first = nullptr, *second = nullptr;
    CHECK(ncclCommRegister(comm, data, 4096, &first) == ncclSuccess);
    CHECK(ncclCommRegister(comm, data + 8, 64, &second) == ncclSuccess);  // within the first
    CHECK(registered() == 1);
    CHECK_THROWS_WITH(cudaFree(data), doctest::Contains("rank 0 of a communicator has registered"));
    CHECK(ncclCommDeregister(comm, second) == ncclSuccess);
    CHECK_THROWS_WITH(ncclCommFinalize(comm), doctest::Contains("ncclCommFinalize of rank 0"));
    CHECK_THROWS_WITH(ncclCommDestroy(comm), doctest::Contains("ncclCommDestroy of rank 0"));
    CHECK(ncclCommDeregister(comm, first) == ncclSuccess);
    CHECK(ncclCommDeregister(comm, first) == ncclInvalidUsage);
    CHECK(std::string(ncclGetLastError(nullptr)).find("not any more") != std::string::npos);
    float host = 0;
    CHECK(ncclCommRegister(comm, &host, 4, &first) == ncclInvalidArgument);
    CHECK(ncclCommRegister(comm, data, 4097, &first) == ncclInvalidArgument);
    CHECK(std::string(ncclGetLastError(nullptr)).find("more bytes") != std::string::npos);
    CHECK(cudaFree(data) == cudaSuccess);
  });
}

TEST_CASE("emulated nccl: all ranks give a call registered memory, or none") {
  const auto outcome = [](bool message) {
    std::string text;
    on_ranks(2, [&](int rank, ncclComm_t comm, cudaStream_t stream) {
      float* data = array_of(16, 1.0f);
      void* handle = nullptr;
      if (rank == 1) CHECK(ncclCommRegister(comm, data, 64, &handle) == ncclSuccess);
      if (!message) {
        CHECK(ncclAllReduce(data, data, 16, ncclFloat32, ncclSum, comm, stream) == ncclSuccess);
      } else {
        CHECK((rank == 0 ? ncclSend(data, 4, ncclFloat32, 1, comm, stream)
                         : ncclRecv(data, 4, ncclFloat32, 0, comm, stream)) == ncclSuccess);
      }
      CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
      ncclResult_t result = ncclSuccess;
      CHECK(ncclCommGetAsyncError(comm, &result) == ncclSuccess);
      CHECK(result == ncclInvalidUsage);
      if (rank == 0) text = ncclGetLastError(comm);
      CHECK(ncclCommDeregister(comm, handle) == ncclSuccess);
      CHECK(cudaFree(data) == cudaSuccess);
    });
    return text;
  };
  CHECK_MESSAGE(outcome(false).starts_with("registered on some ranks alone: rank 0: ncclAllReduce"),
                outcome(false));
  CHECK_MESSAGE(
      outcome(true).find("ncclSend of 4 of type 7 to 1 sends from memory not registered") !=
          std::string::npos,
      outcome(true));
}

TEST_CASE("emulated nccl: a range is not deregistered while work on it has yet to run") {
  const ThreadStreams threads;
  on_ranks(1, [](int, ncclComm_t comm, cudaStream_t stream) {
    float* data = array_of(16, 1.0f);
    void* handle = nullptr;
    CHECK(ncclCommRegister(comm, data, 64, &handle) == ncclSuccess);
    std::atomic<bool> go{false};
    emulator::enqueue(stream, [&] {
      while (!go) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
    CHECK(ncclAllReduce(data, data, 16, ncclFloat32, ncclSum, comm, stream) == ncclSuccess);
    CHECK(ncclCommDeregister(comm, handle) == ncclInvalidUsage);
    CHECK(std::string(ncclGetLastError(nullptr)).find("has not run yet") != std::string::npos);
    go = true;
    CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
    CHECK(ncclCommDeregister(comm, handle) == ncclSuccess);
    CHECK(cudaFree(data) == cudaSuccess);
  });
}
