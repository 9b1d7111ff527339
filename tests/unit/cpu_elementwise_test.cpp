// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/cpu/elementwise.h>

#include "cpu_kernel_test.h"

using namespace sherd;
using namespace sherd::cpu;
using namespace sherd::cpu::test;

#define ALL_TYPES double, float, bf16, f16

namespace {

// Applies a scalar function element by element: in the arithmetic type, rounded once.
template <typename T, typename F>
std::vector<T> each(const std::vector<T>& a, const std::vector<T>& b, const F& f) {
  std::vector<T> out;
  for (std::size_t i = 0; i < a.size(); ++i) {
    using A = acc_t<T>;
    out.push_back(T(f(static_cast<A>(a[i]), static_cast<A>(b[i]))));
  }
  return out;
}

constexpr std::int64_t kManyBlocks = 100003;

}  // namespace

TEST_CASE_TEMPLATE("cpu elementwise: arithmetic against scalar code", T, ALL_TYPES) {
  using A = acc_t<T>;
  for (const std::int64_t n : kSizes) {
    CAPTURE(n);
    const auto a = random_values<T>(n, 1), b = random_values<T>(n, 2);
    Guarded<T> out(n);
    add<T>(1, n, a.data(), b.data(), out.data());
    CHECK(same_bits(out.values(), each(a, b, [](A x, A y) { return x + y; })));
    scale<T>(1, n, a.data(), A(0.3), out.data());
    CHECK(same_bits(out.values(), each(a, b, [](A x, A) { return x * A(0.3); })));
    fill<T>(1, n, A(-0.0), out.data());
    CHECK(same_bits(out.values(), each(a, b, [](A, A) { return A(-0.0); })));

    Guarded<T> y(b);
    add_inplace<T>(1, n, a.data(), y.data());
    CHECK(same_bits(y.values(), each(a, b, [](A x, A z) { return x + z; })));
    Guarded<A> total(n);
    fill<A>(1, n, A(0.7), total.data());
    accumulate<T>(1, n, a.data(), total.data());
    std::vector<A> expected;
    for (const T x : a) expected.push_back(A(0.7) + static_cast<A>(x));
    CHECK(same_bits(total.values(), expected));
  }
}

TEST_CASE_TEMPLATE("cpu elementwise: relu", T, ALL_TYPES) {
  using A = acc_t<T>;
  for (const std::int64_t n : kSizes) {
    auto x = random_values<T>(n, 3);
    x[0] = T(A(0));
    const auto grad = random_values<T>(n, 4);
    Guarded<T> out(n);
    relu_forward<T>(1, n, x.data(), out.data());
    CHECK(same_bits(out.values(), each(x, x, [](A v, A) { return v > 0 ? v : A(0); })));
    relu_backward<T>(1, n, x.data(), grad.data(), out.data());
    CHECK(same_bits(out.values(), each(x, grad, [](A v, A g) { return v > 0 ? g : A(0); })));
  }
  // Neither pass hides a NaN, and a dead element lets no infinity through.
  const A nan = std::numeric_limits<A>::quiet_NaN(), inf = std::numeric_limits<A>::infinity();
  const std::vector<T> x = {T(nan), T(A(-1)), T(inf), T(-inf)};
  const std::vector<T> grad = {T(A(2)), T(inf), T(A(3)), T(nan)};
  Guarded<T> out(4);
  relu_forward<T>(1, 4, x.data(), out.data());
  CHECK(std::isnan(to_double(out.data()[0])));
  CHECK(to_double(out.data()[1]) == 0);
  CHECK(to_double(out.data()[2]) == static_cast<double>(inf));
  CHECK(to_double(out.data()[3]) == 0);
  relu_backward<T>(1, 4, x.data(), grad.data(), out.data());
  const double expected[] = {2, 0, 3, 0};
  for (int i = 0; i < 4; ++i) CHECK(to_double(out.data()[i]) == expected[i]);
}

TEST_CASE_TEMPLATE("cpu elementwise: rows with a factor each", T, ALL_TYPES) {
  using A = acc_t<T>;
  for (const auto& shape : {std::pair{1, 1}, {3, 17}, {5, 33}, {2, 40000}, {300, 7}, {0, 5}}) {
    const int rows = shape.first, cols = shape.second;
    CAPTURE(rows);
    CAPTURE(cols);
    const std::int64_t n = std::int64_t{rows} * cols;
    const auto a = random_values<T>(n, 5), b = random_values<T>(n, 6);
    std::vector<A> factors;
    for (int r = 0; r < rows; ++r) factors.push_back(r % 3 == 0 ? A(0) : A(1) / A(0.9));
    std::vector<T> scaled;
    std::vector<double> exact;
    for (std::int64_t i = 0; i < n; ++i) {
      const auto at = static_cast<std::size_t>(i);
      const A factor = factors[static_cast<std::size_t>(i / cols)];
      scaled.push_back(T(static_cast<A>(b[at]) * factor));
      exact.push_back(to_double(a[at]) + static_cast<double>(factor) * to_double(b[at]));
    }
    Guarded<T> out(n);
    scale_rows<T>(2, rows, cols, b.data(), factors.data(), out.data());
    CHECK(same_bits(out.values(), scaled));
    add_scaled_rows<T>(2, rows, cols, a.data(), b.data(), factors.data(), out.data());
    check_as_good_as(out.values(), exact, converted<T>(exact));
  }
}

