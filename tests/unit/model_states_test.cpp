// SPDX-License-Identifier: Apache-2.0
// Published tables of what ranks hold, by the layout's arithmetic.
#include <sherd/tools/planner/model_states.h>

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <sherd/runtime/error.h>

#include <cmath>
#include <numeric>

namespace {

using namespace sherd;
using enum ShardingPolicy;

double states(const char* convention, ShardingPolicy policy, std::vector<std::int64_t> units,
              int ranks) {
  const StateConvention counted = state_convention(convention, {});
  return model_states(counted, policy, units, ranks).total() / counted.unit;
}

// Whether a figure is this one, rounded or cut to as many digits: the paper does both.
bool prints_as(double value, const std::string& figure) {
  const std::size_t point = figure.find('.');
  const int decimals = point == std::string::npos ? 0 : static_cast<int>(figure.size() - point - 1);
  const double scale = std::pow(10.0, decimals), published = std::stod(figure);
  const double rounded = std::floor(value * scale + 0.5) / scale,
               cut = std::floor(value * scale) / scale;
  return std::abs(rounded - published) < 1e-9 || std::abs(cut - published) < 1e-9;
}

TEST_CASE("model states: the ZeRO paper's table") {
  // arXiv 1910.02054, figure 1 and table 1.
  struct Row {
    std::int64_t parameters;
    int ranks;
    ShardingPolicy policy;
    const char* figure;
  };
  constexpr std::int64_t kB = 1'000'000'000;
  const Row rows[] = {{15 * kB / 2, 64, none, "120"},   {15 * kB / 2, 64, zero1, "31.4"},
                      {15 * kB / 2, 64, zero2, "16.6"}, {15 * kB / 2, 64, zero3, "1.88"},
                      {128 * kB, 64, zero1, "536"},     {128 * kB, 64, zero2, "284"},
                      {128 * kB, 64, zero3, "32"},      {1000 * kB, 1024, zero1, "4011"},
                      {1000 * kB, 1024, zero2, "2013"}, {1000 * kB, 1024, zero3, "15.6"}};
  for (const Row& row : rows) {
    const double value = states("zero-paper", row.policy, {row.parameters}, row.ranks);
    CAPTURE(row.figure);
    CAPTURE(value);
    CHECK(prints_as(value, row.figure));
  }
}

TEST_CASE("model states: DeepSpeed's estimates for T5-3B") {
  // 2,851M parameters, 32M of them in the largest layer, 8 devices.
  std::vector<std::int64_t> units(89, 32'000'000);
  units.push_back(2'851'000'000 - 89 * 32'000'000LL);
  CHECK(prints_as(states("deepspeed", zero2, units, 8), "15.93"));
  CHECK(prints_as(states("deepspeed", zero3, units, 8), "6.09"));
}

TEST_CASE("model states: this project's own, by policy and precision") {
  const std::vector<std::int64_t> units{640, 1600};  // 16 divides both
  const StateConvention fp32 = state_convention("sherd", {});
  const auto total = [&](ShardingPolicy policy, const StateConvention& convention) {
    return model_states(convention, policy, units, 16).total();
  };
  constexpr double kAll = 2240, kShard = 140;
  CHECK(total(none, fp32) == 16 * kAll);
  CHECK(total(zero1, fp32) == 8 * kAll + 8 * kShard);
  CHECK(total(zero2, fp32) == 4 * kAll + 12 * kShard);
  CHECK(total(grad_op, fp32) == 16 * kShard);
  CHECK(total(zero3, fp32) == 16 * kShard);
  Precision bf16;
  bf16.parameters = bf16.reduce = DType::bf16;
  const StateConvention mixed = state_convention("sherd", bf16);
  CHECK(total(none, mixed) == (2 + 4 + 12) * kAll);
  CHECK(total(zero3, mixed) == 18 * kShard);
  CHECK_THROWS_WITH_AS(state_convention("zero", {}),
                       doctest::Contains("expected sherd, zero-paper or deepspeed, got 'zero'"),
                       Error);
}

TEST_CASE("model states: a shard is padded as the layout pads") {
  const StateConvention paper = state_convention("zero-paper", {});
  CHECK(model_states(paper, zero3, {100}, 64).parameters == 2 * 2.0);  // 2 elements of 128
}

}  // namespace
