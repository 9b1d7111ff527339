// SPDX-License-Identifier: Apache-2.0
#include <sherd/comm/sharding/partition.h>

#include <sherd/runtime/error.h>

#include <algorithm>
#include <map>
#include <set>

namespace sherd {
namespace {

using ModuleSet = std::set<const Module*>;

void choose_by_size(const Module& module, std::int64_t min_parameters, ModuleSet& units,
                    std::set<const Parameter*>& taken, std::int64_t* open) {
  std::int64_t mine = 0;
  for (const auto& [name, parameter] : module.own_parameters()) {
    if (taken.insert(parameter.get()).second) mine += parameter->numel();
  }
  for (const auto& [name, child] : module.children()) {
    std::int64_t below = 0;
    choose_by_size(*child, min_parameters, units, taken, &below);
    mine += below;
  }
  if (mine >= min_parameters) {
    units.insert(&module);
    mine = 0;
  }
  *open = mine;
}

// The modules that are units, the root among them.
ModuleSet choose_units(Module& root, const UnitRule& rule) {
  ModuleSet units;
  switch (rule.kind) {
    case UnitRule::Kind::model: break;
    case UnitRule::Kind::block:
      root.for_each_module([&](Module& module) {
        if (dynamic_cast<Sequential*>(&module) == nullptr) return;
        for (const auto& [name, child] : module.children()) units.insert(child.get());
      });
      break;
    case UnitRule::Kind::parameters: {
      SHERD_CHECK(rule.min_parameters > 0, "unit rule: min_parameters must be positive, got {}",
                  rule.min_parameters);
      std::set<const Parameter*> taken;
      std::int64_t open = 0;
      choose_by_size(root, rule.min_parameters, units, taken, &open);
      break;
    }
    case UnitRule::Kind::custom:
      SHERD_CHECK(rule.is_unit != nullptr, "unit rule: custom needs a function is_unit");
      root.for_each_module([&](Module& module) {
        if (rule.is_unit(module)) units.insert(&module);
      });
      break;
  }
  units.insert(&root);
  return units;
}

// For every parameter the unit modules around all its users, outermost first.
class Owners {
 public:
  Owners(Module& root, const ModuleSet& units) : units_(units) { visit(root); }

  Module* owner(const Parameter* parameter) const { return chains_.at(parameter).back(); }

 private:
  void visit(Module& module) {
    const bool is_unit = units_.contains(&module);
    if (is_unit) path_.push_back(&module);
    for (const auto& [name, parameter] : module.own_parameters()) {
      const auto [known, first] = chains_.try_emplace(parameter.get(), path_);
      if (first) continue;
      std::vector<Module*>& chain = known->second;  // what the two paths have in common
      const auto end = std::ranges::mismatch(chain, path_).in1;
      chain.erase(end, chain.end());
    }
    for (const auto& [name, child] : module.children()) visit(*child);
    if (is_unit) path_.pop_back();
  }

  const ModuleSet& units_;
  std::vector<Module*> path_;
  std::map<const Parameter*, std::vector<Module*>> chains_;
};

}  // namespace

std::vector<UnitPlan> partition(Module& root, const ShardingOptions& options) {
  const ModuleSet units = choose_units(root, options.units);
  const Owners owners(root, units);
  std::vector<UnitPlan> plans;
  const auto plan_for = [&](Module& module, UnitPlan::Kind kind) -> UnitPlan& {
    for (UnitPlan& plan : plans) {
      if (plan.module == &module && plan.kind == kind) return plan;
    }
    static constexpr const char* kSuffix[] = {"", "/frozen", "/persistent"};
    const std::string path = module.name().empty() ? "(root)" : module.name();
    plans.push_back({path + kSuffix[static_cast<int>(kind)], &module, kind, {}});
    return plans.back();
  };
  for (Parameter* parameter : root.parameters()) {
    SHERD_CHECK(!parameter->name().empty(),
                "sharding: the model's parameters have no names; call assign_names() on it first");
    if (!parameter->requires_grad()) {
      plan_for(*owners.owner(parameter), UnitPlan::Kind::frozen).parameters.push_back(parameter);
    } else if (parameter->numel() < options.persist_below) {
      plan_for(root, UnitPlan::Kind::persistent).parameters.push_back(parameter);
    } else {
      plan_for(*owners.owner(parameter), UnitPlan::Kind::trainable).parameters.push_back(parameter);
    }
  }
  return plans;
}

}  // namespace sherd
