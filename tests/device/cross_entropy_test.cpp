// SPDX-License-Identifier: Apache-2.0
// Cross-entropy on a GPU: losses and gradients against fp64 and the CPU kernel (whose exponential
// and order of sums are others), predictions exactly.
#include <sherd/kernels/cpu/cross_entropy.h>
#include <sherd/kernels/cross_entropy.h>
#include <sherd/kernels/cuda/cross_entropy.h>

#include "row_support.h"

#include <limits>
#include <random>

using namespace sherd;
using namespace sherd::test;
using arguments::acc_t;

namespace {

constexpr std::int64_t kClasses[] = {1, 2, 10, 31, 32, 33, 257, 1000, 2048, 2049, 3000};

template <typename T>
struct Problem {
  using A = acc_t<T>;
  std::int64_t rows, classes;
  std::vector<T> logits;
  std::vector<std::int64_t> labels;
  std::vector<A> soft, row_scale;

  Problem(std::int64_t r, std::int64_t k)
      : rows(r), classes(k), logits(random_values<T>(static_cast<std::size_t>(r * k), "x", 3)) {
    std::mt19937_64 generator(2);
    for (std::int64_t i = 0; i < r; ++i) {
      labels.push_back(static_cast<std::int64_t>(generator() % static_cast<std::uint64_t>(k)));
      row_scale.push_back(A(0.25) * static_cast<A>(i % 4));
    }
    for (std::int64_t i = 0; i < r * k; ++i)
      soft.push_back(static_cast<A>(generator() % 16) / A(64));
  }

  // Losses, then gradients times 0.5 and the row's scale, in long double.
  std::vector<double> exact_loss, exact_grad;
  void compute(bool use_soft, double smoothing) {
    using S = long double;
    exact_loss.clear(), exact_grad.clear();
    const auto n = static_cast<std::size_t>(classes);
    for (std::size_t r = 0; r < labels.size(); ++r) {
      const auto x = [&](std::size_t c) { return S(to_double(logits[r * n + c])); };
      const auto target = [&](std::size_t c) {
        const S t = use_soft ? S(soft[r * n + c]) : S(labels[r] == static_cast<std::int64_t>(c));
        return (1 - S(smoothing)) * t + S(smoothing) / S(n);
      };
      S highest = x(0), sum = 0, loss = 0, total = 0;
      for (std::size_t c = 0; c < n; ++c) highest = std::max(highest, x(c));
      for (std::size_t c = 0; c < n; ++c) sum += std::exp(x(c) - highest);
      const S lse = highest + std::log(sum);
      for (std::size_t c = 0; c < n; ++c) {
        loss += target(c) * (lse - x(c));
        total += target(c);
      }
      exact_loss.push_back(static_cast<double>(loss));
      for (std::size_t c = 0; c < n; ++c) {
        exact_grad.push_back(static_cast<double>((std::exp(x(c) - lse) * total - target(c)) *
                                                 S(0.5) * S(row_scale[r])));
      }
    }
  }
  arguments::CrossEntropy<T> arguments(bool use_soft, double smoothing, const T* x,
                                       const std::int64_t* label, const A* probability) const {
    arguments::CrossEntropy<T> p;
    p.rows = rows;
    p.classes = classes;
    p.logits = x;
    p.labels = use_soft ? nullptr : label;
    p.soft_targets = use_soft ? probability : nullptr;
    p.smoothing = static_cast<A>(smoothing);
    return p;
  }
};

}  // namespace

