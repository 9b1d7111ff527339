// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/matmul.h>

#include <sherd/kernels/cpu/column_sum.h>
#include <sherd/kernels/cpu/product.h>
#include <sherd/kernels/dispatch.h>
#include <sherd/kernels/elementwise.h>

#include <algorithm>
#include <chrono>

namespace sherd {
namespace {

// All leading dimensions folded into rows.
Tensor as_matrix(const Tensor& x) {
  SHERD_CHECK(x.rank() >= 1, "a matrix product needs at least one dimension, got {}", x.describe());
  std::int64_t rows = 1;
  for (int i = 0; i + 1 < x.rank(); ++i) rows *= x.dim(i);
  return contiguous(x).reshape({rows, x.dim(-1)});
}

Shape with_last(const Shape& shape, std::int64_t last) {
  std::array<std::int64_t, Shape::kMaxRank> dims{};
  std::ranges::copy(shape.dims(), dims.begin());
  dims[static_cast<std::size_t>(shape.rank() - 1)] = last;
  return Shape(std::span<const std::int64_t>(dims.data(), static_cast<std::size_t>(shape.rank())));
}

// a, b, bias and the result are contiguous and of one type the backend supports. The result goes to
// `place` where one is given.
Tensor multiply(const cpu::Product& product, const Tensor& a, const Tensor& b, const Tensor& bias,
                const Tensor& place) {
  Context& context = a.context();
  const Tensor out =
      place.defined() ? place : Tensor::empty(context, {product.m, product.n}, product.dtype);
  if (place.defined()) out.storage().mark_modified();
  if (out.numel() == 0) return out;
  if (product.k == 0) {  // a sum of nothing
    if (!bias.defined()) fill(out, 0.0);
    SHERD_INTERNAL_CHECK(!place.defined() || !bias.defined(), "a place is for plain products");
    const Tensor sums =
        bias.defined() ? clone(bias.reshape({1, product.n}).expand(out.shape())) : out;
    return product.activation == Activation::none ? sums
                                                  : activation_forward(sums, product.activation);
  }
  context.work().matmul_flops += 2 * product.m * product.n * product.k;
  const Tensor scratch = workspace(context, cpu::product_workspace_bytes(context, product));
  if (!context.is_meta()) {
    cpu::run_product(context, product, a.raw_data(), b.raw_data(),
                     bias.defined() ? bias.raw_data() : nullptr, out.raw_data(),
                     workspace_data(scratch));
  }
  return out;
}

Tensor run(cpu::Product product, const Tensor& a, const Tensor& b, const Tensor& bias,
           const Tensor& place = {}) {
  SHERD_CHECK(a.dtype() == b.dtype(), "matmul: operands of different types, {} and {}",
              a.describe(), b.describe());
  product.dtype = a.dtype();
  SHERD_CHECK(!place.defined() || (place.shape() == Shape{product.m, product.n} &&
                                   place.dtype() == a.dtype() && place.is_contiguous()),
              "matmul: the place for the result is a {}, expected contiguous {} [{}, {}]",
              place.describe(), name_of(a.dtype()), product.m, product.n);
  if (cpu::product_supports(a.context(), a.dtype())) return multiply(product, a, b, bias, place);
  product.dtype = DType::f32;
  const auto widened = [](const Tensor& x) {
    return x.defined() ? cast(x, DType::f32, MemoryCategory::workspace) : x;
  };
  const Tensor narrow =
      cast(multiply(product, widened(a), widened(b), widened(bias), {}), a.dtype());
  if (!place.defined()) return narrow;
  copy(place, narrow);
  return place;
}

}  // namespace

namespace {

Tensor checked_matmul(const Tensor& a, const Tensor& b, bool transpose_a, bool transpose_b,
                      const Tensor& place) {
  SHERD_CHECK(a.rank() == 2 && b.rank() == 2, "matmul: expected two matrices, got {} and {}",
              a.describe(), b.describe());
  cpu::Product product;
  product.m = a.dim(transpose_a ? 1 : 0);
  product.k = a.dim(transpose_a ? 0 : 1);
  product.n = b.dim(transpose_b ? 0 : 1);
  product.transpose_a = transpose_a;
  product.transpose_b = transpose_b;
  SHERD_CHECK(b.dim(transpose_b ? 1 : 0) == product.k,
              "matmul: inner dimensions differ: {}{} by {}{}", a.describe(),
              transpose_a ? " transposed" : "", b.describe(), transpose_b ? " transposed" : "");
  return run(product, contiguous(a), contiguous(b), {}, place);
}

}  // namespace

Tensor matmul(const Tensor& a, const Tensor& b, bool transpose_a, bool transpose_b) {
  return checked_matmul(a, b, transpose_a, transpose_b, {});
}

Tensor linear_forward(const Tensor& input, const Tensor& weight, const Tensor& bias,
                      Activation activation) {
  SHERD_CHECK(weight.rank() == 2 && input.rank() >= 1 && input.dim(-1) == weight.dim(1),
              "linear: input {} does not fit weight {} (out, in)", input.describe(),
              weight.describe());
  SHERD_CHECK(
      !bias.defined() || (bias.shape() == Shape{weight.dim(0)} && bias.dtype() == weight.dtype()),
      "linear: bias {} does not fit weight {}", bias.describe(), weight.describe());
  const Tensor rows = as_matrix(input);
  cpu::Product product;
  product.m = rows.dim(0);
  product.n = weight.dim(0);
  product.k = weight.dim(1);
  product.transpose_b = true;
  product.bias = bias.defined();
  product.activation = activation;
  return run(product, rows, contiguous(weight), bias.defined() ? contiguous(bias) : bias)
      .reshape(with_last(input.shape(), weight.dim(0)));
}

Tensor linear_backward_input(const Tensor& grad_output, const Tensor& weight) {
  const Tensor rows = as_matrix(grad_output);
  return matmul(rows, weight).reshape(with_last(grad_output.shape(), weight.dim(1)));
}

Tensor linear_backward_weight(const Tensor& grad_output, const Tensor& input, const Tensor& out) {
  return checked_matmul(as_matrix(grad_output), as_matrix(input), true, false, out);
}

Tensor linear_backward_bias(const Tensor& grad_output) {
  const Tensor rows = as_matrix(grad_output);
  Context& context = rows.context();
  const Tensor out = Tensor::empty(context, {rows.dim(1)}, compute_dtype(rows.dtype()));
  dispatch_floating(rows.dtype(), "linear_backward_bias", [&](auto zero) {
    using T = decltype(zero);
    const Tensor scratch =
        workspace(context, cpu::column_sum_workspace_bytes<T>(rows.dim(0), rows.dim(1)));
    if (context.is_meta()) return;
    cpu::column_sum<T>(context.threads(), rows.dim(0), rows.dim(1), rows.data<T>(),
                       out.data<cpu::acc_t<T>>(),
                       static_cast<cpu::acc_t<T>*>(workspace_data(scratch)));
  });
  return out.dtype() == grad_output.dtype() ? out : cast(out, grad_output.dtype());
}

double measure_matmul_rate(Context& context, DType dtype, std::int64_t size, int repeats) {
  using Clock = std::chrono::steady_clock;
  const Tensor a = full(context, {size, size}, dtype, 0.5);
  const Tensor b = full(context, {size, size}, dtype, 0.25);
  matmul(a, b);
  double best = 0.0;
  for (int i = 0; i < repeats; ++i) {
    const auto start = Clock::now();
    matmul(a, b);
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    const auto n = static_cast<double>(size);
    best = std::max(best, 2.0 * n * n * n / seconds);
  }
  return best;
}

}  // namespace sherd
