// SPDX-License-Identifier: Apache-2.0
// Ranks that meet in shared memory, here threads of one process; tests/mpi has processes. Also who
// started a process.
#include <doctest/doctest.h>
#include <sherd/comm/mpi.h>
#include <sherd/comm/rank_threads.h>
#include <sherd/comm/shared_communicator.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>

#include "collective_checks.h"

using namespace sherd;

namespace {

void run_shared(int size, const std::function<void(Communicator&)>& body) {
  run_rank_threads(size, [&](Communicator& threads) {
    const auto shared = make_shared_communicator(threads);
    try {
      body(*shared);
    } catch (const std::exception& error) {
      shared->abort(error.what());
      throw;
    }
  });
}

std::string error_of(int size, const std::function<void(Communicator&)>& body) {
  try {
    run_shared(size, body);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// The message itself: which rank came with it first is chance where all have it.
std::string without_rank(const std::string& text) {
  const bool named = text.starts_with("rank ") && text.substr(6, 2) == ": ";
  return named ? text.substr(8) : text;
}

void has(const std::string& text, const std::string& piece) {
  CAPTURE(text);
  CHECK(text.find(piece) != std::string::npos);
}

}  // namespace

TEST_CASE("collectives: threads and shared memory, every type") {
  for (const int size : {1, 2, 3, 4, 5, 7}) {
    const auto check = [](Communicator& comm) { test::check_collectives(comm, {0, 1, 5, 1030}); };
    run_rank_threads(size, check);
    run_shared(size, check);
  }
}

TEST_CASE("shared memory: more data than fits at once") {
  for (const int size : {2, 3}) {
    run_shared(size, [](Communicator& comm) {
      test::check_type<float>(comm, DType::f32, 300'001);
      test::check_type<bf16>(comm, DType::bf16, 262'145);
      test::check_wide<bf16>(comm, DType::bf16, 262'145);
    });
  }
}

TEST_CASE("shared memory: groups, used by several threads at once") {
  run_shared(4, [](Communicator& world) {
    const std::vector<int> everybody{0, 1, 2, 3};
    const std::vector<int> pair{world.rank() % 2, world.rank() % 2 + 2};
    const auto gathers = world.split(everybody, "gathers");
    const auto reduces = world.split(pair, "reduces");
    std::atomic<bool> good{true};
    std::thread other([&] {
      try {
        for (int i = 0; i < 20; ++i) test::check_type<float>(*gathers, DType::f32, 100 * i);
      } catch (const Error&) {
        good = false;
      }
    });
    for (int i = 0; i < 40; ++i) test::check_type<double>(*reduces, DType::f64, 50 * i);
    other.join();
    SHERD_CHECK(good, "the other thread's calls");
  });
}

TEST_CASE("shared memory: ranks that fail each other get the errors of threads") {
  float x = 0.0f;
  const std::vector<std::function<void(Communicator&)>> mistakes{
      [](Communicator& comm) { comm.barrier(comm.rank() == 1 ? "b" : "a"); },
      [](Communicator& comm) {
        std::vector<float> data(40);
        comm.all_gather(data.data(), data.data() + 20, comm.rank() == 2 ? 4 : 5, DType::f32, "u");
      },
      [](Communicator& comm) {
        float mine = 0.0f;
        if (comm.rank() == 0) comm.send(&mine, 1, DType::f32, 1, "a");
        if (comm.rank() == 1) comm.recv(&mine, 1, DType::i32, 0, "a");
        comm.barrier("end");
      },
      [&](Communicator& comm) {
        if (comm.rank() == 0) comm.send(&x, 1, DType::f32, 1, "a");
        comm.barrier("end");
      },
      [](Communicator& comm) {
        comm.split(comm.rank() == 0 ? std::vector<int>{0} : std::vector<int>{0, 1, 2}, "groups");
      },
      [](Communicator& comm) {
        comm.barrier("start");
        if (comm.rank() == 1) return;
        if (comm.rank() == 0) comm.barrier("end");
        if (comm.rank() == 2) std::this_thread::sleep_for(std::chrono::milliseconds(10));
      },
      [](Communicator& comm) {
        const auto pair =
            comm.split(comm.rank() < 2 ? std::vector<int>{0, 1} : std::vector<int>{2}, "pair");
        if (comm.rank() == 2) fail("the disk is full");
        if (comm.rank() == 0) pair->barrier("waits for rank 1");
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        comm.barrier("end");
      },
  };
  for (const auto& mistake : mistakes) {
    std::string threads;
    try {
      run_rank_threads(3, mistake);
    } catch (const Error& error) {
      threads = error.what();
    }
    CHECK(threads != "");
    CHECK(without_rank(error_of(3, mistake)) == without_rank(threads));
  }
  has(error_of(2, [&](Communicator& comm) { comm.send(&x, 1, DType::f32, 1 - comm.rank(), "a"); }),
      "wait for each other");
}

TEST_CASE("shared memory: an abort reaches ranks in the middle of calls") {
  for (int round = 0; round < 5; ++round) {
    const std::string error = error_of(3, [&](Communicator& comm) {
      std::vector<float> data(50'000, 1.0f);
      for (int i = 0; i < 1000; ++i) {
        if (comm.rank() == 0 && i == round) comm.abort("stopped by the user");
        comm.all_reduce(data.data(), 50'000, DType::f32, ReduceOp::average, "x");
      }
    });
    has(error, "stopped by the user");
  }
}

TEST_CASE("launchers are known by what they leave in the environment") {
  static constexpr const char* kNames[] = {
      "PMI_RANK",      "PMI_SIZE",     "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
      "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"};
  const auto clear = [] {
    for (const char* name : kNames) unsetenv(name);
  };
  const auto set = [](const char* name, const char* value) { setenv(name, value, 1); };
  clear();
  CHECK_FALSE(detect_launcher());
  set("PMI_RANK", "2");
  CHECK_FALSE(detect_launcher());
  set("PMI_SIZE", "4");
  REQUIRE(detect_launcher());
  CHECK(detect_launcher()->name == "mpiexec");
  CHECK(detect_launcher()->rank == 2);
  CHECK(detect_launcher()->size == 4);
  set("PMI_RANK", "4");  // of ranks 0 to 3
  CHECK_FALSE(detect_launcher());
  set("PMI_RANK", "2x");
  CHECK_FALSE(detect_launcher());
  set("SLURM_PROCID", "1");
  set("SLURM_STEP_NUM_TASKS", "3");
  CHECK_FALSE(detect_launcher());
  set("SLURM_STEP_ID", "0");
  REQUIRE(detect_launcher());
  CHECK(detect_launcher()->name == "srun");
  set("OMPI_COMM_WORLD_RANK", "0");
  set("OMPI_COMM_WORLD_SIZE", "8");
  REQUIRE(detect_launcher());
  CHECK(detect_launcher()->size == 8);
  if (!mpi_built()) {
    CHECK_THROWS_WITH_AS(make_mpi_communicator(), doctest::Contains("started 8 ranks, but"), Error);
  }
  clear();
  if (!mpi_built()) {
    CHECK_THROWS_WITH_AS(make_mpi_communicator(), doctest::Contains("built without MPI"), Error);
  }
}
