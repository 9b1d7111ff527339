// SPDX-License-Identifier: Apache-2.0
// Reductions on a GPU to one number: sums against fp64 (a GPU adds in another tree), the rest bit
// for bit as on the processor.
#include <sherd/kernels/cpu/reduce.h>
#include <sherd/kernels/cuda/reduce.h>
#include <sherd/kernels/reduce.h>

#include "row_support.h"

#include <bit>
#include <cstring>
#include <limits>
#include <random>

using namespace sherd;
using namespace sherd::test;
using arguments::acc_t;

namespace {

constexpr std::size_t kManySizes[] = {0,    1,    2,    15,   31,   33,    257,  1000,
                                      1023, 1025, 8191, 8192, 8193, 20001, 70001};

template <typename T>
ExactSum squares_on_cpu(const std::vector<T>& values) {
  ExactSum sum;
  sum.add_squares(values.data(), static_cast<std::int64_t>(values.size()));
  return sum;
}

template <typename T>
ExactSum::Words square_words(const std::vector<T>& values, std::size_t shift = 0) {
  const Placed<T> x(values, shift);
  const DeviceArray<std::int64_t> words(std::vector<std::int64_t>(ExactSum::kWords, 0));
  cuda::add_square_words<T>(device_stream(), static_cast<std::int64_t>(values.size()), x.data(),
                            words.data());
  ExactSum::Words result;
  std::ranges::copy(words.values(), result.begin());
  return ExactSum::from_words(result).words();
}

template <typename T>
void check_squares(const std::vector<T>& values) {
  const ExactSum::Words expected = squares_on_cpu(values).words();
  CHECK(square_words(values) == expected);
  CHECK(square_words(values, 1) == expected);
}

// Any bits at all: every exponent, subnormals, infinities and NaNs.
template <typename T>
std::vector<T> random_bits(std::size_t count, unsigned seed) {
  using Bits = std::conditional_t<sizeof(T) == 8, std::uint64_t,
                                  std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint16_t>>;
  std::mt19937_64 generator(seed);
  std::vector<T> values(count);
  for (T& value : values) value = std::bit_cast<T>(static_cast<Bits>(generator()));
  return values;
}

template <typename T>
bool is_finite(T value) {
  return std::isfinite(to_double(value));
}

}  // namespace

TEST_CASE_TEMPLATE("device reduce: sum", T, ALL_TYPES) {
  using A = acc_t<T>;
  for (const std::size_t n : kManySizes) {
    CAPTURE(n);
    const auto in = random_values<T>(n, "in", 1, 0.1);
    long double exact = 0;
    double partial = 0;
    A plain = 0;
    for (const T v : in) {
      exact += static_cast<long double>(to_double(v));
      plain += static_cast<A>(v);
      partial = std::max(partial, std::abs(static_cast<double>(plain)));
    }
    std::vector<A> first;
    for (const std::size_t shift : {0, 1}) {
      in_all_orders([&] {
        const Placed<T> from(in, shift);
        const Placed<A> out(1);
        const Placed<A> workspace(cuda::reduce_workspace_bytes<T>(static_cast<std::int64_t>(n)) /
                                  sizeof(A));
        cuda::sum<T>(device_stream(), static_cast<std::int64_t>(n), from.data(), A(0.5), out.data(),
                     workspace.data());
        if (first.empty()) first = out.values();
        CHECK(same_bits(out.values(), first));
      });
    }
    first[0] *= A(2);
    check_as_good_as(first, {static_cast<double>(exact)}, std::vector<A>{plain}, 2, partial);
  }
}

TEST_CASE_TEMPLATE("device reduce: what is not finite is found, wherever it is", T, ALL_TYPES) {
  const T nan(std::numeric_limits<float>::quiet_NaN()), inf(std::numeric_limits<float>::infinity());
  for (const std::size_t n : kManySizes) {
    CAPTURE(n);
    auto in = random_values<T>(n, "in");
    const auto found = [&](std::size_t shift) {
      const Placed<T> from(in, shift);
      const DeviceArray<std::int64_t> index(1);
      cuda::first_non_finite<T>(device_stream(), static_cast<std::int64_t>(n), from.data(),
                                index.data());
      return index.values()[0];
    };
    CHECK(found(0) == -1);
    CHECK(found(1) == -1);
    const auto size = static_cast<std::int64_t>(n);
    for (std::int64_t at = size - 1; at >= 0; at -= 1 + size / 5) {
      in[static_cast<std::size_t>(at)] = at % 2 == 0 ? nan : inf;
      in_all_orders([&] {
        CHECK(found(0) == at);
        CHECK(found(1) == at);
      });
    }
  }
}

TEST_CASE_TEMPLATE("device reduce: exact sums of squares of ordinary numbers", T, ALL_TYPES) {
  for (const std::size_t n : kManySizes) {
    CAPTURE(n);
    check_squares(random_values<T>(n, "in", 0.01));
  }
  const auto values = random_values<T>(5000, "in");
  const ExactSum::Words expected = squares_on_cpu(values).words();
  in_all_orders([&] { CHECK(square_words(values) == expected); });
}

