// SPDX-License-Identifier: Apache-2.0
// What a user may choose, what it is called, and what is refused with the flag's name.
#include <doctest/doctest.h>

#include "sharding_support.h"

#include <algorithm>

using namespace sherd;
using namespace sherd::test;

namespace {

using P = ShardingPolicy;
using doctest::Contains;

// Valid options of a policy for 4 ranks.
ShardingOptions options_of(P policy) {
  ShardingOptions options;
  options.policy = policy;
  if (policy == P::hybrid) options.mesh = ProcessMesh::parse("replicate=2,shard=2");
  return options;
}

void check_refused(const ShardingOptions& options, int ranks,
                   std::initializer_list<const char*> parts) {
  std::string message;
  try {
    validate(options, ranks);
  } catch (const Error& error) {
    message = error.what();
  }
  CAPTURE(message);
  for (const char* part : parts) {
    CAPTURE(part);
    CHECK(message.find(part) != std::string::npos);
  }
  // The engine refuses it too, before any rank waits for another.
  const std::unique_ptr<Communicator> world = make_meta_communicator(0, ranks);
  Context context({.device = Device::meta});
  TiedViT model;
  CHECK_THROWS_WITH_AS(ShardingEngine(model, context, *world, DType::f32, options), message.c_str(),
                       Error);
  CHECK(world->counters().total_bytes() == 0);
}

}  // namespace

TEST_CASE("options: a policy has its own name and those of other trainers") {
  for (const P policy : kPolicies) CHECK(sharding_policy_from_name(name_of(policy)) == policy);
  for (const auto& entry :
       std::initializer_list<std::pair<const char*, P>>{{"ddp", P::none},
                                                        {"no_shard", P::none},
                                                        {"shard_grad_op", P::grad_op},
                                                        {"fsdp", P::zero3},
                                                        {"full_shard", P::zero3},
                                                        {"hybrid_shard", P::hybrid},
                                                        {"hsdp", P::hybrid}}) {
    const auto& name = entry.first;  // clang 14 cannot capture bindings
    const auto& policy = entry.second;
    CAPTURE(name);
    CHECK(sharding_policy_from_name(name) == policy);
  }
  CHECK(name_of(P::none) == "none");
  CHECK(name_of(P::grad_op) == "grad_op");
  CHECK(name_of(P::hybrid) == "hybrid");
  CHECK_THROWS_WITH_AS(sharding_policy_from_name("zero4"),
                       Contains("unknown sharding policy 'zero4'"), Error);
  CHECK_THROWS_WITH_AS(sharding_policy_from_name("zero_3"), Contains("zero3"), Error);
  CHECK_THROWS_AS(sharding_policy_from_name(""), Error);
  CHECK_THROWS_AS(sharding_policy_from_name("ZERO3"), Error);
}

TEST_CASE("options: unit rules and resharding are read from text") {
  CHECK(UnitRule::parse("block").kind == UnitRule::Kind::block);
  CHECK(UnitRule::parse("model").kind == UnitRule::Kind::model);
  const UnitRule rule = UnitRule::parse("params:1000000");
  CHECK(rule.kind == UnitRule::Kind::parameters);
  CHECK(rule.min_parameters == 1'000'000);
  for (const char* bad : {"", "blocks", "params", "params:", "params:0", "params:-5", "params:1e6",
                          "params:7x", "params:99999999999999999999", " block"}) {
    CAPTURE(bad);
    CHECK_THROWS_WITH_AS(UnitRule::parse(bad), Contains("--unit"), Error);
  }
  using Reshard = ReshardAfterForward;
  CHECK(Reshard::parse("").kind == Reshard::Kind::by_policy);
  CHECK(Reshard::parse("yes").kind == Reshard::Kind::yes);
  CHECK(Reshard::parse("no").kind == Reshard::Kind::no);
  CHECK(Reshard::parse("8").kind == Reshard::Kind::group);
  CHECK(Reshard::parse("8").group_size == 8);
  for (const char* bad : {"true", "0", "-2", "8 ", "1e2", "4294967296"}) {
    CAPTURE(bad);
    CHECK_THROWS_WITH_AS(Reshard::parse(bad), Contains("--reshard-after-forward"), Error);
  }
}

