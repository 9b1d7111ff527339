// SPDX-License-Identifier: Apache-2.0
// Layer normalisation on a GPU, against fp64 and the CPU kernel. (Not bit for bit: a GPU adds a row
// in another order.)
#include <sherd/kernels/cpu/column_sum.h>
#include <sherd/kernels/cpu/layer_norm.h>
#include <sherd/kernels/cuda/column_sum.h>
#include <sherd/kernels/cuda/layer_norm.h>
#include <sherd/kernels/layer_norm.h>
#include <sherd/kernels/matmul.h>

#include "row_support.h"

using namespace sherd;
using namespace sherd::test;
using arguments::acc_t;

namespace {

constexpr double kEps = 1e-5;

struct Results {
  std::vector<double> output, grad_input, grad_weight, grad_bias;
};

// What all are given, and the textbook in long double.
template <typename T>
struct Problem {
  std::int64_t rows, cols;
  std::vector<T> x, weight, bias, grad;

  Problem(std::int64_t r, std::int64_t c)
      : rows(r),
        cols(c),
        x(random_values<T>(static_cast<std::size_t>(r * c), "x", 1, 0.5)),
        weight(random_values<T>(static_cast<std::size_t>(c), "weight", 0.3, 1)),
        bias(random_values<T>(static_cast<std::size_t>(c), "bias")),
        grad(random_values<T>(static_cast<std::size_t>(r * c), "grad")) {}

  Results exact() const {
    using S = long double;
    const auto n = static_cast<std::size_t>(cols);
    Results result;
    std::vector<S> weight_sum(n), bias_sum(n);
    for (std::size_t r = 0; r < static_cast<std::size_t>(rows); ++r) {
      const auto at = [&](const std::vector<T>& v, std::size_t i) { return S(to_double(v[i])); };
      S mean = 0, variance = 0, sum = 0, dot = 0;
      for (std::size_t c = 0; c < n; ++c) mean += at(x, r * n + c) / S(n);
      for (std::size_t c = 0; c < n; ++c)
        variance += (at(x, r * n + c) - mean) * (at(x, r * n + c) - mean) / S(n);
      const S rstd = 1 / std::sqrt(variance + S(kEps));
      for (std::size_t c = 0; c < n; ++c) {
        const S h = (at(x, r * n + c) - mean) * rstd, g = at(grad, r * n + c);
        result.output.push_back(static_cast<double>(h * at(weight, c) + at(bias, c)));
        weight_sum[c] += g * h;
        bias_sum[c] += g;
        sum += g * at(weight, c);
        dot += g * at(weight, c) * h;
      }
      for (std::size_t c = 0; c < n; ++c) {
        const S h = (at(x, r * n + c) - mean) * rstd, d = at(grad, r * n + c) * at(weight, c);
        result.grad_input.push_back(static_cast<double>(rstd * (d - sum / S(n) - h * dot / S(n))));
      }
    }
    result.grad_weight.assign(weight_sum.begin(), weight_sum.end());
    result.grad_bias.assign(bias_sum.begin(), bias_sum.end());
    return result;
  }
};

template <typename T>
struct Outputs {
  std::vector<T> output, grad_input;
  std::vector<acc_t<T>> mean, rstd, grad_weight, grad_bias;
};

template <typename T>
Outputs<T> on_cpu(const Problem<T>& problem) {
  using A = acc_t<T>;
  Outputs<T> out;
  out.output.resize(problem.x.size());
  out.grad_input.resize(problem.x.size());
  out.mean.resize(static_cast<std::size_t>(problem.rows));
  out.rstd = out.mean;
  out.grad_weight.resize(problem.weight.size());
  out.grad_bias = out.grad_weight;
  arguments::LayerNormForward<T> p;
  p.rows = problem.rows;
  p.cols = problem.cols;
  p.input = problem.x.data();
  p.weight = problem.weight.data();
  p.bias = problem.bias.data();
  p.eps = A(kEps);
  p.output = out.output.data();
  p.mean = out.mean.data();
  p.rstd = out.rstd.data();
  cpu::layer_norm_forward<T>(1, p);
  std::vector<A> workspace(cpu::layer_norm_backward_workspace_bytes<T>(problem.rows, problem.cols) /
                           sizeof(A));
  arguments::LayerNormBackward<T> q;
  q.rows = problem.rows;
  q.cols = problem.cols;
  q.input = problem.x.data();
  q.weight = problem.weight.data();
  q.mean = out.mean.data();
  q.rstd = out.rstd.data();
  q.grad_output = problem.grad.data();
  q.grad_input = out.grad_input.data();
  q.grad_weight = out.grad_weight.data();
  q.grad_bias = out.grad_bias.data();
  q.workspace = workspace.data();
  cpu::layer_norm_backward<T>(1, q);
  return out;
}

// A problem on the device, with every array `shift` elements off a multiple of 16 bytes.
template <typename T>
struct OnDevice {
  using A = acc_t<T>;
  Placed<T> x, weight, bias, grad, output, grad_input;
  Placed<A> mean, rstd, grad_weight, grad_bias, workspace;
  arguments::LayerNormForward<T> forward;
  arguments::LayerNormBackward<T> backward;

