// SPDX-License-Identifier: Apache-2.0
// Communicators: every collective against plain loops for 1 to 8 ranks, the tree of sums, in-place
// use, and each way in which ranks can fail each other.
#include <doctest/doctest.h>
#include <sherd/comm/communicator.h>
#include <sherd/comm/faulty_communicator.h>
#include <sherd/comm/process_mesh.h>
#include <sherd/comm/rank_threads.h>
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

// The group of two ranks with this one: 0 and 1, 2 and 3, ...
std::vector<int> pair_of(int rank) {
  return {rank / 2 * 2, rank / 2 * 2 + 1};
}

Fault fault_of(Fault::Kind kind, std::int64_t call, std::string label = "") {
  Fault fault;
  fault.kind = kind;
  fault.call = call;
  fault.label = std::move(label);
  return fault;
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
    const auto shard = world.split(mesh.group(world.rank(), "shard"), "shard groups");
    const auto replicate = world.split(mesh.group(world.rank(), "replicate"), "replicate groups");
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
    const auto pair = world.split(pair_of(world.rank()), "pairs");
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
  run_all(4, [](Communicator& world) {
    const auto pair = world.split(pair_of(world.rank()), "pairs");
    const auto self = pair->split(std::vector{world.rank() % 2}, "alone");
    world.barrier("made");
    if (world.rank() != 3) return;
    world.abort("enough");
    SHERD_CHECK(pair->end_reason() == "enough", "the pair goes on");
    SHERD_CHECK(self->end_reason() == "enough", "the group of one goes on");
  });
}

