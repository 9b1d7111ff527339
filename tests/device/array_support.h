// SPDX-License-Identifier: Apache-2.0
// For tests of kernels that give the bits of the CPU's: arrays anywhere in memory, and numbers that
// are hard to treat alike.
#pragma once

#include <sherd/kernels/cpu/simd.h>

#include <cstring>

#include "device_support.h"

namespace sherd::test {

// Elements on the device that begin `offset` elements behind an aligned address. What lies before
// and behind them must stay as it is.
template <typename T>
class Placed {
 public:
  Placed(const std::vector<T>& values, std::size_t offset)
      : offset_(offset), array_([&] {
          T ones;
          std::memset(static_cast<void*>(&ones), 0xff, sizeof ones);
          std::vector<T> all(offset, ones);
          all.insert(all.end(), values.begin(), values.end());
          return all;
        }()) {}
  Placed(std::size_t count, std::size_t offset) : Placed(std::vector<T>(count), offset) {}

  T* data() const { return array_.data() + offset_; }
  std::vector<T> values() const {
    const std::vector<T> all = array_.values();
    const auto* const bytes = reinterpret_cast<const unsigned char*>(all.data());
    CHECK(std::all_of(bytes, bytes + offset_ * sizeof(T),
                      [](unsigned char byte) { return byte == 0xff; }));
    return {all.begin() + static_cast<std::ptrdiff_t>(offset_), all.end()};
  }

 private:
  std::size_t offset_;
  DeviceArray<T> array_;
};

template <typename T>
bool is_nan(T value) {
  if constexpr (std::is_integral_v<T>) {
    return false;
  } else if constexpr (sizeof(T) == 2) {
    return std::isnan(static_cast<float>(value));
  } else {
    return std::isnan(value);
  }
}

// The same bits; a NaN may be another NaN, whose bits devices choose.
template <typename T>
bool same_numbers(const std::vector<T>& a, const std::vector<T>& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (is_nan(a[i]) && is_nan(b[i])) continue;
    if (std::memcmp(&a[i], &b[i], sizeof(T)) != 0) {
      MESSAGE("element ", i, " of ", a.size(),
              " differs: ", as_doubles(std::vector<T>{a[i], b[i]})[0], " and ",
              as_doubles(std::vector<T>{a[i], b[i]})[1]);
      return false;
    }
  }
  return true;
}

template <typename T>
T number(double value) {
  if constexpr (sizeof(T) == 2) {
    return T(static_cast<float>(value));
  } else {
    return static_cast<T>(value);
  }
}

// Normal numbers, and among them zeros of both signs, infinities, NaN, tiny and huge ones.
template <typename T>
std::vector<T> hard_values(std::size_t count, const char* name, double scale = 1.0) {
  std::vector<T> values = random_values<T>(count, name, scale);
  const double special[] = {0.0, -0.0, INFINITY, -INFINITY, NAN, 1e-40, -1e-45, 3e38, 6e-8, -7e4};
  std::size_t at = 2;
  for (const double value : special) {
    if (at < count) values[at] = number<T>(value);
    at += 5;
  }
  return values;
}

// Whether the CPU's kernels have fused multiply-adds, as a GPU's always do.
inline bool cpu_fuses() {
  const auto x = cpu::broadcast<float>(1 + 0x1p-12f);
  return cpu::madd(x, x, cpu::broadcast<float>(-1 - 0x1p-11f))[0] > 0;
}

// Equal to within `tolerance` of the larger, or of 1.
template <typename T>
bool close_numbers(const std::vector<T>& a, const std::vector<T>& b, double tolerance) {
  const std::vector<double> x = as_doubles(a), y = as_doubles(b);
  if (x.size() != y.size()) return false;
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (x[i] == y[i] || (std::isnan(x[i]) && std::isnan(y[i]))) continue;
    const double scale = std::max({std::abs(x[i]), std::abs(y[i]), 1.0});
    if (!(std::abs(x[i] - y[i]) <= tolerance * scale)) return false;
  }
  return true;
}

// For kernels with fused multiply-adds: the CPU's bits where it has them, else a few roundings off.
template <typename T>
bool like_cpu(const std::vector<T>& a, const std::vector<T>& b) {
  const double roundoff = sizeof(T) == 8 ? 0x1p-53 : sizeof(T) == 4 ? 0x1p-24 : 0x1p-8;
  return cpu_fuses() ? same_numbers(a, b) : close_numbers(a, b, 8 * roundoff);
}

}  // namespace sherd::test
