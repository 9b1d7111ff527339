// SPDX-License-Identifier: Apache-2.0
// Which parameters form a unit.
#include <doctest/doctest.h>

#include "sharding_support.h"

#include <algorithm>
#include <map>
#include <set>

using namespace sherd;
using namespace sherd::test;

namespace {

using Kind = UnitPlan::Kind;

std::map<std::string, std::vector<std::string>> parameters_by_unit(
    const std::vector<UnitPlan>& plans) {
  std::map<std::string, std::vector<std::string>> all;
  for (const UnitPlan& plan : plans) {
    CHECK_FALSE(all.contains(plan.name));
    for (const Parameter* parameter : plan.parameters) {
      all[plan.name].push_back(parameter->name());
    }
  }
  return all;
}

const UnitPlan& plan_named(const std::vector<UnitPlan>& plans, const std::string& name) {
  const auto found = std::ranges::find(plans, name, &UnitPlan::name);
  REQUIRE(found != plans.end());
  return *found;
}

ShardingOptions with_units(UnitRule rule) {
  ShardingOptions options;
  options.units = std::move(rule);
  return options;
}

bool is_below(const Module& module, const Parameter* parameter) {
  return std::ranges::count(module.parameters(), parameter) > 0;
}

// True of any partition: every parameter is in one unit, of a module under which it is, in the
// model's order; frozen and persistent ones apart.
void check_is_partition(Module& root, const ShardingOptions& options) {
  const std::vector<Parameter*> all = root.parameters();
  std::multiset<const Parameter*> found;
  for (const UnitPlan& plan : partition(root, options)) {
    CAPTURE(plan.name);
    CHECK_FALSE(plan.parameters.empty());
    std::ptrdiff_t last = -1;
    for (const Parameter* parameter : plan.parameters) {
      CAPTURE(parameter->name());
      found.insert(parameter);
      CHECK(is_below(*plan.module, parameter));
      CHECK(parameter->requires_grad() == (plan.kind != Kind::frozen));
      const bool persists =
          parameter->requires_grad() && parameter->numel() < options.persist_below;
      CHECK(persists == (plan.kind == Kind::persistent));
      const std::ptrdiff_t place = std::ranges::find(all, parameter) - all.begin();
      CHECK(place > last);
      last = place;
    }
  }
  CHECK(found.size() == all.size());
  for (const Parameter* parameter : all) CHECK(found.count(parameter) == 1);
}

}  // namespace

TEST_CASE("partition: blocks are units, and what is around them is one") {
  VisionTransformer vit({.image_height = 4,
                         .image_width = 4,
                         .channels = 1,
                         .patch = 2,
                         .dim = 8,
                         .depth = 2,
                         .heads = 2,
                         .classes = 3});
  const auto plans = partition(vit, {});
  REQUIRE(plans.size() == 3);
  CHECK(plans[0].name == "(root)");
  CHECK(plans[0].module == &vit);
  CHECK(plans[1].name == "blocks.0");
  CHECK(plans[1].module == vit.child("blocks")->child("0").get());
  CHECK(plans[2].name == "blocks.1");
  const auto units = parameters_by_unit(plans);
  CHECK(units.at("(root)") == std::vector<std::string>{"cls_token", "pos_embed",
                                                       "patch_embed.proj.weight",
                                                       "patch_embed.proj.bias", "norm.weight",
                                                       "norm.bias", "head.weight", "head.bias"});
  CHECK(units.at("blocks.1").size() == 12);
  for (const std::string& name : units.at("blocks.1")) CHECK(name.starts_with("blocks.1."));
}

TEST_CASE("partition: model is one unit") {
  OddNet model;
  const auto plans = partition(model, with_units(UnitRule::parse("model")));
  REQUIRE(plans.size() == 1);
  CHECK(plans[0].module == &model);
  CHECK(plans[0].parameters == model.parameters());
}

TEST_CASE("partition: a tied parameter belongs to the innermost unit around all its users") {
  OddNet odd;
  auto units = parameters_by_unit(partition(odd, with_units(cells())));
  // first and last share a matrix; each keeps its own bias.
  CHECK(units.at("(root)") ==
        std::vector<std::string>{"scalar", "empty", "unused", "first.weight"});
  CHECK(units.at("first") == std::vector<std::string>{"first.bias"});
  CHECK(units.at("last") == std::vector<std::string>{"last.bias"});
  CHECK(units.at("nested") == std::vector<std::string>{"nested.weight", "nested.bias"});
  CHECK(units.at("nested.inner") ==
        std::vector<std::string>{"nested.inner.weight", "nested.inner.bias"});

  // Tied inside one unit, it stays there.
  class Pair : public Module {
   public:
    Pair() {
      const auto first = std::make_shared<OddNet::Cell>(nullptr);
      register_child("a", first);
      register_child("b", std::make_shared<OddNet::Cell>(first->weight()));
    }

   protected:
    Variable forward(const Variable& x) override { return x; }
  };
  Sequential model;
  model.append("0", std::make_shared<Pair>());
  model.append("1", std::make_shared<Pair>());
  model.assign_names();
  units = parameters_by_unit(partition(model, {}));
  CHECK(units.size() == 2);
  CHECK(units.at("0") == std::vector<std::string>{"0.a.weight", "0.a.bias", "0.b.bias"});
  // ... and in the outer one of two units, one inside the other.
  UnitRule both = cells();
  both.is_unit = [](const Module& module) { return module.name() != ""; };
  units = parameters_by_unit(partition(model, with_units(both)));
  CHECK(units.at("1") == std::vector<std::string>{"1.a.weight"});
  CHECK(units.at("1.b") == std::vector<std::string>{"1.b.bias"});
}

