// SPDX-License-Identifier: Apache-2.0
// Elementary functions on vectors: vexp, vtanh, verf and normal_cdf_pdf (for the exact GELU).
//
// fp32 versions are branch-free, so every lane runs the same instructions and an element's bits do
// not depend on its neighbours (see Note [Same bits wherever an array is cut] in simd.h). NaN
// propagates, infinities give the limit. fp64 versions call the C library lane by lane: fp64 is for
// checking gradients, not for speed. Largest error of fp32 over a sweep of all binades, asserted in
// tests/unit/cpu_math_test.cpp: exp 0.92 ulp, tanh 1.1, erf 2.3; cdf 1.7e-7 absolute and, apart
// from the rounding of x^2, 3.4e-7 relative in both tails; GELU 9e-8, its derivative 1.9e-7 of
// max(1, |x|).
//
// Note [Polynomials]
// Coefficients not credited to a source are minimax fits to the named function, computed with the
// Remez exchange in 40-digit arithmetic and rounded to fp32.
#pragma once

#include <sherd/kernels/cpu/simd.h>

#include <cmath>

namespace sherd::cpu {

using VecF32 = Vec<float>;
using VecF64 = Vec<double>;

namespace detail {

// Horner's rule, highest power first.
template <typename... Rest>
SHERD_INLINE VecF32 polynomial(VecF32 x, float highest, Rest... rest) {
  VecF32 sum = broadcast<float>(highest);
  ((sum = madd(sum, x, broadcast<float>(rest))), ...);
  return sum;
}

SHERD_INLINE VecF32 vabs(VecF32 x) {
  return (VecF32)((Mask<float>)x & 0x7fffffff);
}
// The magnitude of `magnitude` (which must not be negative) with the sign of `sign`.
SHERD_INLINE VecF32 with_sign_of(VecF32 magnitude, VecF32 sign) {
  constexpr std::int32_t kSignBit = INT32_MIN;
  return (VecF32)((Mask<float>)magnitude | ((Mask<float>)sign & kSignBit));
}

// y * 2^n for integral n in [-150, 129], rounded once.
SHERD_INLINE VecF32 times_power_of_two(VecF32 y, VecF32 n) {
#if defined(__AVX512F__)
  // (g++ 12 warns about the unmasked form.)
  return (VecF32)_mm512_maskz_scalef_ps(0xffff, (__m512)y, (__m512)n);
#else
  // 2^n may be no normal number where y * 2^n is one, so multiply by two halves. Adding 1.5 * 2^23
  // leaves the integer in the low bits.
  const VecF32 magic = broadcast<float>(12582912.f);
  const auto k = (Mask<float>)(n + magic) - (Mask<float>)magic;
  const auto half = k >> 1;
  return y * (VecF32)((half + 127) << 23) * (VecF32)((k - half + 127) << 23);
#endif
}

template <typename F>
SHERD_INLINE VecF64 each_lane(VecF64 x, const F& f) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = f(x[i]);
  return x;
}

}  // namespace detail

