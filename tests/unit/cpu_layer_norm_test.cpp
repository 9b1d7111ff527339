// SPDX-License-Identifier: Apache-2.0
// LayerNorm, and the sums over columns that its backward pass shares with a bias gradient.
#include <sherd/kernels/cpu/column_sum.h>
#include <sherd/kernels/cpu/layer_norm.h>

#include "cpu_kernel_test.h"

using namespace sherd;
using namespace sherd::cpu;
using namespace sherd::cpu::test;

#define ALL_TYPES double, float, bf16, f16

namespace {

constexpr double kEps = 1e-5;

// The textbook, in S; every result is converted to Out.
template <typename S>
struct Reference {
  std::vector<double> output, grad_input, grad_weight, grad_bias;

  template <typename T>
  Reference(std::int64_t rows, std::int64_t cols, const std::vector<T>& x, const std::vector<T>& w,
            const std::vector<T>& b, const std::vector<T>& g)
      : output(x.size()),
        grad_input(x.size()),
        grad_weight(static_cast<std::size_t>(cols)),
        grad_bias(static_cast<std::size_t>(cols)) {
    const auto n = static_cast<std::size_t>(cols);
    std::vector<S> weight_sum(n, S(0)), bias_sum(n, S(0));
    for (std::size_t r = 0; r < static_cast<std::size_t>(rows); ++r) {
      const auto at = [&](const std::vector<T>& v, std::size_t c) { return S(to_double(v[c])); };
      S mean = 0, variance = 0;
      for (std::size_t c = 0; c < n; ++c) mean += at(x, r * n + c);
      mean /= S(n);
      for (std::size_t c = 0; c < n; ++c) {
        const S centred = at(x, r * n + c) - mean;
        variance += centred * centred;
      }
      const S rstd = S(1) / std::sqrt(variance / S(n) + S(kEps));
      S sum = 0, dot = 0;
      for (std::size_t c = 0; c < n; ++c) {
        const S h = (at(x, r * n + c) - mean) * rstd;
        const S grad = at(g, r * n + c), d = grad * at(w, c);
        output[r * n + c] = static_cast<double>(h * at(w, c) + at(b, c));
        weight_sum[c] += grad * h;
        bias_sum[c] += grad;
        sum += d;
        dot += d * h;
      }
      for (std::size_t c = 0; c < n; ++c) {
        const S h = (at(x, r * n + c) - mean) * rstd;
        const S d = at(g, r * n + c) * at(w, c);
        grad_input[r * n + c] = static_cast<double>(rstd * (d - sum / S(n) - h * dot / S(n)));
      }
    }
    for (std::size_t c = 0; c < n; ++c) {
      grad_weight[c] = static_cast<double>(weight_sum[c]);
      grad_bias[c] = static_cast<double>(bias_sum[c]);
    }
  }
};

template <typename T>
struct Problem {
  using A = acc_t<T>;
  std::int64_t rows, cols;
  std::vector<T> x, w, b, g;
  std::vector<A> mean, rstd, workspace;

  Problem(std::int64_t r, std::int64_t c)
      : rows(r),
        cols(c),
        x(random_values<T>(r * c, 1, 1, 0.5)),
        w(random_values<T>(c, 2, 0.3, 1)),
        b(random_values<T>(c, 3)),
        g(random_values<T>(r * c, 4)),
        mean(static_cast<std::size_t>(r)),
        rstd(static_cast<std::size_t>(r)),
        workspace(layer_norm_backward_workspace_bytes<T>(r, c) / sizeof(A)) {}

  LayerNormForward<T> forward(T* output) {
    LayerNormForward<T> p;
    p.rows = rows;
    p.cols = cols;
    p.input = x.data();
    p.weight = w.data();
    p.bias = b.data();
    p.eps = A(kEps);
    p.output = output;
    p.mean = mean.data();
    p.rstd = rstd.data();
    return p;
  }
  LayerNormBackward<T> backward(T* grad_input, A* grad_weight, A* grad_bias) {
    LayerNormBackward<T> p;
    p.rows = rows;
    p.cols = cols;
    p.input = x.data();
    p.weight = w.data();
    p.mean = mean.data();
    p.rstd = rstd.data();
    p.grad_output = g.data();
    p.grad_input = grad_input;
    p.grad_weight = grad_weight;
    p.grad_bias = grad_bias;
    p.workspace = workspace.data();
    return p;
  }
};

}  // namespace

