// SPDX-License-Identifier: Apache-2.0
// kernels/cpu/math.h against the C library in fp64; conversions and lane sums of simd.h, and
// parallel.h. Each sweep walks fp32 numbers by their bit pattern, so it covers every binade; the
// stride is odd so that all low bits occur.
#include <doctest/doctest.h>
#include <sherd/kernels/cpu/math.h>
#include <sherd/kernels/cpu/parallel.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

namespace {

using namespace sherd::cpu;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Distance in units of the last place of the exact value (of the smallest subnormal near zero).
double ulps(float got, double want) {
  if (std::isinf(got)) got = std::numeric_limits<float>::max();
  const auto rounded = static_cast<float>(std::fabs(want));
  const double exponent = rounded < 1.17549435e-38f ? -126 : std::ilogb(rounded);
  return std::fabs(static_cast<double>(got) - want) /
         std::ldexp(1.0, static_cast<int>(exponent) - 23);
}

// Calls visit(x, f(x)) for every stride-th fp32 number with |x| in [low, high], both signs.
template <typename F, typename Visit>
void sweep(float low, float high, const F& f, const Visit& visit) {
  constexpr unsigned kHalf = kLanes<float> / 2;
  const auto last = std::bit_cast<std::uint32_t>(high);
  for (auto bits = std::bit_cast<std::uint32_t>(low); bits <= last; bits += 4973u * kHalf) {
    float x[kLanes<float>], y[kLanes<float>];
    for (unsigned i = 0; i < kHalf; ++i) {
      x[i] = std::min(high, std::bit_cast<float>(bits + 4973u * i));
      x[i + kHalf] = -x[i];
    }
    store<float>(y, f(load<float>(x)));
    for (int i = 0; i < kLanes<float>; ++i) visit(x[i], y[i]);
  }
}

template <typename F>
float one(const F& f, float x) {
  return f(broadcast<float>(x))[3];
}

const auto vexp32 = [](VecF32 x) { return vexp(x); };
const auto vtanh32 = [](VecF32 x) { return vtanh(x); };
const auto verf32 = [](VecF32 x) { return verf(x); };

}  // namespace

TEST_CASE("math: exp") {
  double worst = 0;
  sweep(0.f, 88.7228f, vexp32, [&](float x, float y) {
    worst = std::max(worst, ulps(y, std::exp(static_cast<double>(x))));
  });
  CHECK(worst < 1.0);
  // Subnormal results are rounded once more.
  worst = 0;
  sweep(87.f, 110.f, vexp32, [&](float x, float y) {
    if (x < 0) worst = std::max(worst, ulps(y, std::exp(static_cast<double>(x))));
  });
  CHECK(worst < 1.0);

  CHECK(one(vexp32, 0.f) == 1.f);
  CHECK(one(vexp32, -0.f) == 1.f);
  CHECK(one(vexp32, 88.73f) == kInf);
  CHECK(one(vexp32, 1e30f) == kInf);
  CHECK(one(vexp32, kInf) == kInf);
  CHECK(one(vexp32, -103.f) > 0.f);
  CHECK(one(vexp32, -104.f) == 0.f);
  CHECK(one(vexp32, -1e30f) == 0.f);
  CHECK(one(vexp32, -kInf) == 0.f);
  CHECK(std::isnan(one(vexp32, kNan)));
}

TEST_CASE("math: tanh") {
  double worst = 0;
  sweep(0.f, 20.f, vtanh32, [&](float x, float y) {
    worst = std::max(worst, ulps(y, std::tanh(static_cast<double>(x))));
  });
  CHECK(worst < 2.0);
  CHECK(one(vtanh32, kInf) == 1.f);
  CHECK(one(vtanh32, -kInf) == -1.f);
  CHECK(std::signbit(one(vtanh32, -0.f)));
  CHECK(std::isnan(one(vtanh32, kNan)));
}

TEST_CASE("math: erf") {
  double worst = 0;
  sweep(0.f, 12.f, verf32, [&](float x, float y) {
    worst = std::max(worst, ulps(y, std::erf(static_cast<double>(x))));
  });
  CHECK(worst < 2.5);
  CHECK(one(verf32, kInf) == 1.f);
  CHECK(one(verf32, -kInf) == -1.f);
  CHECK(one(verf32, 1e30f) == 1.f);
  CHECK(std::signbit(one(verf32, -0.f)));
  CHECK(std::isnan(one(verf32, kNan)));
}

