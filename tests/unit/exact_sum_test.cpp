// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>
#include <sherd/runtime/error.h>
#include <sherd/runtime/exact_sum.h>
#include <sherd/runtime/philox.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

using sherd::bf16;
using sherd::ExactSum;
using sherd::f16;
using sherd::RandomStream;

namespace {

constexpr double kMax = std::numeric_limits<double>::max();
constexpr double kTiny = std::numeric_limits<double>::denorm_min();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A correctly rounded sum by another algorithm: Shewchuk's growing expansions with Hettinger's
// final rounding (Python's math.fsum). Not for partial sums that overflow.
double reference_sum(const std::vector<double>& values) {
  std::vector<double> partials;
  for (double x : values) {
    std::size_t kept = 0;
    for (double y : partials) {
      if (std::abs(x) < std::abs(y)) std::swap(x, y);
      const double high = x + y;
      const double low = y - (high - x);
      if (low != 0.0) partials[kept++] = low;
      x = high;
    }
    partials.resize(kept);
    partials.push_back(x);
  }
  if (partials.empty()) return 0.0;
  double high = partials.back();
  double low = 0.0;
  std::size_t i = partials.size() - 1;
  while (i > 0) {
    const double x = high;
    const double y = partials[--i];
    high = x + y;
    low = y - (high - x);
    if (low != 0.0) break;
  }
  if (i > 0 && ((low < 0.0 && partials[i - 1] < 0.0) || (low > 0.0 && partials[i - 1] > 0.0))) {
    const double twice = low * 2.0;
    const double rounded = high + twice;
    if (twice == rounded - high) high = rounded;
  }
  return high;
}

double exact(const std::vector<double>& values) {
  ExactSum sum;
  for (const double value : values) sum.add(value);
  return sum.value();
}

template <typename T>
ExactSum squares(const T* values, std::size_t n) {
  ExactSum sum;
  sum.add_squares(values, static_cast<std::int64_t>(n));
  return sum;
}
template <typename T>
ExactSum squares(const std::vector<T>& values) {
  return squares(values.data(), values.size());
}

// What add_squares must equal, one value at a time.
template <typename T>
ExactSum plain_squares(const std::vector<T>& values) {
  ExactSum sum;
  for (const T value : values) {
    double wide = 0.0;
    if constexpr (sizeof(T) == 2) {
      wide = static_cast<float>(value);
    } else {
      wide = value;
    }
    sum.add(wide * wide);
  }
  return sum;
}

void check_same(const ExactSum& a, const ExactSum& b) {
  REQUIRE(a.words() == b.words());
  REQUIRE(std::bit_cast<std::uint64_t>(a.value()) == std::bit_cast<std::uint64_t>(b.value()));
}

// Normal numbers times 2^-e, e uniform in [0, range).
std::vector<float> wide_floats(const char* name, std::size_t n, std::uint64_t range) {
  const RandomStream random(5, "test", name);
  std::vector<float> values(n);
  for (std::size_t i = 0; i < n; ++i) {
    const int exponent = -static_cast<int>(random.below(2 * i, range));
    values[i] = static_cast<float>(std::ldexp(random.normal(2 * i + 1), exponent));
  }
  return values;
}

// Finite doubles of every sign and exponent in [low, high).
std::vector<double> wide_doubles(const char* name, std::size_t n, int low, int high) {
  const RandomStream random(6, "test", name);
  std::vector<double> values(n);
  for (std::size_t i = 0; i < n; ++i) {
    const auto exponent =
        low + static_cast<int>(random.below(2 * i, static_cast<std::uint64_t>(high - low)));
    values[i] = std::ldexp(random.uniform(2 * i + 1) - 0.5, exponent + 1);
  }
  return values;
}

void shuffle(std::vector<double>& values, std::uint64_t seed) {
  const RandomStream random(seed, "test", "shuffle");
  for (std::size_t i = values.size(); i > 1; --i)
    std::swap(values[i - 1], values[random.below(i, i)]);
}

}  // namespace

