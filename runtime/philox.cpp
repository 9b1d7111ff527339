// SPDX-License-Identifier: Apache-2.0
#include <sherd/runtime/error.h>
#include <sherd/runtime/philox.h>
#include <xxhash.h>

#include <cmath>
#include <limits>
#include <string>

namespace sherd {
namespace {

void append_u64(std::string& bytes, std::uint64_t value) {
  for (int shift = 0; shift < 64; shift += 8) bytes.push_back(static_cast<char>(value >> shift));
}

// Note [Random key]
// The key is XXH3-64 (seed 0) of the bytes
//   seed, length of purpose, purpose, length of name, name
// with the numbers as 8 little-endian bytes. XXH3's output is frozen since xxHash 0.8.0 and the
// same on every machine, which std::hash is not; the lengths keep ("ab", "c") apart from ("a",
// "bc").
std::uint64_t random_key(std::uint64_t seed, std::string_view purpose, std::string_view name) {
  std::string bytes;
  bytes.reserve(24 + purpose.size() + name.size());
  append_u64(bytes, seed);
  append_u64(bytes, purpose.size());
  bytes.append(purpose);
  append_u64(bytes, name.size());
  bytes.append(name);
  return XXH3_64bits(bytes.data(), bytes.size());
}

// Words 2i and 2i + 1 as one number. They share a block, and i / 2 cannot overflow where 2i would.
std::uint64_t word_pair(const RandomStream& stream, std::uint64_t index) {
  const auto words = stream.block(index / 2);
  const std::size_t lane = 2 * (index % 2);
  return std::uint64_t{words[lane + 1]} << 32 | words[lane];
}

// Horner's rule, coefficients from the constant term up.
template <std::size_t N>
double polynomial(const double (&coefficients)[N], double x) {
  double result = coefficients[N - 1];
  for (std::size_t i = N - 1; i-- > 0;) result = result * x + coefficients[i];
  return result;
}

}  // namespace

RandomStream::RandomStream(std::uint64_t seed, std::string_view purpose, std::string_view name,
                           std::uint64_t step)
    : key_(random_key(seed, purpose, name)), step_(step) {}

// The middles of 2^52 equal cells, so odd multiples of 2^-53: every one is a double, neither 0 nor
// 1 occurs, and the set is symmetric about 1/2.
double RandomStream::uniform(std::uint64_t index) const {
  return static_cast<double>((word_pair(*this, index) >> 12) * 2 + 1) * 0x1p-53;
}

double RandomStream::normal(std::uint64_t index) const {
  return normal_quantile(uniform(index));
}

// The upper half of the 128-bit product (Lemire, "Fast random integer generation in an interval",
// 2019, without the rejection step, which would need a varying count of words). A value's
// probability is off by less than 2^-64, so relatively by less than bound / 2^64.
std::uint64_t RandomStream::below(std::uint64_t index, std::uint64_t bound) const {
  SHERD_CHECK(bound > 0, "RandomStream::below: bound is 0, expected at least 1");
  const std::uint64_t random = word_pair(*this, index);
  const std::uint64_t random_low = random & 0xffffffffu;
  const std::uint64_t random_high = random >> 32;
  const std::uint64_t bound_low = bound & 0xffffffffu;
  const std::uint64_t bound_high = bound >> 32;
  const std::uint64_t middle = random_high * bound_low + (random_low * bound_low >> 32);
  const std::uint64_t carry = random_low * bound_high + (middle & 0xffffffffu);
  return random_high * bound_high + (middle >> 32) + (carry >> 32);
}

double normal_cdf(double x) {
  return 0.5 * std::erfc(x * -0.70710678118654752440);
}

// AS 241, routine PPND16: relative error about 1e-16.
double normal_quantile(double probability) {
  SHERD_CHECK(probability >= 0.0 && probability <= 1.0,
              "normal_quantile: probability is {}, expected one in [0, 1]", probability);
  static constexpr double kA[] = {3.3871328727963666080e0,  1.3314166789178437745e+2,
                                  1.9715909503065514427e+3, 1.3731693765509461125e+4,
                                  4.5921953931549871457e+4, 6.7265770927008700853e+4,
                                  3.3430575583588128105e+4, 2.5090809287301226727e+3};
  static constexpr double kB[] = {1.0,
                                  4.2313330701600911252e+1,
                                  6.8718700749205790830e+2,
                                  5.3941960214247511077e+3,
                                  2.1213794301586595867e+4,
                                  3.9307895800092710610e+4,
                                  2.8729085735721942674e+4,
                                  5.2264952788528545610e+3};
  static constexpr double kC[] = {1.42343711074968357734e0,  4.63033784615654529590e0,
                                  5.76949722146069140550e0,  3.64784832476320460504e0,
                                  1.27045825245236838258e0,  2.41780725177450611770e-1,
                                  2.27238449892691845833e-2, 7.74545014278341407640e-4};
  static constexpr double kD[] = {1.0,
                                  2.05319162663775882187e0,
                                  1.67638483018380384940e0,
                                  6.89767334985100004550e-1,
                                  1.48103976427480074590e-1,
                                  1.51986665636164571966e-2,
                                  5.47593808499534494600e-4,
                                  1.05075007164441684324e-9};
  static constexpr double kE[] = {6.65790464350110377720e0,  5.46378491116411436990e0,
                                  1.78482653991729133580e0,  2.96560571828504891230e-1,
                                  2.65321895265761230930e-2, 1.24266094738807843860e-3,
                                  2.71155556874348757815e-5, 2.01033439929228813265e-7};
  static constexpr double kF[] = {1.0,
                                  5.99832206555887937690e-1,
                                  1.36929880922735805310e-1,
                                  1.48753612908506148525e-2,
                                  7.86869131145613259100e-4,
                                  1.84631831751005468180e-5,
                                  1.42151175831644588870e-7,
                                  2.04426310338993978564e-15};

  const double centred = probability - 0.5;
  if (std::abs(centred) <= 0.425) {
    const double r = 0.180625 - centred * centred;
    return centred * polynomial(kA, r) / polynomial(kB, r);
  }
  const double tail = centred < 0.0 ? probability : 1.0 - probability;
  const double sign = centred < 0.0 ? -1.0 : 1.0;
  if (tail == 0.0) return sign * std::numeric_limits<double>::infinity();
  const double r = std::sqrt(-std::log(tail));
  if (r <= 5.0) return sign * polynomial(kC, r - 1.6) / polynomial(kD, r - 1.6);
  return sign * polynomial(kE, r - 5.0) / polynomial(kF, r - 5.0);
}

}  // namespace sherd
