// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/cpu/reduce.h>

#include "cpu_kernel_test.h"

using namespace sherd;
using namespace sherd::cpu;
using namespace sherd::cpu::test;

#define ALL_TYPES double, float, bf16, f16

namespace {
constexpr std::int64_t kManySizes[] = {0,    1,    15,   16,    17,    33,    257,   1000,
                                       4095, 4096, 4097, 12289, 40000, 70001, 100003};
}

TEST_CASE_TEMPLATE("cpu reduce: sum and largest magnitude", T, ALL_TYPES) {
  using A = acc_t<T>;
  for (const std::int64_t n : kManySizes) {
    CAPTURE(n);
    const auto in = random_values<T>(n, 1, 1, 0.1);
    long double exact = 0;
    double partial = 0;
    A plain = 0;
    for (const T v : in) {
      exact += static_cast<long double>(to_double(v));
      plain += static_cast<A>(v);
      partial = std::max(partial, std::abs(static_cast<double>(plain)));
    }
    std::vector<A> workspace(reduce_workspace_bytes<T>(n) / sizeof(A));
    const A total = sum<T>(1, n, in.data(), workspace.data());
    const std::vector<double> reference = {static_cast<double>(exact)};
    check_as_good_as(std::vector<A>{total}, reference, std::vector<A>{plain}, 2, partial);
    for (int threads = 2; threads <= 3; ++threads) {
      CHECK(same_bits<A>({total}, {sum<T>(threads, n, in.data(), workspace.data())}));
    }
  }
}

TEST_CASE_TEMPLATE("cpu reduce: what is not finite is found, wherever it is", T, ALL_TYPES) {
  using A = acc_t<T>;
  const A nan = std::numeric_limits<A>::quiet_NaN(), inf = std::numeric_limits<A>::infinity();
  for (const std::int64_t n : kManySizes) {
    auto in = random_values<T>(n, 2);
    CHECK(first_non_finite<T>(1, n, in.data()) == -1);
    if (n == 0) continue;
    for (std::int64_t at = n - 1; at >= 0; at -= 1 + n / 7) {
      in[static_cast<std::size_t>(at)] = T(at % 2 == 0 ? nan : inf);
      for (int threads = 1; threads <= 3; ++threads) {
        CHECK(first_non_finite<T>(threads, n, in.data()) == at);
      }
      in[static_cast<std::size_t>(at)] = T(nan);
    }
  }
}