  explicit OnDevice(const Problem<T>& problem, std::size_t shift = 0)
      : x(problem.x, shift),
        weight(problem.weight, shift),
        bias(problem.bias, shift),
        grad(problem.grad, shift),
        output(problem.x.size(), shift),
        grad_input(problem.x.size(), shift),
        mean(static_cast<std::size_t>(problem.rows), shift),
        rstd(static_cast<std::size_t>(problem.rows), shift),
        grad_weight(problem.weight.size(), shift),
        grad_bias(problem.weight.size(), shift),
        workspace(
            cuda::layer_norm_backward_workspace_bytes<T>(problem.rows, problem.cols) / sizeof(A),
            shift) {
    forward.rows = backward.rows = problem.rows;
    forward.cols = backward.cols = problem.cols;
    forward.input = backward.input = x.data();
    forward.weight = backward.weight = weight.data();
    forward.bias = bias.data();
    forward.eps = A(kEps);
    forward.output = output.data();
    forward.mean = mean.data();
    forward.rstd = rstd.data();
    backward.mean = mean.data();
    backward.rstd = rstd.data();
    backward.grad_output = grad.data();
    backward.grad_input = grad_input.data();
    backward.grad_weight = grad_weight.data();
    backward.grad_bias = grad_bias.data();
    backward.workspace = workspace.data();
  }
  void run() const {
    cuda::layer_norm_forward<T>(device_stream(), forward);
    cuda::layer_norm_backward<T>(device_stream(), backward);
  }
  Outputs<T> values() const {
    return {output.values(), grad_input.values(),  mean.values(),
            rstd.values(),   grad_weight.values(), grad_bias.values()};
  }
};

template <typename T>
void check_same(const Outputs<T>& a, const Outputs<T>& b) {
  CHECK(same_bits(a.output, b.output));
  CHECK(same_bits(a.grad_input, b.grad_input));
  CHECK(same_bits(a.mean, b.mean));
  CHECK(same_bits(a.rstd, b.rstd));
  CHECK(same_bits(a.grad_weight, b.grad_weight));
  CHECK(same_bits(a.grad_bias, b.grad_bias));
}

struct Size {
  std::int64_t rows, cols;
};

}  // namespace

TEST_CASE_TEMPLATE("device layer_norm: forward and backward against fp64", T, ALL_TYPES) {
  std::vector<Size> sizes = {{1, 1}, {3, 2}, {70, 1}, {7001, 3}, {300, 33}, {33, 200}};
  for (const std::int64_t cols : {7, 8, 31, 64, 192, 255, 256, 257, 384, 768, 1000, 1024, 1280,
                                  1408, 1536, 1544, 2048, 2049, 3000})
    sizes.push_back({5, cols});
  for (const Size& size : sizes) {
    CAPTURE(size.rows);
    CAPTURE(size.cols);
    const Problem<T> problem(size.rows, size.cols);
    const Results exact = problem.exact();
    const Outputs<T> plain = on_cpu(problem);
    const OnDevice<T> device(problem);
    device.run();
    const Outputs<T> result = device.values();
    check_as_good_as(result.output, exact.output, plain.output);
    if (size.cols > 1) {  // a row of one element has no gradient, only the rounding of its parts
      check_as_good_as(result.grad_input, exact.grad_input, plain.grad_input, 3);
    }
    check_as_good_as(result.grad_weight, exact.grad_weight, plain.grad_weight, 3);
    check_as_good_as(result.grad_bias, exact.grad_bias, plain.grad_bias, 3);
  }
}

TEST_CASE_TEMPLATE("device layer_norm: same bits in any order and at any address", T, ALL_TYPES) {
  for (const Size& size : {Size{35, 64}, Size{40, 768}, Size{5, 1000}, Size{18, 2056}}) {
    CAPTURE(size.cols);
    const Problem<T> problem(size.rows, size.cols);
    const OnDevice<T> expected(problem);
    expected.run();
    const Outputs<T> values = expected.values();
    for (const std::size_t shift : {0, 1, 3}) {
      in_all_orders([&] {
        const OnDevice<T> device(problem, shift);
        device.run();
        check_same(device.values(), values);
      });
    }
  }
}