TEST_CASE("communicator: groups end with their last rank, not with the world") {
  const int before = thread_groups();
  run_all(4, [&](Communicator& world) {
    const int half = world.rank() / 2 * 2;
    const std::vector<int> pair{half, half + 1};
    for (int i = 0; i < 50; ++i) {
      std::unique_ptr<Communicator> group = world.split(pair, "pairs");
      world.barrier("made");
      SHERD_CHECK(thread_groups() == before + 3, "{} groups, not 3", thread_groups() - before);
      world.barrier("counted");
      std::unique_ptr<Communicator> self = group->split(std::vector{world.rank() % 2}, "alone");
      world.barrier("made");
      SHERD_CHECK(thread_groups() == before + 7, "{} groups, not 7", thread_groups() - before);
      world.barrier("counted");
      group.reset();
      self.reset();
      world.barrier("gone");
      SHERD_CHECK(thread_groups() == before + 1, "{} groups, not 1", thread_groups() - before);
      world.barrier("counted");
    }
  });
  CHECK(thread_groups() == before);
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

TEST_CASE("communicator: the wide reduce_scatter counts what travels, and passes through faults") {
  auto meta = make_meta_communicator(1, 4);
  meta->reduce_scatter_wide(nullptr, nullptr, 10, DType::bf16, ReduceOp::sum, "w");
  CHECK(meta->counters().bytes[static_cast<std::size_t>(Collective::reduce_scatter)] == 10 * 2 * 3);
  auto ranks = make_thread_communicators(3);
  ranks[1] = make_faulty_communicator(std::move(ranks[1]), {fault_of(Fault::Kind::delay, -1)});
  for (const std::string& error : run_ranks(std::move(ranks), [](Communicator& comm) {
         std::vector<bf16> input(6);
         for (bf16& x : input) x = bf16(comm.rank() == 0 ? 256.0f : 1.0f);
         float sums[2] = {};
         comm.reduce_scatter_wide(input.data(), sums, 2, DType::bf16, ReduceOp::sum, "w");
         SHERD_CHECK(sums[0] == 258.0f && sums[1] == 258.0f, "sums {} {}", sums[0], sums[1]);
         SHERD_CHECK(comm.counters().total_bytes() == 2 * 2 * 2, "counted {}",
                     comm.counters().total_bytes());
       }))
    CHECK(error == "");
  // A single rank converts.
  const bf16 one(3.0f);
  float result = 0.0f;
  make_self_communicator()->reduce_scatter_wide(&one, &result, 1, DType::bf16, ReduceOp::sum, "w");
  CHECK(result == 3.0f);
}

TEST_CASE("communicator: ranks that disagree about the type of a result, and where it overlaps") {
  const auto errors = run_ranks(make_thread_communicators(2), [](Communicator& comm) {
    const std::vector<bf16> input(1024);
    std::vector<float> output(512);
    if (comm.rank() == 0)
      comm.reduce_scatter(input.data(), output.data(), 512, DType::bf16, ReduceOp::sum, "head");
    else
      comm.reduce_scatter_wide(input.data(), output.data(), 512, DType::bf16, ReduceOp::sum,
                               "head");
  });
  for (const std::string& error : errors) {
    CAPTURE(error);
    CHECK(error.find("rank 0: reduce_scatter (sum) of 512 bf16 for 'head'; rank 1: reduce_scatter "
                     "(sum) of 512 bf16 to f32 for 'head'") != std::string::npos);
  }
  // Of f32 both are the same call.
  run_all(2, [](Communicator& comm) {
    std::vector<float> data{1.0f, 2.0f};
    float* mine = data.data() + comm.rank();
    if (comm.rank() == 0)
      comm.reduce_scatter(data.data(), mine, 1, DType::f32, ReduceOp::sum, "s");
    else
      comm.reduce_scatter_wide(data.data(), mine, 1, DType::f32, ReduceOp::sum, "s");
    SHERD_CHECK(*mine == 2.0f * static_cast<float>(comm.rank() + 1), "sum {}", *mine);
  });
  std::vector<float> memory(12);
  const auto self = make_self_communicator();
  const auto* narrow = reinterpret_cast<const bf16*>(memory.data() + 4);
  const auto sum_to = [&](std::size_t place) {
    self->reduce_scatter_wide(narrow, memory.data() + place, 4, DType::bf16, ReduceOp::sum, "o");
  };
  CHECK_THROWS_WITH_AS(sum_to(4), doctest::Contains("overlaps the input"), Error);
  CHECK_THROWS_WITH_AS(sum_to(1), doctest::Contains("of 4 bf16 to f32 for 'o'"), Error);
  CHECK_THROWS_AS(sum_to(5), Error);
  CHECK_NOTHROW(sum_to(0));
  CHECK_NOTHROW(sum_to(6));
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

TEST_CASE("communicator: split takes the ranks of a group, and all must name the same") {
  run_all(5, [](Communicator& world) {
    const bool odd = world.rank() % 2 == 1;
    const std::vector<int> members = odd ? std::vector<int>{1, 3} : std::vector<int>{0, 2, 4};
    const auto group = world.split(members, "parity");
    SHERD_CHECK(group->size() == (odd ? 2 : 3) && group->rank() == world.rank() / 2, "rank");
    std::int64_t sum = world.rank();
    group->all_reduce(&sum, 1, DType::i64, ReduceOp::sum, "sum");
    SHERD_CHECK(sum == (odd ? 4 : 6), "sum {}", sum);
  });
  const auto lists = [](std::vector<std::vector<int>> named) {
    const auto errors = run_ranks(make_thread_communicators(3), [&](Communicator& world) {
      world.split(named[static_cast<std::size_t>(world.rank())], "odd groups");
    });
    for (const std::string& error : errors) CHECK(error == errors[0]);
    return errors[0];
  };
  CHECK(lists({{0, 1}, {0, 1}, {2}}) == "");
  const std::string missing = lists({{0, 1}, {1}, {2}});
  CHECK(missing.find("split for 'odd groups'") != std::string::npos);
  CHECK(missing.find("rank 0: [0, 1]; rank 1: [1]; rank 2: [2]") != std::string::npos);
  CHECK(lists({{0, 1}, {0, 1, 2}, {2}}).find("rank 1: [0, 1, 2]") != std::string::npos);

  const auto self = make_self_communicator();
  for (const std::vector<int>& wrong : {std::vector<int>{}, {1}, {0, 0}, {-1, 0}, {0, 1}}) {
    CHECK_THROWS_WITH_AS(self->split(wrong, "s"), doctest::Contains("ascending order with this"),
                         Error);
  }
  // On paper too; the new group counts for itself and ends with the old one.
  const auto paper = make_meta_communicator(5, 8);
  const auto group = paper->split(std::vector<int>{1, 3, 5, 7}, "s");
  CHECK(group->rank() == 2);
  CHECK(group->size() == 4);
  group->all_gather(nullptr, nullptr, 10, DType::f32, "g");
  CHECK(group->counters().total_bytes() == 3 * 40);
  paper->abort("over");
  CHECK(group->end_reason() == "over");
  CHECK_THROWS_WITH_AS(group->barrier("b"), "over", Error);
}

TEST_CASE("communicator: messages between two ranks") {
  run_all(3, [](Communicator& comm) {
    const int next = (comm.rank() + 1) % 3, last = (comm.rank() + 2) % 3;
    for (int round = 0; round < 50; ++round) {
      const std::vector<float> mine = values(comm.rank(), 100 * round);
      std::vector<float> theirs(mine.size());
      const auto count = static_cast<std::int64_t>(mine.size());
      // Rank 0 receives first; with all three sending they would wait for each other.
      if (comm.rank() == 0) comm.recv(theirs.data(), count, DType::f32, last, "ring");
      comm.send(mine.data(), count, DType::f32, next, "ring");
      if (comm.rank() != 0) comm.recv(theirs.data(), count, DType::f32, last, "ring");
      SHERD_CHECK(theirs == values(last, count), "rank {}: another message", comm.rank());
    }
    SHERD_CHECK(
        comm.counters().bytes[static_cast<std::size_t>(Collective::send)] == 100 * 4 * 50 * 49 / 2,
        "bytes of send");
    SHERD_CHECK(comm.counters().total_bytes() == 100 * 4 * 50 * 49 / 2, "recv counts no bytes");
    SHERD_CHECK(comm.counters().calls[static_cast<std::size_t>(Collective::recv)] == 50, "calls");
  });
  const auto paper = make_meta_communicator(0, 2);
  paper->send(nullptr, 3, DType::f32, 1, "m");
  CHECK(paper->counters().total_bytes() == 12);
  float x = 0.0f;
  CHECK_THROWS_WITH_AS(paper->send(&x, 1, DType::f32, 0, "m"),
                       doctest::Contains("a message goes to another rank"), Error);
  CHECK_THROWS_WITH_AS(make_self_communicator()->recv(&x, 1, DType::f32, 0, "m"),
                       doctest::Contains("this is rank 0 of 1"), Error);
}

TEST_CASE("communicator: messages that do not fit end in an error that names both") {
  const auto all = [](int size, const RankBody& body) {
    const auto errors = run_ranks(make_thread_communicators(size), body);
    for (const std::string& error : errors) CHECK(error == errors[0]);
    return errors[0];
  };
  const auto has = [](const std::string& text, const std::string& piece) {
    CAPTURE(text);
    CHECK(text.find(piece) != std::string::npos);
  };
  float x = 1.0f;
  const std::string labels = all(2, [&](Communicator& comm) {
    float mine = 0.0f;
    if (comm.rank() == 0) comm.send(&mine, 1, DType::f32, 1, "a");
    if (comm.rank() == 1) comm.recv(&mine, 1, DType::f32, 0, "b");
  });
  has(labels, "ranks disagree at message number 0 from rank 0 to rank 1");
  has(labels, "rank 0: send of 1 f32 to rank 1 for 'a'; rank 1: recv of 1 f32 from rank 0 for 'b'");
  const std::string stuck = all(2, [&](Communicator& comm) {
    if (comm.rank() == 0) comm.send(&x, 1, DType::f32, 1, "a");
    if (comm.rank() == 1) comm.barrier("end");
  });
  has(stuck, "wait for each other: rank 0 in send of 1 f32 to rank 1 for 'a', rank 1 in barrier");
  const std::string ring = all(
      3, [&](Communicator& comm) { comm.send(&x, 1, DType::f32, (comm.rank() + 1) % 3, "ring"); });
  has(ring, "wait for each other");
  const auto left = run_ranks(make_thread_communicators(2), [](Communicator& comm) {
    float mine = 0.0f;
    if (comm.rank() == 1) comm.recv(&mine, 1, DType::f32, 0, "a");
  });
  has(left[1], "rank 0 has left the group, so rank 1 waits in vain in recv of 1 f32 from rank 0");
}

TEST_CASE("communicator: a call that is skipped, or made late, is noticed before data moves") {
  const auto errors_with = [](const Fault& fault, bool messages) {
    auto ranks = make_thread_communicators(3);
    ranks[1] = make_faulty_communicator(std::move(ranks[1]), {fault});
    return run_ranks(std::move(ranks), [&](Communicator& comm) {
      std::vector<float> data(4 * 3, static_cast<float>(comm.rank()));
      if (messages) {
        for (const char* label : {"first", "second"}) {
          if (comm.rank() == 0) comm.recv(data.data(), 4, DType::f32, 1, label);
          if (comm.rank() == 1) comm.send(data.data(), 4, DType::f32, 0, label);
        }
        return comm.barrier("end");
      }
      for (const char* label : {"unit 0", "unit 1", "unit 2"}) {
        try {
          comm.all_reduce(data.data(), 4, DType::f32, ReduceOp::sum, label);
        } catch (const Error&) {
          // Only 'unit 0' may have moved anything.
          if (std::string(label) == "unit 1") {
            SHERD_CHECK(data[0] == 3.0f, "data moved: {}", data[0]);
          }
          throw;
        }
      }
    });
  };
  const auto all_say = [](const std::vector<std::string>& errors, const std::string& piece) {
    for (const std::string& error : errors) {
      CAPTURE(error);
      CHECK(error.find(piece) != std::string::npos);
    }
  };
  const std::string other =
      "rank 0: all_reduce (sum) of 4 f32 for 'unit 1'; rank 1: all_reduce (sum) of 4 f32 for ";
  all_say(errors_with(fault_of(Fault::Kind::drop, 1), false), other + "'unit 2'");
  all_say(errors_with(fault_of(Fault::Kind::reorder, 1), false), other + "'unit 2'");
  all_say(errors_with(fault_of(Fault::Kind::different_label, 1), false),
          other + "'unit 1 (other)'");
  all_say(errors_with(fault_of(Fault::Kind::drop, 0, "unit 1"), false), other + "'unit 2'");
  // The last call, dropped or held back for one that never comes: the rank leaves without it.
  for (const Fault::Kind kind : {Fault::Kind::drop, Fault::Kind::reorder}) {
    const auto errors = errors_with(fault_of(kind, 2), false);
    CHECK(errors[1] == "");
    for (const std::size_t r : {0, 2}) {
      CHECK(errors[r].find("rank 1 has left the group") != std::string::npos);
      CHECK(errors[r].find("for 'unit 2'") != std::string::npos);
    }
  }
  const std::string message =
      "rank 1: send of 4 f32 to rank 0 for 'second'; rank 0: recv of 4 f32 from rank 1 for 'first'";
  all_say(errors_with(fault_of(Fault::Kind::drop, 0), true), message);
  all_say(errors_with(fault_of(Fault::Kind::reorder, 0), true), message);
  all_say(errors_with(fault_of(Fault::Kind::drop, 1), true),
          "rank 0 in recv of 4 f32 from rank 1 for 'second', rank 1 in barrier for 'end'");
}

TEST_CASE("communicator: faults of every call, or with a label, hold in groups too") {
  const auto seconds_with = [](const Fault& fault) {
    auto ranks = make_thread_communicators(2);
    ranks[1] = make_faulty_communicator(std::move(ranks[1]), {fault});
    const auto start = std::chrono::steady_clock::now();
    for (const std::string& error : run_ranks(std::move(ranks), [](Communicator& world) {
           const auto group = world.split(std::vector<int>{0, 1}, "group");
           for (int i = 0; i < 3; ++i) group->barrier("gather");
           group->barrier("other");
         })) {
      CHECK(error == "");
    }
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  Fault fault = fault_of(Fault::Kind::delay, -1);
  fault.delay_seconds = 0.05;
  CHECK(seconds_with(fault) >= 0.2);
  fault.label = "gather";
  CHECK(seconds_with(fault) >= 0.15);
  fault.call = 1;
  CHECK(seconds_with(fault) >= 0.05);
  // One of a certain call of the whole group does not.
  seconds_with(fault_of(Fault::Kind::fail, 0));
}

TEST_CASE("rank threads: one rank runs here, several in threads of their own") {
  const auto here = std::this_thread::get_id();
  run_rank_threads(1, [&](Communicator& comm) {
    CHECK(comm.size() == 1);
    CHECK(std::this_thread::get_id() == here);
  });
  std::atomic<int> ran{0};
  run_rank_threads(4, [&](Communicator& comm) {
    SHERD_CHECK((std::this_thread::get_id() == here) == (comm.rank() == 0), "thread");
    comm.barrier("all");
    ++ran;
  });
  CHECK(ran == 4);
}

TEST_CASE("rank threads: the error is that of the rank that failed, not of those it took along") {
  using doctest::Contains;
  for (const int failing : {0, 2}) {
    CHECK_THROWS_WITH_AS(run_rank_threads(3,
                                          [&](Communicator& comm) {
                                            if (comm.rank() == failing) fail("no more disk");
                                            comm.barrier("wait");
                                          }),
                         fmt::format("rank {}: no more disk", failing).c_str(), Error);
  }
  // Something the body owns ends the group while the exception passes by; others are told first.
  struct Engine {
    Communicator& comm;
    ~Engine() {
      if (std::uncaught_exceptions() == 0) return;
      comm.abort("rank 1 gave up");
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
    }
  };
  CHECK_THROWS_WITH_AS(run_rank_threads(3,
                                        [](Communicator& comm) {
                                          const Engine engine{comm};
                                          if (comm.rank() == 1) throw std::bad_alloc();
                                          comm.barrier("wait");
                                        }),
                       "rank 1: std::bad_alloc", Error);
  // Where all fail with the same reason there is no other.
  CHECK_THROWS_WITH_AS(
      run_rank_threads(2, [](Communicator& comm) { comm.barrier(comm.rank() == 0 ? "a" : "b"); }),
      Contains("ranks disagree at collective number 0"), Error);
  CHECK_THROWS_WITH_AS(run_rank_threads(2,
                                        [](Communicator& c) {
                                          if (c.rank() == 1) throw 3;
                                        }),
                       "rank 1: an exception that is no std::exception", Error);
}
