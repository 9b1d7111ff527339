// SPDX-License-Identifier: Apache-2.0
// The bytes that ranks send in a step, as exact integers from the units' layouts.
#include <doctest/doctest.h>
#include <sherd/runtime/exact_sum.h>

#include "sharding_support.h"

#include <array>

using namespace sherd;
using namespace sherd::test;

namespace {

using P = ShardingPolicy;

constexpr auto kAllReduce = static_cast<std::size_t>(Collective::all_reduce);
constexpr auto kReduceScatter = static_cast<std::size_t>(Collective::reduce_scatter);
constexpr auto kAllGather = static_cast<std::size_t>(Collective::all_gather);

struct Case {
  std::string name;
  ShardingOptions options;
  int shards = 1, replicas = 1;  // of the mesh
  int neighbours = 0;            // with a secondary copy
};

std::vector<Case> cases(int ranks) {
  std::vector<Case> all;
  const auto add = [&](const std::string& name, P policy) -> Case& {
    Case c;
    c.name = name;
    c.options.policy = policy;
    c.shards = ranks;
    all.push_back(c);
    return all.back();
  };
  for (const P policy : {P::none, P::zero1, P::zero2, P::grad_op, P::zero3}) {
    add(std::string(name_of(policy)), policy);
  }
  add("zero3, no prefetch", P::zero3).options.prefetch = 0;
  add("zero3, far prefetch", P::zero3).options.prefetch = 4;
  add("zero3, one unit", P::zero3).options.units = UnitRule::parse("model");
  add("zero3, kept until backward", P::zero3).options.reshard_after_forward =
      ReshardAfterForward::parse("no");
  add("zero3, small ones persist", P::zero3).options.persist_below = 40;
  add("grad_op, small ones persist", P::grad_op).options.persist_below = 40;
  for (const int neighbours : {1, 2, 8}) {
    if (ranks % neighbours != 0) continue;
    Case& c = add("zero3, groups of " + std::to_string(neighbours), P::zero3);
    c.neighbours = neighbours;
    c.options.reshard_after_forward = ReshardAfterForward::parse(std::to_string(neighbours));
  }
  for (const int shards : {1, 2, 3, 8}) {
    if (ranks % shards != 0) continue;
    for (const P policy : {P::hybrid, P::none}) {
      Case& c = add(fmt::format("{}, shard groups of {}", name_of(policy), shards), policy);
      c.shards = shards;
      c.replicas = ranks / shards;
      c.options.mesh = ProcessMesh({{"replicate", c.replicas}, {"shard", shards}});
    }
  }
  return all;
}

struct Traffic {
  std::array<std::int64_t, kCollectives> calls{}, bytes{};
  bool operator==(const Traffic&) const = default;

