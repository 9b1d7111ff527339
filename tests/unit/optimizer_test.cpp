// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>
#include <sherd/kernels/elementwise.h>
#include <sherd/kernels/random.h>
#include <sherd/optim/optimizer.h>
#include <sherd/optim/schedule.h>

#include <cmath>

using namespace sherd;

namespace {

ParameterSpan span_of(Context& context, const std::string& name, std::int64_t n, bool decay) {
  const Tensor value = Tensor::empty(context, {n}, DType::f32),
               grad = Tensor::empty(context, {n}, DType::f32);
  fill_normal(value, 0.0, 1.0, RandomStream(1, "value", name));
  fill_normal(grad, 0.0, 1.0, RandomStream(1, "grad", name));
  return {name, value, grad, decay};
}

}  // namespace

TEST_CASE("optimizers: a shard's update has the bits of the whole one's, wherever it is cut") {
  Context context;
  for (const bool adam : {true, false}) {
    const auto make = [&] { return adam ? make_adamw({}) : make_sgd({0.9, true, 0.01}); };
    for (std::int64_t cut = 0; cut <= 67; ++cut) {
      const ParameterSpan whole = span_of(context, "w", 67, true);
      const ParameterSpan other = span_of(context, "w", 67, true);
      std::vector<ParameterSpan> parts;
      for (const auto& [begin, end] :
           {std::pair{std::int64_t{0}, cut}, std::pair{cut, std::int64_t{67}}}) {
        parts.push_back(
            {"w", other.value.slice(0, begin, end), other.grad.slice(0, begin, end), true});
      }
      const auto one = make(), two = make();
      one->prepare(std::span(&whole, 1));
      two->prepare(parts);
      for (int step = 0; step < 3; ++step) {
        one->step(std::span(&whole, 1), 1e-2, 0.7);
        two->step(parts, 1e-2, 0.7);
      }
      REQUIRE(whole.value.to_vector<float>() == other.value.to_vector<float>());
    }
  }
}

TEST_CASE("gradient norm: exact, whatever the split, and counting what is not finite") {
  Context context;
  const ParameterSpan whole = span_of(context, "g", 1000, true);
  const double norm = gradient_norm(std::span(&whole, 1));
  for (const std::int64_t cut : {1, 17, 500, 999}) {
    std::vector<ParameterSpan> parts;
    parts.push_back({"b", whole.value.slice(0, cut, 1000), whole.grad.slice(0, cut, 1000), true});
    parts.push_back({"a", whole.value.slice(0, 0, cut), whole.grad.slice(0, 0, cut), true});
    CHECK(gradient_norm(parts) == norm);
  }
  long double square = 0.0;
  for (const float g : whole.grad.to_vector<float>()) square += static_cast<long double>(g) * g;
  CHECK(norm == doctest::Approx(static_cast<double>(std::sqrt(square))).epsilon(1e-14));
  whole.grad.data<float>()[3] = NAN;
  CHECK(std::isnan(gradient_norm(std::span(&whole, 1))));
  Context plan({.device = Device::meta});
  const ParameterSpan planned = span_of(plan, "g", 10, true);
  CHECK(gradient_norm(std::span(&planned, 1)) == 1.0);
}

TEST_CASE("clipping as PyTorch does it") {
  CHECK(clip_factor(0.5, 1.0) == 1.0);
  CHECK(clip_factor(4.0, 1.0) == doctest::Approx(1.0 / 4.000001));
  CHECK(clip_factor(4.0, 0.0) == 1.0);
}

TEST_CASE("optimizers: settings that make no sense, and spans that changed") {
  CHECK_THROWS_WITH_AS(make_adamw({1.0, 0.999, 1e-8, 0.0}), doctest::Contains("betas"), Error);
  CHECK_THROWS_WITH_AS(make_adamw({0.9, 0.999, 0.0, 0.0}), doctest::Contains("eps"), Error);
  CHECK_THROWS_WITH_AS(make_sgd({0.0, true, 0.0}), doctest::Contains("Nesterov"), Error);
  Context context;
  const ParameterSpan span = span_of(context, "w", 4, true);
  const auto optimizer = make_adamw({});
  optimizer->prepare(std::span(&span, 1));
  CHECK_THROWS_WITH_AS(optimizer->step({}, 0.1, 1.0), doctest::Contains("prepared for 1 spans"),
                       Error);
  CHECK(context.ledger().live(MemoryCategory::optimizer_state) == 2 * Allocator::kGranule);
}

TEST_CASE("schedule: warm-up, decays, ends") {
  LrSchedule s{1.0, 0.1, 4, 20, Decay::cosine};
  CHECK(s.at(0) == 0.25);
  CHECK(s.at(3) == 1.0);
  CHECK(s.at(4) == 1.0);
  CHECK(s.at(12) == doctest::Approx(0.55));
  CHECK(s.at(20) == doctest::Approx(0.1));
  CHECK(s.at(100) == doctest::Approx(0.1));
  s.decay = Decay::linear;
  CHECK(s.at(12) == doctest::Approx(0.55));
  s.decay = Decay::constant;
  CHECK(s.at(19) == 1.0);
  CHECK_THROWS_WITH_AS((LrSchedule{1.0, 0.0, 21, 20, Decay::cosine}.validate()),
                       doctest::Contains("warm-up of 21 steps"), Error);
  CHECK_THROWS_AS((LrSchedule{1.0, 2.0, 0, 20, Decay::cosine}.validate()), Error);
  CHECK_THROWS_WITH_AS(decay_from_name("cosin"), doctest::Contains("cosine"), Error);
}