TEST_CASE_TEMPLATE("device cross_entropy: forward and backward against fp64", T, ALL_TYPES) {
  using A = acc_t<T>;
  for (const std::int64_t classes : kClasses) {
    for (const int form : {0, 1, 2, 3}) {
      const bool soft = form % 2 != 0;
      const double smoothing = form < 2 ? 0.0 : 0.125;
      CAPTURE(classes);
      CAPTURE(soft);
      CAPTURE(smoothing);
      Problem<T> problem(classes < 100 ? 19 : 3, classes);
      problem.compute(soft, smoothing);
      const auto rows = static_cast<std::size_t>(problem.rows);

      std::vector<A> plain_loss(rows), plain_lse(rows);
      std::vector<T> plain_grad(problem.logits.size());
      const auto host = problem.arguments(soft, smoothing, problem.logits.data(),
                                          problem.labels.data(), problem.soft.data());
      cpu::cross_entropy_forward<T>(1, host, plain_loss.data(), plain_lse.data());
      cpu::cross_entropy_backward<T>(1, host, plain_lse.data(), A(0.5), problem.row_scale.data(),
                                     plain_grad.data());

      const DeviceArray<T> logits(problem.logits), grad(problem.logits.size());
      const DeviceArray<std::int64_t> labels(problem.labels);
      const DeviceArray<A> probabilities(problem.soft), row_scale(problem.row_scale), loss(rows),
          lse(rows), grad_loss(std::vector<A>{A(2)});
      const auto p =
          problem.arguments(soft, smoothing, logits.data(), labels.data(), probabilities.data());
      cuda::cross_entropy_forward<T>(device_stream(), p, loss.data(), lse.data());
      cuda::cross_entropy_backward<T>(device_stream(), p, lse.data(), grad_loss.data(), A(0.25),
                                      row_scale.data(), grad.data());
      check_as_good_as(loss.values(), problem.exact_loss, plain_loss);
      check_as_good_as(grad.values(), problem.exact_grad, plain_grad, 3);

      // In place, with one scale for all rows; in any order.
      cuda::cross_entropy_backward<T>(device_stream(), p, lse.data(), grad_loss.data(), A(0.25),
                                      nullptr, grad.data());
      const std::vector<A> losses = loss.values();
      const std::vector<T> grads = grad.values();
      in_all_orders([&] {
        const DeviceArray<T> place(problem.logits);
        auto q = p;
        q.logits = place.data();
        cuda::cross_entropy_forward<T>(device_stream(), q, loss.data(), lse.data());
        cuda::cross_entropy_backward<T>(device_stream(), q, lse.data(), grad_loss.data(), A(0.25),
                                        nullptr, place.data());
        CHECK(same_bits(loss.values(), losses));
        CHECK(same_bits(place.values(), grads));
      });
    }
  }
}

TEST_CASE_TEMPLATE("device cross_entropy: predictions are the processor's", T, ALL_TYPES) {
  for (const std::int64_t classes : kClasses) {
    CAPTURE(classes);
    constexpr std::int64_t kRows = 21;
    auto logits = random_values<T>(static_cast<std::size_t>(kRows * classes), "x", 0.01);
    // Ties, of which the first counts; NaNs anywhere; rows of infinities.
    for (std::int64_t r = 0; r < kRows; ++r) {
      const auto at = [&](std::int64_t c) -> T& {
        return logits[static_cast<std::size_t>(r * classes + c % classes)];
      };
      if (r % 7 == 1) at(3 * r) = at(5 * r + 1) = T(2.f);
      if (r % 7 == 2) at(11 * r) = T(std::numeric_limits<float>::quiet_NaN());
      if (r % 7 == 3)
        for (std::int64_t c = 0; c < classes; ++c)
          at(c) = T(-std::numeric_limits<float>::infinity());
      if (r % 7 == 4)
        for (std::int64_t c = 0; c < classes; ++c) at(c) = T(std::nanf(""));
      if (r % 7 == 5) at(classes - 1) = T(std::numeric_limits<float>::infinity());
    }
    std::vector<std::int64_t> expected(kRows), labels(kRows);
    cpu::argmax_rows<T>(1, kRows, classes, logits.data(), expected.data());
    for (std::size_t r = 0; r < kRows; ++r)
      labels[r] = r % 3 == 0 && expected[r] >= 0 ? expected[r] : std::int64_t(r) % classes;
    const DeviceArray<T> x(logits);
    const DeviceArray<std::int64_t> label(labels), index(kRows), count(1);
    in_all_orders([&] {
      cuda::argmax_rows<T>(device_stream(), kRows, classes, x.data(), index.data());
      cuda::count_equal(device_stream(), kRows, index.data(), label.data(), count.data());
      CHECK(index.values() == expected);
      CHECK(count.values()[0] == cpu::count_equal(kRows, expected.data(), labels.data()));
    });
  }
}

TEST_CASE("device cross_entropy: the first bad label") {
  for (const std::size_t rows : {0, 1, 31, 256, 257, 1000}) {
    std::vector<std::int64_t> labels(rows, 4);
    const auto found = [&] {
      const DeviceArray<std::int64_t> from(labels), row(1);
      cuda::first_bad_label(device_stream(), static_cast<std::int64_t>(rows), 5, from.data(),
                            row.data());
      return row.values()[0];
    };
    CHECK(found() == -1);
    for (auto at = static_cast<std::int64_t>(rows) - 1; at >= 0; at -= 1 + at / 3) {
      labels[static_cast<std::size_t>(at)] = at % 2 == 0 ? 5 : -1;
      in_all_orders([&] { CHECK(found() == at); });
    }
  }
}