namespace {

VecF32 cdf_of(VecF32 x) {
  VecF32 cdf, pdf;
  normal_cdf_pdf(x, &cdf, &pdf);
  return cdf;
}
VecF32 pdf_of(VecF32 x) {
  VecF32 cdf, pdf;
  normal_cdf_pdf(x, &cdf, &pdf);
  return pdf;
}
double exact_cdf(double x) {
  return 0.5 * std::erfc(-x / std::sqrt(2.0));
}
double exact_pdf(double x) {
  return std::exp(-0.5 * x * x) / std::sqrt(2 * M_PI);
}

}  // namespace

TEST_CASE("math: normal distribution and exact GELU") {
  double worst_cdf = 0, worst_gelu = 0, worst_slope = 0;
  sweep(0.f, 20.f, cdf_of, [&](float x, float cdf) {
    const double scale = std::max(1.f, std::fabs(x)), exact = exact_cdf(x);
    const double slope = cdf + x * one(pdf_of, x), exact_slope = exact + x * exact_pdf(x);
    worst_cdf = std::max(worst_cdf, std::fabs(cdf - exact));
    worst_gelu = std::max(worst_gelu, std::fabs(x * cdf - x * exact) / scale);
    worst_slope = std::max(worst_slope, std::fabs(slope - exact_slope) / scale);
  });
  CHECK(worst_cdf < 2e-7);
  CHECK(worst_gelu < 1.2e-7);
  CHECK(worst_slope < 2.5e-7);

  // In the tails the results are small but still right: what is left is the rounding of x * x.
  double worst_tail = 0, worst_pdf = 0;
  sweep(0.f, 13.f, cdf_of, [&](float x, float cdf) {
    worst_tail = std::max(worst_tail, std::fabs(cdf / exact_cdf(x) - 1) / (1 + x * x / 2));
  });
  sweep(0.f, 13.f, pdf_of, [&](float x, float pdf) {
    worst_pdf = std::max(worst_pdf, std::fabs(pdf / exact_pdf(x) - 1) / (1 + x * x / 2));
  });
  CHECK(worst_tail < 4e-7);
  CHECK(worst_pdf < 2e-7);

  CHECK(one(cdf_of, 0.f) == doctest::Approx(0.5).epsilon(1e-7));
  CHECK(one(cdf_of, kInf) == 1.f);
  CHECK(one(cdf_of, -kInf) == 0.f);
  CHECK(one(cdf_of, 3e38f) == 1.f);
  CHECK(one(cdf_of, -3e38f) == 0.f);
  CHECK(one(pdf_of, kInf) == 0.f);
  CHECK(one(pdf_of, -3e38f) == 0.f);
  CHECK(std::isnan(one(cdf_of, kNan)));
  CHECK(std::isnan(one(pdf_of, kNan)));
}

TEST_CASE("math: fp64 is the C library") {
  VecF64 x;
  for (int i = 0; i < kLanes<double>; ++i) x[i] = -2.5 + 0.7 * i;
  VecF64 cdf, pdf;
  normal_cdf_pdf(x, &cdf, &pdf);
  const VecF64 exp = vexp(x), tanh = vtanh(x), erf = verf(x);
  const auto near = [](double got, double want) { return std::fabs(got - want) <= 1e-15; };
  for (int i = 0; i < kLanes<double>; ++i) {
    const double v = x[i];
    CHECK(near(exp[i] / std::exp(v), 1));
    CHECK(near(tanh[i], std::tanh(v)));
    CHECK(near(erf[i], std::erf(v)));
    CHECK(near(cdf[i], 0.5 * (1 + std::erf(v / std::sqrt(2.0)))));
    CHECK(near(pdf[i], std::exp(-v * v / 2) / std::sqrt(2 * M_PI)));
  }
}

TEST_CASE("math: a lane's bits depend on that lane alone") {
  VecF32 x;
  for (int i = 0; i < kLanes<float>; ++i) x[i] = -3.f + 0.43f * static_cast<float>(i);
  VecF32 cdf, pdf;
  normal_cdf_pdf(x, &cdf, &pdf);
  for (int i = 0; i < kLanes<float>; ++i) {
    VecF32 alone = broadcast<float>(kNan), alone_cdf, alone_pdf;
    alone[kLanes<float> - 1 - i] = x[i];
    normal_cdf_pdf(alone, &alone_cdf, &alone_pdf);
    const auto same = [i](VecF32 got, VecF32 want) {
      return got[kLanes<float> - 1 - i] == want[i];
    };
    CHECK(same(alone_cdf, cdf));
    CHECK(same(alone_pdf, pdf));
    CHECK(same(vexp(alone), vexp(x)));
    CHECK(same(vtanh(alone), vtanh(x)));
    CHECK(same(verf(alone), verf(x)));
  }
}