TEST_CASE("partition: by size, from the leaves up, whatever is large enough is a unit") {
  VisionTransformer vit({.image_height = 4,
                         .image_width = 4,
                         .channels = 1,
                         .patch = 2,
                         .dim = 8,
                         .depth = 2,
                         .heads = 2,
                         .classes = 3});
  // A block of 872: attention 216 + 72, MLP 288 + 264, two norms of 16.
  const auto at = [&](const std::string& text) {
    std::set<std::string> names;
    for (const UnitPlan& plan : partition(vit, with_units(UnitRule::parse(text)))) {
      names.insert(plan.name);
    }
    return names;
  };
  CHECK(at("params:5000") == std::set<std::string>{"(root)"});
  CHECK(at("params:872") == std::set<std::string>{"(root)", "blocks.0", "blocks.1"});
  CHECK(at("params:873") == std::set<std::string>{"(root)", "blocks"});
  CHECK(at("params:500") ==
        std::set<std::string>{"(root)", "blocks", "blocks.0.mlp", "blocks.1.mlp"});
  CHECK(at("params:1").contains("blocks.1.norm2"));
  CHECK_FALSE(at("params:1").contains("blocks.1"));  // nothing is left for it
  // A tied matrix is counted once.
  UnitRule none;
  none.kind = UnitRule::Kind::parameters;
  CHECK_THROWS_WITH_AS(partition(vit, with_units(none)), doctest::Contains("positive"), Error);
}

TEST_CASE("partition: frozen and small parameters are apart") {
  TiedViT vit;
  ShardingOptions options;
  auto plans = partition(vit, options);
  CHECK(plan_named(plans, "vit.blocks.1/frozen").kind == Kind::frozen);
  CHECK(plan_named(plans, "vit.blocks.1/frozen").module ==
        plan_named(plans, "vit.blocks.1").module);
  CHECK(plan_named(plans, "vit.blocks.1/frozen").parameters.size() == 4);
  options.persist_below = 11;
  plans = partition(vit, options);
  const UnitPlan& persistent = plan_named(plans, "(root)/persistent");
  CHECK(persistent.kind == Kind::persistent);
  CHECK(persistent.module == &vit);
  CHECK(std::ranges::all_of(persistent.parameters, [](auto* p) { return p->numel() <= 10; }));
  // A frozen parameter of 10 elements stays with the frozen ones, which are not updated.
  CHECK(plan_named(plans, "vit.blocks.1/frozen").parameters.size() == 4);
}

TEST_CASE("partition: every parameter is in exactly one unit, whatever the rule") {
  OddNet odd;
  TiedViT tied;
  tied.parameters().front()->set_requires_grad(false);
  for (Module* root : {static_cast<Module*>(&odd), static_cast<Module*>(&tied)}) {
    std::vector<UnitRule> rules{UnitRule::parse("block"), UnitRule::parse("model"), cells()};
    for (const char* size : {"params:1", "params:6", "params:30", "params:100", "params:1000"}) {
      rules.push_back(UnitRule::parse(size));
    }
    UnitRule all = cells();
    all.is_unit = [](const Module&) { return true; };
    rules.push_back(all);
    for (const UnitRule& rule : rules) {
      CAPTURE(static_cast<int>(rule.kind));
      CAPTURE(rule.min_parameters);
      for (const std::int64_t persist_below : {0, 1, 11, 100, 100'000}) {
        CAPTURE(persist_below);
        ShardingOptions options = with_units(rule);
        options.persist_below = persist_below;
        check_is_partition(*root, options);
      }
    }
  }
}

TEST_CASE("partition: what cannot be divided is an error") {
  class Nameless : public Module {
   public:
    Nameless() { register_parameter("w", {2}, Initializer::ones(), true); }

   protected:
    Variable forward(const Variable& x) override { return x; }
  } model;
  CHECK_THROWS_WITH_AS(partition(model, {}), doctest::Contains("call assign_names()"), Error);
  UnitRule rule;
  rule.kind = UnitRule::Kind::custom;
  model.assign_names();
  CHECK_THROWS_WITH_AS(partition(model, with_units(rule)), doctest::Contains("is_unit"), Error);
}
