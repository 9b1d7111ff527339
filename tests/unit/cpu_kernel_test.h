// SPDX-License-Identifier: Apache-2.0
// What the tests of CPU kernels share: arrays with guard regions, random values, bitwise
// comparison, and the rule for low precision.
#pragma once

#include <doctest/doctest.h>
#include <sherd/kernels/cpu/simd.h>
#include <sherd/runtime/dtype.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

namespace sherd::cpu::test {

inline constexpr std::int64_t kSizes[] = {1, 15, 16, 17, 33, 257, 1000};

template <typename T>
T from_double(double value) {
  if constexpr (std::is_same_v<T, double> || std::is_same_v<T, float>) {
    return static_cast<T>(value);
  } else {
    return T(static_cast<float>(value));
  }
}
template <typename T>
double to_double(T value) {
  if constexpr (std::is_same_v<T, double> || std::is_same_v<T, float>) {
    return static_cast<double>(value);
  } else {
    return static_cast<double>(static_cast<float>(value));
  }
}

// Unit roundoff: half the distance from 1 to the next number.
template <typename T>
double roundoff() {
  if constexpr (std::is_same_v<T, double>) return 0x1p-53;
  if constexpr (std::is_same_v<T, float>) return 0x1p-24;
  if constexpr (std::is_same_v<T, bf16>) return 0x1p-8;
  return 0x1p-11;
}

// An output array with a pattern before and after it that a kernel must leave alone.
template <typename T>
class Guarded {
 public:
  explicit Guarded(std::int64_t size)
      : size_(static_cast<std::size_t>(size)), bytes_(size_ * sizeof(T) + 2 * kGuard, kPattern) {}
  explicit Guarded(const std::vector<T>& values)
      : Guarded(static_cast<std::int64_t>(values.size())) {
    std::copy(values.begin(), values.end(), data());
  }
  T* data() { return reinterpret_cast<T*>(bytes_.data() + kGuard); }
  std::vector<T> values() {
    check();
    return {data(), data() + size_};
  }
  void check() const {
    const auto untouched = [](unsigned char byte) { return byte == kPattern; };
    CHECK(std::all_of(bytes_.begin(), bytes_.begin() + kGuard, untouched));
    CHECK(std::all_of(bytes_.end() - kGuard, bytes_.end(), untouched));
  }

 private:
  static constexpr std::ptrdiff_t kGuard = 192;
  static constexpr unsigned char kPattern = 0xa5;
  std::size_t size_;
  std::vector<unsigned char> bytes_;
};

template <typename T>
std::vector<T> random_values(std::int64_t n, unsigned seed, double scale = 1, double shift = 0) {
  std::mt19937_64 generator(seed);
  std::normal_distribution<double> normal;
  std::vector<T> values(static_cast<std::size_t>(n));
  for (T& value : values) value = from_double<T>(normal(generator) * scale + shift);
  return values;
}

template <typename T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

template <typename To, typename From>
std::vector<To> converted(const std::vector<From>& values) {
  std::vector<To> out;
  for (const From value : values) out.push_back(from_double<To>(to_double(value)));
  return out;
}

// The largest distance from `exact`.
template <typename T>
double worst_error(const std::vector<T>& values, const std::vector<double>& exact) {
  REQUIRE(values.size() == exact.size());
  double worst = 0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    const double error = std::abs(to_double(values[i]) - exact[i]);
    worst = error <= worst ? worst : error;
  }
  return worst;
}

// The rule for low precision: the error against fp64 is at most `factor` times that of `plain`, the
// straightforward computation in the same precision. A few roundings of the largest value (or of
// `magnitude`, that of terms which cancel) are granted on top, since few elements may be exact by
// luck.
template <typename T, typename Plain>
void check_as_good_as(const std::vector<T>& values, const std::vector<double>& exact,
                      const std::vector<Plain>& plain, double factor = 2, double magnitude = 0) {
  double largest = magnitude;
  for (const double value : exact) largest = std::max(largest, std::abs(value));
  const double allowed = factor * worst_error(plain, exact) + 4 * roundoff<T>() * largest;
  CHECK(worst_error(values, exact) <= allowed);
}

// run(begin, count, out) computes elements [begin, begin + count) into `out`, which points at the
// first of them. Every cut of 67 elements in two must give the bits of the whole.
template <typename T, typename Run>
void check_every_cut(const Run& run) {
  constexpr std::int64_t n = 67;
  Guarded<T> whole(n);
  run(std::int64_t{0}, n, whole.data());
  const std::vector<T> expected = whole.values();
  for (std::int64_t cut = 0; cut <= n; ++cut) {
    Guarded<T> parts(n);
    run(std::int64_t{0}, cut, parts.data());
    run(cut, n - cut, parts.data() + cut);
    CHECK(same_bits(parts.values(), expected));
  }
}

// run(threads, out) must give the same bits for 1, 2 and 3 threads.
template <typename T, typename Run>
void check_threads(std::int64_t out_size, const Run& run) {
  Guarded<T> one(out_size);
  run(1, one.data());
  for (int threads = 2; threads <= 3; ++threads) {
    Guarded<T> more(out_size);
    run(threads, more.data());
    CHECK(same_bits(more.values(), one.values()));
  }
}

}  // namespace sherd::cpu::test
