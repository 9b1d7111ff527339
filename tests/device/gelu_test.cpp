// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/cpu/elementwise.h>
#include <sherd/kernels/cpu/gelu.h>
#include <sherd/kernels/cuda/gelu.h>

#include "array_support.h"

using namespace sherd;
using arguments::acc_t;
using arguments::GeluForm;
using test::Placed;

namespace {

// fp64 calls the C library on the CPU and CUDA's on a GPU.
template <typename T>
bool like_cpu(const std::vector<T>& a, const std::vector<T>& b) {
  return sizeof(T) == 8 ? test::close_numbers(a, b, 1e-14) : test::like_cpu(a, b);
}

// Numbers of all magnitudes around those where GELU bends, and the hard ones.
template <typename T>
std::vector<T> inputs(std::size_t count) {
  std::vector<T> values = test::hard_values<T>(count, "x", 2);
  for (std::size_t i = 60; i < count; i += 3)
    values[i] = test::number<T>(-16 + 32 * static_cast<double>(i) / static_cast<double>(count));
  for (std::size_t i = 61; i < count; i += 30)
    values[i] = test::number<T>(std::ldexp(1, -static_cast<int>(i % 140)));
  return values;
}

}  // namespace

TEST_CASE_TEMPLATE("cuda gelu: forward and backward as the CPU's", T, double, float, bf16, f16) {
  Stream& stream = test::DeviceArray<T>::stream();
  test::in_all_orders([&] {
    for (const GeluForm form : {GeluForm::exact, GeluForm::tanh}) {
      for (const std::size_t n : {std::size_t{5}, std::size_t{9001}}) {
        for (const std::size_t offset : {0, 1}) {
          CAPTURE(n);
          CAPTURE(offset);
          CAPTURE(static_cast<int>(form));
          const auto size = static_cast<std::int64_t>(n);
          const auto x = inputs<T>(n), grad = test::random_values<T>(n, "grad");
          const Placed<T> device_x(x, offset), device_grad(grad, 0), out(n, 0);
          std::vector<T> expected(n);
          cpu::gelu_forward<T>(1, size, form, x.data(), expected.data());
          cuda::gelu_forward<T>(stream, size, form, device_x.data(), out.data());
          CHECK(like_cpu(out.values(), expected));
          cpu::gelu_backward<T>(1, size, form, x.data(), grad.data(), expected.data());
          cuda::gelu_backward<T>(stream, size, form, device_x.data(), device_grad.data(),
                                 device_grad.data());
          CHECK(like_cpu(device_grad.values(), expected));
        }
      }
    }
  });
}

TEST_CASE_TEMPLATE("cuda gelu: backward with the sums of its columns", T, double, float, bf16,
                   f16) {
  using A = acc_t<T>;
  constexpr std::int64_t kShapes[][2] = {{1, 1}, {3, 40}, {130, 17}, {300, 264}, {0, 8}};
  Stream& stream = test::DeviceArray<T>::stream();
  test::in_all_orders([&] {
    for (const auto& shape : kShapes) {
      const std::int64_t rows = shape[0], cols = shape[1];
      for (const GeluForm form : {GeluForm::exact, GeluForm::tanh}) {
        const auto n = static_cast<std::size_t>(rows * cols),
                   width = static_cast<std::size_t>(cols);
        const auto x = test::random_values<T>(n, "x", 2), grad = test::random_values<T>(n, "grad");
        // The CPU's kernel in A, rounded after that.
        std::vector<A> inputs(n), grads(n), slopes(n);
        cpu::cast<T, A>(1, rows * cols, x.data(), inputs.data());
        cpu::cast<T, A>(1, rows * cols, grad.data(), grads.data());
        cpu::gelu_backward<A>(1, rows * cols, form, inputs.data(), grads.data(), slopes.data());
        std::vector<T> expected_grad(n);
        cpu::cast<A, T>(1, rows * cols, slopes.data(), expected_grad.data());
        std::vector<long double> exact(width);
        std::vector<A> plain(width);
        for (std::size_t i = 0; i < n; ++i) {
          exact[i % width] += static_cast<long double>(slopes[i]);
          plain[i % width] += slopes[i];
        }

        const std::vector<double> bias_sums(exact.begin(), exact.end());
        std::vector<A> first_grad_bias;
        for (const std::size_t offset : {0, 1}) {
          CAPTURE(rows);
          CAPTURE(cols);
          CAPTURE(offset);
          const Placed<T> device_x(x, offset), device_grad(grad, 0);
          const Placed<A> grad_bias(width, 0);
          const std::size_t bytes = cuda::gelu_backward_sums_workspace_bytes<T>(rows, cols);
          const test::DeviceArray<A> workspace(bytes / sizeof(A));
          cuda::gelu_backward_sums<T>(
              stream, {rows, cols, form, device_x.data(), device_grad.data(), device_grad.data(),
                       grad_bias.data(), workspace.data()});
          CHECK(like_cpu(device_grad.values(), expected_grad));
          const std::vector<A> sum = grad_bias.values();
          CHECK(test::error_of(test::as_doubles(sum), bias_sums) <=
                3 * test::error_of(test::as_doubles(plain), bias_sums) +
                    (sizeof(A) == 8 ? 0x1p-51 : 0x1p-22));
          // The same bits wherever the arrays begin.
          if (offset == 0) first_grad_bias = sum;
          CHECK(test::same_numbers(sum, first_grad_bias));
        }
      }
    }
  });
}
