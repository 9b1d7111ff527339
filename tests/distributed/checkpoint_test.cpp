// SPDX-License-Identifier: Apache-2.0
// Checkpoints written by some ranks under some policy, read by others under another.
#include <doctest/doctest.h>
#include <sherd/tools/trainer/checkpoints.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "../unit/io_support.h"
#include "sharding_support.h"

namespace sherd {
namespace {

namespace fs = std::filesystem;
using test::RankTrainer;
using test::RunOptions;
using test::RunResult;
using test::Workload;

constexpr const char* kRun = "{\"steps\":3}";

std::string save(RankTrainer& rank, const std::string& directory, std::int64_t step,
                 bool async = false) {
  CheckpointStore store(rank.world, directory, 3);
  CheckpointSaver saver(rank.context, *rank.model, rank.engine, *rank.optimizer, async);
  saver.save(store, step, {"test", kRun, "[run]\n", false});
  return saver.finish(store);
}

void load(RankTrainer& rank, const std::string& path, std::int64_t optimizer_steps) {
  const CheckpointReader reader(path);
  check_checkpoint(reader, *rank.model, rank.optimizer.get());
  load_weights(reader, rank.engine);
  RunProgress progress;
  progress.optimizer_steps = optimizer_steps;
  load_state(reader, rank.engine, *rank.optimizer, progress);
}

// Every tensor of a checkpoint, whole.
std::map<std::string, std::vector<std::uint8_t>> contents(const std::string& path) {
  const CheckpointReader reader(path);
  reader.verify();
  std::map<std::string, std::vector<std::uint8_t>> all;
  for (const CheckpointTensor& tensor : reader.index().tensors) {
    std::vector<std::uint8_t>& bytes = all[tensor.key()];
    bytes.resize(static_cast<std::size_t>(tensor.shape.numel()) * size_of(tensor.dtype));
    reader.read_bytes(tensor, 0, bytes);
  }
  return all;
}

RunOptions options_of(ShardingPolicy policy, int ranks, bool odd) {
  RunOptions run = test::run_of(policy, ranks, odd);
  run.steps = 3;
  return run;
}

}  // namespace

TEST_CASE("checkpoint: what 4 ranks write under zero3, others read under every policy, and back") {
  for (const bool odd : {false, true}) {
    const test::TempDirectory folder;
    const Workload work = odd ? test::odd_net() : test::tied_vit();
    std::string first;
    test::on_threads(4, work, options_of(ShardingPolicy::zero3, 4, odd), [&](RankTrainer& rank) {
      for (int step = 0; step < 3; ++step) rank.step(step);
      const std::string path = save(rank, folder.path("first"), 3);
      if (rank.world.rank() == 0) first = path;
    });
    const auto expected = contents(first);
    CHECK(expected.size() > 10);
    // It is what the ranks held: not all zero, and the second moment not negative.
    bool any = false;
    for (const auto& [name, bytes] : expected) {
      any = any || (name.ends_with(".exp_avg") &&
                    std::ranges::any_of(bytes, [](std::uint8_t byte) { return byte != 0; }));
    }
    CHECK(any);
    for (const int ranks : {1, 2, 3, 8}) {
      for (const ShardingPolicy policy : test::kPolicies) {
        CAPTURE(odd);
        CAPTURE(ranks);
        CAPTURE(name_of(policy));
        const std::string there = folder.path("there"), back = folder.path("back");
        std::string second, third;
        test::on_threads(ranks, work, options_of(policy, ranks, odd), [&](RankTrainer& rank) {
          load(rank, first, 3);
          const std::string path = save(rank, there, 3);
          if (rank.world.rank() == 0) second = path;
        });
        CHECK(contents(second) == expected);
        if (ranks == 3) {  // the way back, once a policy
          test::on_threads(4, work, options_of(ShardingPolicy::zero3, 4, odd),
                           [&](RankTrainer& rank) {
                             load(rank, second, 3);
                             const std::string path = save(rank, back, 3);
                             if (rank.world.rank() == 0) third = path;
                           });
          CHECK(contents(third) == expected);
        }
        fs::remove_all(there);
        fs::remove_all(back);
      }
    }
  }
}

TEST_CASE("checkpoint: a run that goes on has the bits of one that was never stopped") {
  const Workload work = test::odd_net();
  const test::TempDirectory folder;
  std::vector<std::pair<ShardingPolicy, Precision>> cases;
  for (const ShardingPolicy policy : test::kPolicies) cases.emplace_back(policy, DType::f32);
  for (const Precision& precision : test::mixed_precisions()) {
    cases.emplace_back(ShardingPolicy::zero3, precision);
    cases.emplace_back(ShardingPolicy::zero2, precision);
  }
  cases.emplace_back(ShardingPolicy::grad_op, DType::f64);
  for (const auto& one : cases) {
    const ShardingPolicy policy = one.first;
    const Precision& precision = one.second;
    CAPTURE(name_of(policy));
    CAPTURE(describe(precision));
    RunOptions run = options_of(policy, 2, true);
    run.precision = precision;
    const auto finish = [](RankTrainer& rank, int from, RunResult& result) {
      for (int step = from; step < 6; ++step) rank.step(step);
      RunResult mine;
      rank.weights_into(mine);
      if (rank.world.rank() == 0) result = mine;
    };
    RunResult whole, resumed, elsewhere;
    std::string path;
    test::on_threads(2, work, run, [&](RankTrainer& rank) {
      for (int step = 0; step < 3; ++step) rank.step(step);
      const std::string saved = save(rank, folder.path(), 3);
      if (rank.world.rank() == 0) path = saved;
      finish(rank, 3, whole);
    });
    test::on_threads(2, work, run, [&](RankTrainer& rank) {
      load(rank, path, 3);
      finish(rank, 3, resumed);
    });
    CHECK(resumed == whole);
    // The same number of ranks under another policy has the same sums too.
    RunOptions other = run;
    other.sharding = options_of(ShardingPolicy::zero1, 2, true).sharding;
    test::on_threads(2, work, other, [&](RankTrainer& rank) {
      load(rank, path, 3);
      finish(rank, 3, elsewhere);
    });
    CHECK(elsewhere == whole);
  }
}

TEST_CASE("checkpoint: what is offloaded to the host or to files is saved and read") {
  const Workload work = test::tied_vit();
  const test::TempDirectory folder;
  std::map<std::string, std::vector<std::uint8_t>> expected;
  for (const char* to : {"none", "cpu", "nvme:"}) {
    CAPTURE(to);
    RunOptions run = options_of(ShardingPolicy::zero3, 2, false);
    run.precision.parameters = DType::bf16;
    const std::string place = to == std::string("nvme:") ? to + folder.path() : to;
    run.sharding.offload_optimizer = OffloadTo::parse(place, "--offload-optimizer");
    run.sharding.offload_parameters = OffloadTo::parse(place, "--offload-parameters");
    std::string path, again;
    test::on_threads(2, work, run, [&](RankTrainer& rank) {
      for (int step = 0; step < 3; ++step) rank.step(step);
      const std::string saved = save(rank, folder.path("a"), 3);
      if (rank.world.rank() == 0) path = saved;
    });
    if (expected.empty()) expected = contents(path);
    CHECK(contents(path) == expected);
    test::on_threads(2, work, run, [&](RankTrainer& rank) {
      load(rank, path, 3);
      const std::string saved = save(rank, folder.path("b"), 3);
      if (rank.world.rank() == 0) again = saved;
    });
    CHECK(contents(again) == expected);
  }
}

TEST_CASE("checkpoint: one written beside training is of the step at which it was asked for") {
  const Workload work = test::tied_vit();
  const test::TempDirectory folder;
  std::string at_once, beside;
  test::on_threads(2, work, options_of(ShardingPolicy::zero3, 2, false), [&](RankTrainer& rank) {
    for (int step = 0; step < 3; ++step) rank.step(step);
    const std::string saved = save(rank, folder.path("a"), 3);
    CheckpointStore store(rank.world, folder.path("b"), 3);
    CheckpointSaver saver(rank.context, *rank.model, rank.engine, *rank.optimizer, true);
    const std::int64_t copied = rank.context.host_ledger().live(MemoryCategory::checkpoint);
    CHECK(copied >= saver.bytes());
    saver.save(store, 3, {"test", kRun, "", false});
    for (int step = 3; step < 6; ++step) rank.step(step);  // while it is written
    CHECK(find_checkpoints(store.directory()).empty());
    const std::string late = saver.finish(store);
    CHECK(rank.context.host_ledger().live(MemoryCategory::checkpoint) == copied);
    if (rank.world.rank() != 0) return;
    at_once = saved;
    beside = late;
  });
  CHECK(contents(at_once) == contents(beside));
}

TEST_CASE("checkpoint: a rank reads its share, and holds no more than that and a block") {
  const Workload work = test::tied_vit();
  const test::TempDirectory folder;
  std::string path;
  RunOptions run = options_of(ShardingPolicy::zero3, 4, false);
  test::on_threads(4, work, run, [&](RankTrainer& rank) {
    const std::string saved = save(rank, folder.path(), 1);
    if (rank.world.rank() == 0) path = saved;
  });
  test::on_threads(4, work, run, [&](RankTrainer& rank) {
    Ledger& ledger = rank.context.ledger();
    const std::int64_t held = ledger.live_total();
    ledger.reset_peak();
    const CheckpointReader reader(path);
    load_weights(reader, rank.engine);
    load_state(reader, rank.engine, *rank.optimizer, {});
    CHECK(ledger.peak_total() == held);
    std::uint64_t all = 0;
    for (const CheckpointFile& file : reader.index().files) all += file.bytes;
    CHECK(reader.bytes_read() < all / 2);  // about a quarter: pieces here are smaller than blocks
  });
}

TEST_CASE("checkpoint: a model or an optimizer that does not fit is one clear error") {
  const test::TempDirectory folder;
  std::string path;
  test::on_threads(1, test::tied_vit(), options_of(ShardingPolicy::none, 1, false),
                   [&](RankTrainer& rank) { path = save(rank, folder.path(), 1); });
  const CheckpointReader reader(path);
  const std::unique_ptr<Module> other = test::odd_net().model();
  other->assign_names();
  const auto contains = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  CHECK(contains(test::error_of([&] { check_checkpoint(reader, *other, nullptr); }),
                 "that the model needs"));
  const std::unique_ptr<Module> same = test::tied_vit().model();
  same->assign_names();
  const std::unique_ptr<Optimizer> sgd = make_sgd({.momentum = 0.9});
  CHECK(contains(test::error_of([&] { check_checkpoint(reader, *same, sgd.get()); }),
                 "has no optimizer state 'momentum' of"));
  check_checkpoint(reader, *same, make_adamw({}).get());
  CHECK(reader.config() == "[run]\n");
  std::ofstream(path + "/config.toml", std::ios::app) << "seed = 1\n";
  CHECK(contains(test::error_of([&] { reader.verify(); }), "config.toml is damaged or was edited"));
}

TEST_CASE("checkpoint: a rank that cannot write stops all, and what was there stays") {
  const test::TempDirectory folder;
  std::string error;
  test::on_threads(
      2, test::tied_vit(), options_of(ShardingPolicy::zero3, 2, false), [&](RankTrainer& rank) {
        CheckpointStore store(rank.world, folder.path(), 1);
        CheckpointSaver saver(rank.context, *rank.model, rank.engine, *rank.optimizer, false);
        saver.save(store, 1, {"test", kRun, "", true});
        saver.finish(store);
        const std::string directory = store.begin(2);
        // What a writer says where its file cannot be made.
        const std::string failure = test::error_of([&] {
          if (rank.world.rank() == 0)
            fs::create_directory(directory + "/rank-00001-of-00002.safetensors");
          rank.world.barrier("test");
          if (rank.world.rank() == 1) CheckpointShardWriter(directory, 1, 2, {}, {});
          if (rank.world.rank() == 0) fail("fine");
        });
        const std::string mine = test::error_of([&] {
          store.finish("{}", rank.world.rank() == 1 ? failure : "", {"test", kRun, "", false});
        });
        if (rank.world.rank() == 0) error = mine;
      });
  CAPTURE(error);
  CHECK(error.find("rank 1: cannot save a checkpoint of step 2: ") == 0);
  CHECK(error.find("Is a directory") != std::string::npos);
  CHECK(error.find("untouched") != std::string::npos);
  const auto found = find_checkpoints(folder.path());
  REQUIRE(found.size() == 1);
  CHECK(found[0].step == 1);
  CheckpointReader(found[0].path).verify();
  CHECK(!fs::exists(folder.path(".step-00000002.partial")));
}

}  // namespace sherd
