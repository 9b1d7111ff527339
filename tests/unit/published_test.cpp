// SPDX-License-Identifier: Apache-2.0
// Published cases: that their settings make the models that were measured, and their terms.
#include <doctest/doctest.h>
#include <sherd/models/vit.h>
#include <sherd/runtime/error.h>
#include <sherd/tools/planner/published.h>
#include <sherd/tools/trainer/plan.h>

#include <set>

using namespace sherd;

namespace {

// Relative alone: doctest's own tolerance is 12 microseconds.
doctest::Approx near(double value) {
  return doctest::Approx(value).scale(0);
}

ViTSettings model_of(const PublishedCase& c) {
  const TrainSettings s = published_settings(c);
  return model_settings(s, 1, 1, c.tokens - 1, s.classes);
}

}  // namespace

TEST_CASE("published cases: names are unique, systems are there, and settings are those of a run") {
  std::set<std::string> names;
  for (const PublishedCase& c : published_cases()) {
    CAPTURE(c.name);
    CHECK(names.insert(c.name).second);
    CHECK_FALSE(c.about.empty());
    CHECK_FALSE(c.source.empty());
    CHECK((c.published > 0) == (c.name != "10-8"));  // which only another is held against
    CHECK(read_system(c.system).products.size() > 1);
    CHECK(model_of(c).tokens() == c.tokens);
    const TrainSettings s = published_settings(c);
    if (!c.waiting.empty()) continue;
    CHECK(s.batch_size == c.sequences * c.ranks);
    CHECK(c.sequences % s.micro_batch == 0);
    CHECK(s.shard == "zero3");
    CHECK(read_system(c.system).products.contains(dtype_from_name(s.precision)));
    if (!c.ratio_to.empty()) CHECK(published_case(c.ratio_to).unit == c.unit);
  }
  CHECK_THROWS_WITH_AS(published_case("6-385"), doctest::Contains("did you mean '6-384'?"), Error);
}

TEST_CASE("published cases: the parameters are as many as were published") {
  const auto count = [](const char* name) {
    return static_cast<double>(VisionTransformer(model_of(published_case(name))).parameter_count());
  };
  CHECK(count("6-384") == near(174.6e9).epsilon(1e-3));
  CHECK(count("7-640") == near(529.6e9).epsilon(1e-3));
  CHECK(count("9-512-b1") == near(175e9).epsilon(5e-3));
  CHECK(count("10-8") == near(11.3e9).epsilon(5e-3));
  CHECK(count("11-8") == near(8.03e9).epsilon(8e-3));
  CHECK(count("12-h100") == near(6658859008.0).epsilon(1e-3));
  CHECK(count("13-8") == near(1315950592.0).epsilon(1e-3));
  CHECK(count("4-22b") == near(22e9).epsilon(1e-2));
  CHECK(count("4-1t") == near(1008e9).epsilon(1e-2));
}

TEST_CASE("published cases: the unchanged step can be planned, and memory is as was published") {
  constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;
  for (const PublishedCase& c : published_cases()) {
    if (!c.waiting.empty()) continue;
    CAPTURE(c.name);
    const StepPlan plan = plan_step(published_settings(c), c.ranks);
    const double device = static_cast<double>(read_system(c.system).memory_bytes);
    CHECK(static_cast<double>(plan.device.peak_bytes + vocabulary_bytes(c)) < device);
    // Compiled, where no kernel of PyTorch alone leaves more between them.
    if (!c.name.ends_with("compiled")) continue;
    CHECK(static_cast<double>(plan.device.peak_bytes + vocabulary_bytes(c)) / kGiB ==
          near(c.published_gib).epsilon(0.1));
  }
}

TEST_CASE("published cases: figures in the units of the authors") {
  // 175B on 384 ranks: Megatron counts 4.51e18 FLOPs for a batch of 1536, four sequences a rank.
  const PublishedCase& c = published_case("6-384");
  CHECK(c.flops_per_sequence * 1536 == near(4.51e18).epsilon(2e-3));
  CHECK(published_figure(c, 81.55) == near(144).epsilon(2e-3));
  CHECK(published_figure(published_case("12-h100"), 0.5) == near(6 * 2048 / 0.5));
  CHECK(published_case("12-h100").published == near(10643).epsilon(1e-4));
  CHECK(published_figure(published_case("4-22b"), 1.5) == 1.5);
  CHECK_THROWS_WITH_AS(published_figure(c, 0), doctest::Contains("6-384"), Error);
}

TEST_CASE("published cases: terms of attention, of lists and of the vocabulary") {
  Work attention;
  attention.name = "attention_forward";
  attention.bytes = 1000;
  attention.flops = 2 * 2 * 128 * 5000;  // of 5000 scores, heads of 128
  const PublishedCase& unfused = published_case("6-384");
  CHECK(with_terms(unfused, attention).bytes == 1000 + 6 * 2 * 5000);
  CHECK(with_terms(unfused, attention).flops == attention.flops);
  const PublishedCase& causal = published_case("12-a100");
  CHECK(with_terms(causal, attention).bytes == 1000);
  CHECK(with_terms(causal, attention).flops == attention.flops / 2);
  attention.name = "attention_backward";
  attention.flops = 5 * 2 * 128 * 5000;
  CHECK(with_terms(unfused, attention).bytes == 1000 + 9 * 2 * 5000);
  Work other;
  other.bytes = 7;
  CHECK(with_terms(unfused, other).bytes == 7);

  System system = read_system("dgx-a100");
  system.launch_seconds = 5e-6;
  system.smallest_kernel_seconds = 2e-6;
  system.memory_bytes_per_second = 1e12;
  system.memory_reached = 0.5;
  Work gather;
  gather.kind = Work::Kind::collective;
  gather.name = "all_gather";
  gather.bytes = 1000;
  gather.group = {0, 384, 1};
  CHECK(more_seconds(unfused, gather, system) == near(384 * 2 * 5e-6));
  gather.bytes = 2'000'000'000;
  CHECK(more_seconds(unfused, gather, system) == near(8e-3));
  CHECK(more_seconds(causal, gather, system) == 0);
  gather.name = "all_reduce";
  CHECK(more_seconds(unfused, gather, system) == 0);

  const std::vector<Work> works = vocabulary_work(causal);  // two passes: three products, a loss
  REQUIRE(works.size() == 8);
  CHECK(works[0].m == 6 * 2048);
  CHECK(works[0].n == 50432);
  CHECK(works[0].k == 4096);
  CHECK(works[1].bytes == std::int64_t{6} * 6 * 2048 * 50432);
  const PublishedCase& unfused_loss = published_case("11-8");
  CHECK(vocabulary_work(unfused_loss)[1].bytes == std::int64_t{32} * 2 * 8192 * 128256);
  CHECK(vocabulary_bytes(unfused_loss) == std::int64_t{12} * 2 * 8192 * 128256);
  std::int64_t flops = 0;
  for (const Work& work : works) flops += work.flops;
  CHECK(flops == causal.vocabulary_flops * causal.sequences);
  CHECK(vocabulary_bytes(causal) == std::int64_t{4} * 6 * 2048 * 50432);
}
