// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/cpu/elementwise.h>
#include <sherd/kernels/cuda/elementwise.h>

#include "array_support.h"

using namespace sherd;
using arguments::acc_t;
using test::hard_values;
using test::Placed;
using test::same_numbers;

namespace {

// Several blocks of every type's vectors, and less than one vector.
constexpr std::size_t kSizes[] = {0, 1, 7, 16, 250, 9001};

// Where inputs and output begin: aligned; cut at the same place; never aligned together.
struct Offsets {
  std::size_t a, b, out;
};
constexpr Offsets kOffsets[] = {{0, 0, 0}, {3, 3, 3}, {1, 0, 0}, {0, 1, 0}, {0, 0, 1}};

template <typename T, typename Body>
void for_each_case(const Body& body) {
  test::in_all_orders([&] {
    for (const std::size_t n : kSizes) {
      for (const Offsets& offsets : kOffsets) {
        CAPTURE(n);
        CAPTURE(offsets.a);
        CAPTURE(offsets.b);
        CAPTURE(offsets.out);
        body(n, offsets);
      }
    }
  });
}

template <typename T, typename A, typename B, typename Out>
struct Operation {
  void (*cpu)(std::int64_t n, const A* a, const B* b, Out* out);
  void (*cuda)(Stream& stream, std::int64_t n, const A* a, const B* b, Out* out);
};

template <typename T, typename A, typename B, typename Out>
void check(const Operation<T, A, B, Out>& operation, bool in_place = false) {
  for_each_case<T>([&](std::size_t n, const Offsets& offsets) {
    const auto a = hard_values<A>(n, "a", 2);
    const auto start = hard_values<Out>(n, "out");
    const auto b = hard_values<B>(n, "b", 3);
    std::vector<Out> expected = start;
    const auto size = static_cast<std::int64_t>(n);
    operation.cpu(size, a.data(), b.data(), expected.data());
    const Placed<A> device_a(a, offsets.a);
    const Placed<B> device_b(b, offsets.b);
    const Placed<Out> out(start, offsets.out);
    operation.cuda(test::DeviceArray<T>::stream(), size, device_a.data(), device_b.data(),
                   out.data());
    CHECK(same_numbers(out.values(), expected));
    if (!in_place) return;
    if constexpr (std::is_same_v<A, Out>) {
      operation.cuda(test::DeviceArray<T>::stream(), size, device_a.data(), device_b.data(),
                     device_a.data());
      CHECK(same_numbers(device_a.values(), expected));
    }
  });
}

}  // namespace

TEST_CASE_TEMPLATE("cuda elementwise: the bits of the CPU's, at any address", T, double, float,
                   bf16, f16) {
  using A = acc_t<T>;
  using Plain = Operation<T, T, T, T>;
  check<T, T, T, T>(
      Plain{[](auto n, auto, auto, auto out) { cpu::fill<T>(1, n, A(1.7), out); },
            [](auto& s, auto n, auto, auto, auto out) { cuda::fill<T>(s, n, A(1.7), out); }});
  check<T, T, T, T>(
      Plain{[](auto n, auto a, auto b, auto out) { cpu::add<T>(1, n, a, b, out); },
            [](auto& s, auto n, auto a, auto b, auto out) { cuda::add<T>(s, n, a, b, out); }},
      true);
  check<T, T, T, T>(
      Plain{[](auto n, auto a, auto, auto out) { cpu::add_inplace<T>(1, n, a, out); },
            [](auto& s, auto n, auto a, auto, auto out) { cuda::add_inplace<T>(s, n, a, out); }});
  check<T, T, T, A>(Operation<T, T, T, A>{
      [](auto n, auto a, auto, auto out) { cpu::accumulate<T>(1, n, a, out); },
      [](auto& s, auto n, auto a, auto, auto out) { cuda::accumulate<T>(s, n, a, out); }});
  check<T, T, T, T>(
      Plain{
          [](auto n, auto a, auto, auto out) { cpu::scale<T>(1, n, a, A(-0.37), out); },
          [](auto& s, auto n, auto a, auto, auto out) { cuda::scale<T>(s, n, a, A(-0.37), out); }},
      true);
  check<T, T, T, T>(
      Plain{[](auto n, auto a, auto, auto out) { cpu::relu_forward<T>(1, n, a, out); },
            [](auto& s, auto n, auto a, auto, auto out) { cuda::relu_forward<T>(s, n, a, out); }},
      true);
  check<T, T, T, T>(
      Plain{[](auto n, auto a, auto b, auto out) { cpu::relu_backward<T>(1, n, a, b, out); },
            [](auto& s, auto n, auto a, auto b, auto out) {
              cuda::relu_backward<T>(s, n, a, b, out);
            }},
      true);
}

