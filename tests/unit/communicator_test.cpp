// SPDX-License-Identifier: Apache-2.0
// Communicators: every collective against plain loops for 1 to 8 ranks, the tree of sums, in-place
// use, and each way in which ranks can fail each other.
#include <doctest/doctest.h>
#include <sherd/comm/communicator.h>
#include <sherd/comm/process_mesh.h>
#include <sherd/runtime/error.h>
#include <sherd/runtime/philox.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <functional>
#include <thread>

using namespace sherd;

namespace {

using RankBody = std::function<void(Communicator&)>;

// Runs body on `size` ranks, a thread each, and returns what each threw ("" for nothing). A rank
// that throws ends its group, as a training program's would.
std::vector<std::string> run_ranks(std::vector<std::unique_ptr<Communicator>> ranks,
                                   const RankBody& body) {
  std::vector<std::string> errors(ranks.size());
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    threads.emplace_back([&, r] {
      const std::unique_ptr<Communicator> mine = std::move(ranks[r]);
      try {
        body(*mine);
      } catch (const Error& error) {
        errors[r] = error.what();
        mine->abort(error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

void run_all(int size, const RankBody& body) {
  for (const std::string& error : run_ranks(make_thread_communicators(size), body)) {
    CHECK(error == "");
  }
}

float value(int rank, std::int64_t i) {
  const RandomStream stream(5, "test", "communicator", static_cast<std::uint64_t>(rank));
  return static_cast<float>(stream.normal(static_cast<std::uint64_t>(i)));
}

std::vector<float> values(int rank, std::int64_t count) {
  std::vector<float> all;
  for (std::int64_t i = 0; i < count; ++i) all.push_back(value(rank, i));
  return all;
}

// The documented tree, written down again.
template <typename T>
T tree_sum(const std::vector<T>& v, std::size_t first, std::size_t last) {
  if (last - first == 1) return v[first];
  std::size_t left = 1;
  while (left * 2 < last - first) left *= 2;
  return tree_sum(v, first, first + left) + tree_sum(v, first + left, last);
}

float expected_sum(int size, std::int64_t i) {
  std::vector<float> all;
  for (int r = 0; r < size; ++r) all.push_back(value(r, i));
  return tree_sum(all, 0, all.size());
}

const int kSizes[] = {1, 2, 3, 4, 5, 8};

}  // namespace

TEST_CASE("communicator: all_reduce has the bits of the documented tree, on every rank") {
  for (const int size : kSizes) {
    for (const std::int64_t count : {0, 1, 3, 1025, 5000}) {
      run_all(size, [&](Communicator& comm) {
        std::vector<float> data = values(comm.rank(), count);
        comm.all_reduce(data.data(), count, DType::f32, ReduceOp::sum, "sum");
        bool equal = true;
        for (std::int64_t i = 0; i < count; ++i) {
          equal = equal && data[static_cast<std::size_t>(i)] == expected_sum(size, i);
        }
        SHERD_CHECK(equal, "rank {} of {}: another sum of {}", comm.rank(), size, count);
      });
    }
  }
}

TEST_CASE("communicator: average and max; every type") {
  run_all(4, [](Communicator& comm) {
    std::vector<double> average{static_cast<double>(comm.rank())};
    comm.all_reduce(average.data(), 1, DType::f64, ReduceOp::average, "average");
    SHERD_CHECK(average[0] == 1.5, "average {}", average[0]);
    std::vector<std::int64_t> words{comm.rank(), -comm.rank()};
    comm.all_reduce(words.data(), 2, DType::i64, ReduceOp::sum, "words");
    SHERD_CHECK(words[0] == 6 && words[1] == -6, "integers {} {}", words[0], words[1]);
    std::vector<std::int32_t> top{comm.rank() * 3};
    comm.all_reduce(top.data(), 1, DType::i32, ReduceOp::max, "max");
    SHERD_CHECK(top[0] == 9, "max {}", top[0]);
    // Sums of 16-bit values are taken in fp32: 256 + 1 + 1 + 1 would stay 256 in bf16.
    std::vector<bf16> narrow{bf16(comm.rank() == 0 ? 256.0f : 1.0f)};
    comm.all_reduce(narrow.data(), 1, DType::bf16, ReduceOp::sum, "bf16");
    SHERD_CHECK(static_cast<float>(narrow[0]) == 260.0f, "bf16 {}", static_cast<float>(narrow[0]));
    std::vector<f16> half{f16(comm.rank() == 2 ? 2048.0f : 1.0f)};
    comm.all_reduce(half.data(), 1, DType::f16, ReduceOp::sum, "f16");
    SHERD_CHECK(static_cast<float>(half[0]) == 2052.0f, "f16 {}", static_cast<float>(half[0]));
    std::vector<float> nan{comm.rank() == 1 ? NAN : 7.0f};
    comm.all_reduce(nan.data(), 1, DType::f32, ReduceOp::max, "nan");
    SHERD_CHECK(std::isnan(nan[0]), "a NaN was lost in a max");
  });
}

TEST_CASE("communicator: reduce_scatter and all_gather, in place and not") {
  for (const int size : kSizes) {
    for (const std::int64_t count : {1, 7, 2000}) {
      run_all(size, [&](Communicator& comm) {
        std::vector<float> input = values(comm.rank(), size * count);
        std::vector<float> piece(static_cast<std::size_t>(count));
        comm.reduce_scatter(input.data(), piece.data(), count, DType::f32, ReduceOp::sum, "rs");
        float* own = input.data() + comm.rank() * count;
        comm.reduce_scatter(input.data(), own, count, DType::f32, ReduceOp::sum, "rs in place");
        bool equal = true;
        for (std::int64_t i = 0; i < count; ++i) {
          const float expected = expected_sum(size, comm.rank() * count + i);
          equal = equal && piece[static_cast<std::size_t>(i)] == expected && own[i] == expected;
        }
        SHERD_CHECK(equal, "rank {} of {}: another reduce_scatter", comm.rank(), size);

        std::vector<float> whole(static_cast<std::size_t>(size * count), -1.0f);
        comm.all_gather(piece.data(), whole.data(), count, DType::f32, "ag");
        std::vector<float> in_place(static_cast<std::size_t>(size * count), -1.0f);
        std::copy(piece.begin(), piece.end(), in_place.begin() + comm.rank() * count);
        comm.all_gather(in_place.data() + comm.rank() * count, in_place.data(), count, DType::f32,
                        "ag");
        bool gathered = whole == in_place;
        for (std::int64_t i = 0; i < size * count; ++i) {
          gathered = gathered && whole[static_cast<std::size_t>(i)] == expected_sum(size, i);
        }
        SHERD_CHECK(gathered, "rank {} of {}: another all_gather", comm.rank(), size);
      });
    }
  }
}

TEST_CASE("communicator: broadcast, all_to_all, barrier") {
  for (const int size : kSizes) {
    run_all(size, [&](Communicator& comm) {
      for (int root = 0; root < size; ++root) {
        std::vector<std::int64_t> data{comm.rank() == root ? 100 + root : -1, 5};
        comm.broadcast(data.data(), 1, DType::i64, root, "broadcast");
        SHERD_CHECK(data[0] == 100 + root && data[1] == 5, "broadcast {}", data[0]);
      }
      std::vector<std::int32_t> out(static_cast<std::size_t>(size)), in(out.size());
      for (int r = 0; r < size; ++r) in[static_cast<std::size_t>(r)] = 10 * comm.rank() + r;
      comm.all_to_all(in.data(), out.data(), 1, DType::i32, "all_to_all");
      for (int r = 0; r < size; ++r) {
        SHERD_CHECK(out[static_cast<std::size_t>(r)] == 10 * r + comm.rank(), "all_to_all");
      }
      comm.barrier("end");
    });
  }
}

TEST_CASE("communicator: a barrier holds everybody until the last one comes") {
  std::atomic<int> arrived{0};
  run_all(4, [&](Communicator& comm) {
    if (comm.rank() == 3) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    ++arrived;
    comm.barrier("all here");
    SHERD_CHECK(arrived == 4, "a rank went on with {} of 4 here", arrived.load());
  });
}

TEST_CASE("communicator: delays change nothing") {
  const auto result = [](std::vector<Fault> faults) {
    auto ranks = make_thread_communicators(3);
    ranks[1] = make_faulty_communicator(std::move(ranks[1]), std::move(faults));
    std::vector<float> sum;
    const auto errors = run_ranks(std::move(ranks), [&](Communicator& comm) {
      std::vector<float> data = values(comm.rank(), 1000);
      for (int i = 0; i < 5; ++i)
        comm.all_reduce(data.data(), 1000, DType::f32, ReduceOp::average, "x");
      if (comm.rank() == 2) sum = data;
    });
    for (const std::string& error : errors) CHECK(error == "");
    return sum;
  };
  Fault delay;
  delay.call = -1;
  delay.delay_seconds = 0.003;
  CHECK(result({}) == result({delay}));
}

TEST_CASE("communicator: ranks that call different things are named, with what each called") {
  const auto disagreement = [](const RankBody& body) {
    const auto errors = run_ranks(make_thread_communicators(3), body);
    for (const std::string& error : errors) CHECK(error == errors[0]);
    return errors[0];
  };
  std::vector<float> data(8);
  const std::string labels = disagreement([](Communicator& comm) {
    std::vector<float> mine(8);
    comm.barrier("first");
    comm.all_reduce(mine.data(), 8, DType::f32, ReduceOp::sum,
                    comm.rank() == 1 ? "blocks.2" : "blocks.1");
  });
  CHECK(labels.find("ranks disagree at collective number 1") != std::string::npos);
  CHECK(labels.find("rank 1: all_reduce (sum) of 8 f32 for 'blocks.2'") != std::string::npos);
  CHECK(labels.find("rank 2: all_reduce (sum) of 8 f32 for 'blocks.1'") != std::string::npos);
  const std::string counts = disagreement([](Communicator& comm) {
    std::vector<float> mine(80);
    comm.all_gather(mine.data(), mine.data() + 40, comm.rank() == 2 ? 4 : 8, DType::f32, "unit");
  });
  CHECK(counts.find("rank 2: all_gather of 4 f32") != std::string::npos);
  const std::string kinds = disagreement([](Communicator& comm) {
    float mine = 0.0f;
    if (comm.rank() == 0)
      comm.barrier("x");
    else
      comm.all_reduce(&mine, 1, DType::f32, ReduceOp::sum, "x");
  });
  CHECK(kinds.find("rank 0: barrier for 'x'") != std::string::npos);
}

TEST_CASE("communicator: a failing rank ends everybody with its reason") {
  auto ranks = make_thread_communicators(4);
  Fault fault;
  fault.kind = Fault::Kind::fail;
  fault.call = 2;
  fault.reason = "the disk is on fire";
  ranks[2] = make_faulty_communicator(std::move(ranks[2]), {fault});
  const auto errors = run_ranks(std::move(ranks), [](Communicator& comm) {
    std::vector<float> data(100'000, 1.0f);  // freed by a rank that gives up while others may read
    for (int i = 0; i < 10; ++i) {
      comm.all_reduce(data.data(), static_cast<std::int64_t>(data.size()), DType::f32,
                      ReduceOp::sum, "x");
    }
  });
  for (const std::string& error : errors) CHECK(error == "rank 2: the disk is on fire");
}

TEST_CASE("communicator: a rank that leaves does not leave the others waiting") {
  for (const bool late : {false, true}) {
    const auto errors = run_ranks(make_thread_communicators(3), [late](Communicator& comm) {
      comm.barrier("both");
      if (comm.rank() == 1) {
        if (late) std::this_thread::sleep_for(std::chrono::milliseconds(20));
        return;  // one batch fewer than the others
      }
      if (!late) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      comm.barrier("another batch");
    });
    CHECK(errors[1] == "");
    for (const std::size_t r : {0, 2}) {
      CHECK(errors[r].find("rank 1 has left the group") != std::string::npos);
      CHECK(errors[r].find("another batch") != std::string::npos);
    }
  }
}

TEST_CASE("communicator: an abort from outside reaches ranks in the middle of a call") {
  for (int round = 0; round < 20; ++round) {
    std::atomic<int> calls{0};
    const auto errors = run_ranks(make_thread_communicators(4), [&](Communicator& comm) {
      std::vector<float> data(20'000, 1.0f);
      for (int i = 0; i < 1000; ++i) {
        if (comm.rank() == 0 && i == round) comm.abort("stopped by the user");
        comm.all_reduce(data.data(), static_cast<std::int64_t>(data.size()), DType::f32,
                        ReduceOp::average, "x");
        ++calls;
      }
    });
    for (const std::string& error : errors) CHECK(error == "stopped by the user");
    CHECK(calls <= 4 * (round + 1));
  }
}

TEST_CASE(
    "communicator: groups along the axes of a mesh; contiguous ones of a power of two keep the "
    "tree") {
  const ProcessMesh mesh({{"replicate", 2}, {"shard", 4}});
  run_all(8, [&](Communicator& world) {
    const auto shard = world.split(mesh.color(world.rank(), "shard"), "shard groups");
    const auto replicate = world.split(mesh.color(world.rank(), "replicate"), "replicate groups");
    SHERD_CHECK(shard->size() == 4 && shard->rank() == mesh.coordinate(world.rank(), "shard"),
                "shard");
    SHERD_CHECK(
        replicate->size() == 2 && replicate->rank() == mesh.coordinate(world.rank(), "replicate"),
        "replicate");
    std::vector<float> whole = values(world.rank(), 999), parts = whole;
    world.all_reduce(whole.data(), 999, DType::f32, ReduceOp::sum, "all");
    shard->all_reduce(parts.data(), 999, DType::f32, ReduceOp::sum, "inside");
    replicate->all_reduce(parts.data(), 999, DType::f32, ReduceOp::sum, "across");
    SHERD_CHECK(whole == parts, "rank {}: other bits in two steps", world.rank());
  });
}

TEST_CASE("communicator: an abort of the world ends its groups") {
  const auto errors = run_ranks(make_thread_communicators(4), [](Communicator& world) {
    const auto pair = world.split(world.rank() / 2, "pairs");
    if (world.rank() == 3) fail("rank 3 gave up");
    if (world.rank() == 2) pair->barrier("waiting for rank 3");
    world.barrier("end");
  });
  for (const std::string& error : errors) {
    const bool told =
        error == "rank 3 gave up" || error.find("has left the group") != std::string::npos;
    CHECK(told);
  }
  CHECK(errors[3] == "rank 3 gave up");
}

TEST_CASE("communicator: counters follow the usual accounting, on paper as in fact") {
  const auto work = [](Communicator& comm, void* data) {
    comm.all_reduce(data, 12, DType::f32, ReduceOp::sum, "a");
    comm.reduce_scatter(data, data, 3, DType::f32, ReduceOp::sum, "b");
    comm.all_gather(data, data, 3, DType::bf16, "c");
    comm.barrier("d");
  };
  auto meta = make_meta_communicator(7, 4096);
  work(*meta, nullptr);
  const CommunicationCounters& paper = meta->counters();
  CHECK(paper.bytes[static_cast<std::size_t>(Collective::all_reduce)] == 2 * 12 * 4 * 4095 / 4096);
  CHECK(paper.bytes[static_cast<std::size_t>(Collective::reduce_scatter)] == 3 * 4 * 4095);
  CHECK(paper.bytes[static_cast<std::size_t>(Collective::all_gather)] == 3 * 2 * 4095);
  CHECK(paper.calls[static_cast<std::size_t>(Collective::barrier)] == 1);
  run_all(4, [&](Communicator& comm) {
    auto on_paper = make_meta_communicator(comm.rank(), 4);
    std::vector<float> data(12);
    comm.all_reduce(data.data(), 12, DType::f32, ReduceOp::sum, "a");
    on_paper->all_reduce(nullptr, 12, DType::f32, ReduceOp::sum, "a");
    SHERD_CHECK(comm.counters().total_bytes() == on_paper->counters().total_bytes() &&
                    comm.counters().total_bytes() == 72,
                "counted {}", comm.counters().total_bytes());
  });
}

TEST_CASE("communicator: wrong arguments") {
  CHECK_THROWS_WITH_AS(make_thread_communicators(0), doctest::Contains("at least one rank"), Error);
  CHECK_THROWS_WITH_AS(make_meta_communicator(4, 4), doctest::Contains("rank 4 of 4"), Error);
  const auto self = make_self_communicator();
  float x = 1.0f;
  CHECK_THROWS_WITH_AS(self->broadcast(&x, 1, DType::f32, 1, "b"), doctest::Contains("root 1 of 1"),
                       Error);
  CHECK_THROWS_WITH_AS(self->all_reduce(&x, -1, DType::f32, ReduceOp::sum, "n"),
                       doctest::Contains("negative"), Error);
  std::int64_t i = 3;
  CHECK_THROWS_WITH_AS(self->all_reduce(&i, 1, DType::i64, ReduceOp::average, "i"),
                       doctest::Contains("average of i64"), Error);
}