TEST_CASE_TEMPLATE("cpu elementwise: same bits wherever cut, on any number of threads", T,
                   ALL_TYPES) {
  using A = acc_t<T>;
  const auto a = random_values<T>(kManyBlocks, 7), b = random_values<T>(kManyBlocks, 8);
  const std::vector<A> factors(1, A(1.1));
  const auto both = [&](const auto& run) {
    check_every_cut<T>([&](std::int64_t begin, std::int64_t n, T* out) { run(1, begin, n, out); });
    check_threads<T>(kManyBlocks,
                     [&](int threads, T* out) { run(threads, std::int64_t{0}, kManyBlocks, out); });
  };
  both([&](int t, std::int64_t i, std::int64_t n, T* out) {
    add<T>(t, n, a.data() + i, b.data() + i, out);
  });
  both([&](int t, std::int64_t i, std::int64_t n, T* out) {
    scale<T>(t, n, a.data() + i, A(0.7), out);
  });
  both([&](int t, std::int64_t i, std::int64_t n, T* out) {
    relu_forward<T>(t, n, a.data() + i, out);
  });
  both([&](int t, std::int64_t i, std::int64_t n, T* out) {
    relu_backward<T>(t, n, a.data() + i, b.data() + i, out);
  });
  both([&](int t, std::int64_t i, std::int64_t n, T* out) {
    add_scaled_rows<T>(t, 1, n, a.data() + i, b.data() + i, factors.data(), out);
  });
  both([&](int t, std::int64_t i, std::int64_t n, T* out) {
    std::copy(b.begin() + i, b.begin() + i + n, out);
    add_inplace<T>(t, n, a.data() + i, out);
  });
}

namespace {

// The element type's numbers next to `value`, both sides.
template <typename T>
void check_nearest(double value, T got) {
  const double distance = std::abs(to_double(got) - value);
  for (const int step : {-1, 1}) {
    T neighbour = got;
    neighbour.bits = static_cast<std::uint16_t>(neighbour.bits + step);
    const double other = std::abs(to_double(neighbour) - value);
    CHECK((distance < other || (distance == other && got.bits % 2 == 0)));
  }
}

template <typename From, typename To>
void check_cast() {
  constexpr std::int64_t n = 1000;
  auto in = random_values<From>(n, 9);
  Guarded<To> out(n);
  cast<From, To>(1, n, in.data(), out.data());
  const auto values = out.values();
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double exact = to_double(in[i]);
    if constexpr (sizeof(To) >= sizeof(From)) {
      if constexpr (!(std::is_same_v<From, bf16> && std::is_same_v<To, f16>)&&!(
                        std::is_same_v<From, f16> && std::is_same_v<To, bf16>)) {
        CHECK(to_double(values[i]) == exact);
      }
    } else {
      CHECK(to_double(values[i]) == to_double(from_double<To>(exact)));
    }
  }
  check_every_cut<To>([&](std::int64_t begin, std::int64_t count, To* to) {
    cast<From, To>(1, count, in.data() + begin, to);
  });
}

template <typename From>
void check_casts_from() {
  check_cast<From, double>();
  check_cast<From, float>();
  check_cast<From, bf16>();
  check_cast<From, f16>();
}

// fp64 numbers a hair beside a tie, which rounding by way of fp32 would take for the tie itself.
template <typename T>
void check_rounds_once(double ulp_at_one) {
  std::vector<double> in;
  for (int k = 0; k < 40; ++k) {
    for (const double hair : {-0x1p-40, 0x1p-40, 0.0, 0x1p-30, -0x1p-22}) {
      for (const double sign : {-1.0, 1.0})
        in.push_back(sign * (1 + (k + 0.5) * ulp_at_one + hair));
    }
  }
  std::vector<T> out(in.size());
  cast<double, T>(1, static_cast<std::int64_t>(in.size()), in.data(), out.data());
  for (std::size_t i = 0; i < in.size(); ++i) check_nearest(in[i], out[i]);
}

}  // namespace