  void add(std::size_t collective, std::int64_t sent) {
    ++calls[collective];
    bytes[collective] += sent;
  }
};

std::ostream& operator<<(std::ostream& out, const Traffic& traffic) {
  for (std::size_t i = 0; i < kCollectives; ++i) {
    if (traffic.calls[i] == 0) continue;
    out << name_of(static_cast<Collective>(i)) << ": " << traffic.calls[i] << " calls, "
        << traffic.bytes[i] << " bytes; ";
  }
  return out;
}

// The table: Ψ padded elements of a unit, of which S shards are shared out and R copies kept.
// Every gather or scatter sends Ψ (S-1)/S elements, an all-reduce 2 Ψ (S-1)/S.
// Parameters and gradients travel in types of their own; a sum that stays whole on all ranks is
// gathered in the type in which it was taken.
Traffic expected(const Case& c, const ShardingEngine& engine) {
  const auto size = [](DType dtype) { return static_cast<std::int64_t>(size_of(dtype)); };
  const Precision& precision = engine.precision();
  const std::int64_t S = c.shards, R = c.replicas;
  const P policy = c.options.policy;
  const bool shards_parameters = policy == P::grad_op || policy == P::zero3 || policy == P::hybrid;
  const bool kept =
      policy == P::grad_op || c.options.reshard_after_forward.kind == ReshardAfterForward::Kind::no;
  Traffic traffic;
  std::int64_t parameters = 0;
  std::int64_t across = 0;  // calls among copies, each part of one among shards
  for (const auto& unit : engine.units()) {
    const std::int64_t numel = unit->layout().shard_numel();
    const std::int64_t psi = numel * S * size(precision.parameters);
    const std::int64_t summed = numel * S * size(precision.master);
    const std::int64_t rounded = numel * S * size(precision.reduce);
    const bool persistent = unit->plan().kind == UnitPlan::Kind::persistent;
    const bool gathered = shards_parameters && !persistent;
    const bool frozen = unit->plan().kind == UnitPlan::Kind::frozen;
    parameters += static_cast<std::int64_t>(unit->plan().parameters.size());
    if (gathered) {
      traffic.add(kAllGather, psi / S * (S - 1));  // for forward
      if (!kept) {                                 // and again for backward
        const std::int64_t K = c.neighbours == 0 ? S : c.neighbours;
        traffic.add(kAllGather, psi / K * (K - 1));
      }
    }
    if (frozen) continue;
    if (R > 1) ++across;
    if (policy == P::none && precision.reduce == precision.master) {
      traffic.add(kAllReduce, 2 * summed * (S - 1) / S);
      if (R > 1) traffic.add(kAllReduce, 2 * summed * (R - 1) / R);
      continue;
    }
    traffic.add(kReduceScatter, rounded / S * (S - 1));
    if (R > 1) traffic.add(kAllReduce, 2 * summed / S * (R - 1) / R);
    if (policy == P::none) {
      traffic.add(kAllGather, summed / S * (S - 1));
      if (R > 1) ++across;  // in one with the two before
      continue;
    }
    if (!gathered) traffic.add(kAllGather, psi / S * (S - 1));  // of the update
  }
  // Apart: the sums behind norm and loss, and a count for each parameter.
  const std::int64_t message = (2 * ExactSum::kWords + parameters) * 8;
  traffic.add(kAllReduce, 2 * message * (S - 1) / S);
  if (R > 1) {
    traffic.add(kAllReduce, 2 * message * (R - 1) / R);
    ++across;
  }
  // Where there are groups beside that of the shards, all ranks compare every call first.
  if (R > 1 || c.neighbours > 0) {
    std::int64_t calls = 0;
    for (const std::int64_t count : traffic.calls) calls += count;
    traffic.calls[static_cast<std::size_t>(Collective::barrier)] = calls - across;
  }
  return traffic;
}

Traffic sent_in_step(RankTrainer& rank, int step) {
  const CommunicationCounters before = rank.engine.counters();
  rank.step(step);
  const CommunicationCounters after = rank.engine.counters();
  Traffic traffic;
  for (std::size_t i = 0; i < kCollectives; ++i) {
    traffic.calls[i] = after.calls[i] - before.calls[i];
    traffic.bytes[i] = after.bytes[i] - before.bytes[i];
  }
  return traffic;
}

}  // namespace

TEST_CASE("traffic: each policy sends what the table says, on paper for any number of ranks") {
  for (const int ranks : {1, 2, 3, 8, 64, 512, 4096}) {
    CAPTURE(ranks);
    for (const Case& c : cases(ranks)) {
      CAPTURE(c.name);
      RunOptions run;
      run.sharding = c.options;
      run.batch = 2 * ranks;
      for (const int rank : {0, ranks - 1}) {
        on_meta(rank, ranks, tied_vit(), run, [&](RankTrainer& trainer) {
          for (int step = 0; step < 2; ++step) {
            CHECK(sent_in_step(trainer, step) == expected(c, trainer.engine));
          }
        });
      }
    }
  }
}