TEST_CASE("options: a policy shards what the table says") {
  struct Row {
    P policy;
    bool parameters, reshards, gradients, optimizer;
  };
  for (const Row& row : {Row{P::none, false, false, false, false},
                         {P::zero1, false, false, false, true},
                         {P::zero2, false, false, true, true},
                         {P::grad_op, true, false, true, true},
                         {P::zero3, true, true, true, true},
                         {P::hybrid, true, true, true, true}}) {
    CAPTURE(name_of(row.policy));
    ShardingOptions options = options_of(row.policy);
    validate(options, 4);
    const UnitPolicy unit = unit_policy(options);
    CHECK(unit.shard_parameters == row.parameters);
    CHECK(unit.reshard_after_forward == row.reshards);
    CHECK(unit.shard_gradients == row.gradients);
    CHECK(unit.shard_optimizer == row.optimizer);
    const UnitPolicy persistent = persistent_unit_policy(options);
    CHECK_FALSE(persistent.shard_parameters);
    CHECK_FALSE(persistent.reshard_after_forward);
    CHECK(persistent.shard_gradients == row.gradients);
    if (!row.reshards) continue;
    options.reshard_after_forward = ReshardAfterForward::parse("no");
    CHECK_FALSE(unit_policy(options).reshard_after_forward);
    options.reshard_after_forward = ReshardAfterForward::parse("2");
    CHECK(unit_policy(options).reshard_after_forward);
  }
}

TEST_CASE("options: a mesh that does not fit is refused") {
  ShardingOptions hybrid = options_of(P::hybrid);
  validate(hybrid, 4);
  check_refused(hybrid, 8, {"--mesh replicate=2,shard=2", "4 ranks", "there are 8"});
  hybrid.mesh = ProcessMesh::parse("shard=4");
  check_refused(hybrid, 4, {"--shard hybrid", "--mesh shard=4", "replicate=R,shard=S"});
  hybrid.mesh = ProcessMesh::parse("replicate=4");
  check_refused(hybrid, 4, {"--shard hybrid", "--mesh replicate=4"});
  hybrid.mesh.reset();
  check_refused(hybrid, 4, {"--shard hybrid", "--mesh replicate=R,shard=S", "(4)"});
  check_refused(hybrid, 1, {"--shard hybrid", "(1)"});
  hybrid.mesh = ProcessMesh::parse("replicate=2,tensor=2");
  check_refused(hybrid, 4, {"--mesh replicate=2,tensor=2", "'tensor'"});
  for (const P policy : {P::zero1, P::zero2, P::grad_op, P::zero3}) {
    CAPTURE(name_of(policy));
    ShardingOptions options = options_of(policy);
    options.mesh = ProcessMesh::parse("replicate=2,shard=2");
    const std::string flag = "--shard " + std::string(name_of(policy));
    check_refused(options, 4, {flag.c_str(), "2 replicas", "--shard hybrid"});
    for (const char* same : {"shard=4", "replicate=1,shard=4"}) {
      options.mesh = ProcessMesh::parse(same);
      CHECK_NOTHROW(validate(options, 4));
    }
  }
  for (const char* any : {"shard=4", "replicate=4", "replicate=2,shard=2"}) {
    ShardingOptions none = options_of(P::none);
    none.mesh = ProcessMesh::parse(any);
    CHECK_NOTHROW(validate(none, 4));
  }
}

TEST_CASE("options: what has no effect with a policy is refused, with the flag") {
  for (const P policy : kPolicies) {
    CAPTURE(name_of(policy));
    const bool shards = unit_policy(options_of(policy)).shard_parameters;
    for (const char* text : {"yes", "no", "2"}) {
      CAPTURE(text);
      ShardingOptions options = options_of(policy);
      options.reshard_after_forward = ReshardAfterForward::parse(text);
      const bool keeps = policy == P::grad_op && std::string_view(text) != "no";
      if (shards && !keeps) {
        CHECK_NOTHROW(validate(options, 4));
      } else {
        check_refused(options, 4, {"--reshard-after-forward", "--shard "});
      }
    }
    ShardingOptions options = options_of(policy);
    options.persist_below = 100;
    if (shards) {
      CHECK_NOTHROW(validate(options, 4));
    } else {
      check_refused(options, 4, {"--persist-below", "--shard "});
    }
    options = options_of(policy);
    options.reduce_every_pass = true;
    if (unit_policy(options).shard_gradients) {
      CHECK_NOTHROW(validate(options, 4));
    } else {
      check_refused(options, 4, {"--reduce-every micro", "--shard "});
    }
  }
}

TEST_CASE("options: numbers out of range are refused, with the flag") {
  ShardingOptions options = options_of(P::zero3);
  options.prefetch = -1;
  check_refused(options, 4, {"--prefetch", "-1"});
  options = options_of(P::zero3);
  options.persist_below = -7;
  check_refused(options, 4, {"--persist-below", "-7"});
  for (const int group : {3, 8}) {
    options = options_of(P::zero3);
    options.reshard_after_forward = {ReshardAfterForward::Kind::group, group};
    check_refused(options, 4, {"--reshard-after-forward", "4 ranks"});
  }
  // Of the ranks that share one copy, not of all.
  options = options_of(P::hybrid);
  options.reshard_after_forward = ReshardAfterForward::parse("4");
  check_refused(options, 4, {"--reshard-after-forward 4", "2 ranks"});
}
