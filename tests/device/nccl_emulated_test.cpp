// SPDX-License-Identifier: Apache-2.0
// What goes wrong between devices: ranks that die while others wait on the device, seen through the
// emulator's streams with threads of their own; and the emulated NCCL itself.
#include "device_support.h"

#include <emulator/emulator.h>
#include <nccl.h>
#include <sherd/runtime/tensor.h>

#include <atomic>
#include <chrono>
#include <optional>
#include <thread>

#include "nccl_emulated_support.h"
#include "nccl_support.h"

using namespace sherd;
using namespace sherd::test;

TEST_CASE("nccl: streams with threads and delays change no bit") {
  const ThreadStreams threads(300);
  for (const int size : {2, 3}) {
    test::on_devices(size, small_options(), [](DeviceRank& rank) {
      std::vector<float> data(3'000), expected(3'000);
      for (std::size_t i = 0; i < data.size(); ++i)
        expected[i] = data[i] =
            1.0f / static_cast<float>(i + 1) + static_cast<float>(rank.host.rank());
      Tensor tensor = Tensor::from_host<float>(rank.context, {3'000}, data);
      rank.stream.wait(rank.context.compute_stream().record());
      for (int i = 0; i < 10; ++i) {
        rank.nccl.all_reduce(tensor.raw_data(), 3'000, DType::f32, ReduceOp::average, "a");
        rank.host.all_reduce(expected.data(), 3'000, DType::f32, ReduceOp::average, "b");
      }
      rank.context.compute_stream().wait(rank.stream.record());
      SHERD_CHECK(tensor.to_vector<float>() == expected, "other bits");
    });
  }
}

TEST_CASE("nccl: an abort reaches ranks that wait for the device, soon") {
  const ThreadStreams threads;
  // How a rank waits: for the stream, an event of it, or another stream that waits for it.
  for (int how = 0; how < 3; ++how) {
    CAPTURE(how);
    const auto start = Clock::now();
    const std::string error = test::error_on_devices(3, small_options(), [&](DeviceRank& rank) {
      Tensor data = Tensor::zeros(rank.context, {1'000}, DType::f32);
      rank.stream.wait(rank.context.compute_stream().record());
      rank.stream.synchronize();
      std::optional<Held> held;
      if (rank.host.rank() == 0) held.emplace(rank.stream);
      // All ranks agree, but rank 0's never begins on its device.
      rank.nccl.all_reduce(data.raw_data(), 1'000, DType::f32, ReduceOp::sum, "a");
      if (rank.host.rank() == 0) {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        CHECK_FALSE(rank.stream.record().done());
        rank.host.abort("rank 0: the disk is full");
      }
      const Event event = rank.stream.record();
      std::string message;
      try {
        if (how == 0) rank.stream.synchronize();
        if (how == 1) event.wait();
        rank.context.compute_stream().wait(event);
        if (how == 2) rank.context.compute_stream().synchronize();
      } catch (const Error& problem) {
        message = problem.what();
      }
      CHECK(message == "rank 0: the disk is full");
      CHECK(rank.nccl.end_reason() == message);
      CHECK_THROWS_WITH_AS(rank.nccl.barrier("later"), message.c_str(), Error);
      held.reset();
      fail("{}", message);
    });
    CHECK(error == "rank 0: the disk is full");
    CHECK(seconds_since(start) < 5.0);
  }
}

TEST_CASE("nccl: an abort reaches ranks that the driver would hold") {
  const ThreadStreams threads;
  // In these the driver waits for all that the device does.
  for (int how = 0; how < 3; ++how) {
    CAPTURE(how);
    const auto start = Clock::now();
    const std::string error = test::error_on_devices(3, small_options(), [&](DeviceRank& rank) {
      Allocator& allocator = how == 0 ? rank.context.allocator() : rank.context.host_allocator();
      auto other = rank.context.make_stream("another");
      const Tensor data = Tensor::zeros(rank.context, {1'000}, DType::f32);
      const MemoryBlock block = allocator.allocate(3 << 20, MemoryCategory::workspace);
      rank.stream.wait(rank.context.compute_stream().record());
      rank.stream.synchronize();
      std::optional<Held> held;
      if (rank.host.rank() == 0) held.emplace(rank.stream);
      rank.nccl.all_reduce(data.raw_data(), 1'000, DType::f32, ReduceOp::sum, "a");
      other->wait(rank.stream.record());
      if (rank.host.rank() == 0) {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        rank.host.abort("rank 0: the disk is full");
      }
      allocator.release(block, MemoryCategory::workspace, {});
      if (rank.host.rank() > 0) {
        if (how < 2) allocator.trim();
        if (how == 2) other.reset();
      }
      // Who waits for results is told nevertheless.
      CHECK_THROWS_WITH_AS(rank.stream.synchronize(), "rank 0: the disk is full", Error);
      held.reset();
      fail("rank 0: the disk is full");
    });
    CHECK(error == "rank 0: the disk is full");
    CHECK(seconds_since(start) < 5.0);
  }
}

TEST_CASE("nccl: a rank that fails alone ends the others, who wait on their devices") {
  const ThreadStreams threads;
  const auto start = Clock::now();
  const std::string error = test::error_on_devices(3, small_options(), [&](DeviceRank& rank) {
    Tensor data = Tensor::zeros(rank.context, {1'000}, DType::f32);
    rank.stream.wait(rank.context.compute_stream().record());
    for (int i = 0; i < 100; ++i) {
      if (rank.host.rank() == 2 && i == 5) fail("no more memory");
      rank.nccl.all_reduce(data.raw_data(), 1'000, DType::f32, ReduceOp::sum, "a");
    }
    rank.stream.synchronize();
  });
  CHECK(error.find("no more memory") != std::string::npos);
  CHECK(seconds_since(start) < 5.0);
}

TEST_CASE("nccl: an error of NCCL's ends the group of all with its words") {
  const ThreadStreams threads;
  emulator::set_nccl_patience(0.2);
  const std::string error = test::error_on_devices(2, small_options(), [&](DeviceRank& rank) {
    Tensor data = Tensor::zeros(rank.context, {1'000}, DType::f32);
    rank.stream.wait(rank.context.compute_stream().record());
    rank.stream.synchronize();
    std::optional<Held> held;
    if (rank.host.rank() == 0) held.emplace(rank.stream);
    rank.nccl.all_gather(data.raw_data(), data.raw_data(), 10, DType::f32, "a");
    CHECK_THROWS_WITH_AS(rank.stream.synchronize(), doctest::Contains("too long a wait"), Error);
    const std::string reason = rank.host.end_reason();
    CHECK(reason.find("NCCL: unhandled system error") != std::string::npos);
    CHECK(reason.find("rank 1 is in ncclAllGather of 10") != std::string::npos);
    held.reset();
    fail("{}", reason);
  });
  CHECK(error.find("too long a wait") != std::string::npos);
}

TEST_CASE("nccl: a rank that fails while the others begin does not leave them waiting") {
  const auto start = Clock::now();
  std::string error;
  try {
    run_rank_threads(3, [&](Communicator& host) {
      ContextOptions options;
      options.device = Device::cuda;
      options.device_index = host.rank();
      Context context(options);
      if (host.rank() == 2) {
        ncclUniqueId id;
        host.broadcast(&id, sizeof id, DType::u8, 0, "NCCL's id");
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        fail("no GPU here");
      }
      NcclOptions mine = small_options();
      mine.allocator = context.shared_allocator(MemoryPool::device);
      make_nccl_communicator(host, host.rank(), context.compute_stream(), mine);
    });
  } catch (const Error& problem) {
    error = problem.what();
  }
  CHECK(error == "rank 2: no GPU here");
  CHECK(seconds_since(start) < 5.0);
}

TEST_CASE("emulated nccl: two ranks on one device are refused, by both") {
  std::atomic<int> told{0};
  try {
    run_rank_threads(2, [&](Communicator& host) {
      ContextOptions options;
      options.device = Device::cuda;
      Context context(options);
      NcclOptions mine = small_options();
      mine.allocator = context.shared_allocator(MemoryPool::device);
      try {
        make_nccl_communicator(host, 0, context.compute_stream(), mine);
      } catch (const Error& error) {
        told += std::string(error.what()).find("two ranks on device 0") != std::string::npos;
        throw;
      }
    });
  } catch (const Error&) {
  }
  CHECK(told == 2);
}

TEST_CASE("emulated nccl: calls that differ are an error of all ranks, and name them") {
  const auto outcome = [](const std::function<void(int, ncclComm_t, cudaStream_t, float*)>& calls) {
    std::string message;
    on_ranks(2, [&](int rank, ncclComm_t comm, cudaStream_t stream) {
      float* data = array_of(16, 1.0f);
      calls(rank, comm, stream, data);
      CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
      ncclResult_t result = ncclSuccess;
      CHECK(ncclCommGetAsyncError(comm, &result) == ncclSuccess);
      CHECK(result == ncclInvalidUsage);
      if (rank == 0) message = ncclGetLastError(comm);
      CHECK(cudaFree(data) == cudaSuccess);
    });
    return message;
  };
  const auto has = [](const std::string& text, const char* piece) {
    CAPTURE(text);
    CHECK(text.find(piece) != std::string::npos);
  };
  has(outcome([](int rank, ncclComm_t comm, cudaStream_t stream, float* data) {
        CHECK(ncclAllReduce(data, data, rank == 0 ? 4 : 5, ncclFloat32, ncclSum, comm, stream) ==
              ncclSuccess);
      }),
      "calls differ: rank 0: ncclAllReduce of 4 of type 7, operation 0; rank 1: ncclAllReduce of "
      "5");
  has(outcome([](int rank, ncclComm_t comm, cudaStream_t stream, float* data) {
        CHECK((rank == 0 ? ncclSend(data, 4, ncclFloat32, 1, comm, stream)
                         : ncclRecv(data, 4, ncclInt32, 0, comm, stream)) == ncclSuccess);
      }),
      "messages differ: ncclSend of 4 of type 7 to 1; ncclRecv of 4 of type 2 from 0");
  has(outcome([](int rank, ncclComm_t comm, cudaStream_t stream, float* data) {
        CHECK((rank == 0 ? ncclSend(data, 4, ncclFloat32, 1, comm, stream)
                         : ncclAllReduce(data, data, 4, ncclFloat32, ncclSum, comm, stream)) ==
              ncclSuccess);
      }),
      "rank 0 waits in ncclSend of 4 of type 7 to 1, and that rank in ncclAllReduce");
}

TEST_CASE("emulated nccl: buffers are checked before anything runs") {
  on_ranks(2, [&](int rank, ncclComm_t comm, cudaStream_t stream) {
    float* data = array_of(16, 1.0f);
    float host[16] = {};
    const auto refused = [&](ncclResult_t result, const char* piece) {
      CHECK(result == ncclInvalidArgument);
      const std::string text = ncclGetLastError(nullptr);
      CAPTURE(text);
      CHECK(text.find(piece) != std::string::npos);
    };
    refused(ncclAllReduce(host, data, 4, ncclFloat32, ncclSum, comm, stream),
            "the send buffer is no device memory");
    refused(ncclAllGather(data, data, 9, ncclFloat32, comm, stream), "the receive buffer is too");
    refused(ncclReduceScatter(data, data, 9, ncclFloat32, ncclSum, comm, stream),
            "the send buffer");
    refused(ncclSend(data, 4, ncclFloat32, 2, comm, stream), "no such rank");
    CHECK(cudaSetDevice(1 - rank) == cudaSuccess);
    refused(ncclAllReduce(data, data, 4, ncclFloat32, ncclSum, comm, stream), "another device");
    CHECK(cudaSetDevice(rank) == cudaSuccess);
    int count = 0, device = -1, number = -1;
    CHECK(ncclCommCount(comm, &count) == ncclSuccess);
    CHECK(ncclCommCuDevice(comm, &device) == ncclSuccess);
    CHECK(ncclCommUserRank(comm, &number) == ncclSuccess);
    CHECK(count == 2);
    CHECK(device == rank);
    CHECK(number == rank);
    CHECK(cudaFree(data) == cudaSuccess);
  });
}

TEST_CASE("emulated nccl: what a stream captures runs at every replay") {
  on_ranks(3, [&](int rank, ncclComm_t comm, cudaStream_t stream) {
    float* data = array_of(16, 1.0f);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    CHECK(ncclAllReduce(data, data, 16, ncclFloat32, ncclSum, comm, stream) == ncclSuccess);
    CHECK(ncclGroupStart() == ncclSuccess);
    CHECK(ncclSend(data, 8, ncclFloat32, (rank + 1) % 3, comm, stream) == ncclSuccess);
    CHECK(ncclRecv(data + 8, 8, ncclFloat32, (rank + 2) % 3, comm, stream) == ncclSuccess);
    CHECK(ncclGroupEnd() == ncclSuccess);
    CHECK(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
    CHECK(values_at(data, 16) == std::vector<float>(16, 1.0f));
    CHECK(cudaGraphInstantiate(&executable, graph, 0) == cudaSuccess);
    for (int replay = 0; replay < 3; ++replay)
      CHECK(cudaGraphLaunch(executable, stream) == cudaSuccess);
    CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
    const std::vector<float> got = values_at(data, 16);
    CAPTURE(got.front());
    CAPTURE(got.back());
    CHECK(got == std::vector<float>(16, 27.0f));
    CHECK(cudaGraphExecDestroy(executable) == cudaSuccess);
    CHECK(cudaGraphDestroy(graph) == cudaSuccess);
    CHECK(cudaFree(data) == cudaSuccess);
  });
}
