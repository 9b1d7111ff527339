// SPDX-License-Identifier: Apache-2.0
// The sharding engine with tensors of GPUs, or of emulated ones.
#include <doctest/doctest.h>

#include <sherd/runtime/cuda/device.h>

#include "../distributed/sharding_support.h"
#include "../unit/io_support.h"

#include <algorithm>
#include <cmath>

using namespace sherd;
using namespace sherd::test;

namespace {

RunOptions on_cuda(RunOptions run) {
  run.device = Device::cuda;
  run.sharding.exact_sums = true;
  run.steps = 3;
  return run;
}

void check_close(const RunResult& a, const RunResult& b, double bound) {
  REQUIRE(a.losses.size() == b.losses.size());
  for (std::size_t i = 0; i < a.losses.size(); ++i) {
    CHECK(std::abs(a.losses[i] - b.losses[i]) <= bound * std::abs(b.losses[i]));
    CHECK(std::abs(a.norms[i] - b.norms[i]) <= bound * std::abs(b.norms[i]));
  }
  for (const auto& entry : b.values) {
    const std::string& name = entry.first;
    CAPTURE(name);
    for (std::size_t i = 0; i < entry.second.size(); ++i)
      CHECK(std::abs(a.values.at(name)[i] - entry.second[i]) <= bound);
  }
}

// As many as there are GPUs, at most.
bool enough_devices(int ranks) {
  if (cuda::device_count() >= ranks) return true;
  MESSAGE("skipped on ", ranks, " ranks: there are ", cuda::device_count(), " GPUs");
  return false;
}

}  // namespace

TEST_CASE("device: training gives the numbers of the processor") {
  for (const DType dtype : {DType::f64, DType::f32}) {
    CAPTURE(name_of(dtype));
    for (const int ranks : {1, 2}) {
      if (!enough_devices(ranks)) continue;
      CAPTURE(ranks);
      RunOptions run = run_of(ShardingPolicy::zero3, ranks);
      run.precision = dtype;
      run.steps = 3;
      const RunResult expected = train_ranks(ranks, tied_vit(), run);
      const RunResult result = train_ranks(ranks, tied_vit(), on_cuda(run));
      check_close(result, expected, dtype == DType::f64 ? 1e-11 : 2e-4);
    }
  }
}

TEST_CASE("device: the same bits under every policy and precision") {
  std::vector<Precision> precisions = mixed_precisions();
  precisions.resize(2);
  precisions.emplace_back(DType::f32);
  for (const Precision& precision : precisions) {
    CAPTURE(describe(precision));
    for (const int ranks : {2, 4}) {
      if (!enough_devices(ranks)) continue;
      CAPTURE(ranks);
      RunOptions run = on_cuda(run_of(ShardingPolicy::none, ranks));
      run.precision = precision;
      const RunResult expected = train_ranks(ranks, tied_vit(), run);
      for (const ShardingPolicy policy : kPolicies) {
        CAPTURE(name_of(policy));
        RunOptions other = on_cuda(run_of(policy, ranks));
        other.precision = precision;
        const RunResult result = train_ranks(ranks, tied_vit(), other);
        CHECK(result.losses == expected.losses);
        CHECK(result.norms == expected.norms);
        CHECK(result.weights == expected.weights);
      }
    }
  }
}

TEST_CASE("device: offloading to pinned memory and to files leaves the bits as they are") {
  if (!enough_devices(2)) return;
  const TempDirectory scratch;
  const auto check = [&](RunOptions run) {
    const RunResult expected = train_ranks(2, tied_vit(), run);
    const bool shards = run.sharding.policy == ShardingPolicy::zero3;
    for (const std::string& place : {std::string("cpu"), "nvme:" + scratch.path()}) {
      CAPTURE(place);
      run.sharding.offload_optimizer = OffloadTo::parse(place, "--offload-optimizer");
      run.sharding.offload_parameters = {};
      CHECK(train_ranks(2, tied_vit(), run) == expected);
      if (!shards) continue;
      run.sharding.offload_parameters = OffloadTo::parse(place, "--offload-parameters");
      CHECK(train_ranks(2, tied_vit(), run) == expected);
    }
  };
  for (const bool mixed : {false, true}) {
    CAPTURE(mixed);
    for (const ShardingPolicy policy :
         {ShardingPolicy::none, ShardingPolicy::zero2, ShardingPolicy::zero3}) {
      CAPTURE(name_of(policy));
      RunOptions run = on_cuda(run_of(policy, 2));
      if (mixed) run.precision = mixed_precisions().front();
      check(run);
      if (policy != ShardingPolicy::zero3) continue;
      run.passes = 2;
      run.sync_each_pass = run.sharding.reduce_every_pass = true;
      check(run);
    }
  }
}

TEST_CASE("device: memory is what meta plans, in both pools") {
  for (const std::string place : {"none", "cpu"}) {
    CAPTURE(place);
    for (const ShardingPolicy policy :
         {ShardingPolicy::none, ShardingPolicy::zero2, ShardingPolicy::zero3}) {
      if (!enough_devices(2)) return;
      CAPTURE(name_of(policy));
      RunOptions run = on_cuda(run_of(policy, 2));
      run.precision = mixed_precisions().front();
      run.sharding.offload_optimizer = OffloadTo::parse(place, "--offload-optimizer");
      std::vector<std::pair<MemoryBreakdown, MemoryBreakdown>> real(2), planned(2);
      const auto measure = [](RankTrainer& rank) {
        rank.step(0);
        rank.context.ledger().reset_peak();
        rank.context.host_ledger().reset_peak();
        rank.step(1);
        return std::pair(rank.context.ledger().peaks(), rank.context.host_ledger().peaks());
      };
      on_threads(2, tied_vit(), run, [&](RankTrainer& rank) {
        real[static_cast<std::size_t>(rank.world.rank())] = measure(rank);
      });
      for (int r = 0; r < 2; ++r) {
        on_meta(r, 2, tied_vit(), run,
                [&](RankTrainer& rank) { planned[static_cast<std::size_t>(r)] = measure(rank); });
      }
      CHECK(real == planned);
    }
  }
}
