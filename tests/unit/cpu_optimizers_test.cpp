// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/cpu/optimizers.h>

#include "cpu_kernel_test.h"

using namespace sherd;
using namespace sherd::cpu;
using namespace sherd::cpu::test;

namespace {

template <typename T>
AdamWArgs<T> adamw_args(int step) {
  AdamWArgs<T> a;
  a.scalars.lr = 3e-3;
  a.beta1 = 0.9;
  a.beta2 = 0.95;
  a.eps = 1e-8;
  a.weight_decay = 0.05;
  a.scalars.bias_correction1 = 1 - std::pow(0.9, step);
  a.scalars.sqrt_bias_correction2 = std::sqrt(1 - std::pow(0.95, step));
  a.scalars.grad_scale = 0.5;
  return a;
}

// torch.optim._functional's single-tensor AdamW, line by line, in S.
template <typename S>
void plain_adamw(const AdamWArgs<S>& a, S& p, S g, S& m, S& v) {
  g *= S(a.scalars.grad_scale);
  p *= S(1 - a.scalars.lr * a.weight_decay);
  m = m * S(a.beta1) + g * S(1 - a.beta1);
  v = v * S(a.beta2) + g * g * S(1 - a.beta2);
  const S denominator = std::sqrt(v) / S(a.scalars.sqrt_bias_correction2) + S(a.eps);
  p -= S(a.scalars.lr / a.scalars.bias_correction1) * m / denominator;
}

template <typename S>
void plain_sgd(const SgdArgs<S>& a, S& p, S g, S* buffer) {
  g *= S(a.grad_scale);
  if (a.weight_decay != 0) g += S(a.weight_decay) * p;
  if (buffer != nullptr) {
    *buffer = *buffer * S(a.momentum) + g;
    g = a.nesterov ? g + *buffer * S(a.momentum) : *buffer;
  }
  p -= S(a.lr) * g;
}

template <typename T>
SgdArgs<T> sgd_args(int variant) {
  SgdArgs<T> a;
  a.lr = 0.1;
  a.grad_scale = 0.25;
  a.weight_decay = variant % 2 == 0 ? 0 : 1e-2;
  a.momentum = variant / 2 == 0 ? 0 : 0.9;
  a.nesterov = variant / 2 == 2;
  return a;
}

constexpr int kSteps = 20;
constexpr int kSgdVariants = 6;

}  // namespace

TEST_CASE_TEMPLATE("cpu optimizers: adamw over 20 steps", T, double, float) {
  for (const std::int64_t n : kSizes) {
    Guarded<T> param(random_values<T>(n, 1)), m(std::vector<T>(static_cast<std::size_t>(n))),
        v(std::vector<T>(static_cast<std::size_t>(n)));
    std::vector<double> exact = converted<double>(param.values()), exact_m(exact.size()),
                        exact_v(exact.size());
    std::vector<T> plain = param.values(), plain_m(exact.size()), plain_v(exact.size());
    for (int step = 1; step <= kSteps; ++step) {
      const auto grad = random_values<T>(n, static_cast<unsigned>(10 + step));
      auto a = adamw_args<T>(step);
      a.param = param.data();
      a.grad = grad.data();
      a.exp_avg = m.data();
      a.exp_avg_sq = v.data();
      adamw<T>(1, n, a);
      for (std::size_t i = 0; i < exact.size(); ++i) {
        plain_adamw<double>(adamw_args<double>(step), exact[i], static_cast<double>(grad[i]),
                            exact_m[i], exact_v[i]);
        plain_adamw<T>(adamw_args<T>(step), plain[i], grad[i], plain_m[i], plain_v[i]);
      }
    }
    check_as_good_as(param.values(), exact, plain);
    check_as_good_as(m.values(), exact_m, plain_m);
    check_as_good_as(v.values(), exact_v, plain_v);
  }
}

TEST_CASE_TEMPLATE("cpu optimizers: sgd over 20 steps", T, double, float) {
  for (int variant = 0; variant < kSgdVariants; ++variant) {
    for (const std::int64_t n : kSizes) {
      CAPTURE(variant);
      Guarded<T> param(random_values<T>(n, 1)), buffer(std::vector<T>(static_cast<std::size_t>(n)));
      std::vector<double> exact = converted<double>(param.values()), exact_buffer(exact.size());
      std::vector<T> plain = param.values(), plain_buffer(exact.size());
      for (int step = 1; step <= kSteps; ++step) {
        const auto grad = random_values<T>(n, static_cast<unsigned>(10 + step));
        auto a = sgd_args<T>(variant);
        a.param = param.data();
        a.grad = grad.data();
        if (a.momentum != 0) a.momentum_buffer = buffer.data();
        sgd<T>(1, n, a);
        for (std::size_t i = 0; i < exact.size(); ++i) {
          const bool momentum = a.momentum != 0;
          plain_sgd<double>(sgd_args<double>(variant), exact[i], static_cast<double>(grad[i]),
                            momentum ? &exact_buffer[i] : nullptr);
          plain_sgd<T>(sgd_args<T>(variant), plain[i], grad[i],
                       momentum ? &plain_buffer[i] : nullptr);
        }
      }
      check_as_good_as(param.values(), exact, plain);
      check_as_good_as(buffer.values(), exact_buffer, plain_buffer);
    }
  }
}