TEST_CASE("an exact sum rounds once, to nearest-even") {
  CHECK(exact({}) == 0.0);
  CHECK_FALSE(std::signbit(exact({-0.0, -0.0})));
  CHECK(exact({1e100, 1.0, -1e100}) == 1.0);
  CHECK(exact({1.0, 0x1p-53}) == 1.0);                     // a tie, to even
  CHECK(exact({1.0, 0x1p-53, kTiny}) == 1.0 + 0x1p-52);    // just above it
  CHECK(exact({1.0, 0x1p-52, 0x1p-53}) == 1.0 + 0x1p-51);  // a tie, to even, upwards
  CHECK(exact({1.0, 0x1p-52, 0x1p-53, -kTiny}) == 1.0 + 0x1p-52);
  CHECK(exact({-1.0, -0x1p-53, -kTiny}) == -1.0 - 0x1p-52);
  CHECK(exact({-1.0, -0x1p-53, kTiny}) == -1.0);
  CHECK(exact({2.0, -0x1p-53}) == 2.0);  // carries into the next binade
  CHECK(exact({2.0, -0x1p-53, -kTiny}) == 2.0 - 0x1p-52);
}

TEST_CASE("a single double comes back as it was") {
  const RandomStream random(9, "test", "bits");
  for (std::uint64_t i = 0; i < 20000; ++i) {
    const auto bits = std::uint64_t{random.word(2 * i)} << 32 | random.word(2 * i + 1);
    const auto value = std::bit_cast<double>(bits);
    if (std::isfinite(value)) REQUIRE(exact({value}) == value);
  }
  for (int exponent = -1074; exponent <= 1023; ++exponent) {
    const double power = std::ldexp(1.0, exponent);
    REQUIRE(exact({power}) == power);
    REQUIRE(exact({-power}) == -power);
    REQUIRE(exact({power, power, -power}) == power);
  }
}

TEST_CASE("subnormal and huge sums") {
  const double smallest_normal = std::numeric_limits<double>::min();
  CHECK(exact({kTiny, kTiny, kTiny}) == 3.0 * kTiny);
  CHECK(exact({smallest_normal, -kTiny}) == smallest_normal - kTiny);
  CHECK(exact({smallest_normal - kTiny, kTiny}) == smallest_normal);
  CHECK(exact({kMax, -kMax, kTiny}) == kTiny);
  CHECK(exact({kMax, kMax}) == kInfinity);
  CHECK(exact({-kMax, -kMax}) == -kInfinity);
  CHECK(exact({kMax, kMax, -kMax}) == kMax);                // no overflow on the way
  CHECK(exact({kMax, std::ldexp(1.0, 970)}) == kInfinity);  // the tie above the largest
  CHECK(exact({kMax, std::ldexp(1.0, 970), -kTiny}) == kMax);
  CHECK(exact({-kMax, std::ldexp(-1.0, 970), kTiny}) == -kMax);
}

TEST_CASE("signed sums agree with an independent correctly rounded sum, in any order") {
  struct Range {
    const char* name;
    int low;
    int high;
  };
  for (const Range& range : {Range{"narrow", -3, 3}, Range{"wide", -60, 60},
                             Range{"widest", -1074, 1000}, Range{"subnormal", -1074, -1010}}) {
    CAPTURE(range.name);
    std::vector<double> values = wide_doubles(range.name, 3000, range.low, range.high);
    // Nearly everything cancels: what is left is some 2^-60 of the terms.
    const std::size_t half = values.size();
    for (std::size_t i = 0; i < half; ++i) values.push_back(-values[i] * (1.0 + 0x1p-52));
    const double expected = reference_sum(values);
    CHECK(exact(values) == expected);
    ExactSum first;
    for (const double value : values) first.add(value);
    for (std::uint64_t order = 0; order < 5; ++order) {
      shuffle(values, order);
      REQUIRE(reference_sum(values) == expected);
      ExactSum again;
      for (const double value : values) again.add(value);
      check_same(again, first);
    }
    for (double& value : values) value = -value;
    CHECK(exact(values) == -expected);
  }
}

TEST_CASE("squares of floats are summed exactly") {
  // Integers, where int64 is the reference.
  std::vector<float> integers(5000);
  std::iota(integers.begin(), integers.end(), -2000.0f);
  std::int64_t expected = 0;
  for (const float value : integers) {
    expected += static_cast<std::int64_t>(value) * static_cast<std::int64_t>(value);
  }
  CHECK(squares(integers).value() == static_cast<double>(expected));

  for (const std::uint64_t range : {1u, 20u, 30u, 60u, 149u}) {
    CAPTURE(range);
    const std::vector<float> values = wide_floats("squares", 4099, range);
    check_same(squares(values), plain_squares(values));
    std::vector<double> terms;
    for (const float value : values) terms.push_back(double{value} * double{value});
    REQUIRE(squares(values).value() == reference_sum(terms));
  }
}

