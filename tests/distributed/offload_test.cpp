// SPDX-License-Identifier: Apache-2.0
// Optimizer state and parameters in the host's memory or in files: the same bits, memory as
// planned, files that come and go, and what happens when they do not.
#include <doctest/doctest.h>

#include "sharding_support.h"
#include "unit/io_support.h"

#include <algorithm>
#include <filesystem>
#include <mutex>

using namespace sherd;
using namespace sherd::test;

namespace {

using P = ShardingPolicy;
using M = MemoryCategory;
namespace fs = std::filesystem;

// A folder that is empty again at the end, or the test fails.
class Scratch : public TempDirectory {
 public:
  ~Scratch() { CHECK(files().empty()); }
  std::vector<std::string> files() const {
    std::vector<std::string> all;
    for (const auto& entry : fs::directory_iterator(path())) all.push_back(entry.path().string());
    std::ranges::sort(all);
    return all;
  }
};

struct Places {
  std::string optimizer, parameters;  // as on the command line, without the folder
};

OffloadTo to(const std::string& text, const Scratch& scratch) {
  return OffloadTo::parse(text == "nvme" ? "nvme:" + scratch.path() : text, "--offload");
}

// Those that the policy and the precision allow.
std::vector<Places> places(P policy, const Precision& precision) {
  std::vector<Places> all{{"cpu", "none"}, {"nvme", "none"}};
  if (policy == P::none || policy == P::zero1 || policy == P::zero2) return all;
  for (const char* optimizer : {"none", "cpu", "nvme"}) {
    if (precision.mixed() && std::string(optimizer) == "none") continue;
    for (const char* parameters : {"cpu", "nvme"}) all.push_back({optimizer, parameters});
  }
  return all;
}

std::vector<Precision> precisions() {
  std::vector<Precision> all{Precision(DType::f32)};
  for (const Precision& mixed : mixed_precisions()) {
    if (all.size() < 3) all.push_back(mixed);  // all bf16, all fp16
  }
  return all;
}

void check_equal(const RunResult& result, const RunResult& expected) {
  CHECK(result.losses == expected.losses);
  CHECK(result.norms == expected.norms);
  CHECK(result.weights == expected.weights);
}

RunOptions offloaded(RunOptions run, const Places& p, const Scratch& scratch) {
  run.sharding.offload_optimizer = to(p.optimizer, scratch);
  run.sharding.offload_parameters = to(p.parameters, scratch);
  return run;
}

struct Peaks {
  std::int64_t device = 0, host = 0;
  MemoryBreakdown device_peaks{}, host_peaks{};
  bool operator==(const Peaks&) const = default;
};

std::int64_t live(const Ledger& ledger, M category) {
  return ledger.live(category);
}

}  // namespace

TEST_CASE("offload: the same bits as without, under every policy and precision") {
  const Scratch scratch;
  for (const Precision& precision : precisions()) {
    CAPTURE(describe(precision));
    for (const P policy : kPolicies) {
      CAPTURE(name_of(policy));
      for (const int ranks : {1, 2, 3}) {
        CAPTURE(ranks);
        for (const bool odd : {false, true}) {
          const Workload work = odd ? odd_net() : tied_vit();
          RunOptions run = run_of(policy, ranks, odd);
          run.precision = precision;
          run.steps = 3;
          const RunResult expected = train_ranks(ranks, work, run);
          for (const Places& p : places(policy, precision)) {
            CAPTURE(p.optimizer);
            CAPTURE(p.parameters);
            check_equal(train_ranks(ranks, work, offloaded(run, p, scratch)), expected);
          }
        }
      }
    }
  }
}

TEST_CASE("offload: with small persistent ones, secondary copies, several passes and SGD's none") {
  const Scratch scratch;
  const Places everything{"nvme", "nvme"};
  for (const Precision& precision : precisions()) {
    CAPTURE(describe(precision));
    std::vector<RunOptions> runs(4, run_of(P::zero3, 4));
    runs[0].sharding.persist_below = 40;
    runs[1].sharding.reshard_after_forward = ReshardAfterForward::parse("2");
    runs[2].passes = 3;
    runs[3].passes = 2;
    runs[3].sharding.reduce_every_pass = runs[3].sync_each_pass = true;
    for (RunOptions& run : runs) {
      run.precision = precision;
      check_equal(train_ranks(4, tied_vit(), offloaded(run, everything, scratch)),
                  train_ranks(4, tied_vit(), run));
    }
  }
}

