// SPDX-License-Identifier: Apache-2.0
// Times from a machine's tables: what was measured comes back, what lies between is between.
#include <sherd/tools/planner/measured_cost.h>

#include <doctest/doctest.h>
#include <sherd/runtime/error.h>

#include <cmath>

namespace {

using namespace sherd;
using Json = nlohmann::ordered_json;

// Relative: doctest's Approx has an absolute part that is larger than a microsecond.
bool near(double a, double b, double tolerance = 1e-3) {
  return std::abs(a - b) <= tolerance * std::abs(b);
}

Work kernel(std::string_view name, std::int64_t bytes, DType dtype = DType::f32) {
  return {.kind = Work::Kind::kernel, .name = name, .dtype = dtype, .bytes = bytes};
}

Work product(std::int64_t m, std::int64_t n, std::int64_t k, bool transposed_b = false) {
  return {.kind = Work::Kind::product,
          .name = "product",
          .bytes = 4 * (m * k + k * n + m * n),
          .flops = 2 * m * n * k,
          .m = m,
          .n = n,
          .k = k,
          .transposed_b = transposed_b};
}

Json tables(const std::vector<Json>& all) {
  Json list = Json::array();
  for (const Json& table : all) list.push_back(table);
  return {{"cores", 8}, {"tables", list}};
}

TEST_CASE("measured costs: a point that was measured comes back, also through a file") {
  const Work add = kernel("add", 4096), gelu = kernel("gelu_forward", 4096);
  const Work wide = product(64, 96, 32), across = product(64, 96, 32, true);
  const Json table = measured_table(2, 1,
                                    {{add, "add", 1e-6},
                                     {kernel("add", 1 << 20), "add", 4e-5},
                                     {gelu, "gelu_forward", 7e-6},
                                     {wide, "product", 3e-6},
                                     {across, "product", 5e-6}});
  const Json read = Json::parse(tables({table}).dump());
  const MeasuredCosts costs(read, 2, 1, "here.json");
  CHECK(costs.cores() == 8);
  CHECK(near(costs.seconds(add), 1e-6));
  CHECK(near(costs.seconds(gelu), 7e-6));
  CHECK(near(costs.seconds(wide), 3e-6));
  CHECK(near(costs.seconds(across), 5e-6));
  // Whatever it is a part of.
  Work patches = wide;
  patches.name = "patch_embed";
  CHECK(near(costs.seconds(patches), 3e-6));
}

TEST_CASE("measured costs: between two sizes a rate between theirs, beyond them the nearest") {
  const Json table = measured_table(1, 1,
                                    {{kernel("add", 1 << 10), "add", 1e-6},       // 1.0 GB/s
                                     {kernel("add", 1 << 20), "add", 1.05e-4}});  // 10 GB/s
  const MeasuredCosts costs(tables({table}), 1, 1, "here.json");
  const auto rate = [&](std::int64_t bytes) {
    return static_cast<double>(bytes) / costs.seconds(kernel("add", bytes));
  };
  const double low = rate(1 << 10), high = rate(1 << 20);
  CHECK(near(rate(1 << 15), std::sqrt(low * high), 0.01));  // in the middle
  CHECK(rate(1 << 12) > low);
  CHECK(rate(1 << 12) < rate(1 << 18));
  CHECK(rate(1 << 18) < high);
  CHECK(rate(1 << 30) < high * 1.0001);
  CHECK(rate(1 << 30) > std::sqrt(low * high));
}

TEST_CASE("measured costs: the table of the nearest use is taken") {
  const auto table = [](int threads, int ranks, double seconds) {
    return measured_table(threads, ranks, {{kernel("add", 4096), "add", seconds}});
  };
  const Json all = tables({table(8, 1, 1e-6), table(1, 8, 2e-6), table(1, 1, 3e-6)});
  const auto seconds = [&](int threads, int ranks) {
    return MeasuredCosts(all, threads, ranks, "here.json").seconds(kernel("add", 4096));
  };
  CHECK(near(seconds(8, 1), 1e-6));
  CHECK(near(seconds(1, 8), 2e-6));
  CHECK(near(seconds(1, 1), 3e-6));
  CHECK(near(seconds(1, 6), 2e-6));
  CHECK(near(seconds(6, 1), 1e-6));
}

TEST_CASE("measured costs: what is missing or impossible is one message") {
  const MeasuredCosts costs(tables({measured_table(1, 1, {{kernel("add", 4096), "add", 1e-6}})}), 1,
                            1, "here.json");
  CHECK_THROWS_WITH_AS(
      costs.seconds(kernel("add", 4096, DType::bf16)),
      doctest::Contains("here.json: nothing like 'add' in bf16 was measured; make the file again "
                        "with that type: sherd bench calibrate --precisions bf16"),
      Error);
  const auto refused = [](const Json& measured, const char* message) {
    CHECK_THROWS_WITH_AS(MeasuredCosts(measured, 1, 1, "here.json"), doctest::Contains(message),
                         Error);
  };
  refused(Json::object(), "\"cores\" is missing, or of another type");
  refused(tables({}), "has no table");
  Json broken = tables({measured_table(1, 1, {{kernel("add", 4096), "add", 1e-6}})});
  broken["tables"][0]["points"][0]["seconds"] = -1.0;
  refused(broken, "expected positive numbers");
  broken["tables"][0]["points"][0]["m"] = "many";
  refused(broken, "\"m\" is missing, or of another type");
  broken["tables"][0]["points"][0]["dtype"] = "f31";
  refused(broken, "here.json: \"measured\": \"dtype\": ");
  broken["tables"][0]["points"][0]["size"] = 3;
  refused(broken, "the key 'size' is not known");
  broken["tables"][0]["points"][0].erase("size");
  broken["tables"][0]["points"][0]["kind"] = "guess";
  refused(broken, "no kind of work is 'guess'");
  broken["tables"][0]["threads"] = 0;
  refused(broken, "a table of 0 threads");
}

}  // namespace