TEST_CASE("squares at the ends of the ranges") {
  constexpr float kFloatMax = std::numeric_limits<float>::max();
  constexpr float kFloatTiny = std::numeric_limits<float>::denorm_min();
  const auto holds = [](const auto& values) { check_same(squares(values), plain_squares(values)); };
  holds(std::vector<float>(777, kFloatMax));
  holds(std::vector<float>(777, kFloatTiny));
  holds(std::vector<float>(777, -0.0f));
  std::vector<float> mixed(777, kFloatTiny);
  mixed[3] = kFloatMax;
  mixed[500] = 1.0f;
  holds(mixed);
  CHECK(squares(std::vector<float>(1024, kFloatMax)).value() ==
        1024.0 * double{kFloatMax} * double{kFloatMax});

  holds(std::vector<double>(777, 1.3407807929942596e154));  // squares just below the largest
  holds(std::vector<double>(777, 0x1p-537));                // squares to the smallest subnormal
  holds(std::vector<double>(777, 1.7e-162));
  holds(std::vector<double>(777, 1e-170));  // squares to zero
  // Every exponent up to where a square overflows; a block of 512 ones has the limits of exactness.
  for (int exponent = -540; exponent < 512; ++exponent) {
    std::vector<double> values(515, std::ldexp(2.0 - 0x1p-52, exponent - 1));
    values[7] = std::ldexp(1.0 + 0x1p-52, exponent - 30);
    values[8] = std::ldexp(1.0 + 0x1p-52, exponent - 80);
    holds(values);
  }
  // Squares that all leave nearly half a unit of the first slice, upwards, to the second one.
  const RandomStream random(8, "test", "halves");
  for (int left_bits = 6; left_bits <= 10; ++left_bits) {
    const std::uint64_t wanted = (std::uint64_t{1} << (left_bits - 1)) - 1;
    double value = 0.0;
    for (std::uint64_t i = 0; value == 0.0; ++i) {
      const double candidate = 1.3 + random.uniform(i) / 10.0;
      const auto bits = std::bit_cast<std::uint64_t>(candidate * candidate);
      if ((bits & (2 * wanted + 1)) == wanted) value = candidate;
    }
    holds(std::vector<double>(512, value));
  }
  for (int exponent = -149; exponent < 128; ++exponent) {
    std::vector<float> values(515, std::ldexp(2.0f - 0x1p-23f, exponent - 1));
    values[7] = std::ldexp(1.0f + 0x1p-23f, exponent - 25);
    values[8] = std::ldexp(1.0f + 0x1p-23f, exponent - 50);
    holds(values);
  }
}

TEST_CASE("squares of f64, f16 and bf16") {
  for (const int range : {2, 60, 1000}) {
    const std::vector<double> values = wide_doubles("f64", 3001, -range / 2, range / 2);
    check_same(squares(values), plain_squares(values));
    std::vector<double> terms;
    for (const double value : values) terms.push_back(value * value);
    REQUIRE(squares(values).value() == reference_sum(terms));
  }
  // Every finite number of the 16-bit types, subnormals included.
  std::vector<f16> halves;
  std::vector<bf16> brains;
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    f16 half;
    half.bits = static_cast<std::uint16_t>(bits);
    if (std::isfinite(static_cast<float>(half))) halves.push_back(half);
    bf16 brain;
    brain.bits = static_cast<std::uint16_t>(bits);
    if (std::isfinite(static_cast<float>(brain))) brains.push_back(brain);
  }
  CHECK(halves.size() == 0x10000 - 2 * 0x400);
  CHECK(brains.size() == 0x10000 - 2 * 0x80);
  check_same(squares(halves), plain_squares(halves));
  check_same(squares(brains), plain_squares(brains));
}

