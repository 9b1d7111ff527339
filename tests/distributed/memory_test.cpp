// SPDX-License-Identifier: Apache-2.0
// The bytes a rank holds: model state by a formula from the units' layouts, and everything else the
// same on paper as for real.
#include <doctest/doctest.h>

#include "sharding_support.h"

using namespace sherd;
using namespace sherd::test;

namespace {

using P = ShardingPolicy;
using M = MemoryCategory;

struct Case {
  std::string name;
  ShardingOptions options;
};

std::vector<Case> cases(int ranks) {
  std::vector<Case> all;
  const auto add = [&](const std::string& name, P policy) -> ShardingOptions& {
    all.push_back({name, {}});
    all.back().options.policy = policy;
    return all.back().options;
  };
  for (const P policy : {P::none, P::zero1, P::zero2, P::grad_op, P::zero3}) {
    add(std::string(name_of(policy)), policy);
  }
  add("zero3, one unit", P::zero3).units = UnitRule::parse("model");
  add("zero3, no prefetch", P::zero3).prefetch = 0;
  add("zero3, prefetch 3", P::zero3).prefetch = 3;
  add("zero3, small ones persist", P::zero3).persist_below = 40;
  add("zero3, kept until backward", P::zero3).reshard_after_forward =
      ReshardAfterForward::parse("no");
  if (ranks % 2 == 0) {
    add("zero3, pairs with a secondary copy", P::zero3).reshard_after_forward =
        ReshardAfterForward::parse("2");
    add("hybrid", P::hybrid).mesh = ProcessMesh({{"replicate", ranks / 2}, {"shard", 2}});
  }
  return all;
}

std::int64_t allocated(std::int64_t elements, DType dtype) {
  return static_cast<std::int64_t>(
      Allocator::rounded(static_cast<std::size_t>(elements) * size_of(dtype)));
}

struct ModelState {
  std::int64_t parameters = 0, gradients = 0, optimizer_state = 0;
  bool operator==(const ModelState&) const = default;
};

std::ostream& operator<<(std::ostream& out, const ModelState& state) {
  return out << state.parameters << " of parameters, " << state.gradients << " of gradients, "
             << state.optimizer_state << " of optimizer state";
}

ModelState live(RankTrainer& rank) {
  const Ledger& ledger = rank.context.ledger();
  return {ledger.live(M::parameters), ledger.live(M::gradients), ledger.live(M::optimizer_state)};
}

// The table, in whole allocations: one buffer of a unit's parameters, one of its gradients and one
// of two states for the optimizer, of all padded elements or a shard of them.
ModelState expected(RankTrainer& rank, bool with_gradients) {
  const ShardingEngine& engine = rank.engine;
  const P policy = engine.options().policy;
  const Precision& precision = rank.options.precision;
  const DType dtype = precision.master;
  ModelState state;
  for (const auto& unit : engine.units()) {
    const FlatLayout& layout = unit->layout();
    const bool persistent = unit->plan().kind == UnitPlan::Kind::persistent;
    const bool whole_parameters =
        policy == P::none || policy == P::zero1 || policy == P::zero2 || persistent;
    const bool whole_gradients = policy == P::none || policy == P::zero1;
    // Mixed precision: master weights, and beside them what is gathered and stays.
    const bool frozen = unit->plan().kind == UnitPlan::Kind::frozen;
    const bool whole_master =
        precision.mixed() ? !unit->policy().shard_parameters && (policy == P::none || frozen)
                          : whole_parameters;
    state.parameters +=
        allocated(whole_master ? layout.padded_numel() : layout.shard_numel(), dtype);
    if (precision.mixed() && whole_parameters) {
      state.parameters += allocated(layout.padded_numel(), precision.parameters);
    }
    if (frozen) continue;
    if (with_gradients) {
      state.gradients +=
          allocated(whole_gradients ? layout.padded_numel() : layout.shard_numel(), dtype);
    }
    state.optimizer_state +=
        allocated(2 * (policy == P::none ? layout.padded_numel() : layout.shard_numel()), dtype);
  }
  return state;
}

void check_model_state(RankTrainer& rank) {
  const Ledger& ledger = rank.context.ledger();
  CHECK(live(rank) == expected(rank, false));
  // Nothing else full-size has ever been there, not even while the shards were filled.
  CHECK(ledger.peaks()[static_cast<std::size_t>(M::parameters)] == ledger.live(M::parameters));
  CHECK(ledger.peaks()[static_cast<std::size_t>(M::gathered_parameters)] == 0);
  CHECK(ledger.peak_total() == ledger.live(M::parameters) + ledger.live(M::optimizer_state));
  for (int step = 0; step < 2; ++step) {
    const GlobalStep all = rank.forward_backward(step);
    CHECK(live(rank) == expected(rank, true));
    CHECK(ledger.live(M::gathered_parameters) == 0);
    CHECK(ledger.live(M::activations) == 0);
    rank.update(all);
    CHECK(live(rank) == expected(rank, false));
    CHECK(ledger.live_total() == ledger.live(M::parameters) + ledger.live(M::optimizer_state));
  }
}

struct Peaks {
  std::int64_t total = 0;
  MemoryBreakdown of_categories{}, at_peak{};
  bool operator==(const Peaks&) const = default;
};

std::ostream& operator<<(std::ostream& out, const Peaks& peaks) {
  return out << peaks.total << " bytes; categories: " << format_breakdown(peaks.of_categories)
             << "; at the peak: " << format_breakdown(peaks.at_peak);
}

Peaks peaks_of(RankTrainer& rank) {
  for (int step = 0; step < 3; ++step) rank.step(step);
  const Ledger& ledger = rank.context.ledger();
  return {ledger.peak_total(), ledger.peaks(), ledger.at_peak()};
}

void check_peaks(int ranks, const Workload& work, const RunOptions& run) {
  std::vector<Peaks> real(static_cast<std::size_t>(ranks));
  on_threads(ranks, work, run, [&](RankTrainer& rank) {
    real[static_cast<std::size_t>(rank.world.rank())] = peaks_of(rank);
  });
  for (int rank = 0; rank < ranks; ++rank) {
    CAPTURE(rank);
    on_meta(rank, ranks, work, run, [&](RankTrainer& trainer) {
      CHECK(real[static_cast<std::size_t>(rank)] == peaks_of(trainer));
    });
  }
}

}  // namespace

