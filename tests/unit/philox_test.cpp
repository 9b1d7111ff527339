// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>
#include <sherd/runtime/error.h>
#include <sherd/runtime/philox.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <set>
#include <vector>

using sherd::normal_cdf;
using sherd::normal_quantile;
using sherd::philox4x32;
using sherd::RandomStream;

namespace {

using Block = std::array<std::uint32_t, 4>;

// Pearson's correlation of the uniforms of two streams.
double correlation(const RandomStream& a, const RandomStream& b, std::uint64_t shift) {
  constexpr std::uint64_t kCount = 40000;
  double product = 0.0;
  for (std::uint64_t i = 0; i < kCount; ++i) {
    product += (a.uniform(i) - 0.5) * (b.uniform(i + shift) - 0.5);
  }
  return product / kCount * 12.0;
}

}  // namespace

TEST_CASE("philox4x32-10 gives Random123's known answers") {
  CHECK(philox4x32({0, 0, 0, 0}, {0, 0}) == Block{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  CHECK(philox4x32({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}) ==
        Block{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  CHECK(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}) ==
        Block{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST_CASE("a random stream's words are the blocks of its key and step") {
  const RandomStream stream(7, "init", "head.weight", 0x0000000500000003u);
  const std::array<std::uint32_t, 2> key{static_cast<std::uint32_t>(stream.key()),
                                         static_cast<std::uint32_t>(stream.key() >> 32)};
  CHECK(stream.block(0x0000000200000001u) == philox4x32({1, 2, 3, 5}, key));
  for (std::uint64_t i : {0u, 1u, 2u, 3u, 4u, 1001u}) {
    CHECK(stream.word(i) == stream.block(i / 4)[i % 4]);
  }
  for (std::uint64_t i : {0u, 1u, 2u, 777u}) {
    const std::uint64_t pair = std::uint64_t{stream.word(2 * i + 1)} << 32 | stream.word(2 * i);
    CHECK(std::abs(stream.uniform(i) - static_cast<double>(pair) * 0x1p-64) <= 0x1p-53);
    CHECK(std::fmod(stream.uniform(i) * 0x1p53, 2.0) == 1.0);  // so neither 0 nor 1
    CHECK(stream.normal(i) == normal_quantile(stream.uniform(i)));
    CHECK(stream.below(i, std::uint64_t{1} << 63) == pair >> 1);
  }
  // The last index, where 2i + 1 would overflow.
  const std::uint64_t last = std::numeric_limits<std::uint64_t>::max();
  const Block words = stream.block(last / 2);
  CHECK(stream.below(last, std::uint64_t{1} << 32) == words[3]);
}

// Weights of a run must not change with the version of Sherd or the machine. The expected keys are
// XXH3-64 of the bytes in Note [Random key].
TEST_CASE("keys are stable") {
  CHECK(RandomStream(0, "", "").key() == 0x743df94ee4c78a2au);
  CHECK(RandomStream(1234, "init", "blocks.0.attention.qkv.weight").key() == 0x530c0d48e3415dceu);
  CHECK(RandomStream(1, "init", "w", 0).key() == RandomStream(1, "init", "w", 9).key());
}

TEST_CASE("each part of the key separates streams") {
  const std::vector<RandomStream> streams = {
      {1, "init", "weight"},
      {2, "init", "weight"},
      {1, "order", "weight"},
      {1, "init", "bias"},
      {1, "init", "weight", 1},
      {1, "initw", "eight"},
      {1, "", "initweight"},
      {1, "initweight", ""},
      {std::uint64_t{1} << 63, "init", "weight"},
      {1, "weight", "init"},
      {1, "init", {"weight\0", 7}},
  };
  std::set<std::uint32_t> first_words;
  for (const RandomStream& stream : streams) first_words.insert(stream.word(0));
  CHECK(first_words.size() == streams.size());

  for (std::size_t i = 1; i < 6; ++i) {
    CHECK(std::abs(correlation(streams[0], streams[i], 0)) < 0.025);  // 5 standard deviations
    CHECK(std::abs(correlation(streams[0], streams[i], 1)) < 0.025);
  }
  CHECK(std::abs(correlation(streams[0], streams[0], 1)) < 0.025);
  CHECK(std::abs(correlation(streams[0], streams[0], 2)) < 0.025);
  CHECK(correlation(streams[0], streams[0], 0) > 0.95);
}

TEST_CASE("uniform numbers are uniform and inside (0, 1)") {
  const RandomStream stream(3, "test", "uniform");
  constexpr int kCount = 200000;
  constexpr int kCells = 64;
  std::array<int, kCells> histogram{};
  double sum = 0.0;
  double squares = 0.0;
  bool inside = true;
  for (int i = 0; i < kCount; ++i) {
    const double u = stream.uniform(static_cast<std::uint64_t>(i));
    inside = inside && u > 0.0 && u < 1.0;
    sum += u;
    squares += u * u;
    ++histogram[static_cast<std::size_t>(u * kCells)];
  }
  CHECK(inside);
  CHECK(std::abs(sum / kCount - 0.5) < 0.0033);  // 5 standard deviations
  CHECK(std::abs(squares / kCount - 1.0 / 3.0) < 0.0034);
  double chi_squared = 0.0;
  for (const int count : histogram) {
    const double expected = static_cast<double>(kCount) / kCells;
    chi_squared += (count - expected) * (count - expected) / expected;
  }
  CHECK(chi_squared > 63.0 - 5.0 * 11.3);
  CHECK(chi_squared < 63.0 + 5.0 * 11.3);
}

TEST_CASE("normal numbers have the normal distribution's moments and shape") {
  const RandomStream stream(3, "test", "normal");
  constexpr int kCount = 200000;
  std::vector<double> values(kCount);
  std::array<double, 5> moments{};
  for (int i = 0; i < kCount; ++i) {
    double power = 1.0;
    values[static_cast<std::size_t>(i)] = stream.normal(static_cast<std::uint64_t>(i));
    for (double& moment : moments) {
      moment += power / kCount;
      power *= values[static_cast<std::size_t>(i)];
    }
  }
  // Within 5 standard deviations; the variance of x^k is m(2k) - m(k)^2.
  CHECK(std::abs(moments[1]) < 5.0 * std::sqrt(1.0 / kCount));
  CHECK(std::abs(moments[2] - 1.0) < 5.0 * std::sqrt(2.0 / kCount));
  CHECK(std::abs(moments[3]) < 5.0 * std::sqrt(15.0 / kCount));
  CHECK(std::abs(moments[4] - 3.0) < 5.0 * std::sqrt(96.0 / kCount));
  // Kolmogorov-Smirnov distance; above 2 / sqrt(n) with probability 7e-4.
  std::sort(values.begin(), values.end());
  double distance = 0.0;
  for (int i = 0; i < kCount; ++i) {
    const double cdf = normal_cdf(values[static_cast<std::size_t>(i)]);
    distance = std::max({distance, cdf - static_cast<double>(i) / kCount,
                         static_cast<double>(i + 1) / kCount - cdf});
  }
  CHECK(distance < 2.0 / std::sqrt(kCount));
}

TEST_CASE("below is in range, even, and right for bounds of any size") {
  const RandomStream stream(11, "test", "below");
  std::array<int, 7> histogram{};
  for (std::uint64_t i = 0; i < 70000; ++i) {
    const std::uint64_t value = stream.below(i, 7);
    REQUIRE(value < 7);
    ++histogram[value];
  }
  for (const int count : histogram) CHECK(std::abs(count - 10000) < 465);  // 5 standard deviations
  CHECK(stream.below(5, 1) == 0);
  // Against long multiplication with another cut of the words.
  for (const std::uint64_t bound :
       {std::uint64_t{3}, std::uint64_t{0xffffffff}, std::uint64_t{0x123456789abcdef},
        std::numeric_limits<std::uint64_t>::max()}) {
    for (std::uint64_t i = 0; i < 200; ++i) {
      std::uint64_t high = 0;  // of bound * word pair, one bit at a time
      const std::uint64_t pair = std::uint64_t{stream.word(2 * i + 1)} << 32 | stream.word(2 * i);
      std::uint64_t low = 0;
      for (int bit = 63; bit >= 0; --bit) {
        high = high << 1 | low >> 63;
        low <<= 1;
        if (pair >> bit & 1) {
          low += bound;
          if (low < bound) ++high;
        }
      }
      REQUIRE(stream.below(i, bound) == high);
      REQUIRE(high < bound);
    }
  }
  CHECK_THROWS_WITH_AS(stream.below(0, 0), doctest::Contains("bound is 0"), sherd::Error);
}

// Expected values: mpmath with 60 digits.
TEST_CASE("the normal distribution function and its inverse are accurate") {
  struct Case {
    double probability;
    double x;
  };
  for (const Case& c : {
           Case{1e-300, -37.047096299361199237},
           Case{1e-20, -9.2623400897984075796},
           Case{1e-15, -7.9413453261709967713},
           Case{1e-10, -6.3613409024040561991},
           Case{1e-5, -4.2648907939228246102},
           Case{0.001, -3.0902323061678135354},
           Case{0.07, -1.4757910281791706856},
           Case{0.075, -1.4395314709384559349},
           Case{0.25, -0.6744897501960817432},
           Case{0.6, 0.25334710313579974132},
           Case{0.925, 1.4395314709384562291},
           Case{0.93, 1.475791028179171099},
           Case{0.975, 1.9599639845400538556},
           Case{0.999999, 4.7534243088170877657},
       }) {
    CAPTURE(c.probability);
    CHECK(std::abs(normal_quantile(c.probability) - c.x) <= 4e-15 * std::abs(c.x));
    CHECK(std::abs(normal_cdf(normal_quantile(c.probability)) / c.probability - 1.0) < 1e-12);
  }
  CHECK(normal_quantile(0.5) == 0.0);
  CHECK(normal_quantile(0.0) == -std::numeric_limits<double>::infinity());
  CHECK(normal_quantile(1.0) == std::numeric_limits<double>::infinity());
  for (const double wrong : {-0.1, 1.1, std::numeric_limits<double>::quiet_NaN()}) {
    CHECK_THROWS_WITH_AS(normal_quantile(wrong), doctest::Contains("expected one in [0, 1]"),
                         sherd::Error);
  }
  for (const Case& c : {
           Case{5.7255712225245768227e-300, -37.0},
           Case{6.2209605742717841235e-16, -8.0},
           Case{0.006209665325776135167, -2.5},
           Case{0.38208857781104736693, -0.3},
           Case{0.75803634777692697138, 0.7},
           Case{0.99865010196836990547, 3.0},
       }) {
    CAPTURE(c.x);
    // The rounding of x / sqrt(2) alone costs x^2 units in the last place.
    CHECK(std::abs(normal_cdf(c.x) / c.probability - 1.0) < 3e-16 * (2.0 + c.x * c.x));
  }
}
