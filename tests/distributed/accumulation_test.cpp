// SPDX-License-Identifier: Apache-2.0
// The same global batch, however it is divided: over passes, over ranks, evenly or not.
#include <doctest/doctest.h>

#include "sharding_support.h"

#include <algorithm>
#include <cmath>

using namespace sherd;
using namespace sherd::test;

namespace {

using P = ShardingPolicy;

struct Case {
  std::string name;
  ShardingOptions options;
};

// Those that shard gradients, or all.
std::vector<Case> cases(int ranks, const UnitRule& units, bool all_policies) {
  std::vector<Case> all;
  const auto add = [&](const std::string& name, P policy) -> ShardingOptions& {
    all.push_back({name, {}});
    all.back().options.policy = policy;
    all.back().options.units = units;
    return all.back().options;
  };
  if (all_policies) {
    add("none", P::none);
    add("zero1", P::zero1);
  }
  add("zero2", P::zero2);
  add("grad_op", P::grad_op);
  add("zero3", P::zero3);
  add("zero3, no prefetch", P::zero3).prefetch = 0;
  add("zero3, small ones persist", P::zero3).persist_below = 40;
  add("zero3, one unit", P::zero3).units = UnitRule::parse("model");
  add("zero2, small units", P::zero2).units = UnitRule::parse("params:30");
  if (ranks % 2 == 0) {
    add("zero3, secondary copy", P::zero3).reshard_after_forward = ReshardAfterForward::parse("2");
    add("hybrid", P::hybrid).mesh = ProcessMesh({{"replicate", ranks / 2}, {"shard", 2}});
  }
  return all;
}

void check_bitwise(int ranks, const Workload& work, const UnitRule& units, RunOptions run) {
  CAPTURE(ranks);
  CAPTURE(run.passes);
  std::optional<RunResult> expected;
  for (const Case& c : cases(ranks, units, !run.sync_each_pass)) {
    CAPTURE(c.name);
    run.sharding = c.options;
    run.sharding.reduce_every_pass = run.sync_each_pass;
    const RunResult result = train_ranks(ranks, work, run);
    if (!expected) expected = result;
    CHECK(result.losses == expected->losses);
    CHECK(result.norms == expected->norms);
    for (const auto& entry : expected->weights) {
      const auto& name = entry.first;  // clang 14 cannot capture bindings
      const auto& bytes = entry.second;
      CAPTURE(name);
      CHECK(result.weights.at(name) == bytes);
    }
  }
}

double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
  REQUIRE(a.size() == b.size());
  double most = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double difference = std::abs(a[i] - b[i]);
    most = std::isnan(difference) ? INFINITY : std::max(most, difference);
  }
  return most;
}

void check_near(const RunResult& result, const RunResult& expected, double losses, double weights) {
  CHECK(largest_difference(result.losses, expected.losses) < losses);
  CHECK(largest_difference(result.norms, expected.norms) < 10 * losses);
  for (const auto& entry : expected.values) {
    const auto& name = entry.first;  // clang 14 cannot capture bindings
    const auto& values = entry.second;
    CAPTURE(name);
    CHECK(largest_difference(result.values.at(name), values) < weights);
  }
}

const std::vector<std::pair<Workload, UnitRule>>& workloads() {
  static const std::vector<std::pair<Workload, UnitRule>> all{{tied_vit(), {}},
                                                              {odd_net(), cells()}};
  return all;
}

}  // namespace

TEST_CASE("passes: adding up on each rank, reduced at last, gives equal bits under every policy") {
  for (const auto& [work, units] : workloads()) {
    for (const std::int64_t passes : {1, 2, 3}) {
      RunOptions run;
      run.steps = 3;
      run.passes = passes;
      for (const int ranks : {1, 3, 4}) check_bitwise(ranks, work, units, run);
    }
  }
}

TEST_CASE("passes: with mixed precision each rank adds up in fp32 and rounds once") {
  for (const Precision& precision : mixed_precisions()) {
    CAPTURE(describe(precision));
    for (const auto& [work, units] : workloads()) {
      RunOptions run;
      run.steps = 2;
      run.passes = 3;
      run.precision = precision;
      for (const bool each : {false, true}) {
        run.sync_each_pass = each;
        for (const int ranks : {1, 3}) check_bitwise(ranks, work, units, run);
      }
    }
  }
}

