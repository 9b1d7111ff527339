// SPDX-License-Identifier: Apache-2.0
// Ranks that meet over TCP, here threads (and for those that die, processes) of one machine with
// real sockets: the results of threads, every mistake at the start, and every way to go away.
#include <doctest/doctest.h>
#include <sherd/comm/rank_threads.h>
#include <sherd/comm/tcp_communicator.h>
#include <sherd/comm/tcp_hello.h>
#include <sherd/comm/tcp_socket.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>

#include "collective_checks.h"
#include "io_support.h"

using namespace sherd;

namespace {

using Clock = std::chrono::steady_clock;

void sleep_ms(int milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

// A port that is free now; nobody else here takes ports by number.
std::string free_address() {
  return tcp_listen({"127.0.0.1", 0}).here().text();
}

using Change = std::function<void(TcpOptions&)>;
using Body = std::function<void(Communicator&)>;

// A thread for every rank, with these options; what each threw.
std::vector<std::string> errors_of(int size, const Body& body, const Change& change = {}) {
  const std::string address = free_address();
  std::vector<std::string> errors(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) {
    threads.emplace_back([&, r] {
      TcpOptions options{.address = address, .rank = r, .size = size, .token = "t"};
      options.join_seconds = 20.0;
      if (change) change(options);
      std::unique_ptr<Communicator> comm;
      try {
        comm = make_tcp_communicator(options);
        body(*comm);
      } catch (const Error& error) {
        errors[static_cast<std::size_t>(r)] = error.what();
        if (comm) comm->abort(error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

void run_tcp(int size, const Body& body, const Change& change = {}) {
  for (const std::string& error : errors_of(size, body, change)) CHECK(error == "");
}

std::string text_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void has(const std::string& text, const std::string& piece) {
  CAPTURE(text);
  CHECK(text.find(piece) != std::string::npos);
}

// The first that is not empty.
std::string first_of(const std::vector<std::string>& errors) {
  for (const std::string& error : errors) {
    if (!error.empty()) return error;
  }
  return "";
}

}  // namespace

TEST_CASE("TCP: every collective and type has the bits of threads") {
  for (const int size : {1, 2, 3, 4, 5, 8}) {
    run_tcp(size, [](Communicator& comm) { test::check_collectives(comm, {0, 1, 5, 1030}); });
  }
  run_tcp(3, [](Communicator& comm) {
    CHECK(comm.backend() == "TCP");
    if (comm.rank() == 0) CHECK(comm.counters().total_bytes() == 0);
    std::vector<float> data(12);
    comm.all_reduce(data.data(), 12, DType::f32, ReduceOp::sum, "a");
    CHECK(comm.counters().total_bytes() == 2 * 12 * 4 * 2 / 3);
  });
}

TEST_CASE("TCP: more data than fits into buffers, in odd sizes") {
  for (const int size : {2, 3}) {
    run_tcp(size, [](Communicator& comm) {
      test::check_type<float>(comm, DType::f32, 300'001);
      test::check_type<bf16>(comm, DType::bf16, 262'145);
      test::check_wide<bf16>(comm, DType::bf16, 300'001);
      test::check_type<std::uint8_t>(comm, DType::u8, 1'048'577);
    });
  }
}

TEST_CASE("TCP: groups, used by several threads at once, and groups of groups") {
  run_tcp(4, [](Communicator& world) {
    const std::vector<int> everybody{0, 1, 2, 3};
    const std::vector<int> pair{world.rank() % 2, world.rank() % 2 + 2};
    const auto gathers = world.split(everybody, "gathers");
    const auto reduces = world.split(pair, "reduces");
    std::string error;
    std::thread other([&] {
      try {
        for (int i = 0; i < 20; ++i) test::check_type<float>(*gathers, DType::f32, 100 * i);
      } catch (const Error& problem) {
        error = problem.what();
      }
    });
    for (int i = 0; i < 40; ++i) test::check_type<double>(*reduces, DType::f64, 50 * i);
    other.join();
    SHERD_CHECK(error.empty(), "the other thread's calls: {}", error);
    for (int round = 0; round < 5; ++round) {
      const auto alone = reduces->split(std::vector<int>{reduces->rank()}, "alone");
      const auto again = reduces->split(std::vector<int>{0, 1}, "again");
      test::check_type<float>(*alone, DType::f32, 10);
      test::check_type<float>(*again, DType::f32, 10);
    }
  });
}

TEST_CASE("TCP: ranks that fail each other get the errors of threads") {
  float x = 0.0f;
  const std::vector<Body> mistakes{
      [](Communicator& comm) { comm.barrier(comm.rank() == 1 ? "b" : "a"); },
      [](Communicator& comm) {
        std::vector<float> data(40);
        comm.all_gather(data.data(), data.data() + 20, comm.rank() == 2 ? 4 : 5, DType::f32, "u");
      },
      [](Communicator& comm) {
        const std::vector<bf16> input(30);
        float output[10] = {};
        if (comm.rank() == 0)
          comm.reduce_scatter(input.data(), output, 10, DType::bf16, ReduceOp::sum, "unit");
        else
          comm.reduce_scatter_wide(input.data(), output, 10, DType::bf16, ReduceOp::sum, "unit");
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
        if (comm.rank() == 2) sleep_ms(10);
      },
      [](Communicator& comm) {
        const auto pair =
            comm.split(comm.rank() < 2 ? std::vector<int>{0, 1} : std::vector<int>{2}, "pair");
        if (comm.rank() == 2) fail("rank 2: the disk is full");
        if (comm.rank() == 0) pair->barrier("waits for rank 1");
        sleep_ms(20);
        comm.barrier("end");
      },
  };
  for (const Body& mistake : mistakes) {
    std::string threads;
    try {
      run_rank_threads(3, mistake);
    } catch (const Error& error) {
      threads = error.what();
    }
    if (threads.starts_with("rank ") && threads.substr(6, 7) == ": ranks ")
      threads = threads.substr(8);
    const auto errors = errors_of(3, mistake);
    has(threads, first_of(errors));
    CHECK(first_of(errors) != "");
  }
  has(first_of(errors_of(
          2, [&](Communicator& comm) { comm.send(&x, 1, DType::f32, 1 - comm.rank(), "a"); })),
      "wait for each other");
}

TEST_CASE("TCP: an abort reaches the others wherever they wait, soon") {
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
        std::vector<float> data(3'000'000);
        world.send(data.data(), 3'000'000, DType::f32, 0, "waits");
      },
  };
  for (const auto& wait : waits) {
    const auto errors = errors_of(3, [&](Communicator& world) {
      const auto group = world.split(std::vector<int>{0, 1, 2}, "group");
      world.barrier("start");
      if (world.rank() == 0) {
        sleep_ms(30);
        world.abort("rank 0: no space left");
      }
      const auto start = Clock::now();
      std::string error;
      try {
        if (world.rank() == 0) world.barrier("after the end");
        wait(world, *group);
      } catch (const Error& problem) {
        error = problem.what();
      }
      SHERD_CHECK(error == "rank 0: no space left", "got '{}'", error);
      SHERD_CHECK(group->end_reason() == error, "the group: '{}'", group->end_reason());
      SHERD_CHECK(std::chrono::duration<double>(Clock::now() - start).count() < 1.0, "late");
    });
    CHECK(first_of(errors) == "");
  }
  // From another thread of a rank that waits itself.
  const auto errors = errors_of(2, [](Communicator& world) {
    if (world.rank() == 1) {
      while (world.end_reason().empty()) sleep_ms(1);
      return;
    }
    std::thread other([&] {
      sleep_ms(30);
      world.abort("stopped by the user");
    });
    std::string error;
    try {
      world.barrier("waits");
    } catch (const Error& problem) {
      error = problem.what();
    }
    other.join();
    fail("{}", error);
  });
  CHECK(errors[0] == "stopped by the user");
}

TEST_CASE("TCP: a process that dies ends the group of the others, with its name") {
  for (const bool in_message : {false, true}) {
    const std::string address = free_address();
    const auto options = [&](int rank) {
      return TcpOptions{.address = address, .rank = rank, .size = 3, .token = "t"};
    };
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      try {
        const auto comm = make_tcp_communicator(options(2));
        const auto group = comm->split(std::vector<int>{2}, "groups");
        comm->barrier("start");
        kill(getpid(), SIGKILL);
      } catch (...) {
      }
      _exit(3);
    }
    std::string errors[2];
    std::vector<std::thread> threads;
    const auto start = Clock::now();
    for (int r = 0; r < 2; ++r) {
      threads.emplace_back([&, r] {
        try {
          const auto comm = make_tcp_communicator(options(r));
          const auto pair = comm->split(std::vector<int>{0, 1}, "groups");
          comm->barrier("start");
          float x = 0.0f;
          // The dead one is not in this group, and yet nobody waits in it for ever.
          if (in_message && r == 0) pair->recv(&x, 1, DType::f32, 1, "a");
          comm->barrier("end");
        } catch (const Error& error) {
          errors[r] = error.what();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFSIGNALED(status));
    for (const std::string& error : errors) has(error, "rank 2 of 3 (127.0.0.1) has died");
    CHECK(std::chrono::duration<double>(Clock::now() - start).count() < 5.0);
  }
}

TEST_CASE("TCP: what is wrong at the start is one message on both sides") {
  const Body nothing = [](Communicator& comm) { comm.barrier("start"); };
  const auto all_say = [&](const Change& change, const std::string& piece) {
    const auto start = Clock::now();
    const auto errors = errors_of(3, nothing, change);
    for (const std::string& error : errors) CHECK(error == errors[0]);
    has(errors[0], piece);
    CHECK(std::chrono::duration<double>(Clock::now() - start).count() < 5.0);
  };
  // Rank 1 makes the mistake when rank 2 is there, so that all three hear of it.
  const auto last = [](TcpOptions& options, const Change& change) {
    if (options.rank != 1) return;
    sleep_ms(200);
    change(options);
  };
  all_say([&](TcpOptions& o) { last(o, [](TcpOptions& mine) { mine.token = "u"; }); },
          "has another token than rank 0");
  all_say([&](TcpOptions& o) { last(o, [](TcpOptions& mine) { mine.token = ""; }); },
          "has another token than rank 0");
  all_say([&](TcpOptions& o) { last(o, [](TcpOptions& mine) { mine.size = 4; }); },
          "was started as one of 4 ranks and rank 0 as one of 3");
  all_say([&](TcpOptions& o) { last(o, [](TcpOptions& mine) { mine.rank = 2; }); },
          "two processes say that they are rank 2 of 3: one at 127.0.0.1:");

  const auto refused = [](TcpOptions options, const char* piece) {
    CHECK_THROWS_WITH_AS(make_tcp_communicator(options), doctest::Contains(piece), Error);
  };
  refused({.address = "127.0.0.1:1", .rank = 3, .size = 3}, "rank 3 of 3");
  refused({.rank = 0, .size = 3}, "neither is given");
  refused({.address = "127.0.0.1:1", .file = "f", .rank = 0, .size = 3}, "not both");
  refused({.address = "127.0.0.1", .rank = 0, .size = 3}, "expected host:port");
  refused({.address = "1.2.3.4:x", .rank = 0, .size = 3}, "expected host:port");
  refused({.address = "::1:80", .rank = 0, .size = 3}, "expected host:port");
  refused({.address = "127.0.0.1:1", .size = 2, .token = std::string(128, 'x')}, "128 bytes");
  refused({.address = "no.such.host.invalid:80", .size = 2}, "no.such.host.invalid");
  refused({.address = "192.0.2.1:2000", .size = 2}, "cannot listen at 192.0.2.1:2000");
}

TEST_CASE("TCP: another version is an error of both; what is not Sherd's does not matter") {
  const std::string address = free_address();
  std::string error;
  std::thread first([&] {
    try {
      make_tcp_communicator({.address = address, .rank = 0, .size = 2, .join_seconds = 20.0});
    } catch (const Error& problem) {
      error = problem.what();
    }
  });
  const auto visit = [&](const void* data, std::size_t bytes) {
    TcpSocket socket;
    for (int i = 0; i < 200 && !socket; ++i) {  // until it listens
      TcpSocket attempt = tcp_connect(parse_tcp_address(address, "test"));
      sleep_ms(10);
      if (attempt.connect_error().empty()) socket = std::move(attempt);
    }
    tcp_send_all(socket, data, bytes, tcp_deadline(5));
    return socket;
  };
  const std::string request = "GET / HTTP/1.0\r\n\r\n";
  const TcpSocket stranger = visit(request.data(), request.size());
  char byte = 0;
  CHECK(tcp_receive_all(stranger, &byte, 1, tcp_deadline(5)) == TcpOutcome::closed);
  const TcpSocket silent = visit(request.data(), 0);
  TcpHello hello = tcp_hello(TcpHello::Kind::join, 1, 2, "");
  const TcpSocket half = visit(&hello, 20);
  ++hello.version;
  const TcpSocket newer = visit(&hello, sizeof hello);
  CHECK_THROWS_WITH_AS(receive_reply(newer, "rank 0", tcp_deadline(5)),
                       doctest::Contains("speaks version 2 of the protocol and rank 0 version 1"),
                       Error);
  first.join();
  has(error, "speaks version 2 of the protocol and rank 0 version 1");
}

TEST_CASE("TCP: a rank that never comes is named, on all that are there") {
  const auto start = Clock::now();
  const auto errors = errors_of(
      4, [](Communicator&) {},
      [](TcpOptions& options) {
        options.size = 6;
        options.join_seconds = options.rank == 0 ? 0.5 : 1.0;
      });
  for (const std::string& error : errors) {
    CHECK(error == errors[0]);
    has(error, "ranks 4, 5 of 6 did not come to 127.0.0.1:");
    has(error, "within 0.5 s");
  }
  CHECK(std::chrono::duration<double>(Clock::now() - start).count() < 5.0);
  const std::string nobody = free_address();
  CHECK_THROWS_WITH_AS(
      make_tcp_communicator({.address = nobody, .rank = 1, .size = 2, .join_seconds = 0.3}),
      doctest::Contains(("rank 1 of 2 did not reach rank 0 at " + nobody).c_str()), Error);
  // One that goes away again before all are there.
  std::string error;
  std::thread first([&] {
    try {
      make_tcp_communicator({.address = nobody, .rank = 0, .size = 3, .join_seconds = 20.0});
    } catch (const Error& problem) {
      error = problem.what();
    }
  });
  sleep_ms(100);
  {
    const TcpSocket socket = tcp_connect(parse_tcp_address(nobody, "test"));
    sleep_ms(20);
    const TcpHello hello = tcp_hello(TcpHello::Kind::join, 1, 3, "");
    tcp_send_all(socket, &hello, sizeof hello, tcp_deadline(5));
    sleep_ms(100);
  }
  first.join();
  has(error, "rank 1 of 3 went away before all ranks were there");
}

TEST_CASE("TCP: ranks meet by a file, whatever an earlier run has left in it") {
  const test::TempDirectory folder;
  const std::string path = folder.path("meet");
  // Where somebody listens who never answers: only the token keeps this one from being tried.
  const TcpSocket other = tcp_listen({"127.0.0.1", 0});
  std::vector<std::string> stale{
      "", "sherd rendezvous 1 0123456789abcdef\n", "garbage\n",
      "sherd rendezvous 1 0123456789abcdef\n" + other.here().text() + "\n"};
  {
    // Left by a run with the same token, whose rank 0 is gone.
    const std::string gone = free_address();
    std::thread first([&] {
      CHECK_THROWS_AS(make_tcp_communicator(
                          {.file = path, .rank = 0, .size = 2, .token = "t", .join_seconds = 0.5}),
                      Error);
    });
    std::string left;
    while (!left.ends_with("\n")) {
      left = text_of(path);
      sleep_ms(5);
    }
    struct stat status {};
    CHECK(stat(path.c_str(), &status) == 0);
    CHECK((status.st_mode & 0777) == 0600);
    first.join();
    CHECK(left.find("t\n") == std::string::npos);  // no token
    stale.push_back(left.substr(0, left.find('\n') + 1) + gone + "\n");
  }
  for (const std::string& text : stale) {
    CAPTURE(text);
    if (!text.empty()) test::put_file(path, test::bytes_of(text));
    run_tcp(
        3, [](Communicator& comm) { test::check_type<float>(comm, DType::f32, 100); },
        [&](TcpOptions& options) {
          options.address = "";
          options.file = path;
          if (options.rank == 0) sleep_ms(150);
        });
    CHECK(access(path.c_str(), F_OK) != 0);
  }
  CHECK_THROWS_WITH_AS(
      make_tcp_communicator(
          {.file = folder.path("no/such/folder"), .rank = 0, .size = 2, .join_seconds = 1.0}),
      doctest::Contains("cannot write the rendezvous file"), Error);
  CHECK_THROWS_WITH_AS(
      make_tcp_communicator({.file = path, .rank = 1, .size = 2, .join_seconds = 0.3}),
      doctest::Contains("the file is not there"), Error);
}

TEST_CASE("TCP: the environment of Sherd and of torchrun, and what contradicts itself") {
  static constexpr const char* kNames[] = {
      "SHERD_RENDEZVOUS",  "SHERD_RANK", "SHERD_WORLD_SIZE", "SHERD_TOKEN", "MASTER_ADDR",
      "MASTER_PORT",       "RANK",       "WORLD_SIZE",       "PMI_RANK",    "PMI_SIZE",
      "SHERD_JOIN_SECONDS"};
  const auto clear = [] {
    for (const char* name : kNames) unsetenv(name);
  };
  const auto set = [](const char* name, const char* value) { setenv(name, value, 1); };
  const auto refused = [](const char* piece) {
    CHECK_THROWS_WITH_AS(tcp_options_from_environment(), doctest::Contains(piece), Error);
  };
  clear();
  CHECK_FALSE(tcp_options_from_environment());
  set("SHERD_RANK", "1");
  refused("SHERD_RANK=1 is set, but not where the ranks meet");
  set("SHERD_RENDEZVOUS", "10.0.0.1:29400");
  refused("SHERD_WORLD_SIZE is not set");
  set("SHERD_WORLD_SIZE", "4");
  set("SHERD_TOKEN", "s3cret");
  auto options = tcp_options_from_environment();
  REQUIRE(options);
  CHECK(options->address == "10.0.0.1:29400");
  CHECK(options->file == "");
  CHECK(options->rank == 1);
  CHECK(options->size == 4);
  CHECK(options->token == "s3cret");
  CHECK(options->join_seconds == 120.0);
  set("SHERD_JOIN_SECONDS", "7");
  CHECK(tcp_options_from_environment()->join_seconds == 7.0);
  set("SHERD_JOIN_SECONDS", "7s");
  refused("SHERD_JOIN_SECONDS=7s: expected a whole number");
  unsetenv("SHERD_JOIN_SECONDS");
  set("SHERD_RANK", "4");
  refused("rank 4 of 4");
  set("SHERD_RANK", "one");
  refused("SHERD_RANK=one: expected a whole number");
  set("SHERD_RANK", "1");
  set("RANK", "2");
  refused("SHERD_RANK=1 and RANK=2 contradict each other");
  set("RANK", "1");
  set("MASTER_ADDR", "10.0.0.1");
  set("MASTER_PORT", "29401");
  refused("contradict each other");
  set("MASTER_PORT", "29400");
  CHECK(tcp_options_from_environment()->rank == 1);
  set("SHERD_RENDEZVOUS", "10.0.0.1");
  unsetenv("MASTER_ADDR");
  refused("expected host:port");
  set("SHERD_RENDEZVOUS", "10.0.0.1:0");
  refused("cannot know a port of 0");
  set("SHERD_RENDEZVOUS", "file:/tmp/meet");
  CHECK(tcp_options_from_environment()->file == "/tmp/meet");
  CHECK(tcp_options_from_environment()->address == "");

  clear();
  set("MASTER_ADDR", "fe80::1");
  set("MASTER_PORT", "1234");
  set("RANK", "0");
  CHECK_FALSE(tcp_options_from_environment());  // one of the four is missing
  set("WORLD_SIZE", "2");
  CHECK(tcp_options_from_environment()->address == "[fe80::1]:1234");
  CHECK(tcp_options_from_environment()->size == 2);

  clear();  // places by a launcher
  set("PMI_RANK", "2");
  set("PMI_SIZE", "3");
  CHECK_FALSE(tcp_options_from_environment());
  set("SHERD_RENDEZVOUS", "file:f");
  CHECK(tcp_options_from_environment()->rank == 2);
  CHECK(tcp_options_from_environment()->size == 3);
  clear();
}