namespace {

// Every 16-bit pattern read as T, and every fp32 value near one written as T, equal T's own scalar
// conversions; part vectors touch no more than their count.
template <typename T>
void check_conversions() {
  constexpr int kCount = kLanes<T>;
  for (int base = 0; base < 0x10000; base += kCount) {
    T from[kCount], to[kCount];
    for (int i = 0; i < kCount; ++i) from[i].bits = static_cast<std::uint16_t>(base + i);
    const VecF32 v = load<T>(from);
    bool same = true;
    for (int i = 0; i < kCount; ++i) {
      const auto want = static_cast<float>(from[i]);
      same = same && (std::isnan(want) ? std::isnan(v[i]) : v[i] == want);
    }
    for (const int nudge : {0, 1, 0xfff, 0x1000, 0x1001, 0x7fff, 0x8000, 0x8001}) {
      VecF32 moved;
      for (int i = 0; i < kCount; ++i) {
        const float value = v[i];
        const auto bits = std::bit_cast<std::uint32_t>(value) + static_cast<unsigned>(nudge);
        moved[i] = std::isfinite(value) ? std::bit_cast<float>(bits) : value;
      }
      store<T>(to, moved);
      for (int i = 0; i < kCount; ++i) {
        const T want(static_cast<float>(moved[i]));
        const bool nan = std::isnan(moved[i]) && std::isnan(static_cast<float>(to[i]));
        same = same && (nan || to[i].bits == want.bits);
      }
    }
    CHECK(same);
  }
}

template <typename T>
void check_part_vectors() {
  T from[kLanes<T>], to[kLanes<T>];
  for (int count = 1; count <= kLanes<T>; ++count) {
    for (int i = 0; i < kLanes<T>; ++i) {
      from[i] = T(1.f + static_cast<float>(i));
      to[i] = T(-1.f);
    }
    const Vec<T> v = load_first<T>(from, count);
    store_first<T>(to, v + 1.f, count);
    bool right = true;
    for (int i = 0; i < kLanes<T>; ++i) {
      const auto element = static_cast<acc_t<T>>(i);
      right = right && v[i] == (i < count ? element + 1 : 0);
      right = right && static_cast<acc_t<T>>(to[i]) == (i < count ? element + 2 : -1);
    }
    CHECK(right);
  }
}

}  // namespace

TEST_CASE("simd: conversions are those of the scalar types") {
  check_conversions<sherd::bf16>();
  check_conversions<sherd::f16>();
}

TEST_CASE("simd: part vectors") {
  check_part_vectors<double>();
  check_part_vectors<float>();
  check_part_vectors<sherd::bf16>();
  check_part_vectors<sherd::f16>();
}

TEST_CASE("simd: lane sums add in one fixed tree") {
  float lane[kLanes<float>];
  for (int i = 0; i < kLanes<float>; ++i) {
    lane[i] = std::ldexp(1.f + 0.3f * static_cast<float>(i), (i * 7) % 13);
  }
  const VecF32 v = load<float>(lane);
  CHECK(horizontal_max<float>(v) == *std::max_element(lane, lane + kLanes<float>));
  CHECK(horizontal_max<float>(-v) == -1.f);
  for (int half = kLanes<float> / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  }
  CHECK(horizontal_sum<float>(v) == lane[0]);
}

TEST_CASE("simd: broadcast keeps the sign of zero") {
  CHECK(std::signbit(broadcast<float>(-0.f)[0]));
  CHECK(std::signbit(broadcast<double>(-0.0)[0]));
}

TEST_CASE("parallel_workers: every task once, a worker is one thread") {
  for (const int threads : {1, 2, 3, 7}) {
    for (const std::int64_t tasks : {0, 1, 5, 100}) {
      std::vector<int> runs(static_cast<std::size_t>(tasks));
      std::vector<std::int64_t> done(static_cast<std::size_t>(threads));  // unguarded on purpose
      parallel_workers(threads, tasks, [&](int worker, std::int64_t task) {
        ++runs[static_cast<std::size_t>(task)];
        ++done[static_cast<std::size_t>(worker)];
      });
      CHECK(std::all_of(runs.begin(), runs.end(), [](int count) { return count == 1; }));
      std::int64_t sum = 0;
      for (const std::int64_t count : done) sum += count;
      CHECK(sum == tasks);
    }
  }
}
