// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/cpu/elementwise.h>
#include <sherd/kernels/cpu/philox_vector.h>
#include <sherd/kernels/cpu/random_fill.h>
#include <sherd/kernels/cpu/vector_loop.h>

#include <cmath>

namespace sherd::cpu {
namespace {

using V = Vec<double>;
using M = Mask<double>;

// Horner's rule, coefficients from the constant term up.
template <std::size_t N>
SHERD_INLINE V polynomial(const double (&coefficients)[N], V x) {
  V result = broadcast<double>(coefficients[N - 1]);
  for (std::size_t i = N - 1; i-- > 0;)
    result = madd(result, x, broadcast<double>(coefficients[i]));
  return result;
}

// Natural logarithm of positive normal numbers (fdlibm's e_log.c, Sun Microsystems 1993): with
// x = 2^k (1 + f) and s = f / (2 + f), log(1 + f) = 2 atanh(s).
SHERD_INLINE V log_of(V x) {
  constexpr std::int64_t kRootHalf = 0x3fe6a09e00000000;  // about sqrt(1/2)
  const M bits = (M)x;
  // 1 + f in [sqrt(1/2), sqrt(2)); the shift is arithmetic, k may be negative.
  const M k = (bits - kRootHalf) >> 52;
  const V f = (V)(bits - (k << 52)) - 1.0;
  const V s = f / (f + 2.0);
  const V z = s * s;
  static constexpr double kSeries[] = {6.666666666666735130e-01, 3.999999999940941908e-01,
                                       2.857142874366239149e-01, 2.222219843214978396e-01,
                                       1.818357216161805012e-01, 1.531383769920937332e-01,
                                       1.479819860511658591e-01};
  const V series = z * polynomial(kSeries, z);
  const V half_square = f * f * 0.5;
  const V exponent = __builtin_convertvector(k, V);
  const V low = madd(s, half_square + series, exponent * 1.90821492927058770002e-10);
  return exponent * 6.93147180369123816490e-01 - ((half_square - low) - f);
}

// The inverse of the normal distribution function: Wichura's AS 241 (PPND16), as normal_quantile in
// runtime/philox.h, on a vector of numbers.
SHERD_INLINE V quantile(V probability) {
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
  const V centred = probability - 0.5;
  const V r = 0.180625 - centred * centred;
  const V middle = centred * polynomial(kA, r) / polynomial(kB, r);
  const V tail = vmin(probability, 1.0 - probability);
  const V root = vsqrt(-log_of(tail));
  const V far = polynomial(kC, root - 1.6) / polynomial(kD, root - 1.6);
  V result = select(r >= 0.0, middle, select(centred < 0.0, -far, far));
  // Beyond 2.7e-11 AS 241 has a third formula: too rare to be worth a vector.
  if (any_lane<double>(root > 5.0)) {
    for (int i = 0; i < kLanes<double>; ++i) {
      if (root[i] > 5.0) result[i] = normal_quantile(probability[i]);
    }
  }
  return result;
}

// A vector of RandomStream::uniform's numbers from twice as many words.
SHERD_INLINE V uniform_from(const std::uint32_t* words) {
  M pair;  // each fits the signed type after the shift
  std::memcpy(&pair, words, sizeof pair);
  pair = (pair >> 12) & 0xfffffffffffff;
  return __builtin_convertvector(pair * 2 + 1, V) * 0x1p-53;
}

// out[i] = map(uniform number first_index + i) rounded to T.
template <typename T, typename Map>
SHERD_INLINE void fill_with(int threads, std::int64_t n, T* out, const RandomStream& stream,
                            std::uint64_t first_index, const Map& map) {
  constexpr int kChunk = kRandomChunk / 2;  // an element takes two words
  parallel_blocks(threads, n, kElementwiseBlock / 8, [&](std::int64_t begin, std::int64_t end) {
    std::uint32_t room[kRandomRoom + 2 * kLanes<double>] = {};
    double numbers[kChunk];
    for (std::int64_t at = begin; at < end; at += kChunk) {
      const auto size = static_cast<int>(std::min<std::int64_t>(kChunk, end - at));
      const std::uint64_t first = 2 * (first_index + static_cast<std::uint64_t>(at));
      const std::uint32_t* const words = random_words(stream, first, 2 * size, room);
      for (int i = 0; i < size; i += kLanes<double>) {
        store<double>(numbers + i, map(uniform_from(words + 2 * i)));
      }
      cast<double, T>(1, size, numbers, out + at);
    }
  });
}

}  // namespace

template <typename T>
void fill_uniform(int threads, std::int64_t n, T* out, const RandomStream& stream,
                  std::uint64_t first_index, double low, double high) {
  fill_with<T>(threads, n, out, stream, first_index,
               [=](V u) { return madd(u, broadcast<double>(high - low), broadcast<double>(low)); });
}

template <typename T>
void fill_normal(int threads, std::int64_t n, T* out, const RandomStream& stream,
                 std::uint64_t first_index, double mean, double std) {
  fill_with<T>(threads, n, out, stream, first_index, [=](V u) {
    return madd(quantile(u), broadcast<double>(std), broadcast<double>(mean));
  });
}

template <typename T>
void fill_truncated_normal(int threads, std::int64_t n, T* out, const RandomStream& stream,
                           std::uint64_t first_index, const TruncatedNormal& distribution) {
  const TruncatedNormal& d = distribution;
  const double below_low = normal_cdf((d.low - d.mean) / d.std);
  const double below_high = normal_cdf((d.high - d.mean) / d.std);
  fill_with<T>(threads, n, out, stream, first_index, [=](V u) {
    const V p =
        vmin(madd(u, broadcast<double>(below_high - below_low), broadcast<double>(below_low)),
             broadcast<double>(below_high));
    const V x = madd(quantile(p), broadcast<double>(d.std), broadcast<double>(d.mean));
    return vmax(broadcast<double>(d.low), vmin(broadcast<double>(d.high), x));
  });
}

#define SHERD_INSTANTIATE(T)                                                                       \
  template void fill_uniform<T>(int, std::int64_t, T*, const RandomStream&, std::uint64_t, double, \
                                double);                                                           \
  template void fill_normal<T>(int, std::int64_t, T*, const RandomStream&, std::uint64_t, double,  \
                               double);                                                            \
  template void fill_truncated_normal<T>(int, std::int64_t, T*, const RandomStream&,               \
                                         std::uint64_t, const TruncatedNormal&);
SHERD_INSTANTIATE(double)
SHERD_INSTANTIATE(float)
SHERD_INSTANTIATE(bf16)
SHERD_INSTANTIATE(f16)
#undef SHERD_INSTANTIATE

}  // namespace sherd::cpu
