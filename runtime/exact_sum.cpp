// SPDX-License-Identifier: Apache-2.0
//
// Note [Exact block sums]
// Adding squares digit by digit costs a few ns each. A block of squares is instead cut into slices
// by floating-point additions that are all exact (Rump, Ogita and Oishi, "Accurate floating-point
// summation", 2008; Demmel and Nguyen, "Parallel reproducible summation", 2015):
//
//   t = sum + d;  d -= t - sum;  sum = t;        sum starts at 1.5 * 2^(52 + g)
//
// While sum stays in its binade [2^(52+g), 2^(53+g)) its unit in the last place is 2^g. So d
// rounded to a multiple of 2^g has been added, what is left of d is exact and at most 2^(g-1), and
// the difference of sum's bit pattern from where it started *is* the integer count of 2^g. It does
// stay there while its 2^k additions have d <= 2^(g+s) with s = 50 - k, as they reach 2^(g+50) +
// 2^(g+k-1) at most. Two slices take 2s + 1 bits (93 with AVX-512) below the block's largest
// square; the rest, nearly always zero, goes round again. Only exactness matters: the cuts differ
// with the block's contents and the vectors' width, the sum cannot. Needs -ffp-contract=off, no
// -ffast-math.
#include <sherd/runtime/error.h>
#include <sherd/runtime/exact_sum.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace sherd {
namespace {

constexpr std::int64_t kDigitMask = 0xffffffff;
constexpr std::int64_t kMaxPending = std::int64_t{1} << 29;  // keeps digits below 2^62
constexpr int kMinExponent = -1074;                          // of the smallest subnormal
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Registers as wide as the machine's: the sum being exact, the width cannot show in it, and g++
// does poorly at splitting wider ones (5 times slower, with AVX2).
#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
typedef double Doubles __attribute__((vector_size(kVectorBytes)));
typedef float Floats __attribute__((vector_size(kVectorBytes / 2)));
typedef std::int64_t Int64s __attribute__((vector_size(kVectorBytes)));
typedef std::int32_t Int32s __attribute__((vector_size(kVectorBytes)));

constexpr int kLanes = kVectorBytes / 8;
constexpr int kChains = 4;  // independent sums hide the latency of an addition
constexpr int kStride = kLanes * kChains;
constexpr int kBlock = 512;
constexpr int kSliceBits = 50 - std::countr_zero(unsigned{kBlock / kStride});  // s in the note
constexpr int kMaxBlockExponent = 971 + kSliceBits;  // above, 1.5 * 2^(52 + g) would overflow

inline Doubles load_doubles(const double* from) {
  Doubles v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
inline Doubles load_squares(const double* from) {
  const Doubles v = load_doubles(from);
  return v * v;
}
inline Doubles load_squares(const float* from) {
  Floats v;
  std::memcpy(&v, from, sizeof v);
  const Doubles wide = __builtin_convertvector(v, Doubles);
  return wide * wide;
}

// The largest magnitude of `padded` values: without the sign, bit patterns order as the numbers do,
// with infinities and NaNs on top.
template <typename T, typename Int, typename Ints>
T max_magnitude(const T* values, int padded) {
  constexpr int kWidth = sizeof(Ints) / sizeof(Int);
  Ints largest{};
  for (int i = 0; i < padded; i += kWidth) {
    Ints bits;
    std::memcpy(&bits, values + i, sizeof bits);
    bits &= std::numeric_limits<Int>::max();
    largest = bits > largest ? bits : largest;
  }
  Int result = 0;
  for (int lane = 0; lane < kWidth; ++lane) result = std::max<Int>(result, largest[lane]);
  return std::bit_cast<T>(result);
}
double max_magnitude(const double* values, int padded) {
  return max_magnitude<double, std::int64_t, Int64s>(values, padded);
}
float max_magnitude(const float* values, int padded) {
  return max_magnitude<float, std::int32_t, Int32s>(values, padded);
}

// The least E (but at least -1022) with value < 2^E.
int exponent_above(double value) {
  return static_cast<int>(std::bit_cast<std::uint64_t>(value) >> 52) - 1022;
}

// 1.5 * 2^(52 + exponent), whose unit in the last place is 2^exponent.
double slice_start(int exponent) {
  return std::bit_cast<double>(static_cast<std::uint64_t>(exponent + 52 + 1023) << 52 |
                               std::uint64_t{1} << 51);
}

std::int64_t horizontal_sum(const Int64s& v) {
  std::int64_t sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += v[lane];
  return sum;
}

struct Slice {
  int exponent = 0;
  std::int64_t count = 0;  // the slice's sum in units of 2^exponent
};

// Cuts two slices off `padded` numbers that load(i) gives as vectors, see Note [Exact block sums].
// Leaves what is left of them in `rest`; false if that is nothing.
template <typename Load>
inline bool peel(const Load& load, int padded, Slice& high, Slice& low, double* rest) {
  const Doubles high_start = Doubles{} + slice_start(high.exponent);
  const Doubles low_start = Doubles{} + slice_start(low.exponent);
  Doubles high_sum[kChains];
  Doubles low_sum[kChains];
  Int64s left[kChains];
  for (int c = 0; c < kChains; ++c) {
    high_sum[c] = high_start;
    low_sum[c] = low_start;
    left[c] = Int64s{};
  }
  for (int i = 0; i < padded; i += kStride) {
    for (int c = 0; c < kChains; ++c) {
      Doubles d = load(i + c * kLanes);
      const Doubles high_next = high_sum[c] + d;
      d -= high_next - high_sum[c];
      high_sum[c] = high_next;
      const Doubles low_next = low_sum[c] + d;
      d -= low_next - low_sum[c];
      low_sum[c] = low_next;
      std::memcpy(rest + i + c * kLanes, &d, sizeof d);
      left[c] |= (Int64s)d;
    }
  }
  Int64s high_count{};
  Int64s low_count{};
  Int64s any{};
  for (int c = 0; c < kChains; ++c) {
    high_count += (Int64s)high_sum[c] - (Int64s)high_start;
    low_count += (Int64s)low_sum[c] - (Int64s)low_start;
    any |= left[c];
  }
  high.count = horizontal_sum(high_count);
  low.count = horizontal_sum(low_count);
  std::int64_t some = 0;
  for (int lane = 0; lane < kLanes; ++lane) some |= any[lane];
  return some != 0;
}

// |value| as a float, which is enough for a square. The product scales f16's exponent range, and
// its subnormals, to fp32's.
float magnitude(f16 value) {
  const std::uint32_t bits = value.bits & 0x7fffu;
  const float scaled = std::bit_cast<float>(bits << 13) * 0x1p112f;
  return bits >= 0x7c00u ? std::numeric_limits<float>::infinity() : scaled;
}
float magnitude(bf16 value) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits & 0x7fffu) << 16);
}

}  // namespace

