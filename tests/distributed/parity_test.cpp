// SPDX-License-Identifier: Apache-2.0
// The same bits under every policy, unit rule and prefetch; nearly the same values whatever the
// number of ranks.
#include <doctest/doctest.h>

#include "sharding_support.h"

#include <cmath>

using namespace sherd;
using namespace sherd::test;

namespace {

struct Case {
  std::string name;
  ShardingOptions options;
};

std::vector<Case> cases(int ranks, const UnitRule& units) {
  std::vector<Case> all;
  const auto add = [&](const std::string& name, ShardingPolicy policy,
                       const std::function<void(ShardingOptions&)>& change = {}) {
    Case c{name, {}};
    c.options.policy = policy;
    c.options.units = units;
    if (change) change(c.options);
    all.push_back(c);
  };
  using P = ShardingPolicy;
  for (const P policy : {P::none, P::zero1, P::zero2, P::grad_op, P::zero3}) {
    add(std::string(name_of(policy)), policy);
  }
  add("none, one unit", P::none, [](auto& o) { o.units = UnitRule::parse("model"); });
  add("zero1, small units", P::zero1, [](auto& o) { o.units = UnitRule::parse("params:50"); });
  add("zero3, one unit", P::zero3, [](auto& o) { o.units = UnitRule::parse("model"); });
  add("zero3, small units", P::zero3, [](auto& o) { o.units = UnitRule::parse("params:20"); });
  add("zero3, no prefetch", P::zero3, [](auto& o) { o.prefetch = 0; });
  add("zero3, prefetch 5", P::zero3, [](auto& o) { o.prefetch = 5; });
  add("zero3, small ones persist", P::zero3, [](auto& o) { o.persist_below = 40; });
  add("grad_op, small ones persist", P::grad_op, [](auto& o) { o.persist_below = 40; });
  add("zero3, kept until backward", P::zero3,
      [](auto& o) { o.reshard_after_forward = ReshardAfterForward::parse("no"); });
  for (const char* group : {"1", "2", "4"}) {
    if (ranks % std::stoi(group) != 0) continue;
    add(std::string("zero3, secondary copy in groups of ") + group, P::zero3,
        [&](auto& o) { o.reshard_after_forward = ReshardAfterForward::parse(group); });
  }
  // Contiguous shard groups of a power of two: the same tree.
  for (int shard = 2; shard < ranks; shard *= 2) {
    if (ranks % shard != 0) continue;
    add(fmt::format("hybrid, shard groups of {}", shard), P::hybrid, [&](auto& o) {
      o.mesh = ProcessMesh({{"replicate", ranks / shard}, {"shard", shard}});
    });
  }
  return all;
}

void check_all_equal(const Workload& work, const UnitRule& units, RunOptions run) {
  const bool plain = run.precision == Precision(DType::f32);
  for (const int ranks : {1, 2, 3, 4, 8}) {
    if (ranks == 8 && !plain) continue;
    CAPTURE(ranks);
    run.steps = !plain || ranks == 8 ? 3 : 10;  // more threads than most machines have cores
    run.sharding = cases(ranks, units).front().options;
    const RunResult expected = train_ranks(ranks, work, run);
    CHECK(expected.losses.size() == static_cast<std::size_t>(run.steps));
    for (const Case& c : cases(ranks, units)) {
      CAPTURE(c.name);
      run.sharding = c.options;
      const RunResult result = train_ranks(ranks, work, run);
      CHECK(result.losses == expected.losses);
      CHECK(result.norms == expected.norms);
      for (const auto& entry : expected.weights) {
        const auto& name = entry.first;  // clang 14 cannot capture bindings
        const auto& bytes = entry.second;
        CAPTURE(name);
        CHECK(result.weights.at(name) == bytes);
      }
    }
  }
}

}  // namespace

TEST_CASE("sharding: a ViT ends in the same bits under every policy") {
  check_all_equal(tied_vit(), {}, {});
}

TEST_CASE("sharding: mixed precision ends in the same bits under every policy") {
  for (const Precision& precision : mixed_precisions()) {
    CAPTURE(describe(precision));
    RunOptions run;
    run.precision = precision;
    check_all_equal(tied_vit(), {}, run);
    check_all_equal(odd_net(), cells(), run);
  }
}

TEST_CASE("sharding: odd parameters and modules end in the same bits under every policy") {
  check_all_equal(odd_net(), cells(), {});
}
