// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/cpu/gelu.h>

#include "cpu_kernel_test.h"

using namespace sherd;
using namespace sherd::cpu;
using namespace sherd::cpu::test;

namespace {

template <typename S>
S plain_gelu(GeluForm form, S x) {
  if (form == GeluForm::exact)
    return x * S(0.5) * (S(1) + std::erf(x * S(0.70710678118654752440L)));
  const S inner = S(0.79788456080286535588L) * (x + S(0.044715L) * x * x * x);
  return S(0.5) * x * (S(1) + std::tanh(inner));
}

template <typename S>
S plain_slope(GeluForm form, S x) {
  if (form == GeluForm::exact) {
    const S cdf = S(0.5) * (S(1) + std::erf(x * S(0.70710678118654752440L)));
    return cdf + x * S(0.39894228040143267794L) * std::exp(S(-0.5) * x * x);
  }
  const S slope = S(0.79788456080286535588L);
  const S t = std::tanh(slope * (x + S(0.044715L) * x * x * x));
  return S(0.5) * (S(1) + t) +
         S(0.5) * x * (S(1) - t * t) * slope * (S(1) + S(3 * 0.044715L) * x * x);
}

}  // namespace

TEST_CASE_TEMPLATE("cpu gelu: forward and backward against fp64", T, double, float, bf16, f16) {
  using A = acc_t<T>;
  for (const GeluForm form : {GeluForm::exact, GeluForm::tanh}) {
    for (const std::int64_t n : kSizes) {
      CAPTURE(n);
      const auto x = random_values<T>(n, 1, 2), grad = random_values<T>(n, 2);
      std::vector<double> exact, exact_grad;
      std::vector<T> plain, plain_grad;
      for (std::size_t i = 0; i < x.size(); ++i) {
        const long double v = to_double(x[i]), g = to_double(grad[i]);
        exact.push_back(static_cast<double>(plain_gelu<long double>(form, v)));
        exact_grad.push_back(static_cast<double>(g * plain_slope<long double>(form, v)));
        plain.push_back(T(plain_gelu<A>(form, static_cast<A>(x[i]))));
        plain_grad.push_back(
            T(static_cast<A>(grad[i]) * plain_slope<A>(form, static_cast<A>(x[i]))));
      }
      Guarded<T> out(n);
      gelu_forward<T>(1, n, form, x.data(), out.data());
      check_as_good_as(out.values(), exact, plain, 2);
      gelu_backward<T>(1, n, form, x.data(), grad.data(), out.data());
      check_as_good_as(out.values(), exact_grad, plain_grad, 3);
    }
  }
}

TEST_CASE_TEMPLATE("cpu gelu: far from zero", T, float, double) {
  const std::vector<T> x = {T(-1000), T(-40), T(40), T(1000), std::numeric_limits<T>::quiet_NaN()};
  const std::vector<T> ones(5, T(1));
  for (const GeluForm form : {GeluForm::exact, GeluForm::tanh}) {
    std::vector<T> out(5), slope(5);
    gelu_forward<T>(1, 5, form, x.data(), out.data());
    gelu_backward<T>(1, 5, form, x.data(), ones.data(), slope.data());
    for (std::size_t i = 0; i < 2; ++i) {
      CHECK(std::abs(out[i]) < T(1e-30));
      CHECK(std::abs(slope[i]) < T(1e-30));
      CHECK(out[i + 2] == x[i + 2]);
      CHECK(slope[i + 2] == T(1));
    }
    CHECK(std::isnan(out[4]));
    CHECK(std::isnan(slope[4]));
  }
}

TEST_CASE_TEMPLATE("cpu gelu: same bits wherever cut, on any number of threads", T, double, float,
                   bf16, f16) {
  constexpr std::int64_t kMany = 20011;
  const auto x = random_values<T>(kMany, 3, 2), grad = random_values<T>(kMany, 4);
  for (const GeluForm form : {GeluForm::exact, GeluForm::tanh}) {
    check_every_cut<T>([&](std::int64_t i, std::int64_t n, T* out) {
      gelu_forward<T>(1, n, form, x.data() + i, out);
    });
    check_every_cut<T>([&](std::int64_t i, std::int64_t n, T* out) {
      gelu_backward<T>(1, n, form, x.data() + i, grad.data() + i, out);
    });
    check_threads<T>(
        kMany, [&](int threads, T* out) { gelu_forward<T>(threads, kMany, form, x.data(), out); });
    check_threads<T>(kMany, [&](int threads, T* out) {
      gelu_backward<T>(threads, kMany, form, x.data(), grad.data(), out);
    });
  }
}
