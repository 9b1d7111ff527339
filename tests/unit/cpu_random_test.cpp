// SPDX-License-Identifier: Apache-2.0
// Dropout and random initialisation, and the vectorised Philox below them.
#include <sherd/kernels/cpu/dropout.h>
#include <sherd/kernels/cpu/philox_vector.h>
#include <sherd/kernels/cpu/random_fill.h>
#include <sherd/runtime/philox.h>

#include "cpu_kernel_test.h"

using namespace sherd;
using namespace sherd::cpu;
using namespace sherd::cpu::test;

#define ALL_TYPES double, float, bf16, f16

TEST_CASE("cpu philox: sixteen blocks at a time are RandomStream's words") {
  std::vector<std::uint32_t> room(kRandomRoom);
  for (const std::uint64_t step : {std::uint64_t{0}, std::uint64_t{7}, ~std::uint64_t{0}}) {
    const RandomStream stream(11, "test", "philox", step);
    // The last starting points carry from the counter's low word into its high one.
    for (const std::uint64_t first :
         {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{2}, std::uint64_t{3},
          std::uint64_t{1001}, (std::uint64_t{1} << 34) - 37, (std::uint64_t{1} << 34) - 4}) {
      for (const int count : {1, 5, 64, 65, kRandomChunk}) {
        const std::uint32_t* const words = random_words(stream, first, count, room.data());
        bool equal = true;
        for (int i = 0; i < count; ++i) {
          equal = equal && words[i] == stream.word(first + static_cast<std::uint64_t>(i));
        }
        CHECK(equal);
      }
    }
  }
}

TEST_CASE_TEMPLATE("cpu dropout: against one word at a time", T, ALL_TYPES) {
  using A = acc_t<T>;
  const RandomStream stream(3, "dropout", "layer", 5);
  for (const double probability : {0.1, 0.9, 0.5, 1.0, 0.0, 1e-12}) {
    for (const std::int64_t n : kSizes) {
      const auto in = random_values<T>(n, 1);
      const std::uint64_t first = 12345;
      std::vector<T> expected;
      for (std::size_t i = 0; i < in.size(); ++i) {
        const double threshold = std::round(probability * 0x1p32);
        const bool kept = static_cast<double>(stream.word(first + i)) < threshold;
        const A factor = kept ? static_cast<A>(1 / probability) : A(0);
        expected.push_back(kept ? T(static_cast<A>(in[i]) * factor) : T(A(0)));
      }
      Guarded<T> out(n);
      dropout<T>(1, n, in.data(), out.data(), probability, stream, first);
      CHECK(same_bits(out.values(), expected));
    }
  }
}

TEST_CASE_TEMPLATE("cpu dropout: same bits wherever cut, on any number of threads", T, ALL_TYPES) {
  constexpr std::int64_t kMany = 50021;
  const auto in = random_values<T>(kMany, 2);
  const RandomStream stream(3, "dropout", "layer");
  check_every_cut<T>([&](std::int64_t i, std::int64_t n, T* out) {
    dropout<T>(1, n, in.data() + i, out, 0.7, stream, 99 + static_cast<std::uint64_t>(i));
  });
  check_threads<T>(kMany, [&](int threads, T* out) {
    dropout<T>(threads, kMany, in.data(), out, 0.7, stream, 99);
  });
}

TEST_CASE("cpu dropout: the share kept, and no leak from dropped elements") {
  constexpr std::int64_t n = 1 << 20;
  const std::vector<float> ones(n, 1.f);
  std::vector<float> out(n);
  dropout<float>(2, n, ones.data(), out.data(), 0.8, RandomStream(1, "dropout", "x"), 0);
  double kept = 0;
  for (const float v : out) kept += v != 0 ? 1 : 0;
  CHECK(std::abs(kept / n - 0.8) < 5 * std::sqrt(0.16 / n));  // five standard deviations

  const std::vector<float> bad(n, std::numeric_limits<float>::infinity());
  dropout<float>(2, n, bad.data(), out.data(), 0.8, RandomStream(1, "dropout", "x"), 0);
  CHECK(std::none_of(out.begin(), out.end(), [](float v) { return std::isnan(v); }));
}

