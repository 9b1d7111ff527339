// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/cpu/dropout.h>
#include <sherd/kernels/cuda/dropout.h>
#include <sherd/kernels/random.h>

#include "array_support.h"

using namespace sherd;
using test::Placed;

TEST_CASE_TEMPLATE("cuda dropout: drops what the CPU drops", T, double, float, bf16, f16) {
  // Where vectors begin with blocks of the random stream, where they do not, and beyond 32 bits.
  struct Case {
    std::uint64_t first_index;
    std::size_t in, out;
  };
  const Case cases[] = {{0, 0, 0},
                        {16, 0, 0},
                        {3, 0, 0},
                        {5, 3, 3},
                        {6, 2, 2},
                        {0, 1, 0},
                        {(std::uint64_t{1} << 34) + 8, 0, 0}};
  const RandomStream random(11, "dropout", "test", 7);
  test::in_all_orders([&] {
    for (const Case& c : cases) {
      for (const std::size_t n : {1, 6, 77, 3000}) {
        for (const double keep : {0.0, 0.3, 0.9, 1.0}) {
          CAPTURE(c.first_index);
          CAPTURE(c.in);
          CAPTURE(n);
          CAPTURE(keep);
          const auto size = static_cast<std::int64_t>(n);
          const auto values = test::hard_values<T>(n, "values");
          std::vector<T> expected(n);
          cpu::dropout<T>(1, size, values.data(), expected.data(), keep, random, c.first_index);
          const Placed<T> in(values, c.in), out(n, c.out);
          Stream& stream = test::DeviceArray<T>::stream();
          cuda::dropout<T>(stream, size, in.data(), out.data(), keep, random, c.first_index);
          CHECK(test::same_numbers(out.values(), expected));
          cuda::dropout<T>(stream, size, in.data(), in.data(), keep, random, c.first_index);
          CHECK(test::same_numbers(in.values(), expected));
        }
      }
    }
  });
}

TEST_CASE_TEMPLATE("cuda random: initial values have the bits of the CPU's", T, double, float, bf16,
                   f16) {
  constexpr DType kType = dtype_of<T>::value;
  constexpr std::int64_t n = (1 << 20) + 77;  // more than goes over at a time
  const RandomStream stream(3, "init", "weight");
  Context cpu_context;
  const auto fill_all = [&](Context& context) {
    std::vector<std::vector<T>> all;
    const Tensor x = Tensor::zeros(context, {n}, kType);
    const std::uint64_t version = x.storage().version();
    const auto take = [&] { all.push_back(x.to_vector<T>()); };
    fill_uniform(x, -2, 3, stream, 5);
    CHECK(x.storage().version() > version);
    take();
    fill_normal(x, 1, 2, stream);
    take();
    fill_truncated_normal(x, 0, 0.02, -0.03, 0.03, stream, 1);
    take();
    return all;
  };
  const auto expected = fill_all(cpu_context), values = fill_all(test::device_context());
  for (std::size_t i = 0; i < expected.size(); ++i)
    CHECK(test::same_numbers(values[i], expected[i]));
}
