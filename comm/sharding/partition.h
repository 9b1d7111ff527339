// SPDX-License-Identifier: Apache-2.0
// Which parameters form a unit. Pure arithmetic over the module tree: no memory, no ranks.
#pragma once

#include <sherd/comm/sharding/options.h>

#include <string>
#include <vector>

namespace sherd {

// The parameters of one unit, and the module around whose forward and backward they are gathered.
struct UnitPlan {
  enum class Kind : std::uint8_t {
    trainable,
    frozen,      // no gradient, so a flat buffer of their own
    persistent,  // small ones that stay gathered; all of the model's in one unit
  };
  std::string name;  // the module's path; "(root)" for the root; with "/frozen", "/persistent"
  Module* module = nullptr;
  Kind kind = Kind::trainable;
  std::vector<Parameter*> parameters;  // in the model's order
};

// Every parameter below `root` is in exactly one unit: that of the innermost unit module inside
// which all its users run. So a tied parameter is gathered wherever it is used, and a unit may
// contain other units.
SHERD_API std::vector<UnitPlan> partition(Module& root, const ShardingOptions& options);

}  // namespace sherd
