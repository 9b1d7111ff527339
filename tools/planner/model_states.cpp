// SPDX-License-Identifier: Apache-2.0
#include <sherd/tools/planner/model_states.h>

#include <sherd/runtime/error.h>
#include <sherd/runtime/flat_layout.h>

#include <algorithm>
#include <numeric>

namespace sherd {

StateConvention state_convention(const std::string& name, const Precision& precision) {
  constexpr double kGB = 1e9, kGiB = 1073741824.0;
  if (name == "zero-paper") return {name, 2, 2, 12, false, false, kGB, "GB"};
  if (name == "deepspeed") return {name, 2, 2, 16, true, true, kGiB, "GiB"};
  SHERD_CHECK(name == "sherd", "--convention: expected sherd, zero-paper or deepspeed, got '{}'",
              name);
  const auto master = static_cast<std::int64_t>(size_of(precision.master));
  return {name,   static_cast<std::int64_t>(size_of(precision.parameters)),
          master, 2 * master + (precision.mixed() ? master : 0),
          false,  false,
          kGiB,   "GiB"};
}

ModelStates model_states(const StateConvention& convention, ShardingPolicy policy,
                         const std::vector<std::int64_t>& units, int ranks) {
  ShardingOptions options;
  options.policy = policy;
  const UnitPolicy where = unit_policy(options);
  ModelStates states;
  std::int64_t largest = 0;
  for (const std::int64_t numel : units) {
    const FlatLayout layout({{"unit", numel}}, ranks, 1);
    const auto held = [&](bool as_shard, std::int64_t bytes) {
      return static_cast<double>((as_shard ? layout.shard_numel() : numel) * bytes);
    };
    largest = std::max(largest, numel);
    states.parameters += held(where.shard_parameters, convention.parameters);
    states.optimizer += held(where.shard_optimizer, convention.optimizer);
    if (where.shard_parameters && convention.largest_unit_only) continue;
    states.gradients +=
        held(where.shard_gradients && !convention.whole_gradients, convention.gradients);
  }
  if (where.shard_parameters && convention.largest_unit_only) {
    states.largest_unit =
        static_cast<double>(largest * (convention.parameters + convention.gradients));
  }
  return states;
}

std::string model_states_text(const StateConvention& convention,
                              const std::vector<std::int64_t>& units, int ranks) {
  const std::int64_t parameters = std::accumulate(units.begin(), units.end(), std::int64_t{0});
  std::string text = fmt::format(
      "{:.4g} parameters in {} unit{} on {} ranks, by {}: {} + {} + {} bytes of a parameter "
      "(itself, gradient, optimizer)\n\n{:<10} {:>12} {:>12} {:>12} {:>12} {:>12}   {}\n",
      static_cast<double>(parameters), units.size(), units.size() == 1 ? "" : "s", ranks,
      convention.name, convention.parameters, convention.gradients, convention.optimizer, "policy",
      "parameters", "gradients", "optimizer", "unit", "a rank", convention.unit_name);
  for (const ShardingPolicy policy :
       {ShardingPolicy::none, ShardingPolicy::zero1, ShardingPolicy::zero2, ShardingPolicy::grad_op,
        ShardingPolicy::zero3}) {
    const ModelStates states = model_states(convention, policy, units, ranks);
    text += fmt::format("{:<10} {:>12.2f} {:>12.2f} {:>12.2f} {:>12.2f} {:>12.2f}\n",
                        name_of(policy), states.parameters / convention.unit,
                        states.gradients / convention.unit, states.optimizer / convention.unit,
                        states.largest_unit / convention.unit, states.total() / convention.unit);
  }
  return text;
}

}  // namespace sherd