TEST_CASE("offload: what is offloaded is not in the device's memory, and peaks are as planned") {
  const Scratch scratch;
  for (const Precision& precision : precisions()) {
    CAPTURE(describe(precision));
    for (const P policy : kPolicies) {
      CAPTURE(name_of(policy));
      for (const Places& p : places(policy, precision)) {
        CAPTURE(p.optimizer);
        CAPTURE(p.parameters);
        RunOptions run = offloaded(run_of(policy, 2), p, scratch);
        run.precision = precision;
        const auto peaks = [&](RankTrainer& rank) {
          for (int step = 0; step < 3; ++step) rank.step(step);
          const Ledger &device = rank.context.ledger(), &host = rank.context.host_ledger();
          const bool resident = policy == P::none || policy == P::zero1 || policy == P::zero2;
          const bool optimizer = p.optimizer != "none";
          CHECK((live(device, M::optimizer_state) == 0) == optimizer);
          CHECK((live(host, M::optimizer_state) > 0) == (p.optimizer == "cpu"));
          // Between steps files hold all there is, but for what is gathered and stays.
          const bool master_in_host = precision.mixed() && p.optimizer == "cpu";
          if (p.parameters == "nvme") CHECK((live(host, M::parameters) > 0) == master_in_host);
          if (p.parameters != "none") CHECK(live(device, M::parameters) == 0);
          if (resident) CHECK(live(device, M::parameters) > 0);
          CHECK(live(device, M::gradients) + live(host, M::gradients) == 0);
          return Peaks{device.peak_total(), host.peak_total(), device.peaks(), host.peaks()};
        };
        std::array<Peaks, 2> real;
        std::mutex mutex;
        run_rank_threads(2, [&](Communicator& world) {
          RankTrainer rank(world, tied_vit(), run);
          const Peaks mine = peaks(rank);
          const std::lock_guard lock(mutex);
          real[static_cast<std::size_t>(world.rank())] = mine;
        });
        for (int rank = 0; rank < 2; ++rank) {
          CAPTURE(rank);
          on_meta(rank, 2, tied_vit(), run, [&](RankTrainer& trainer) {
            CHECK(peaks(trainer) == real[static_cast<std::size_t>(rank)]);
          });
        }
      }
    }
  }
}

TEST_CASE("offload: gradients of the shard go to the host with the optimizer") {
  const Scratch scratch;
  for (const P policy : {P::zero2, P::grad_op, P::zero3}) {
    CAPTURE(name_of(policy));
    const RunOptions run = offloaded(run_of(policy, 2), {"cpu", "none"}, scratch);
    on_meta(0, 2, tied_vit(), run, [&](RankTrainer& rank) {
      const GlobalStep all = rank.forward_backward(0);
      CHECK(live(rank.context.ledger(), M::gradients) == 0);
      CHECK(live(rank.context.host_ledger(), M::gradients) > 0);
      rank.update(all);
    });
  }
}

TEST_CASE("offload: the update reads a unit ahead and writes behind") {
  const Scratch scratch;
  const RunOptions run = offloaded(run_of(P::zero3, 2), {"nvme", "none"}, scratch);
  on_meta(0, 2, tied_vit(), run, [&](RankTrainer& rank) {
    const GlobalStep all = rank.forward_backward(0);
    rank.engine.record_events(true);
    rank.update(all);
    std::vector<std::string> events;
    for (const ShardingEvent& event : rank.engine.events()) events.push_back(event.to_string());
    std::vector<std::string> units;
    for (const auto& unit : rank.engine.units()) {
      if (unit->trainable()) units.push_back(unit->name());
    }
    std::vector<std::string> expected{"fetch " + units[0]};
    for (std::size_t i = 0; i < units.size(); ++i) {
      if (i + 1 < units.size()) expected.push_back("fetch " + units[i + 1]);
      expected.push_back("update " + units[i]);
      expected.push_back("store " + units[i]);
    }
    CHECK(events == expected);
  });
}

TEST_CASE("offload: what an update reads and writes is counted, on paper too") {
  const Scratch scratch;
  const auto in_blocks = [](std::int64_t bytes) { return (bytes + 4095) / 4096 * 4096; };
  for (const Precision& precision : precisions()) {
    CAPTURE(describe(precision));
    RunOptions run = offloaded(run_of(P::zero3, 2), {"nvme", "nvme"}, scratch);
    run.precision = precision;
    const auto check = [&](RankTrainer& rank) {
      FileTraffic expected;
      for (const auto& unit : rank.engine.units()) {
        if (!unit->trainable()) continue;
        const std::int64_t numel = unit->layout().shard_numel();
        expected.read += in_blocks(4 * numel) + in_blocks(8 * numel);  // weights, AdamW's state
        expected.written += in_blocks(4 * numel) + in_blocks(8 * numel);
        if (precision.mixed()) expected.written += in_blocks(2 * numel);  // their roundings
      }
      for (int step = 0; step < 2; ++step) {
        rank.step(step);
        CHECK(rank.engine.last_update().files == expected);
        CHECK(rank.engine.last_update().seconds > 0.0);
      }
    };
    on_threads(2, tied_vit(), run, check);
    on_meta(1, 2, tied_vit(), run, check);
  }
}