TEST_CASE("cpu elementwise: casts between all floating types") {
  check_casts_from<double>();
  check_casts_from<float>();
  check_casts_from<bf16>();
  check_casts_from<f16>();
  check_rounds_once<bf16>(0x1p-7);
  check_rounds_once<f16>(0x1p-10);
}

TEST_CASE("cpu elementwise: casts of special values") {
  const double inf = std::numeric_limits<double>::infinity();
  const std::vector<double> in = {inf,    -inf,    1e300, -1e300, 0.0,     -0.0,
                                  1e-320, -1e-320, 65520, 65519,  0x1p-25, 0x1.8p-25};
  std::vector<float> single(in.size());
  std::vector<bf16> brain(in.size());
  std::vector<f16> half(in.size());
  const auto n = static_cast<std::int64_t>(in.size());
  cast<double, float>(1, n, in.data(), single.data());
  cast<double, bf16>(1, n, in.data(), brain.data());
  cast<double, f16>(1, n, in.data(), half.data());
  for (std::size_t i = 0; i < 8; ++i) {
    const float expected = static_cast<float>(in[i]);
    CHECK(single[i] == expected);
    if (i < 6) CHECK(static_cast<float>(brain[i]) == expected);
    if (i < 6) CHECK(static_cast<float>(half[i]) == expected);
    CHECK(std::signbit(static_cast<float>(brain[i])) == std::signbit(in[i]));
    CHECK(std::signbit(static_cast<float>(half[i])) == std::signbit(in[i]));
  }
  CHECK(std::isinf(static_cast<float>(half[8])));
  CHECK(static_cast<float>(half[9]) == 65504.f);
  CHECK(static_cast<float>(half[10]) == 0.f);  // a tie between 0 and the least subnormal
  CHECK(static_cast<float>(half[11]) == 0x1p-24f);

  const double nan = std::numeric_limits<double>::quiet_NaN();
  cast<double, bf16>(1, 1, &nan, brain.data());
  cast<double, f16>(1, 1, &nan, half.data());
  CHECK(std::isnan(static_cast<float>(brain[0])));
  CHECK(std::isnan(static_cast<float>(half[0])));
}

TEST_CASE("cpu elementwise: all 16-bit numbers survive the way to fp32 and back") {
  std::vector<bf16> brain(65536), brain_back(65536);
  std::vector<f16> half(65536), half_back(65536);
  for (std::size_t i = 0; i < 65536; ++i) {
    brain[i].bits = half[i].bits = static_cast<std::uint16_t>(i);
  }
  std::vector<float> single(65536);
  cast<bf16, float>(2, 65536, brain.data(), single.data());
  cast<float, bf16>(2, 65536, single.data(), brain_back.data());
  for (std::size_t i = 0; i < 65536; ++i) {
    if (std::isnan(single[i])) continue;
    CHECK(single[i] == static_cast<float>(brain[i]));
    CHECK(brain_back[i].bits == brain[i].bits);
  }
  cast<f16, float>(2, 65536, half.data(), single.data());
  cast<float, f16>(2, 65536, single.data(), half_back.data());
  for (std::size_t i = 0; i < 65536; ++i) {
    if (std::isnan(single[i])) continue;
    CHECK(single[i] == static_cast<float>(half[i]));
    CHECK(half_back[i].bits == half[i].bits);
  }
}

// Vectors of neighbours and vectors of strangers: the processor's conversion is taken for a vector
// without subnormal numbers.
TEST_CASE("cpu elementwise: fp32 to bf16 has the bits of bf16's own rounding, NaN and all") {
  constexpr std::uint32_t kLower[] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff};
  for (const std::uint32_t stride : {1u, 40503u}) {
    std::vector<float> in;
    for (const std::uint32_t lower : kLower) {
      for (std::uint32_t i = 0; i < 65536; ++i) {
        in.push_back(std::bit_cast<float>((i * stride % 65536) << 16 | lower));
      }
    }
    std::vector<bf16> out(in.size());
    cast<float, bf16>(2, static_cast<std::int64_t>(in.size()), in.data(), out.data());
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < in.size(); ++i) wrong += out[i].bits != bf16(in[i]).bits;
    CHECK(wrong == 0);
  }
}

TEST_CASE_TEMPLATE("cpu elementwise: casts from bytes", T, ALL_TYPES) {
  std::vector<std::uint8_t> bytes(256);
  for (std::size_t i = 0; i < 256; ++i) bytes[i] = static_cast<std::uint8_t>(i);
  Guarded<T> out(256);
  cast<std::uint8_t, T>(1, 256, bytes.data(), out.data());
  const auto values = out.values();
  for (std::size_t i = 0; i < 256; ++i) {
    CHECK(to_double(values[i]) == to_double(from_double<T>(static_cast<double>(i))));
  }
}
