// SPDX-License-Identifier: Apache-2.0
// The simulator beside published measurements: what the README says of it.
#include <sherd/tools/planner/published_plan.h>

#include <doctest/doctest.h>
#include <sherd/runtime/error.h>

#include <algorithm>

namespace {

using namespace sherd;

TEST_CASE("published: the collapse of ZeRO-3 comes out of the schedule, and cases are told apart") {
  const PublishedSummary summary = plan_published_cases();
  const auto figure = [&](const char* name) {
    const auto found = std::ranges::find_if(
        summary.results, [&](const auto& result) { return result.published->name == name; });
    REQUIRE(found != summary.results.end());
    return found->figure;
  };
  // 144, 88 and 44 TFLOP/s were published: what a GPU does falls with each doubling of their
  // number.
  CHECK(figure("6-384") / figure("6-768") > 1.3);
  CHECK(figure("6-768") / figure("6-1536") > 1.7);
  // FSDP, which gathers whole blocks ahead, does not collapse on as many.
  CHECK(figure("9-512-b1") / figure("9-128-b1") > 0.95);
  // 0.93 of the figure of 8 GPUs was published for 512.
  CHECK(figure("10-512") > 0.9);
  CHECK(figure("10-512") < 1.05);
  CHECK(summary.results.size() == 20);
  CHECK(summary.waiting.size() == 11);
  CHECK(summary.mean_error < 0.45);
  CHECK(summary.mean_relative_error < 0.13);
  const std::string text = to_text(summary);
  CHECK(text.find("waits for tensor and pipeline parallelism") != std::string::npos);
  CHECK_THROWS_WITH_AS(plan_published(*summary.waiting.front()), doctest::Contains("waits for"),
                       Error);
}

}  // namespace