TEST_CASE_TEMPLATE("device layer_norm: a row's bits do not depend on its neighbours", T,
                   ALL_TYPES) {
  for (const std::int64_t cols : {64, 768, 2056}) {
    const Problem<T> problem(9, cols);
    const OnDevice<T> whole(problem);
    whole.run();
    Problem<T> part(1, cols);
    const auto row = [&](const std::vector<T>& v) {
      return std::vector<T>(v.begin() + 4 * cols, v.begin() + 5 * cols);
    };
    part.x = row(problem.x);
    part.grad = row(problem.grad);
    const OnDevice<T> alone(part);
    alone.run();
    CHECK(same_bits(alone.output.values(), row(whole.output.values())));
    CHECK(same_bits(alone.grad_input.values(), row(whole.grad_input.values())));
  }
}

TEST_CASE_TEMPLATE("device layer_norm: the fused residual is add, then layer_norm", T, ALL_TYPES) {
  using A = acc_t<T>;
  for (const std::int64_t cols : {1, 17, 192, 768, 1408, 1600}) {
    CAPTURE(cols);
    Problem<T> problem(6, cols);
    const auto residual = random_values<T>(problem.x.size(), "residual");
    const OnDevice<T> fused(problem), in_place(problem);
    const Placed<T> other(residual), sum(residual.size());
    auto p = fused.forward;
    p.residual = other.data();
    p.sum = sum.data();
    cuda::layer_norm_forward<T>(device_stream(), p);
    auto q = in_place.forward;  // the sum in the input's place, the output in the residual's
    q.residual = other.data();
    q.sum = in_place.x.data();
    q.output = other.data();
    cuda::layer_norm_forward<T>(device_stream(), q);

    for (std::size_t i = 0; i < problem.x.size(); ++i)
      problem.x[i] = T(static_cast<A>(problem.x[i]) + static_cast<A>(residual[i]));
    const OnDevice<T> expected(problem);
    cuda::layer_norm_forward<T>(device_stream(), expected.forward);
    CHECK(same_bits(sum.values(), problem.x));
    CHECK(same_bits(fused.output.values(), expected.output.values()));
    CHECK(same_bits(fused.mean.values(), expected.mean.values()));
    CHECK(same_bits(fused.rstd.values(), expected.rstd.values()));
    CHECK(same_bits(in_place.x.values(), problem.x));
    CHECK(same_bits(other.values(), expected.output.values()));
  }
}

TEST_CASE_TEMPLATE("device layer_norm: options", T, ALL_TYPES) {
  using A = acc_t<T>;
  for (const std::int64_t cols : {33, 384, 2500}) {
    CAPTURE(cols);
    const Problem<T> problem(20, cols);
    const OnDevice<T> all(problem), some(problem);
    all.run();
    const Outputs<T> expected = all.values();
    const auto backward = [&](auto change) {
      auto p = some.backward;
      p.mean = all.mean.data();
      p.rstd = all.rstd.data();
      change(p);
      cuda::layer_norm_backward<T>(device_stream(), p);
    };
    using Arguments = arguments::LayerNormBackward<T>;
    // Every gradient may be left out.
    backward([](Arguments& p) {
      p.grad_weight = p.grad_bias = nullptr;
      p.workspace = nullptr;
    });
    CHECK(same_bits(some.grad_input.values(), expected.grad_input));
    backward([](Arguments& p) { p.grad_input = nullptr, p.grad_bias = nullptr; });
    CHECK(same_bits(some.grad_weight.values(), expected.grad_weight));
    backward([](Arguments& p) { p.grad_input = nullptr, p.grad_weight = nullptr; });
    CHECK(same_bits(some.grad_bias.values(), expected.grad_bias));

    // '+=' rounds the sum once.
    const auto before = random_values<T>(problem.x.size(), "before");
    const Placed<T> added(before);
    backward([&](Arguments& p) { p.accumulate = true, p.grad_input = added.data(); });
    const std::vector<T> sums = added.values();
    for (std::size_t i = 0; i < before.size(); ++i) {
      const double sum = to_double(before[i]) + to_double(expected.grad_input[i]);
      if constexpr (sizeof(T) == sizeof(A)) {
        CHECK(sums[i] == before[i] + expected.grad_input[i]);
      } else {
        CHECK(to_double(sums[i]) ==
              doctest::Approx(sum).epsilon(2 * cpu::test::roundoff<T>()).scale(4));
      }
    }

    // In place: the gradient of the input where the gradient of the output was.
    const Placed<T> place(problem.grad);
    backward([&](Arguments& p) { p.grad_output = place.data(), p.grad_input = place.data(); });
    CHECK(same_bits(place.values(), expected.grad_input));
    CHECK(same_bits(some.grad_weight.values(), expected.grad_weight));

    // No weight and no bias are ones and zeros.
    Problem<T> plain = problem;
    plain.weight.assign(plain.weight.size(), T(1.f));
    plain.bias.assign(plain.bias.size(), T(0.f));
    const OnDevice<T> ones(plain);
    ones.run();
    OnDevice<T> none(plain);
    none.forward.weight = none.forward.bias = none.backward.weight = nullptr;
    none.run();
    CHECK(as_doubles(none.output.values()) == as_doubles(ones.output.values()));
    CHECK(same_bits(none.grad_input.values(), ones.grad_input.values()));
  }
}