TEST_CASE("passes: reducing after each gives equal bits under every policy that can") {
  for (const auto& [work, units] : workloads()) {
    for (const std::int64_t passes : {2, 3}) {
      RunOptions run;
      run.steps = 3;
      run.passes = passes;
      run.sync_each_pass = true;
      for (const int ranks : {1, 3, 4}) check_bitwise(ranks, work, units, run);
    }
  }
}

TEST_CASE("passes: several small ones are one large one") {
  for (const auto& [work, units] : workloads()) {
    for (const int ranks : {1, 2}) {
      CAPTURE(ranks);
      RunOptions run;
      run.steps = 4;
      run.precision = DType::f64;
      run.sharding.policy = P::none;
      run.sharding.units = units;
      const RunResult expected = train_ranks(ranks, work, run);
      CHECK(expected.losses.front() != expected.losses.back());
      for (const std::int64_t passes : {2, 3}) {
        CAPTURE(passes);
        run.passes = passes;
        for (const bool each : {false, true}) {
          CAPTURE(each);
          run.sync_each_pass = each;
          for (const Case& c : cases(ranks, units, !each)) {
            CAPTURE(c.name);
            run.sharding = c.options;
            run.sharding.reduce_every_pass = each;
            check_near(train_ranks(ranks, work, run), expected, 1e-12, 1e-9);
          }
        }
      }
    }
  }
}

TEST_CASE("ranks: any number of them trains alike on one global batch") {
  for (const auto& [work, units] : workloads()) {
    for (const DType dtype : {DType::f64, DType::f32}) {
      CAPTURE(name_of(dtype));
      RunOptions run;
      run.precision = dtype;
      run.batch = 16;
      run.sharding.units = units;
      const RunResult expected = train_ranks(1, work, run);
      for (const int ranks : {2, 3, 4, 8}) {
        CAPTURE(ranks);
        const RunResult result = train_ranks(ranks, work, run);
        if (dtype == DType::f64) {
          check_near(result, expected, 1e-10, 1e-8);
        } else {
          // Ten steps of rounding near 1e-7; Adam turns the sign of a tiny gradient into a step.
          CHECK(largest_difference(result.losses, expected.losses) < 2e-4);
        }
      }
    }
  }
}

TEST_CASE("ranks: any mesh trains alike, also where sums are taken in another order") {
  for (const auto& [work, units] : workloads()) {
    RunOptions run;
    run.precision = DType::f64;
    run.steps = 5;
    run.sharding.units = units;
    const RunResult expected = train_ranks(1, work, run);
    for (const char* text : {"shard=2,replicate=2", "replicate=2,shard=3", "shard=3,replicate=2",
                             "replicate=3,shard=1", "replicate=1,shard=3", "replicate=3,shard=2"}) {
      CAPTURE(text);
      run.sharding.mesh = ProcessMesh::parse(text);
      for (const P policy : {P::hybrid, P::none}) {
        CAPTURE(name_of(policy));
        run.sharding.policy = policy;
        check_near(train_ranks(run.sharding.mesh->size(), work, run), expected, 1e-10, 1e-8);
      }
    }
  }
}

TEST_CASE("ranks: uneven shares, and ranks without a sample, change nothing") {
  for (const auto& [work, units] : workloads()) {
    for (const std::int64_t batch : {1, 2, 5, 11}) {
      CAPTURE(batch);
      RunOptions run;
      run.precision = DType::f64;
      run.batch = batch;
      run.steps = 3;
      run.sharding.units = units;
      const RunResult expected = train_ranks(1, work, run);
      for (const int ranks : {3, 4}) {
        CAPTURE(ranks);
        for (const Case& c : cases(ranks, units, true)) {
          CAPTURE(c.name);
          run.sharding = c.options;
          check_near(train_ranks(ranks, work, run), expected, 1e-10, 1e-8);
        }
      }
    }
  }
}