TEST_CASE("memory: a rank holds exactly the model state of the table, for 1 to 64 ranks") {
  for (int ranks = 1; ranks <= 64; ++ranks) {
    CAPTURE(ranks);
    for (const Case& c : cases(ranks)) {
      CAPTURE(c.name);
      RunOptions run;
      run.sharding = c.options;
      run.batch = ranks;
      for (const int rank : {ranks / 3, ranks - 1}) {
        CAPTURE(rank);
        on_meta(rank, ranks, tied_vit(), run, check_model_state);
      }
    }
  }
}

TEST_CASE("memory: with mixed precision too") {
  for (const Precision& precision : mixed_precisions()) {
    CAPTURE(describe(precision));
    for (const int ranks : {1, 2, 6, 64}) {
      CAPTURE(ranks);
      for (const Case& c : cases(ranks)) {
        CAPTURE(c.name);
        RunOptions run;
        run.sharding = c.options;
        run.precision = precision;
        run.batch = ranks;
        on_meta(ranks / 3, ranks, tied_vit(), run, check_model_state);
      }
    }
  }
}

TEST_CASE("memory: real ranks hold exactly the model state of the table") {
  for (const int ranks : {1, 2, 4}) {
    CAPTURE(ranks);
    for (const Case& c : cases(ranks)) {
      CAPTURE(c.name);
      RunOptions run;
      run.sharding = c.options;
      run.precision = DType::f64;
      std::mutex mutex;
      std::vector<std::pair<ModelState, ModelState>> all;
      on_threads(ranks, tied_vit(), run, [&](RankTrainer& rank) {
        rank.forward_backward(0);
        const std::lock_guard lock(mutex);
        all.emplace_back(live(rank), expected(rank, true));
      });
      for (const auto& [is, should] : all) CHECK(is == should);
    }
  }
}