TEST_CASE("cpu optimizers: two hand-computed steps") {
  // With bias correction the first step of Adam is lr * sign(grad), whatever the gradient's size.
  double p = 1, g = 1e-3, m = 0, v = 0;
  AdamWArgs<double> a = adamw_args<double>(1);
  a.weight_decay = 0;
  a.eps = 0;
  a.param = &p;
  a.grad = &g;
  a.exp_avg = &m;
  a.exp_avg_sq = &v;
  adamw<double>(1, 1, a);
  CHECK(p == doctest::Approx(1 - 3e-3).epsilon(1e-14));

  double buffer = 2;
  SgdArgs<double> s;
  p = 1;
  g = 1;
  s.param = &p;
  s.grad = &g;
  s.momentum_buffer = &buffer;
  s.lr = 0.5;
  s.momentum = 0.5;
  s.nesterov = true;
  sgd<double>(1, 1, s);  // buffer = 2 * 0.5 + 1 = 2, direction = 1 + 0.5 * 2 = 2
  CHECK(buffer == 2);
  CHECK(p == 0);
}

TEST_CASE_TEMPLATE("cpu optimizers: same bits wherever cut, on any number of threads", T, double,
                   float) {
  constexpr std::int64_t kMany = 100003;
  const auto param = random_values<T>(kMany, 1), grad = random_values<T>(kMany, 2),
             avg = random_values<T>(kMany, 3, 0.1);
  auto square = random_values<T>(kMany, 4);
  for (T& v : square) v *= v;
  // `out` is the parameters; the state is compared by running with each array in that place.
  const auto run_adamw = [&](int threads, std::int64_t i, std::int64_t n, T* out, int which) {
    std::vector<T> p(param.begin() + i, param.begin() + i + n),
        m(avg.begin() + i, avg.begin() + i + n), v(square.begin() + i, square.begin() + i + n);
    auto a = adamw_args<T>(3);
    a.param = p.data();
    a.grad = grad.data() + i;
    a.exp_avg = m.data();
    a.exp_avg_sq = v.data();
    adamw<T>(threads, n, a);
    const std::vector<T>& result = which == 0 ? p : which == 1 ? m : v;
    std::copy(result.begin(), result.end(), out);
  };
  const auto run_sgd = [&](int threads, std::int64_t i, std::int64_t n, T* out, int variant) {
    std::vector<T> buffer(avg.begin() + i, avg.begin() + i + n);
    std::copy(param.begin() + i, param.begin() + i + n, out);
    auto a = sgd_args<T>(variant);
    a.param = out;
    a.grad = grad.data() + i;
    if (a.momentum != 0) a.momentum_buffer = buffer.data();
    sgd<T>(threads, n, a);
  };
  const auto both = [&](const auto& run, int which) {
    check_every_cut<T>([&](std::int64_t i, std::int64_t n, T* out) { run(1, i, n, out, which); });
    check_threads<T>(
        kMany, [&](int threads, T* out) { run(threads, std::int64_t{0}, kMany, out, which); });
  };
  for (int which = 0; which < 3; ++which) both(run_adamw, which);
  for (int variant = 0; variant < kSgdVariants; ++variant) both(run_sgd, variant);
}

TEST_CASE_TEMPLATE(
    "cpu optimizers: adamw rounds its result in the same pass, and takes its scalars "
    "from elsewhere",
    T, double, float) {
  constexpr std::int64_t n = 133;
  const auto start = random_values<T>(n, 1), grad = random_values<T>(n, 2);
  const auto run = [&]<typename Rounded>(Rounded, DType type, bool elsewhere) {
    std::vector<T> p = start, m(n), v(n);
    Guarded<Rounded> rounded(n);
    auto a = adamw_args<T>(3);
    a.param = p.data();
    a.grad = grad.data();
    a.exp_avg = m.data();
    a.exp_avg_sq = v.data();
    a.rounded = rounded.data();
    a.rounded_type = type;
    const AdamWScalars current = a.scalars;
    if (elsewhere) {
      a.current = &current;
      a.scalars = {};
    }
    adamw<T>(1, n, a);
    CHECK(same_bits(rounded.values(), converted<Rounded>(p)));
    return p;
  };
  const std::vector<T> expected = run(bf16{}, DType::bf16, false);
  CHECK(same_bits(run(bf16{}, DType::bf16, true), expected));
  CHECK(same_bits(run(f16{}, DType::f16, false), expected));
}
