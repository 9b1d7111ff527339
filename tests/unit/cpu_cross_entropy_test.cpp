// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/cpu/cross_entropy.h>

#include "cpu_kernel_test.h"

using namespace sherd;
using namespace sherd::cpu;
using namespace sherd::cpu::test;

#define ALL_TYPES double, float, bf16, f16

namespace {

// Targets written out as probabilities, label smoothing included, and the textbook in S.
template <typename S>
struct Reference {
  std::vector<double> loss, grad;

  template <typename T>
  Reference(std::int64_t classes, const std::vector<T>& logits, const std::vector<double>& target,
            const std::vector<double>& scale)
      : grad(logits.size()) {
    const auto n = static_cast<std::size_t>(classes);
    for (std::size_t r = 0; r < scale.size(); ++r) {
      S highest = S(to_double(logits[r * n])), sum = 0, total = 0, row = 0;
      for (std::size_t c = 0; c < n; ++c)
        highest = std::max(highest, S(to_double(logits[r * n + c])));
      for (std::size_t c = 0; c < n; ++c)
        sum += std::exp(S(to_double(logits[r * n + c])) - highest);
      const S lse = highest + std::log(sum);
      for (std::size_t c = 0; c < n; ++c) {
        const S t = S(target[r * n + c]);
        if (t != 0) row += t * (lse - S(to_double(logits[r * n + c])));
        total += t;
      }
      loss.push_back(static_cast<double>(row));
      for (std::size_t c = 0; c < n; ++c) {
        const S softmax = std::exp(S(to_double(logits[r * n + c])) - lse);
        grad[r * n + c] =
            static_cast<double>((softmax * total - S(target[r * n + c])) * S(scale[r]));
      }
    }
  }
};

template <typename T>
struct Problem {
  using A = acc_t<T>;
  std::int64_t rows, classes;
  std::vector<T> logits;
  std::vector<std::int64_t> labels;
  std::vector<A> soft, row_scale;

  Problem(std::int64_t r, std::int64_t k)
      : rows(r), classes(k), logits(random_values<T>(r * k, 1, 3)) {
    std::mt19937_64 generator(2);
    for (std::int64_t i = 0; i < r; ++i) {
      labels.push_back(static_cast<std::int64_t>(generator() % static_cast<std::uint64_t>(k)));
      row_scale.push_back(A(0.25) * static_cast<A>(i % 4));
    }
    for (std::int64_t i = 0; i < r * k; ++i)
      soft.push_back(static_cast<A>(generator() % 16) / A(64));
  }
  CrossEntropy<T> arguments(bool use_soft, A smoothing) const {
    CrossEntropy<T> p;
    p.rows = rows;
    p.classes = classes;
    p.logits = logits.data();
    p.labels = use_soft ? nullptr : labels.data();
    p.soft_targets = use_soft ? soft.data() : nullptr;
    p.smoothing = smoothing;
    return p;
  }
  std::vector<double> targets(bool use_soft, double smoothing) const {
    std::vector<double> out;
    for (std::int64_t i = 0; i < rows * classes; ++i) {
      const auto at = static_cast<std::size_t>(i);
      const double t =
          use_soft ? static_cast<double>(soft[at])
                   : (labels[static_cast<std::size_t>(i / classes)] == i % classes ? 1.0 : 0.0);
      out.push_back((1 - smoothing) * t + smoothing / static_cast<double>(classes));
    }
    return out;
  }
};

}  // namespace

TEST_CASE_TEMPLATE("cpu cross_entropy: forward and backward against fp64", T, ALL_TYPES) {
  using A = acc_t<T>;
  constexpr std::int64_t kRows = 6;
  for (const std::int64_t classes : kSizes) {
    for (const bool soft : {false, true}) {
      for (const double smoothing : {0.0, 0.125}) {
        CAPTURE(classes);
        CAPTURE(soft);
        CAPTURE(smoothing);
        const Problem<T> problem(kRows, classes);
        std::vector<double> scale;
        for (const A s : problem.row_scale) scale.push_back(0.5 * static_cast<double>(s));
        const auto target = problem.targets(soft, smoothing);
        const Reference<long double> exact(classes, problem.logits, target, scale);
        const Reference<A> plain(classes, problem.logits, target, scale);

        const auto p = problem.arguments(soft, static_cast<A>(smoothing));
        Guarded<A> loss(kRows), lse(kRows);
        cross_entropy_forward<T>(1, p, loss.data(), lse.data());
        check_as_good_as(loss.values(), exact.loss, plain.loss);
        Guarded<T> grad(kRows * classes);
        cross_entropy_backward<T>(1, p, lse.data(), A(0.5), problem.row_scale.data(), grad.data());
        check_as_good_as(grad.values(), exact.grad, converted<T>(plain.grad), 3);

        // In place, with one scale for all rows.
        Guarded<T> in_place(problem.logits);
        cross_entropy_backward<T>(1, p, lse.data(), A(0.5), nullptr, grad.data());
        auto q = p;
        q.logits = in_place.data();
        cross_entropy_backward<T>(1, q, lse.data(), A(0.5), nullptr, in_place.data());
        CHECK(same_bits(in_place.values(), grad.values()));
      }
    }
  }
}