TEST_CASE_TEMPLATE("cuda elementwise: rows with a factor each", T, double, float, bf16, f16) {
  using A = acc_t<T>;
  constexpr std::int64_t kShapes[][2] = {{1, 1}, {3, 7}, {5, 264}, {2, 2500}, {300, 8}, {0, 4}};
  test::in_all_orders([&] {
    for (const auto& shape : kShapes) {
      const std::int64_t rows = shape[0], cols = shape[1];
      for (const Offsets& offsets : kOffsets) {
        CAPTURE(rows);
        CAPTURE(cols);
        const auto n = static_cast<std::size_t>(rows * cols);
        const auto a = hard_values<T>(n, "a"), b = hard_values<T>(n, "b");
        std::vector<A> factors = test::random_values<A>(static_cast<std::size_t>(rows), "factor");
        if (rows > 1) factors[1] = 0;
        const Placed<T> device_a(a, offsets.a), device_b(b, offsets.b), out(n, offsets.out);
        const Placed<A> device_factors(factors, 0);
        Stream& stream = test::DeviceArray<T>::stream();
        std::vector<T> expected(n);
        cpu::scale_rows<T>(1, rows, cols, a.data(), factors.data(), expected.data());
        cuda::scale_rows<T>(stream, rows, cols, device_a.data(), device_factors.data(), out.data());
        CHECK(same_numbers(out.values(), expected));
        cpu::add_scaled_rows<T>(1, rows, cols, a.data(), b.data(), factors.data(), expected.data());
        cuda::add_scaled_rows<T>(stream, rows, cols, device_a.data(), device_b.data(),
                                 device_factors.data(), out.data());
        CHECK(test::like_cpu(out.values(), expected));
      }
    }
  });
}

namespace {

// Numbers that lie on and beside ties of the narrower types, and beyond their range.
template <typename From>
std::vector<From> numbers_to_round(std::size_t n) {
  std::vector<From> values = hard_values<From>(n, "numbers", 1);
  const RandomStream exponents(3, "test", "exponents");
  for (std::size_t i = 40; i < n; ++i) {
    const double bits = i % 3 == 0 ? 8 : i % 3 == 1 ? 11 : 24;
    const double tie = std::ldexp(1.0, -static_cast<int>(bits));
    const double off = std::ldexp(static_cast<double>(exponents.below(i, 3)) - 1, -45);
    const auto exponent = static_cast<int>(exponents.below(2 * i + n, 60)) - 40;
    values[i] = test::number<From>(std::ldexp(1 + tie + off, exponent));
  }
  return values;
}
template <>
std::vector<std::uint8_t> numbers_to_round(std::size_t n) {
  std::vector<std::uint8_t> values(n);
  for (std::size_t i = 0; i < n; ++i) values[i] = static_cast<std::uint8_t>(i * 37);
  return values;
}

template <typename From, typename To>
void check_cast() {
  for (const std::size_t n : {std::size_t{5}, std::size_t{9001}}) {
    const std::vector<From> from = numbers_to_round<From>(n);
    std::vector<To> expected(n);
    const auto size = static_cast<std::int64_t>(n);
    cpu::cast<From, To>(1, size, from.data(), expected.data());
    for (const Offsets& offsets : kOffsets) {
      CAPTURE(n);
      CAPTURE(offsets.a);
      CAPTURE(offsets.out);
      const Placed<From> in(from, offsets.a);
      const Placed<To> out(n, offsets.out);
      cuda::cast<From, To>(test::DeviceArray<From>::stream(), size, in.data(), out.data());
      CHECK(same_numbers(out.values(), expected));
    }
  }
}

}  // namespace

TEST_CASE_TEMPLATE("cuda elementwise: casts round once, as the CPU's", From, double, float, bf16,
                   f16, std::uint8_t) {
  test::in_all_orders([] {
    check_cast<From, double>();
    check_cast<From, float>();
    check_cast<From, bf16>();
    check_cast<From, f16>();
  });
}