TEST_CASE("device cross_entropy: tensors, as on the processor and as planned") {
  const auto logits = random_values<float>(9 * 1000, "logits", 2);
  std::vector<std::int64_t> labels;
  for (std::int64_t i = 0; i < 9; ++i) labels.push_back(i * 111);
  std::vector<float> soft(logits.size(), 0.001f);
  const auto all_of = [&](Context& context) {
    const Tensor x = Tensor::from_host<float>(context, {9, 1000}, logits);
    const Tensor l = Tensor::from_host<std::int64_t>(context, {9}, labels);
    const Tensor s = Tensor::from_host<float>(context, {9, 1000}, soft);
    const Tensor g = Tensor::from_host<float>(context, {}, std::vector<float>{0.5f});
    const CrossEntropyTarget hard{l, {}, 0.1}, probable{{}, s, 0.0};
    const CrossEntropyOutput a = cross_entropy_forward(x, hard);
    const CrossEntropyOutput b = cross_entropy_forward(x, probable);
    return std::vector<Tensor>{a.row_loss, b.row_loss, a.lse,
                               cross_entropy_backward(g, x, hard, a.lse, 0.125),
                               cross_entropy_backward(g, x, probable, b.lse, 0.125)};
  };
  Context host;
  const auto expected = all_of(host), result = all_of(device_context());
  for (std::size_t i = 0; i < result.size(); ++i) {
    CAPTURE(i);
    CHECK(result[i].device() == Device::cuda);
    CHECK(error_of(as_doubles(result[i].to_vector<float>()),
                   as_doubles(expected[i].to_vector<float>())) < 1e-6);
  }
  check_planned_peak(all_of);

  const auto correct = [&](Context& context) {
    auto right = labels;
    for (std::size_t i = 0; i < 4; ++i) {
      const auto row = logits.begin() + static_cast<std::ptrdiff_t>(i) * 1000;
      right[i] = std::max_element(row, row + 1000) - row;
    }
    return count_correct(Tensor::from_host<float>(context, {9, 1000}, logits),
                         Tensor::from_host<std::int64_t>(context, {9}, right));
  };
  CHECK(correct(host) >= 4);
  CHECK(correct(device_context()) == correct(host));
}

TEST_CASE("device cross_entropy: a bad label is NaN, and named by check_labels") {
  Context& context = device_context();
  const auto logits = random_values<float>(4 * 6, "logits");
  const Tensor x = Tensor::from_host<float>(context, {4, 6}, logits);
  const Tensor g = Tensor::from_host<float>(context, {}, std::vector<float>{1.f});
  for (const std::int64_t bad : {std::int64_t{6}, std::int64_t{-1}, std::int64_t{1} << 40}) {
    const Tensor labels =
        Tensor::from_host<std::int64_t>(context, {4}, std::vector<std::int64_t>{0, 5, bad, 9});
    for (const double smoothing : {0.0, 0.1}) {
      const CrossEntropyTarget target{labels, {}, smoothing};
      const CrossEntropyOutput y = cross_entropy_forward(x, target);
      const auto loss = y.row_loss.to_vector<float>();
      const auto grad = cross_entropy_backward(g, x, target, y.lse, 1.0).to_vector<float>();
      for (std::size_t i = 0; i < grad.size(); ++i) CHECK(std::isnan(grad[i]) == (i / 6 >= 2));
      for (std::size_t i = 0; i < 4; ++i) CHECK(std::isnan(loss[i]) == (i >= 2));
    }
    const std::string message = "label " + std::to_string(bad) + " of row 2 is outside [0, 6)";
    CHECK_THROWS_WITH_AS(check_labels(labels, 6), doctest::Contains(message.c_str()), Error);
    CHECK_THROWS_WITH_AS(count_correct(x, labels), doctest::Contains(message.c_str()), Error);
  }
  CHECK_NOTHROW(check_labels(
      Tensor::from_host<std::int64_t>(context, {2}, std::vector<std::int64_t>{0, 5}), 6));
}