TEST_CASE_TEMPLATE("cpu layer_norm: forward and backward against fp64", T, ALL_TYPES) {
  using A = acc_t<T>;
  for (const std::int64_t rows : {1, 3, 64, 65, 200}) {
    for (const std::int64_t cols : kSizes) {
      if (rows > 100 && cols > 300) continue;
      CAPTURE(rows);
      CAPTURE(cols);
      Problem<T> problem(rows, cols);
      const Reference<long double> exact(rows, cols, problem.x, problem.w, problem.b, problem.g);
      const Reference<A> plain(rows, cols, problem.x, problem.w, problem.b, problem.g);
      Guarded<T> output(rows * cols), grad_input(rows * cols);
      layer_norm_forward<T>(1, problem.forward(output.data()));
      check_as_good_as(output.values(), exact.output, converted<T>(plain.output));

      Guarded<A> grad_weight(cols), grad_bias(cols);
      layer_norm_backward<T>(
          1, problem.backward(grad_input.data(), grad_weight.data(), grad_bias.data()));
      if (cols > 1) {  // a row of one element has no gradient, only the rounding of its parts
        check_as_good_as(grad_input.values(), exact.grad_input, converted<T>(plain.grad_input), 3);
      }
      check_as_good_as(grad_weight.values(), exact.grad_weight, plain.grad_weight, 3);
      check_as_good_as(grad_bias.values(), exact.grad_bias, plain.grad_bias, 3);
    }
  }
}

TEST_CASE_TEMPLATE("cpu layer_norm: the fused residual is add, then layer_norm", T, ALL_TYPES) {
  using A = acc_t<T>;
  for (const std::int64_t cols : {1, 17, 64, 100}) {
    Problem<T> problem(37, cols);
    const auto residual = random_values<T>(37 * cols, 5);
    Guarded<T> sum(37 * cols), output(37 * cols), expected(37 * cols);
    auto p = problem.forward(output.data());
    p.residual = residual.data();
    p.sum = sum.data();
    layer_norm_forward<T>(2, p);
    const auto mean = problem.mean, rstd = problem.rstd;
    for (std::size_t i = 0; i < problem.x.size(); ++i) {
      problem.x[i] = T(static_cast<A>(problem.x[i]) + static_cast<A>(residual[i]));
    }
    CHECK(same_bits(sum.values(), problem.x));
    layer_norm_forward<T>(1, problem.forward(expected.data()));
    CHECK(same_bits(output.values(), expected.values()));
    CHECK(same_bits(mean, problem.mean));
    CHECK(same_bits(rstd, problem.rstd));
  }
}

TEST_CASE_TEMPLATE("cpu layer_norm: options", T, ALL_TYPES) {
  using A = acc_t<T>;
  constexpr std::int64_t kRows = 70, kCols = 33, n = kRows * kCols;
  Problem<T> problem(kRows, kCols);
  Guarded<T> output(n), again(n);

  // No weight and no bias are ones and zeros.
  auto p = problem.forward(output.data());
  p.weight = p.bias = nullptr;
  layer_norm_forward<T>(1, p);
  const std::vector<T> ones(kCols, T(A(1))), zeros(kCols, T(A(0)));
  p.weight = ones.data();
  p.bias = zeros.data();
  p.output = again.data();
  layer_norm_forward<T>(1, p);
  for (std::size_t i = 0; i < std::size_t{n}; ++i) {
    CHECK(to_double(output.data()[i]) == to_double(again.data()[i]));
  }

  layer_norm_forward<T>(1, problem.forward(output.data()));
  Guarded<T> grad_input(n);
  Guarded<A> grad_weight(kCols), grad_bias(kCols), weight_alone(kCols), bias_alone(kCols);
  layer_norm_backward<T>(1,
                         problem.backward(grad_input.data(), grad_weight.data(), grad_bias.data()));

  // Every gradient may be left out.
  auto q = problem.backward(again.data(), nullptr, nullptr);
  q.workspace = nullptr;
  layer_norm_backward<T>(1, q);
  CHECK(same_bits(again.values(), grad_input.values()));
  layer_norm_backward<T>(1, problem.backward(nullptr, weight_alone.data(), nullptr));
  layer_norm_backward<T>(1, problem.backward(nullptr, nullptr, bias_alone.data()));
  CHECK(same_bits(weight_alone.values(), grad_weight.values()));
  CHECK(same_bits(bias_alone.values(), grad_bias.values()));

  // '+=' rounds the sum once.
  const auto before = random_values<T>(n, 6);
  Guarded<T> added(before);
  q = problem.backward(added.data(), nullptr, nullptr);
  q.accumulate = true;
  layer_norm_backward<T>(1, q);
  if constexpr (std::is_same_v<T, A>) {
    std::vector<T> sum;
    for (std::size_t i = 0; i < before.size(); ++i) sum.push_back(before[i] + grad_input.data()[i]);
    CHECK(same_bits(added.values(), sum));
  } else {
    for (std::size_t i = 0; i < before.size(); ++i) {
      const double sum = to_double(before[i]) + to_double(grad_input.data()[i]);
      CHECK(to_double(added.data()[i]) == doctest::Approx(sum).epsilon(2 * roundoff<T>()).scale(4));
    }
  }

  // In place: the gradient of the input where the gradient of the output was.
  q = problem.backward(problem.g.data(), weight_alone.data(), bias_alone.data());
  layer_norm_backward<T>(1, q);
  CHECK(same_bits(problem.g, grad_input.values()));
  CHECK(same_bits(weight_alone.values(), grad_weight.values()));
}