TEST_CASE_TEMPLATE("device layer_norm: a large mean costs no digits", T, float, double) {
  for (const std::int64_t cols : {64, 256, 4096}) {
    Problem<T> problem(2, cols);
    for (std::size_t i = 0; i < problem.x.size(); ++i)
      problem.x[i] = i < problem.weight.size() ? T(10000) + static_cast<T>(i % 2) : T(3);
    problem.bias.assign(problem.bias.size(), T(0));
    const OnDevice<T> device(problem);
    cuda::layer_norm_forward<T>(device_stream(), device.forward);
    CHECK(device.mean.values()[0] == T(10000.5));
    CHECK(to_double(device.rstd.values()[0]) ==
          doctest::Approx(1 / std::sqrt(0.25 + kEps)).epsilon(1e-6));
    CHECK(device.output.values().back() == T(0));
  }
}

TEST_CASE_TEMPLATE("device column_sum", T, ALL_TYPES) {
  using A = acc_t<T>;
  for (const Size& size : {Size{0, 5}, Size{1, 1}, Size{3, 257}, Size{64, 33}, Size{67, 1000},
                           Size{300, 17}, Size{70000, 2}, Size{1100, 64}}) {
    CAPTURE(size.rows);
    CAPTURE(size.cols);
    const auto count = static_cast<std::size_t>(size.rows * size.cols);
    const auto cols = static_cast<std::size_t>(size.cols);
    const auto in = random_values<T>(count, "in", 1, 0.2);
    std::vector<long double> sums(cols);
    std::vector<A> plain(cols);
    for (std::size_t i = 0; i < count; ++i) {
      sums[i % cols] += static_cast<long double>(to_double(in[i]));
      plain[i % cols] += static_cast<A>(in[i]);
    }
    std::vector<A> first;
    for (const std::size_t shift : {0, 1}) {
      in_all_orders([&] {
        const Placed<T> from(in, shift);
        const Placed<A> out(cols);
        const Placed<A> workspace(cuda::column_sum_workspace_bytes<T>(size.rows, size.cols) /
                                  sizeof(A));
        cuda::column_sum<T>(device_stream(), size.rows, size.cols, from.data(), out.data(),
                            workspace.data());
        if (first.empty()) first = out.values();
        CHECK(same_bits(out.values(), first));
      });
    }
    check_as_good_as(first, std::vector<double>(sums.begin(), sums.end()), plain, 2, 10);
  }
}

TEST_CASE("device layer_norm: tensors, as on the processor and as planned") {
  const auto run = [](Context& context, DType dtype) {
    const auto tensor = [&](const Shape& shape, const char* name) {
      const auto count = static_cast<std::size_t>(shape.numel());
      if (dtype == DType::bf16) {
        return Tensor::from_host<bf16>(context, shape, random_values<bf16>(count, name));
      }
      return Tensor::from_host<float>(context, shape, random_values<float>(count, name));
    };
    const Tensor x = tensor({3, 50, 192}, "x"), g = tensor({3, 50, 192}, "g");
    const Tensor w = tensor({192}, "w"), b = tensor({192}, "b"), sum = tensor({3, 50, 192}, "sum");
    const LayerNormOutput y = layer_norm_forward(x, w, b, 1e-6);
    const LayerNormGradients grads = layer_norm_backward(g, x, y.mean, y.rstd, w, true, true, sum);
    return std::vector<Tensor>{
        y.output, y.mean, y.rstd, grads.input, grads.weight, grads.bias, linear_backward_bias(g)};
  };
  for (const DType dtype : {DType::f32, DType::bf16}) {
    Context host;
    const auto expected = run(host, dtype), result = run(device_context(), dtype);
    for (std::size_t i = 0; i < result.size(); ++i) {
      CAPTURE(i);
      CHECK(result[i].device() == Device::cuda);
      REQUIRE(result[i].dtype() == expected[i].dtype());
      const bool narrow = result[i].dtype() == DType::bf16;
      const auto values = [&](const Tensor& t) {
        return narrow ? as_doubles(t.to_vector<bf16>()) : as_doubles(t.to_vector<float>());
      };
      CHECK(error_of(values(result[i]), values(expected[i])) < (narrow ? 0x1p-8 : 1e-6));
    }
    check_planned_peak([&](Context& context) { run(context, dtype); });
  }
}
