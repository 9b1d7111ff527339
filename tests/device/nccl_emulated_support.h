// SPDX-License-Identifier: Apache-2.0
// For tests of ranks on emulated devices: streams with threads of their own that can be held, and
// NCCL's calls without a communicator of ours.
#pragma once

#include <doctest/doctest.h>
#include <emulator/emulator.h>
#include <nccl.h>
#include <sherd/comm/nccl_communicator.h>
#include <sherd/runtime/stream.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace sherd::test {

using Clock = std::chrono::steady_clock;

// Streams that are made meanwhile have threads.
class ThreadStreams {
 public:
  explicit ThreadStreams(int delay = 0) {
    emulator::set_streams(emulator::Streams::threads, delay);
  }
  ~ThreadStreams() {
    emulator::set_streams(emulator::Streams::in_place);
    emulator::set_nccl_patience(30.0);
  }
};

inline double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Holds a stream until it is let go.
class Held {
 public:
  explicit Held(Stream& stream) {
    stream.enqueue_on_host([go = go_] {
      while (!*go) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
  }
  ~Held() { let_go(); }
  void let_go() { *go_ = true; }

 private:
  std::shared_ptr<std::atomic<bool>> go_ = std::make_shared<std::atomic<bool>>(false);
};

inline NcclOptions small_options() {
  NcclOptions options;
  options.exact_sums = true;
  options.staging_bytes = 1 << 16;
  return options;
}

// A thread for every rank, with its device and its part of one communicator.
inline void on_ranks(int size, const std::function<void(int, ncclComm_t, cudaStream_t)>& body) {
  ncclUniqueId id;
  REQUIRE(ncclGetUniqueId(&id) == ncclSuccess);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      ncclComm_t comm = nullptr;
      cudaStream_t stream = nullptr;
      CHECK(cudaSetDevice(rank) == cudaSuccess);
      CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
      CHECK(ncclCommInitRank(&comm, size, id, rank) == ncclSuccess);
      body(rank, comm, stream);
      CHECK(ncclCommDestroy(comm) == ncclSuccess);
      CHECK(cudaStreamDestroy(stream) == cudaSuccess);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

inline std::vector<float> values_at(const float* data, std::size_t count) {
  std::vector<float> values(count);
  CHECK(cudaMemcpy(values.data(), data, count * sizeof(float), cudaMemcpyDeviceToHost) ==
        cudaSuccess);
  return values;
}

inline float* array_of(std::size_t count, float value) {
  float* data = nullptr;
  CHECK(cudaMalloc(reinterpret_cast<void**>(&data), count * sizeof(float)) == cudaSuccess);
  const std::vector<float> values(count, value);
  CHECK(cudaMemcpy(data, values.data(), count * sizeof(float), cudaMemcpyHostToDevice) ==
        cudaSuccess);
  return data;
}

}  // namespace sherd::test