// e^x; subnormal results are kept, below about -103.97 it is 0, above 88.73 inf.
// x = n ln 2 + r with |r| <= ln 2 / 2 (ln 2 in two pieces, Cody and Waite 1980), e^r by a
// polynomial.
SHERD_INLINE VecF32 vexp(VecF32 x) {
  // The bound comes first: the comparison is false for NaN, which then passes through.
  x = vmax(broadcast<float>(-104.f), vmin(broadcast<float>(89.f), x));
  const VecF32 magic = broadcast<float>(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
  const VecF32 n = madd(x, broadcast<float>(1.44269504f), magic) - magic;
  VecF32 r = madd(n, broadcast<float>(-0.693359375f), x);
  r = madd(n, broadcast<float>(2.12194440e-4f), r);
  const VecF32 tail = detail::polynomial(r, 1.381432063e-3f, 8.368851065e-3f, 4.166840108e-2f,
                                         1.666651952e-1f, 4.999999337e-1f);
  const VecF32 y = madd(r * r, tail, r) + 1.f;  // e^r = 1 + r + r^2 tail(r)
  return detail::times_power_of_two(y, n);
}
SHERD_INLINE VecF64 vexp(VecF64 x) {
  return detail::each_lane(x, [](double v) { return std::exp(v); });
}

// The polynomial is that of Cephes' tanhf (Moshier 1989).
SHERD_INLINE VecF32 vtanh(VecF32 x) {
  const VecF32 magnitude = detail::vabs(x);
  const VecF32 square = x * x;
  const VecF32 tail = detail::polynomial(square, -5.70498872745e-3f, 2.06390887954e-2f,
                                         -5.37397155531e-2f, 1.33314422036e-1f, -3.33332819422e-1f);
  const VecF32 small = madd(tail * square, magnitude, magnitude);
  const VecF32 large = 1.f - 2.f / (vexp(magnitude + magnitude) + 1.f);
  return detail::with_sign_of(select(magnitude < 0.625f, small, large), x);
}
SHERD_INLINE VecF64 vtanh(VecF64 x) {
  return detail::each_lane(x, [](double v) { return std::tanh(v); });
}

namespace detail {

// For x >= 0, given e = exp(-x^2/2): the upper tail of the normal distribution, 1 - cdf(x) =
// e * t * P(t) with t = 1/(1 + 0.35 x). The form is Abramowitz and Stegun's 7.1.26; our fit of P is
// good to 3.2e-8 of the tail itself on [0, 14.5], beyond which the tail is no fp32 number.
SHERD_INLINE VecF32 normal_tail(VecF32 x, VecF32 e) {
  const VecF32 t = 1.f / madd(x, broadcast<float>(0.35f), broadcast<float>(1.f));
  const VecF32 p = polynomial(t, -2.915786314e-2f, 1.440308210e-1f, -2.558388225e-1f,
                              1.593195114e-1f, -2.321224112e-2f, 1.055524600e-01f, 1.198212972e-01f,
                              1.398635143e-01f, 1.396213069e-01f);
  return e * (t * p);
}

}  // namespace detail

SHERD_INLINE VecF32 verf(VecF32 x) {
  const VecF32 magnitude = detail::vabs(x);
  const VecF32 square = x * x;
  const VecF32 small =
      x * detail::polynomial(square, 7.889123076e-5f, -8.020842385e-4f, 5.189535468e-3f,
                             -2.685444466e-2f, 1.128360018e-1f, -3.761262714e-1f, 1.128379166f);
  // erf(x) = 1 - 2 (1 - cdf(sqrt(2) x))
  const VecF32 tail = detail::normal_tail(magnitude * 1.41421356f, vexp(-square));
  return select(magnitude < 1.f, small, detail::with_sign_of(1.f - (tail + tail), x));
}
SHERD_INLINE VecF64 verf(VecF64 x) {
  return detail::each_lane(x, [](double v) { return std::erf(v); });
}

// The standard normal's distribution function and density at x, from one exponential.
//   exact GELU: gelu(x) = x * cdf,  gelu'(x) = cdf + x * pdf
SHERD_INLINE void normal_cdf_pdf(VecF32 x, VecF32* cdf, VecF32* pdf) {
  const VecF32 e = vexp(x * x * -0.5f);
  const VecF32 tail = detail::normal_tail(detail::vabs(x), e);
  *cdf = select(x < 0.f, tail, 1.f - tail);
  *pdf = e * 0.398942280f;  // 1 / sqrt(2 pi)
}
SHERD_INLINE void normal_cdf_pdf(VecF64 x, VecF64* cdf, VecF64* pdf) {
  *cdf =
      detail::each_lane(x, [](double v) { return 0.5 * std::erfc(v * -0.70710678118654752440); });
  *pdf = detail::each_lane(
      x, [](double v) { return 0.39894228040143267794 * std::exp(-0.5 * v * v); });
}

}  // namespace sherd::cpu