TEST_CASE("traffic: mixed precision sends 16-bit parameters and gradients") {
  for (const Precision& precision : mixed_precisions()) {
    CAPTURE(describe(precision));
    for (const int ranks : {1, 2, 8, 512}) {
      CAPTURE(ranks);
      for (const Case& c : cases(ranks)) {
        CAPTURE(c.name);
        RunOptions run;
        run.sharding = c.options;
        run.precision = precision;
        run.batch = 2 * ranks;
        on_meta(ranks - 1, ranks, tied_vit(), run, [&](RankTrainer& trainer) {
          for (int step = 0; step < 2; ++step) {
            CHECK(sent_in_step(trainer, step) == expected(c, trainer.engine));
          }
        });
      }
    }
  }
}

TEST_CASE("traffic: real ranks send what is sent on paper") {
  for (const int ranks : {1, 2, 3, 4}) {
    CAPTURE(ranks);
    for (const Case& c : cases(ranks)) {
      CAPTURE(c.name);
      RunOptions run;
      run.sharding = c.options;
      run.precision = DType::f64;
      std::mutex mutex;
      on_threads(ranks, tied_vit(), run, [&](RankTrainer& trainer) {
        const Traffic first = sent_in_step(trainer, 0), second = sent_in_step(trainer, 1);
        const std::lock_guard lock(mutex);
        CHECK(first == expected(c, trainer.engine));
        CHECK(second == first);
      });
    }
  }
}

TEST_CASE("traffic: sharding everything costs half as much again as sharding nothing") {
  const auto total = [](P policy) {
    RunOptions run;
    run.sharding.policy = policy;
    std::int64_t bytes = 0;
    on_meta(0, 64, {[] { return std::make_unique<OddNet>(); }, {OddNet::kWidth}, 5, {}}, run,
            [&](RankTrainer& trainer) {
              const Traffic sent = sent_in_step(trainer, 0);
              std::int64_t message = 0;
              for (const auto& unit : trainer.engine.units()) {
                message += static_cast<std::int64_t>(unit->plan().parameters.size());
              }
              message = (2 * ExactSum::kWords + message) * 8;
              for (const std::int64_t collective : sent.bytes) bytes += collective;
              bytes -= 2 * message * 63 / 64;
            });
    return bytes;
  };
  const std::int64_t none = total(P::none);
  CHECK(none > 0);
  CHECK(total(P::zero1) == none);
  CHECK(total(P::zero2) == none);
  CHECK(total(P::grad_op) == none);
  CHECK(2 * total(P::zero3) == 3 * none);
}

TEST_CASE("traffic: passes that are not reduced send no gradients, reduced ones each") {
  for (const P policy : {P::zero2, P::grad_op, P::zero3}) {
    CAPTURE(name_of(policy));
    for (const bool each : {false, true}) {
      CAPTURE(each);
      RunOptions run;
      run.sharding.policy = policy;
      run.sharding.reduce_every_pass = run.sync_each_pass = each;
      run.passes = 3;
      run.batch = 24;
      on_meta(1, 4, tied_vit(), run, [&](RankTrainer& trainer) {
        const Traffic sent = sent_in_step(trainer, 0);
        std::int64_t trainable = 0, all = 0, scattered = 0, gathered = 0;
        for (const auto& unit : trainer.engine.units()) {
          const std::int64_t bytes = unit->layout().shard_numel() * 3 * 4;
          all += 1;
          gathered += bytes;
          if (!unit->trainable()) continue;
          trainable += 1;
          scattered += bytes;
        }
        CHECK(sent.calls[kReduceScatter] == trainable * (each ? 3 : 1));
        CHECK(sent.bytes[kReduceScatter] == scattered * (each ? 3 : 1));
        const int gathers = policy == P::zero3 ? 6 : 3;
        if (policy != P::zero2) {
          CHECK(sent.calls[kAllGather] == gathers * all);
          CHECK(sent.bytes[kAllGather] == gathers * gathered);
        }
        CHECK(sent.calls[kAllReduce] == 1);
      });
    }
  }
}
