// SPDX-License-Identifier: Apache-2.0
// Ranks that are processes. Run by tests/mpi/run under mpiexec; every rank runs the same cases, and
// the program fails when a check fails on any of them. `test_mpi --end=HOW` is a program that ends
// in that way, for the cases that run looks at from outside.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>
#include <sherd/comm/faulty_communicator.h>
#include <sherd/comm/mpi.h>
#include <sherd/comm/rank_threads.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <functional>
#include <sstream>
#include <thread>

#include "../unit/collective_checks.h"

using namespace sherd;

namespace {

using Clock = std::chrono::steady_clock;
const MpiTransport kTransports[] = {MpiTransport::shared, MpiTransport::messages};

void sleep_ms(int milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

// Runs body on a new group of all ranks and returns what it threw here ("" for nothing), as a
// program would: a rank that throws ends the group.
std::string error_of(MpiTransport transport, const std::function<void(Communicator&)>& body) {
  const auto comm = make_mpi_communicator(transport);
  try {
    body(*comm);
  } catch (const Error& error) {
    comm->abort(error.what());
    return error.what();
  }
  return "";
}

bool contains(const std::string& text, const std::string& piece) {
  return text.find(piece) != std::string::npos;
}

std::vector<int> ranks_from(int first, int last) {
  std::vector<int> all;
  for (int r = first; r < last; ++r) all.push_back(r);
  return all;
}

}  // namespace

TEST_CASE("mpi: every collective and type, on both transports") {
  for (const MpiTransport transport : kTransports) {
    const auto comm = make_mpi_communicator(transport);
    test::check_collectives(*comm, {0, 1, 5, 1030});
    test::check_type<float>(*comm, DType::f32, 100'003);
    test::check_wide<bf16>(*comm, DType::bf16, 300'001);
    if (comm->size() > 1) CHECK(comm->counters().total_bytes() > 0);
  }
  CHECK(mpi_automatic_transport() == MpiTransport::shared);
  test::check_type<float>(*make_mpi_communicator(), DType::f32, 5000);
}

TEST_CASE("mpi: the same bits as threads") {
  const int size = make_mpi_communicator()->size();
  constexpr std::int64_t kCount = 4'001;
  const auto work = [&](Communicator& comm) {
    auto input = test::rank_values<float>(comm.rank(), size * kCount);
    std::vector<float> piece(kCount);
    comm.reduce_scatter(input.data(), piece.data(), kCount, DType::f32, ReduceOp::average, "rs");
    comm.all_gather(piece.data(), input.data(), kCount, DType::f32, "ag");
    comm.all_reduce(input.data(), size * kCount, DType::f32, ReduceOp::sum, "ar");
    return input;
  };
  std::vector<std::vector<float>> threads(static_cast<std::size_t>(size));
  run_rank_threads(size, [&](Communicator& comm) {
    threads[static_cast<std::size_t>(comm.rank())] = work(comm);
  });
  for (const MpiTransport transport : kTransports) {
    const auto comm = make_mpi_communicator(transport);
    CHECK(work(*comm) == threads[static_cast<std::size_t>(comm->rank())]);
  }
}

TEST_CASE("mpi: groups, used by two threads at once") {
  for (const MpiTransport transport : kTransports) {
    const auto world = make_mpi_communicator(transport);
    const int half = (world->size() + 1) / 2;
    const auto members =
        world->rank() < half ? ranks_from(0, half) : ranks_from(half, world->size());
    const auto gathers = world->split(ranks_from(0, world->size()), "gathers");
    const auto halves = world->split(members, "halves");
    CHECK(halves->size() == static_cast<int>(members.size()));
    CHECK(halves->rank() == world->rank() - members.front());
    std::string error;
    std::thread other([&] {
      try {
        for (int i = 0; i < 10; ++i) test::check_type<float>(*gathers, DType::f32, 300 * i);
      } catch (const Error& problem) {
        error = problem.what();
        gathers->abort(error);
      }
    });
    for (int i = 0; i < 20; ++i) test::check_type<double>(*halves, DType::f64, 100 * i);
    other.join();
    CHECK(error == "");
    const auto third = halves->split(std::vector<int>{halves->rank()}, "alone");
    test::check_type<float>(*third, DType::f32, 10);
  }
}

TEST_CASE("mpi: ranks that disagree all get the words that threads get") {
  const int size = make_mpi_communicator()->size();
  if (size == 1) return;
  const std::vector<std::function<void(Communicator&)>> mistakes{
      [&](Communicator& comm) {
        comm.barrier("start");
        comm.barrier(comm.rank() == size - 1 ? "b" : "a");
      },
      [&](Communicator& comm) {
        std::vector<float> data(static_cast<std::size_t>(size) * 5 + 5);
        const std::int64_t count = comm.rank() == 0 ? 4 : 5;
        comm.all_gather(data.data(), data.data() + 5, count, DType::f32, "unit");
      },
      [&](Communicator& comm) {
        const std::vector<bf16> input(static_cast<std::size_t>(size));
        float output = 0.0f;
        if (comm.rank() == 0)
          comm.reduce_scatter(input.data(), &output, 1, DType::bf16, ReduceOp::sum, "unit");
        else
          comm.reduce_scatter_wide(input.data(), &output, 1, DType::bf16, ReduceOp::sum, "unit");
      },
      [&](Communicator& comm) {
        float x = 0.0f;
        if (comm.rank() == 0) comm.send(&x, 1, DType::f32, 1, "a");
        if (comm.rank() == 1) comm.recv(&x, 1, DType::f32, 0, "b");
        comm.barrier("end");
      },
      [&](Communicator& comm) {
        float x = 0.0f;
        if (comm.rank() == 0) comm.send(&x, 1, DType::f32, 1, "a");
        comm.barrier("end");
      },
      [&](Communicator& comm) {
        float x = 0.0f;
        comm.barrier("start");
        if (comm.rank() == 0) comm.recv(&x, 1, DType::f32, 1, "a");
        if (comm.rank() == 1) comm.recv(&x, 1, DType::f32, 0, "a");
        comm.barrier("end");
      },
      [&](Communicator& comm) {
        const auto everybody = ranks_from(0, size);
        comm.split(comm.rank() == 0 ? std::vector<int>{0} : everybody, "groups");
      },
  };
  for (const auto& mistake : mistakes) {
    std::string threads;
    try {
      run_rank_threads(size, mistake);
    } catch (const Error& error) {
      threads = error.what();
    }
    for (const MpiTransport transport : kTransports) CHECK(error_of(transport, mistake) == threads);
  }
}

TEST_CASE("mpi: a call that is skipped or made late is noticed") {
  const int size = make_mpi_communicator()->size();
  if (size == 1) return;
  for (const MpiTransport transport : kTransports) {
    for (const Fault::Kind kind : {Fault::Kind::drop, Fault::Kind::reorder}) {
      Fault fault;
      fault.kind = kind;
      fault.call = 1;
      auto comm = make_mpi_communicator(transport);
      if (comm->rank() == 1) comm = make_faulty_communicator(std::move(comm), {fault});
      std::string error;
      float data = 1.0f;
      try {
        for (const char* label : {"u0", "u1", "u2"})
          comm->all_reduce(&data, 1, DType::f32, ReduceOp::sum, label);
      } catch (const Error& problem) {
        error = problem.what();
      }
      CAPTURE(error);
      CHECK(contains(error,
                     "rank 0: all_reduce (sum) of 1 f32 for 'u1'; rank 1: all_reduce (sum) "
                     "of 1 f32 for 'u2'"));
      if (comm->rank() != 1) CHECK(data == static_cast<float>(size));
    }
  }
}

TEST_CASE("mpi: an abort reaches the others wherever they wait, soon") {
  const int size = make_mpi_communicator()->size();
  if (size == 1) return;
  const std::vector<std::function<void(Communicator&, Communicator&)>> waits{
      [](Communicator& world, Communicator&) { world.barrier("waits"); },
      [](Communicator&, Communicator& group) { group.barrier("waits in a group"); },
      [](Communicator& world, Communicator&) {
        std::vector<float> data(300'000);
        world.all_reduce(data.data(), 300'000, DType::f32, ReduceOp::sum, "waits");
      },
      [](Communicator& world, Communicator&) {
        float x = 0.0f;
        world.recv(&x, 1, DType::f32, 0, "waits");
      },
      [](Communicator& world, Communicator&) {
        std::vector<float> data(300'000);
        world.send(data.data(), 300'000, DType::f32, 0, "waits");
      },
  };
  for (const MpiTransport transport : kTransports) {
    for (const auto& wait : waits) {
      const auto world = make_mpi_communicator(transport);
      const auto group = world->split(ranks_from(0, size), "group");
      world->barrier("start");
      if (world->rank() == 0) {
        sleep_ms(30);
        world->abort("rank 0: no space left");
      }
      const auto start = Clock::now();
      std::string error;
      try {
        if (world->rank() == 0) world->barrier("after the end");
        wait(*world, *group);
      } catch (const Error& problem) {
        error = problem.what();
      }
      CHECK(error == "rank 0: no space left");
      CHECK(group->end_reason() == "rank 0: no space left");
      CHECK(std::chrono::duration<double>(Clock::now() - start).count() < 1.0);
    }
  }
}

TEST_CASE("mpi: a rank that leaves does not leave the others waiting") {
  const int size = make_mpi_communicator()->size();
  if (size == 1) return;
  for (const MpiTransport transport : kTransports) {
    for (const bool message : {false, true}) {
      const std::string error = error_of(transport, [&](Communicator& comm) {
        float x = 0.0f;
        comm.barrier("start");
        if (comm.rank() == 1) return;
        if (message && comm.rank() == 0) comm.recv(&x, 1, DType::f32, 1, "end");
        comm.barrier("end");
      });
      if (make_mpi_communicator()->rank() == 1) {
        CHECK(error == "");
      } else {
        CAPTURE(error);
        CHECK(contains(error, "rank 1 has left the group, so rank "));
        CHECK(contains(error, "waits in vain in "));
      }
    }
  }
}

namespace {

// A program of several ranks of which the last ends in some way while the others wait for it.
int end_like(const std::string& how) {
  std::unique_ptr<Communicator> comm;
  try {
    comm = make_mpi_communicator(how.ends_with("-messages") ? MpiTransport::messages
                                                            : MpiTransport::automatic);
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  const bool last = comm->rank() == comm->size() - 1;
  try {
    comm->barrier("start");
    if (how.starts_with("well")) return 0;
    if (last) {
      sleep_ms(100);
      if (how.starts_with("kill")) kill(getpid(), SIGKILL);
      if (how.starts_with("exit")) _exit(3);
      if (how.starts_with("uncaught")) std::thread([] { fail("nobody catches this"); }).join();
      fail("the disk is full");
    }
    // Rank 0 does not come back to Sherd: the others end it.
    if (how.starts_with("stuck") && comm->rank() == 0) sleep_ms(1'000'000);
    comm->barrier("end");
  } catch (const Error& error) {
    comm->abort(fmt::format("rank {}: {}", comm->rank(), error.what()));
    std::fprintf(stderr, "rank %d says: %s\n", comm->rank(), comm->end_reason().c_str());
    return 1;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && std::string_view(argv[1]).starts_with("--end=")) return end_like(argv[1] + 6);
  doctest::Context context(argc, argv);
  std::ostringstream text;
  context.setCout(&text);
  const int failed = context.run();
  // What other ranks say matters only when a check failed there.
  const auto comm = make_mpi_communicator(MpiTransport::messages);
  std::int32_t any = failed;
  comm->all_reduce(&any, 1, DType::i32, ReduceOp::max, "outcome");
  if (comm->rank() == 0 || failed != 0) {
    std::printf("%s%s", failed != 0 ? fmt::format("rank {}:\n", comm->rank()).c_str() : "",
                text.str().c_str());
  }
  return any != 0 ? 1 : 0;
}