TEST_CASE("memory: sharding divides the model state of a large unit by the number of ranks") {
  // With units much larger than the padding and the rounding the table's 16Ψ/N shows.
  const Workload wide{[]() -> std::unique_ptr<Module> {
                        return std::make_unique<VisionTransformer>(ViTSettings{.image_height = 8,
                                                                               .image_width = 8,
                                                                               .patch = 4,
                                                                               .dim = 256,
                                                                               .depth = 2,
                                                                               .heads = 4,
                                                                               .classes = 10});
                      },
                      {3, 8, 8},
                      10,
                      {}};
  const auto state = [&](P policy, int ranks) {
    RunOptions run;
    run.sharding.policy = policy;
    run.batch = ranks;
    double bytes = 0.0;
    on_meta(0, ranks, wide, run, [&](RankTrainer& rank) {
      rank.forward_backward(0);
      const ModelState s = live(rank);
      bytes = static_cast<double>(s.parameters + s.gradients + s.optimizer_state) /
              static_cast<double>(rank.model->parameter_count());
    });
    return bytes;
  };
  for (const int ranks : {2, 4, 8}) {
    CAPTURE(ranks);
    const double n = ranks;
    CHECK(state(P::none, ranks) == doctest::Approx(16.0).epsilon(0.01));
    CHECK(state(P::zero1, ranks) == doctest::Approx(8.0 + 8.0 / n).epsilon(0.01));
    CHECK(state(P::zero2, ranks) == doctest::Approx(4.0 + 12.0 / n).epsilon(0.01));
    CHECK(state(P::grad_op, ranks) == doctest::Approx(16.0 / n).epsilon(0.02));
    CHECK(state(P::zero3, ranks) == doctest::Approx(16.0 / n).epsilon(0.02));
  }
}

TEST_CASE("memory: peaks on paper are those of real ranks, byte for byte") {
  for (const int ranks : {1, 2, 3, 4}) {
    CAPTURE(ranks);
    for (const Case& c : cases(ranks)) {
      CAPTURE(c.name);
      RunOptions run;
      run.sharding = c.options;
      check_peaks(ranks, tied_vit(), run);
      run.sharding.units = cells();
      check_peaks(ranks, odd_net(), run);
    }
  }
}

TEST_CASE("memory: peaks on paper hold with mixed precision") {
  for (const Precision& precision : mixed_precisions()) {
    CAPTURE(describe(precision));
    for (const int ranks : {1, 2}) {
      CAPTURE(ranks);
      for (const Case& c : cases(ranks)) {
        CAPTURE(c.name);
        RunOptions run;
        run.sharding = c.options;
        run.precision = precision;
        run.passes = 2;
        check_peaks(ranks, tied_vit(), run);
        if (!unit_policy(c.options).shard_gradients) continue;
        run.sharding.reduce_every_pass = run.sync_each_pass = true;
        check_peaks(ranks, tied_vit(), run);
      }
    }
  }
}

TEST_CASE("memory: peaks on paper hold with several passes a step") {
  for (const int ranks : {1, 2, 3}) {
    CAPTURE(ranks);
    for (const Case& c : cases(ranks)) {
      CAPTURE(c.name);
      RunOptions run;
      run.sharding = c.options;
      run.passes = 2;
      run.batch = 13;  // not the same number of samples everywhere
      check_peaks(ranks, tied_vit(), run);
      if (!unit_policy(c.options).shard_gradients) continue;
      run.sharding.reduce_every_pass = run.sync_each_pass = true;
      check_peaks(ranks, tied_vit(), run);
    }
  }
}
