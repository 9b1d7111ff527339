// SPDX-License-Identifier: Apache-2.0
// Elementary functions of one number: kernels/cpu/math.h and the GELU of kernels/cpu/gelu.cpp step
// by step, so that a GPU gives the bits of a CPU that has fused multiply-adds. See there for
// sources and errors. fp64 calls CUDA's library, whose last bits are its own.
//
// Note [Exact functions in memory's shadow]
// The exact GELU of one element is about 50 instructions, the polynomial of its exponential 22 of
// them. An H200 issues some 30 per element in the time in which it moves a bf16 in and out (4
// bytes, 4 TB/s), and 60 for an fp32: fp32 hides them, bf16 pays up to 1.7 times the time of a
// copy. ex2.approx would save 15 of them and give up equality with the CPU, by which the kernels
// are tested to the bit.
#pragma once

#include <sherd/kernels/arguments/gelu.h>
#include <sherd/kernels/cuda/device.h>

#include <bit>
#include <cmath>

namespace sherd::cuda {

using arguments::GeluForm;

// a * b + c, rounded once.
__device__ __forceinline__ float madd(float a, float b, float c) {
  return std::fma(a, b, c);
}
__device__ __forceinline__ double madd(double a, double b, double c) {
  return std::fma(a, b, c);
}

// Horner's rule, highest power first.
template <typename... Rest>
__device__ __forceinline__ float polynomial(float x, float highest, Rest... rest) {
  float sum = highest;
  ((sum = madd(sum, x, rest)), ...);
  return sum;
}

__device__ __forceinline__ float exp_of(float x) {
  x = x > 89.f ? 89.f : x;  // in this form NaN passes
  x = x < -104.f ? -104.f : x;
  constexpr float kMagic = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
  const float rounded = madd(x, 1.44269504f, kMagic);
  const float n = rounded - kMagic;
  float r = madd(n, -0.693359375f, x);
  r = madd(n, 2.12194440e-4f, r);
  const float tail = polynomial(r, 1.381432063e-3f, 8.368851065e-3f, 4.166840108e-2f,
                                1.666651952e-1f, 4.999999337e-1f);
  const float y = madd(r * r, tail, r) + 1.f;
  // The integer is in the low bits. 2^n may be no normal number where y * 2^n is one, so multiply
  // by two halves.
  const unsigned k = std::bit_cast<unsigned>(rounded) - std::bit_cast<unsigned>(kMagic);
  const auto half = static_cast<unsigned>(static_cast<int>(k) >> 1);
  return y * std::bit_cast<float>((half + 127u) << 23) *
         std::bit_cast<float>((k - half + 127u) << 23);
}

__device__ __forceinline__ float tanh_of(float x) {
  const float magnitude = std::fabs(x);
  const float square = x * x;
  const float tail = polynomial(square, -5.70498872745e-3f, 2.06390887954e-2f, -5.37397155531e-2f,
                                1.33314422036e-1f, -3.33332819422e-1f);
  const float small = madd(tail * square, magnitude, magnitude);
  const float large = 1.f - 2.f / (exp_of(magnitude + magnitude) + 1.f);
  return std::copysign(magnitude < 0.625f ? small : large, x);
}
__device__ __forceinline__ double tanh_of(double x) {
  return std::tanh(x);
}

// The standard normal's distribution function and density.
__device__ __forceinline__ void normal_cdf_pdf(float x, float* cdf, float* pdf) {
  const float e = exp_of(x * x * -0.5f);
  const float t = 1.f / madd(std::fabs(x), 0.35f, 1.f);
  const float p = polynomial(t, -2.915786314e-2f, 1.440308210e-1f, -2.558388225e-1f,
                             1.593195114e-1f, -2.321224112e-2f, 1.055524600e-01f, 1.198212972e-01f,
                             1.398635143e-01f, 1.396213069e-01f);
  const float tail = e * (t * p);
  *cdf = x < 0.f ? tail : 1.f - tail;
  *pdf = e * 0.398942280f;
}
__device__ __forceinline__ void normal_cdf_pdf(double x, double* cdf, double* pdf) {
  *cdf = 0.5 * std::erfc(x * -0.70710678118654752440);
  *pdf = 0.39894228040143267794 * std::exp(-0.5 * x * x);
}

template <typename A>
__device__ __forceinline__ A gelu_tanh_of_inner(A x) {
  constexpr A kCubic = static_cast<A>(arguments::kGeluSlope * arguments::kGeluCubic);
  constexpr A kSlope = static_cast<A>(arguments::kGeluSlope);
  return tanh_of(x * madd(x * x, kCubic, kSlope));
}

template <GeluForm kForm, typename A>
__device__ __forceinline__ A gelu(A x) {
  if constexpr (kForm == GeluForm::exact) {
    A cdf, pdf;
    normal_cdf_pdf(x, &cdf, &pdf);
    return x * cdf;
  } else {
    const A half = x * A(0.5);
    return madd(half, gelu_tanh_of_inner(x), half);
  }
}

// gelu'(x)
template <GeluForm kForm, typename A>
__device__ __forceinline__ A gelu_slope(A x) {
  if constexpr (kForm == GeluForm::exact) {
    A cdf, pdf;
    normal_cdf_pdf(x, &cdf, &pdf);
    return madd(x, pdf, cdf);
  } else {
    constexpr A kCubic = static_cast<A>(3 * arguments::kGeluSlope * arguments::kGeluCubic);
    constexpr A kSlope = static_cast<A>(arguments::kGeluSlope);
    const A half = A(0.5);
    const A t = gelu_tanh_of_inner(x);
    const A inner_slope = madd(x * x, kCubic, kSlope);
    const A tanh_slope = madd(-t, t, A(1));
    return madd(half * x * tanh_slope, inner_slope, madd(half, t, half));
  }
}

}  // namespace sherd::cuda
