// SPDX-License-Identifier: Apache-2.0
#include <sherd/tools/planner/cost_model.h>

#include <sherd/runtime/error.h>
#include <sherd/tools/planner/collective_cost.h>
#include <sherd/tools/planner/kernel_cost.h>

#include <algorithm>

namespace sherd {
namespace {

Collective collective_from_name(std::string_view name) {
  for (std::size_t i = 0; i < kCollectives; ++i) {
    const auto collective = static_cast<Collective>(i);
    if (name_of(collective) == name) return collective;
  }
  fail("'{}' is the name of no collective", name);
}

}  // namespace

CostModel::CostModel(const System& system, int ranks)
    : system_(system), beside_collective_(system), ranks_(ranks) {
  SHERD_CHECK(ranks >= 0, "a cost model for {} ranks: expected at least 0", ranks);
  // A device with fewer multiprocessors, each as fast.
  beside_collective_.multiprocessors -= system.collective_multiprocessors;
  const double left =
      static_cast<double>(beside_collective_.multiprocessors) / system.multiprocessors;
  for (auto& [dtype, products] : beside_collective_.products) {
    products.tile_rate = tile_rate(system, products);
    products.peak *= left;
    products.measured *= left;
  }
}

double CostModel::seconds(const Work& work) const {
  if (work.kind != Work::Kind::collective) return kernel_seconds(system_, work, ranks_);
  return collective_cost(collective_from_name(work.name), work.bytes, work.group, system_, ranks_)
      .seconds;
}

double CostModel::seconds_beside_collective(const Work& work) const {
  if (work.kind == Work::Kind::collective) return seconds(work);
  return std::max(seconds(work), kernel_seconds(beside_collective_, work, ranks_));
}

}  // namespace sherd