TEST_CASE("a sum of squares does not depend on where it is split or how it is merged") {
  for (const std::uint64_t range : {1u, 100u}) {
    const std::vector<float> values = wide_floats("split", 1100, range);
    const std::vector<double> doubles(values.begin(), values.end());
    const ExactSum whole = squares(values);
    for (std::size_t cut = 0; cut <= values.size(); ++cut) {
      ExactSum left = squares(values.data(), cut);
      const ExactSum right = squares(values.data() + cut, values.size() - cut);
      ExactSum::Words sum = left.words();
      const ExactSum::Words other = right.words();
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += other[i];
      check_same(ExactSum::from_words(sum), whole);
      left.merge(right);
      check_same(left, whole);
    }
    ExactSum backwards;
    for (std::size_t end = values.size(); end > 0;) {
      const std::size_t begin = end - std::min<std::size_t>(end, 37);
      backwards.add_squares(doubles.data() + begin, static_cast<std::int64_t>(end - begin));
      end = begin;
    }
    check_same(backwards, whole);
  }
}

TEST_CASE("summed words of many sums are their merged sum") {
  const std::vector<double> values = wide_doubles("words", 4096, -1074, 1020);
  ExactSum whole;
  ExactSum::Words words{};
  for (std::size_t i = 0; i < values.size(); i += 4) {
    ExactSum part;
    for (std::size_t j = i; j < i + 4; ++j) {
      part.add(values[j]);
      whole.add(values[j]);
    }
    const ExactSum::Words part_words = part.words();
    for (std::size_t k = 0; k + 2 < words.size(); ++k) {
      REQUIRE(part_words[k] >= 0);
      REQUIRE(part_words[k] < std::int64_t{1} << 32);
    }
    for (std::size_t k = 0; k < words.size(); ++k) words[k] += part_words[k];
  }
  check_same(ExactSum::from_words(words), whole);
  check_same(ExactSum::from_words(whole.words()), whole);

  ExactSum::Words wrong{};
  wrong[5] = std::int64_t{1} << 62;
  CHECK_THROWS_WITH_AS(ExactSum::from_words(wrong), doctest::Contains("word 5"), sherd::Error);
  wrong[5] = 0;
  wrong.back() = -1;
  CHECK_THROWS_WITH_AS(ExactSum::from_words(wrong), doctest::Contains("-1 non-finite"),
                       sherd::Error);
}

// Merging a sum into itself doubles it, and what it has to carry: 2^29 pending additions come up
// many times.
TEST_CASE("a sum carries in time") {
  ExactSum sum;
  ExactSum largest;
  for (int i = 0; i < 1000; ++i) sum.add(-1.0 / 3.0);
  largest.add(kMax);
  const double start = sum.value();
  for (int doubling = 1; doubling <= 200; ++doubling) {
    sum.merge(sum);
    REQUIRE(sum.value() == std::ldexp(start, doubling));
  }
  for (int doubling = 1; doubling <= 90; ++doubling) largest.merge(largest);
  CHECK(largest.value() == kInfinity);
  ExactSum negative;
  negative.add(-kMax);
  for (int doubling = 1; doubling <= 90; ++doubling) negative.merge(negative);
  CHECK(negative.value() == -kInfinity);
  largest.merge(negative);
  CHECK(largest.words() == ExactSum().words());
  CHECK(largest.value() == 0.0);
}

TEST_CASE("non-finite addends are counted and make the value NaN") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  ExactSum sum;
  sum.add(1.0);
  CHECK(sum.non_finite() == 0);
  sum.add(kInfinity);
  sum.add(-kInfinity);
  sum.add(nan);
  CHECK(sum.non_finite() == 3);
  CHECK(std::isnan(sum.value()));
  CHECK(sum.words().back() == 3);
  CHECK(ExactSum::from_words(sum.words()).non_finite() == 3);
  ExactSum merged;
  merged.merge(sum);
  merged.merge(sum);
  CHECK(merged.non_finite() == 6);

  for (std::size_t at = 0; at < 600; ++at) {
    std::vector<float> values(600, 0.5f);
    values[at] = at % 2 == 0 ? -std::numeric_limits<float>::infinity()
                             : std::numeric_limits<float>::quiet_NaN();
    const ExactSum found = squares(values);
    REQUIRE(found.non_finite() == 1);
    check_same(found, plain_squares(values));
  }
  CHECK(squares(std::vector<double>{1e200, 1.0, -1e200, nan}).non_finite() == 3);  // overflow too
  CHECK(squares(std::vector<f16>{f16(1.0f), f16(1e9f), f16(NAN)}).non_finite() == 2);
  CHECK(squares(std::vector<bf16>{bf16(1.0f), bf16(INFINITY), bf16(NAN)}).non_finite() == 2);
}