TEST_CASE_TEMPLATE("device reduce: exact sums of squares of any bits", T, ALL_TYPES) {
  for (const unsigned seed : {1u, 2u, 3u}) {
    auto values = random_bits<T>(4001, seed);
    std::memset(static_cast<void*>(&values[99]), 0xff,
                sizeof(T));  // the largest bits of all: a NaN
    check_squares(values);
    CHECK(squares_on_cpu(values).non_finite() > 0);
    std::erase_if(values, [](T value) { return !is_finite(value); });
    check_squares(values);
    const ExactSum::Words expected = squares_on_cpu(values).words();
    in_all_orders([&] { CHECK(square_words(values) == expected); });
  }
}

// Numbers just inside, astride and below the slices of a chunk whose largest is given.
TEST_CASE_TEMPLATE("device reduce: exact sums of squares around the slices' ends", T, ALL_TYPES) {
  std::mt19937_64 generator(5);
  std::uniform_real_distribution<double> mantissa(1.0, 2.0);
  const double highest =
      to_double(std::numeric_limits<float>::max()) * (sizeof(T) == 2 ? 1e-34 : 1);
  for (const double largest : {1.0, 1.75, 3e-5, highest}) {
    for (int step = 1; step < 60; ++step) {
      std::vector<T> values(1500, cpu::test::from_double<T>(0));
      for (std::size_t i = 0; i < values.size(); i += 7)
        values[i] = cpu::test::from_double<T>(std::ldexp(mantissa(generator) * largest / 2, -step));
      values[700] = cpu::test::from_double<T>(largest);
      CAPTURE(largest);
      CAPTURE(step);
      check_squares(values);
    }
  }
}

TEST_CASE("device reduce: exact sums of squares at the ends of fp64 and fp32") {
  const double tiny = std::numeric_limits<double>::denorm_min();
  const double huge = std::numeric_limits<double>::max();
  check_squares(std::vector<double>(3000, 0x1p511));  // squares add up beyond fp64
  check_squares(std::vector<double>(100, huge));      // squares overflow
  check_squares(std::vector<double>{0x1p-537, 0x1p-538, 0x1.8p-530, tiny, 0.0, -0.0});
  check_squares(std::vector<double>{0x1p-537, 1e150, -3e100, 0x1.fffffffffffffp-500, 7.0, huge});
  check_squares(std::vector<float>(2000, std::numeric_limits<float>::denorm_min()));
  check_squares(std::vector<float>{std::numeric_limits<float>::max(), 0x1p-149f, 0x1p-126f, -3.f});
  std::vector<float> mixed(5000, 1e-20f);  // all below the slices, but for one
  mixed[17] = 1e30f;
  check_squares(mixed);
  check_squares(std::vector<float>(1 << 15, 0x1.fffffep0f));  // the slices as full as they get
}

TEST_CASE("device reduce: words take several arrays, and go on from a sum") {
  const auto a = random_values<float>(3001, "a"), b = random_values<float>(70, "b", 1e-9);
  ExactSum expected;
  expected.add(-12345.678);
  const ExactSum::Words start = expected.words();
  const DeviceArray<std::int64_t> words(std::vector<std::int64_t>(start.begin(), start.end()));
  for (const auto* values : {&a, &b, &a}) {
    const DeviceArray<float> x(*values);
    const auto n = static_cast<std::int64_t>(values->size());
    cuda::add_square_words<float>(device_stream(), n, x.data(), words.data());
    expected.add_squares(values->data(), n);
  }
  ExactSum::Words result;
  std::ranges::copy(words.values(), result.begin());
  CHECK(ExactSum::from_words(result).words() == expected.words());
  CHECK(ExactSum::from_words(result).value() == expected.value());
}

TEST_CASE("device reduce: tensors, as on the processor and as planned") {
  auto values = random_values<float>(30011, "values");
  const auto all_of = [&](Context& context) {
    const Tensor x = Tensor::from_host<float>(context, {30011}, values);
    const Tensor total = sum(x, 0.25);
    ExactSum squares;
    squares.add(3.0);
    add_sum_of_squares(x, squares);
    const std::int64_t index = first_non_finite(x);
    return std::tuple{context.is_meta() ? 0.0 : total.item(), squares.words(), index};
  };
  for (const float last : {1.f, std::numeric_limits<float>::infinity()}) {
    values.back() = last;
    Context host;
    const auto expected = all_of(host), result = all_of(device_context());
    if (last == 1.f) {
      CHECK(std::get<0>(result) == doctest::Approx(std::get<0>(expected)).epsilon(1e-5));
    }
    CHECK(std::get<1>(result) == std::get<1>(expected));
    CHECK(std::get<2>(result) == std::get<2>(expected));
  }
  check_planned_peak(all_of);
}

TEST_CASE("device reduce: what lies in the host's pool is reduced there") {
  const Tensor x = Tensor::zeros(device_context(), {100}, DType::f32,
                                 MemoryCategory::optimizer_state, MemoryPool::host);
  x.data<float>()[3] = 5.f;
  x.data<float>()[90] = std::numeric_limits<float>::quiet_NaN();
  ExactSum squares;
  add_sum_of_squares(x.slice(0, 0, 50), squares);
  CHECK(squares.value() == 25.0);
  CHECK(first_non_finite(x) == 90);
}