void ExactSum::add_scaled(std::int64_t count, int exponent) {
  const std::int64_t sign = count >> 63;  // 0 or -1; (x ^ sign) - sign is x or -x
  const auto magnitude = static_cast<std::uint64_t>((count ^ sign) - sign);
  const int position = exponent - kMinExponent;
  const int digit = position / 32;
  const int shift = position % 32;
  const auto put = [&](int at, std::uint64_t bits) {
    digits_[static_cast<size_t>(at)] += (static_cast<std::int64_t>(bits) ^ sign) - sign;
  };
  put(digit, (magnitude << shift) & kDigitMask);
  put(digit + 1, (magnitude >> (32 - shift)) & kDigitMask);
  put(digit + 2, magnitude >> 32 >> (32 - shift));
  if (++pending_ >= kMaxPending) normalise();
}

void ExactSum::add(double value) {
  const auto bits = std::bit_cast<std::uint64_t>(value);
  const int exponent = static_cast<int>(bits >> 52 & 0x7ff);
  if (exponent == 0x7ff) {
    ++non_finite_;
    return;
  }
  auto mantissa = static_cast<std::int64_t>(bits & 0xfffffffffffffu);
  if (exponent != 0) mantissa |= std::int64_t{1} << 52;
  add_scaled(bits >> 63 ? -mantissa : mantissa, std::max(exponent, 1) + kMinExponent - 1);
}

template <typename T>
void ExactSum::add_square_block(const T* values, int n) {
  T padded_values[kBlock];
  int padded = n;
  if (n % kStride != 0) {
    padded = (n + kStride - 1) / kStride * kStride;
    std::copy(values, values + n, padded_values);
    std::fill(padded_values + n, padded_values + padded, T{0});
    values = padded_values;
  }

  const double largest = max_magnitude(values, padded);
  int above = exponent_above(largest * largest);
  if (above > kMaxBlockExponent) {  // huge, infinite or NaN
    for (int i = 0; i < n; ++i) {
      const double value = values[i];
      add(value * value);
    }
    return;
  }

  alignas(64) double rest[kBlock];
  Slice high;
  Slice low;
  const auto place = [&] {
    high.exponent = above - kSliceBits;  // at least -1022 - 46
    low.exponent = std::max(high.exponent - 1 - kSliceBits, kMinExponent);
  };
  const auto take = [&] {
    add_scaled(high.count, high.exponent);
    if (low.count != 0) add_scaled(low.count, low.exponent);
  };
  place();
  bool more = peel([&](int i) { return load_squares(values + i); }, padded, high, low, rest);
  take();
  while (more) {
    above = exponent_above(max_magnitude(rest, padded));
    place();
    more = peel([&](int i) { return load_doubles(rest + i); }, padded, high, low, rest);
    take();
  }
}