TEST_CASE("offload: a file that is cut short, deleted or has no room is one error on all ranks") {
  const Scratch scratch;
  const Places everything{"nvme", "nvme"};
  const auto failure = [&](const std::function<void(RankTrainer&)>& damage) {
    std::string message;
    const RunOptions run = offloaded(run_of(P::zero3, 2), everything, scratch);
    try {
      on_threads(2, tied_vit(), run, [&](RankTrainer& rank) {
        rank.step(0);
        rank.world.barrier("before the damage");
        if (rank.world.rank() == 1) damage(rank);
        rank.world.barrier("after the damage");
        rank.step(1);
        rank.step(2);
      });
    } catch (const Error& error) {
      message = error.what();
    }
    return message;
  };
  const auto of_rank_1 = [&](const char* what) {
    for (const std::string& file : scratch.files()) {
      if (file.find(what) != std::string::npos && file.find("rank1") != std::string::npos) {
        return file;
      }
    }
    FAIL("no such file");
    return std::string();
  };
  for (const char* what : {"optimizer", "parameters"}) {
    CAPTURE(what);
    std::string path;
    const std::string deleted = failure([&](RankTrainer&) { fs::remove(path = of_rank_1(what)); });
    CAPTURE(deleted);
    CHECK(deleted.find(path) != std::string::npos);
    CHECK(deleted.find("deleted") != std::string::npos);
    const std::string cut = failure([&](RankTrainer&) {
      path = of_rank_1(what);
      fs::resize_file(path, 4096);
    });
    CAPTURE(cut);
    CHECK(cut.find(path) != std::string::npos);
  }
  RunOptions run = offloaded(run_of(P::zero3, 1), everything, scratch);
  run.sharding.offload_optimizer.directory = scratch.path() + "/nowhere";
  CHECK_THROWS_WITH_AS(train_ranks(1, tied_vit(), run), doctest::Contains("nowhere"), Error);
}

TEST_CASE("offload: a program may update the spans by itself where they are in memory") {
  const Scratch scratch;
  Precision bf16;
  bf16.parameters = bf16.reduce = DType::bf16;
  RunOptions run = run_of(P::zero3, 2);
  run.precision = bf16;
  const auto by_hand = [&](const Places& p) {
    std::array<RunResult, 2> results;
    on_threads(2, tied_vit(), offloaded(run, p, scratch), [&](RankTrainer& rank) {
      RunResult& mine = results[static_cast<std::size_t>(rank.world.rank())];
      for (int step = 0; step < 3; ++step) {
        const GlobalStep all = rank.forward_backward(step);
        mine.losses.push_back(all.loss);
        rank.optimizer->step(rank.engine.spans(), 3e-3, clip_factor(all.grad_norm, 0.5));
        rank.engine.finish_step();
      }
      rank.weights_into(mine);
    });
    return results[0];
  };
  const RunResult expected = by_hand({"none", "none"});
  check_equal(by_hand({"cpu", "cpu"}), expected);
  check_equal(by_hand({"cpu", "nvme"}), expected);
}

TEST_CASE("offload: an update that is broken off leaves weights that nobody should save") {
  class Failing : public Optimizer {
   public:
    std::vector<std::string> state_names() const override { return {}; }

   protected:
    void update_span(const ParameterSpan&, std::span<const Tensor>, double, double) override {
      if (++updates_ == 3) fail("the disk is gone");
    }

   private:
    int updates_ = 0;
  } failing;
  RunOptions run = run_of(P::none, 1);
  on_threads(1, tied_vit(), run, [&](RankTrainer& rank) {
    rank.engine.prepare(failing);
    rank.forward_backward(0);
    CHECK_THROWS_WITH_AS(rank.engine.update(failing, 1e-3, 1.0), doctest::Contains("disk is gone"),
                         Error);
    rank.engine.abandon_step();
    CHECK(rank.engine.torn());
    CHECK(!rank.engine.holds_whole_model());
  });
}

TEST_CASE("offload: state that was not made by the engine is not mistaken for offloaded state") {
  const Scratch scratch;
  Context context({.threads = 1});
  const auto world = make_self_communicator();
  const auto model = tied_vit().model();
  ShardingOptions options;
  options.offload_optimizer.kind = OffloadTo::Kind::cpu;
  ShardingEngine engine(*model, context, *world, DType::f32, options);
  engine.initialize();
  const auto optimizer = make_adamw({});
  optimizer->prepare(engine.spans());
  CHECK_THROWS_WITH_AS(engine.update(*optimizer, 1e-3, 1.0),
                       doctest::Contains("engine.prepare(optimizer)"), Error);
}

TEST_CASE("offload: options that cannot be honoured say what to change") {
  Precision bf16;
  bf16.parameters = DType::bf16;
  ShardingOptions options;
  options.policy = P::zero2;
  options.offload_parameters.kind = OffloadTo::Kind::cpu;
  CHECK_THROWS_WITH_AS(validate(options, 2), doctest::Contains("use zero3"), Error);
  options.policy = P::zero3;
  CHECK_NOTHROW(validate(options, 2));
  CHECK_THROWS_WITH_AS(validate(options, 2, bf16), doctest::Contains("--offload-optimizer"), Error);
  options.offload_optimizer.kind = OffloadTo::Kind::cpu;
  CHECK_NOTHROW(validate(options, 2, bf16));
  for (const char* bad : {"", "disk", "nvme", "nvme:", "CPU"}) {
    CHECK_THROWS_WITH_AS(OffloadTo::parse(bad, "--offload-optimizer"),
                         doctest::Contains("--offload-optimizer: expected"), Error);
  }
}