TEST_CASE_TEMPLATE("cpu random fill: against RandomStream", T, ALL_TYPES) {
  const RandomStream stream(5, "init", "weight");
  const std::uint64_t first = 77;
  for (const std::int64_t n : kSizes) {
    Guarded<T> uniform(n), normal(n), truncated(n);
    fill_uniform<T>(1, n, uniform.data(), stream, first, -2, 3);
    fill_normal<T>(1, n, normal.data(), stream, first, 0.5, 2);
    fill_truncated_normal<T>(1, n, truncated.data(), stream, first, {0.1, 0.5, -0.4, 0.7});
    const double low = normal_cdf(-1.0), high = normal_cdf(1.2);
    const auto u = uniform.values(), z = normal.values(), t = truncated.values();
    for (std::size_t i = 0; i < u.size(); ++i) {
      // One rounding to T, and a few of fp64.
      const auto near = [](T got, double exact) {
        return std::abs(to_double(got) - exact) <=
               roundoff<T>() * std::abs(exact) + 4e-15 + (std::is_same_v<T, f16> ? 0x1p-25 : 0);
      };
      CHECK(near(u[i], -2 + 5 * stream.uniform(first + i)));
      CHECK(near(z[i], 0.5 + 2 * stream.normal(first + i)));
      const double p = low + (high - low) * stream.uniform(first + i);
      CHECK(near(t[i], 0.1 + 0.5 * normal_quantile(p)));
    }
  }
}

TEST_CASE("cpu random fill: the quantile in its tails") {
  // Narrow bounds far out put every number into one branch of the quantile, the scalar one
  // included.
  const RandomStream stream(5, "init", "tail");
  for (const auto& bounds : {std::pair{-9.0, -6.7},
                             {-6.7, -6.4},
                             {-6.6, -1.45},
                             {-1.45, 1.45},
                             {1.4, 1.5},
                             {2.0, 6.0},
                             {6.0, 7.0}}) {
    const double low = bounds.first, high = bounds.second;
    std::vector<double> out(2000);
    fill_truncated_normal<double>(1, 2000, out.data(), stream, 0, {0, 1, low, high});
    const double from = normal_cdf(low), to = normal_cdf(high);
    double worst = 0, least = 1e9, most = -1e9;
    for (std::size_t i = 0; i < out.size(); ++i) {
      const double p = from + (to - from) * stream.uniform(i);
      const double exact = normal_quantile(p);
      // What one rounding of p makes of the quantile: divide by the density.
      const double sensitivity = 0x1p-52 * p / (0.39894 * std::exp(-0.5 * exact * exact));
      worst = std::max(worst, (std::abs(out[i] - exact) - sensitivity) / std::abs(exact));
      least = std::min(least, out[i]);
      most = std::max(most, out[i]);
    }
    CAPTURE(low);
    CHECK(worst < 4e-15);
    CHECK(least >= low);
    CHECK(most <= high);
  }
}

TEST_CASE("cpu random fill: moments, and one number for every type") {
  constexpr std::int64_t n = 1 << 20;
  const RandomStream stream(9, "init", "moments");
  std::vector<double> exact(n);
  fill_normal<double>(2, n, exact.data(), stream, 0, 1, 3);
  double mean = 0, square = 0;
  for (const double v : exact) mean += v / n;
  for (const double v : exact) square += (v - mean) * (v - mean) / n;
  CHECK(std::abs(mean - 1) < 5 * 3 / std::sqrt(double(n)));
  CHECK(std::abs(square / 9 - 1) < 5 * std::sqrt(2.0 / n));

  std::vector<float> single(n);
  fill_normal<float>(2, n, single.data(), stream, 0, 1, 3);
  CHECK(same_bits(single, converted<float>(exact)));

  std::vector<float> truncated(n);
  fill_truncated_normal<float>(2, n, truncated.data(), stream, 0, {0, 0.02, -2, 2});
  CHECK(*std::max_element(truncated.begin(), truncated.end()) < 0.12f);
}

TEST_CASE_TEMPLATE("cpu random fill: same bits wherever cut, on any number of threads", T,
                   ALL_TYPES) {
  constexpr std::int64_t kMany = 20011;
  const RandomStream stream(6, "init", "cut");
  const auto both = [](const auto& run) {
    check_every_cut<T>([&](std::int64_t i, std::int64_t n, T* out) {
      run(1, n, out, 1001 + static_cast<std::uint64_t>(i));
    });
    check_threads<T>(kMany, [&](int threads, T* out) { run(threads, kMany, out, 1001); });
  };
  both([&](int t, std::int64_t n, T* out, std::uint64_t first) {
    fill_uniform<T>(t, n, out, stream, first, -1, 1);
  });
  both([&](int t, std::int64_t n, T* out, std::uint64_t first) {
    fill_normal<T>(t, n, out, stream, first, 0, 0.02);
  });
  both([&](int t, std::int64_t n, T* out, std::uint64_t first) {
    fill_truncated_normal<T>(t, n, out, stream, first, {0, 1, -1, 1.5});
  });
}
