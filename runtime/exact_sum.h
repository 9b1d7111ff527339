// SPDX-License-Identifier: Apache-2.0
// ExactSum: a sum of doubles without any rounding, so without any order.
//
// Global norms, clipping and loss means go through it: however a tensor is cut over threads and
// ranks, the sum has the same bits. (Kulisch's long accumulator; small digits in wide words as in
// Neal, "Fast exact summation using small and large superaccumulators", 2015.)
//
// The sum is a fixed-point number: word i counts units of 2^(32 i - 1074), from the smallest
// subnormal to well above the largest double, so that 2^60 addends of any size fit.
#pragma once

#include <sherd/runtime/api.h>
#include <sherd/runtime/dtype.h>

#include <array>
#include <cstdint>

namespace sherd {

class SHERD_API ExactSum {
 public:
  static constexpr int kDigits = 68;
  // What words() returns: the digits, then the count of non-finite addends.
  static constexpr int kWords = kDigits + 1;
  using Words = std::array<std::int64_t, kWords>;

  // Adds one value. Infinities and NaNs are counted, not added.
  void add(double value);

  // Adds the squares of n values. The square of an f32, f16 or bf16 is exact; that of an f64 is
  // rounded to double once, then added exactly (one that overflows counts as non-finite).
  void add_squares(const float* values, std::int64_t n);
  void add_squares(const double* values, std::int64_t n);
  void add_squares(const f16* values, std::int64_t n);
  void add_squares(const bf16* values, std::int64_t n);

  // Adds everything that `other` holds.
  void merge(const ExactSum& other);

  // The sum, rounded to nearest-even once: an infinity where it exceeds the largest double, NaN
  // where an addend was not finite. An exact zero is +0.
  double value() const;
  std::int64_t non_finite() const { return non_finite_; }  // how many addends were not finite

  // The sum's only normal form: equal sums have equal words. The elementwise integer sum of the
  // words of up to 2^29 sums, given to from_words, is their merged sum; so ranks all-reduce kWords
  // int64.
  Words words() const;
  static ExactSum from_words(const Words& words);  // throws where a word cannot be such a sum

 private:
  void add_scaled(std::int64_t count, int exponent);  // count * 2^exponent; exponent >= -1074
  void normalise();
  template <typename T>
  void add_square_block(const T* values, int n);

  // |digit| <= (pending_ + 1) * 2^32; normalised ones are in [0, 2^32) but for the signed last.
  std::array<std::int64_t, kDigits> digits_{};
  std::int64_t pending_ = 0;
  std::int64_t non_finite_ = 0;
};

}  // namespace sherd