TEST_CASE("cpu layer_norm: a large mean costs no digits, a constant row is finite") {
  constexpr std::int64_t n = 256;
  std::vector<float> x(2 * n), out(2 * n), mean(2), rstd(2);
  for (std::size_t i = 0; i < n; ++i) x[i] = 10000.f + static_cast<float>(i % 2);
  std::fill(x.begin() + n, x.end(), 3.f);
  LayerNormForward<float> p;
  p.rows = 2;
  p.cols = n;
  p.input = x.data();
  p.eps = 1e-5f;
  p.output = out.data();
  p.mean = mean.data();
  p.rstd = rstd.data();
  layer_norm_forward<float>(1, p);
  CHECK(mean[0] == 10000.5f);
  CHECK(rstd[0] == doctest::Approx(1 / std::sqrt(0.25 + 1e-5)).epsilon(1e-6));
  CHECK(out[n] == 0.f);
}

TEST_CASE_TEMPLATE("cpu layer_norm: same bits on any number of threads", T, ALL_TYPES) {
  using A = acc_t<T>;
  for (const auto& shape : {std::pair<std::int64_t, std::int64_t>{1100, 64}, {129, 1000}}) {
    const std::int64_t rows = shape.first, cols = shape.second;
    Problem<T> problem(rows, cols);
    check_threads<T>(rows * cols, [&](int threads, T* out) {
      layer_norm_forward<T>(threads, problem.forward(out));
    });
    check_threads<T>(rows * cols, [&](int threads, T* out) {
      std::vector<A> weight(problem.w.size()), bias(problem.w.size());
      layer_norm_backward<T>(threads, problem.backward(out, weight.data(), bias.data()));
    });
    check_threads<A>(cols, [&](int threads, A* out) {
      layer_norm_backward<T>(threads, problem.backward(nullptr, out, nullptr));
    });
    check_threads<A>(cols, [&](int threads, A* out) {
      layer_norm_backward<T>(threads, problem.backward(nullptr, nullptr, out));
    });
  }
}

TEST_CASE_TEMPLATE("cpu column_sum", T, ALL_TYPES) {
  using A = acc_t<T>;
  for (const std::int64_t rows : {0, 1, 3, 64, 67, 300}) {
    for (const std::int64_t cols : kSizes) {
      const auto in = random_values<T>(rows * cols, 1, 1, 0.2);
      std::vector<long double> sums(static_cast<std::size_t>(cols));
      std::vector<A> plain(sums.size());
      for (std::size_t i = 0; i < in.size(); ++i) {
        sums[i % sums.size()] += static_cast<long double>(to_double(in[i]));
        plain[i % sums.size()] += static_cast<A>(in[i]);
      }
      const std::vector<double> exact(sums.begin(), sums.end());
      std::vector<A> workspace(column_sum_workspace_bytes<T>(rows, cols) / sizeof(A));
      Guarded<A> out(cols);
      column_sum<T>(1, rows, cols, in.data(), out.data(), workspace.data());
      check_as_good_as(out.values(), exact, plain, 2, 10);
      check_threads<A>(cols, [&](int threads, A* to) {
        column_sum<T>(threads, rows, cols, in.data(), to, workspace.data());
      });
    }
  }
}