void ExactSum::add_squares(const float* values, std::int64_t n) {
  for (std::int64_t i = 0; i < n; i += kBlock) {
    add_square_block(values + i, static_cast<int>(std::min<std::int64_t>(kBlock, n - i)));
  }
}

void ExactSum::add_squares(const double* values, std::int64_t n) {
  for (std::int64_t i = 0; i < n; i += kBlock) {
    add_square_block(values + i, static_cast<int>(std::min<std::int64_t>(kBlock, n - i)));
  }
}

void ExactSum::add_squares(const f16* values, std::int64_t n) {
  float wide[kBlock];
  for (std::int64_t i = 0; i < n; i += kBlock) {
    const auto count = static_cast<int>(std::min<std::int64_t>(kBlock, n - i));
    for (int j = 0; j < count; ++j) wide[j] = magnitude(values[i + j]);
    add_square_block(wide, count);
  }
}

void ExactSum::add_squares(const bf16* values, std::int64_t n) {
  float wide[kBlock];
  for (std::int64_t i = 0; i < n; i += kBlock) {
    const auto count = static_cast<int>(std::min<std::int64_t>(kBlock, n - i));
    for (int j = 0; j < count; ++j) wide[j] = magnitude(values[i + j]);
    add_square_block(wide, count);
  }
}

void ExactSum::merge(const ExactSum& other) {
  if (pending_ + other.pending_ + 1 >= kMaxPending) {
    ExactSum normal = other;
    normal.normalise();
    normalise();
    merge(normal);
    return;
  }
  for (size_t i = 0; i < kDigits; ++i) digits_[i] += other.digits_[i];
  pending_ += other.pending_ + 1;
  non_finite_ += other.non_finite_;
}

void ExactSum::normalise() {
  std::int64_t carry = 0;
  for (size_t i = 0; i + 1 < kDigits; ++i) {
    const std::int64_t digit = digits_[i] + carry;
    digits_[i] = digit & kDigitMask;
    carry = digit >> 32;  // rounds down, so that what stays is not negative
  }
  digits_.back() += carry;
  pending_ = 0;
}

double ExactSum::value() const {
  if (non_finite_ != 0) return kNan;
  ExactSum sum = *this;
  sum.normalise();
  const bool negative = sum.digits_.back() < 0;
  if (negative) {
    for (std::int64_t& digit : sum.digits_) digit = -digit;
    sum.normalise();
  }
  const double sign = negative ? -1.0 : 1.0;
  if (sum.digits_.back() != 0) return sign * kInfinity;  // 2^1070 and more

  const auto bit_digit = [&](int at) {
    return at >= 0 ? static_cast<std::uint64_t>(sum.digits_[static_cast<size_t>(at)]) : 0u;
  };
  int top = kDigits - 1;
  while (top > 0 && bit_digit(top) == 0) --top;
  // The three highest digits hold at least 65 bits: 53 to keep, 11 to round by and a sticky one for
  // all that follows.
  const int lead = std::countl_zero(bit_digit(top)) - 32;
  if (lead == 32) return 0.0;
  std::uint64_t bits = (bit_digit(top) << 32 | bit_digit(top - 1)) << lead;
  bits |= bit_digit(top - 2) >> (32 - lead);
  std::uint64_t below = bit_digit(top - 2) << lead & kDigitMask;
  for (int i = top - 3; i >= 0; --i) below |= bit_digit(i);
  const std::uint64_t kept = bits >> 11;
  const std::uint64_t rest = bits & 0x7ffu;
  const bool up = rest > 0x400u || (rest == 0x400u && (below != 0 || (kept & 1u) != 0));
  // A subnormal sum has nothing below its 53 bits, so that ldexp never rounds.
  const int exponent = kMinExponent + 32 * (top - 1) - lead + 11;
  return sign * std::ldexp(static_cast<double>(kept + (up ? 1u : 0u)), exponent);
}

ExactSum::Words ExactSum::words() const {
  ExactSum sum = *this;
  sum.normalise();
  Words words;
  std::copy(sum.digits_.begin(), sum.digits_.end(), words.begin());
  words.back() = sum.non_finite_;
  return words;
}

ExactSum ExactSum::from_words(const Words& words) {
  ExactSum sum;
  for (size_t i = 0; i < kDigits; ++i) {
    SHERD_CHECK(words[i] >> 62 == 0 || words[i] >> 62 == -1,
                "ExactSum::from_words: word {} is {}, expected a magnitude below 2^62", i,
                words[i]);
    sum.digits_[i] = words[i];
  }
  SHERD_CHECK(words.back() >= 0, "ExactSum::from_words: {} non-finite addends, expected 0 or more",
              words.back());
  sum.non_finite_ = words.back();
  sum.normalise();
  return sum;
}

}  // namespace sherd