TEST_CASE("cpu cross_entropy: large and infinite logits") {
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<float> logits = {1000, 0, -1000, -inf, 5, -inf, 1, std::nanf(""), 2};
  const std::vector<std::int64_t> labels = {0, 1, 0};
  CrossEntropy<float> p;
  p.rows = 3;
  p.classes = 3;
  p.logits = logits.data();
  p.labels = labels.data();
  std::vector<float> loss(3), lse(3), grad(9);
  cross_entropy_forward<float>(1, p, loss.data(), lse.data());
  CHECK(loss[0] == 0.f);
  CHECK(loss[1] == 0.f);
  CHECK(std::isnan(loss[2]));
  cross_entropy_backward<float>(1, p, lse.data(), 1, nullptr, grad.data());
  for (std::size_t i = 0; i < 6; ++i) CHECK(grad[i] == 0.f);
  CHECK(std::isnan(grad[6]));
}

TEST_CASE_TEMPLATE("cpu cross_entropy: same bits on any number of threads", T, ALL_TYPES) {
  using A = acc_t<T>;
  constexpr std::int64_t kRows = 500, kClasses = 100;
  const Problem<T> problem(kRows, kClasses);
  for (const bool soft : {false, true}) {
    const auto p = problem.arguments(soft, A(0.1));
    std::vector<A> lse(kRows);
    check_threads<A>(
        kRows, [&](int threads, A* out) { cross_entropy_forward<T>(threads, p, out, lse.data()); });
    check_threads<T>(kRows * kClasses, [&](int threads, T* out) {
      cross_entropy_backward<T>(threads, p, lse.data(), 1, problem.row_scale.data(), out);
    });
  }
}

TEST_CASE_TEMPLATE("cpu argmax: lowest index of the maximum; a NaN is never right", T, ALL_TYPES) {
  using A = acc_t<T>;
  for (const std::int64_t classes : kSizes) {
    constexpr std::int64_t kRows = 40;
    auto logits = random_values<T>(kRows * classes, 3);
    std::vector<std::int64_t> expected;
    for (std::int64_t r = 0; r < kRows; ++r) {
      T* const row = logits.data() + r * classes;
      if (r % 2 == 0) row[r * 7 % classes] = row[r * 3 % classes] = T(A(9));
      if (r % 5 == 0) row[r * 11 % classes] = T(std::numeric_limits<A>::quiet_NaN());
      if (r % 7 == 0) row[r * 5 % classes] = T(-std::numeric_limits<A>::infinity());
      std::int64_t best = 0;
      bool nan = false;
      for (std::int64_t c = 0; c < classes; ++c) {
        nan = nan || std::isnan(to_double(row[c]));
        if (to_double(row[c]) > to_double(row[best])) best = c;
      }
      expected.push_back(nan ? -1 : best);
    }
    Guarded<std::int64_t> index(kRows);
    argmax_rows<T>(2, kRows, classes, logits.data(), index.data());
    CHECK(index.values() == expected);

    std::vector<std::int64_t> labels(kRows, 0);
    const auto zeros = std::count(expected.begin(), expected.end(), 0);
    CHECK(count_equal(kRows, index.data(), labels.data()) == zeros);
  }
}

TEST_CASE("cpu cross_entropy: labels out of range are found") {
  const std::vector<std::int64_t> labels = {0, 9, 3, 10, -1};
  CHECK(first_bad_label(3, 10, labels.data()) == -1);
  CHECK(first_bad_label(5, 10, labels.data()) == 3);
  CHECK(first_bad_label(5, 11, labels.data()) == 4);
}
