// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/matmul.h>

#include <sherd/kernels/cpu/column_sum.h>
#include <sherd/kernels/cpu/product.h>
#include <sherd/kernels/cuda/column_sum.h>
#include <sherd/kernels/cuda/product.h>
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

// A weight [N, ...] as [N, K].
Tensor as_weight_matrix(const Tensor& weight) {
  SHERD_CHECK(weight.rank() >= 2, "linear: a weight is [out, in], got {}", weight.describe());
  std::int64_t in = 1;
  for (int i = 1; i < weight.rank(); ++i) in *= weight.dim(i);
  return contiguous(weight).reshape({weight.dim(0), in});
}

using arguments::Product;

// Whether the backend multiplies this type as it is.
bool supports(Context& context, DType dtype) {
  return context.target() == Device::cuda || cpu::product_supports(context, dtype);
}

std::size_t workspace_bytes(Context& context, const Product& product) {
  return context.target() == Device::cuda ? cuda::product_workspace_bytes(product)
                                          : cpu::product_workspace_bytes(context, product);
}

void record_product(Context& context, const Product& product, std::int64_t bytes) {
  Schedule* const schedule = context.schedule();
  if (schedule == nullptr) return;
  schedule->add({.kind = Work::Kind::product,
                 .name = "product",
                 .dtype = product.dtype,
                 .bytes = bytes,
                 .flops = 2 * product.m * product.n * product.k,
                 .m = product.m,
                 .n = product.n,
                 .k = product.k,
                 .transposed_a = product.transpose_a,
                 .transposed_b = product.transpose_b});
}

// a, b, bias and the result are contiguous; the operands are of one type the backend supports. The
// result goes to `place` where one is given.
Tensor multiply(const Product& product, const Tensor& a, const Tensor& b, const Tensor& bias,
                const Tensor& place) {
  Context& context = a.context();
  const Tensor out =
      place.defined() ? place : Tensor::empty(context, {product.m, product.n}, product.out_dtype);
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
  const Tensor scratch = workspace(context, workspace_bytes(context, product));
  record_product(context, product, bytes_of(a) + bytes_of(b) + bytes_of(bias) + bytes_of(out));
  if (context.is_meta()) return out;
  const auto run_product = out.device() == Device::cuda ? cuda::run_product : cpu::run_product;
  run_product(context, product, a.raw_data(), b.raw_data(),
              bias.defined() ? bias.raw_data() : nullptr, out.raw_data(), workspace_data(scratch));
  return out;
}

// The result is of `out_dtype`: the operands' type, or their compute type.
Tensor run(Product product, DType out_dtype, const Tensor& a, const Tensor& b, const Tensor& bias,
           const Tensor& place = {}) {
  SHERD_CHECK(a.dtype() == b.dtype(), "matmul: operands of different types, {} and {}",
              a.describe(), b.describe());
  SHERD_CHECK(!place.defined() || (place.shape() == Shape{product.m, product.n} &&
                                   place.dtype() == out_dtype && place.is_contiguous()),
              "matmul: the place for the result is a {}, expected contiguous {} [{}, {}]",
              place.describe(), name_of(out_dtype), product.m, product.n);
  product.dtype = a.dtype();
  product.out_dtype = out_dtype;
  if (supports(a.context(), a.dtype())) return multiply(product, a, b, bias, place);
  product.dtype = product.out_dtype = DType::f32;
  const auto widened = [](const Tensor& x) {
    return x.defined() ? cast(x, DType::f32, MemoryCategory::workspace) : x;
  };
  const Tensor wide = multiply(product, widened(a), widened(b), widened(bias), place);
  return out_dtype == DType::f32 ? wide : cast(wide, out_dtype);
}

Product plain_product(const Tensor& a, const Tensor& b, bool transpose_a, bool transpose_b) {
  SHERD_CHECK(a.rank() == 2 && b.rank() == 2, "matmul: expected two matrices, got {} and {}",
              a.describe(), b.describe());
  Product product;
  product.m = a.dim(transpose_a ? 1 : 0);
  product.k = a.dim(transpose_a ? 0 : 1);
  product.n = b.dim(transpose_b ? 0 : 1);
  product.transpose_a = transpose_a;
  product.transpose_b = transpose_b;
  SHERD_CHECK(b.dim(transpose_b ? 1 : 0) == product.k,
              "matmul: inner dimensions differ: {}{} by {}{}", a.describe(),
              transpose_a ? " transposed" : "", b.describe(), transpose_b ? " transposed" : "");
  return product;
}

}  // namespace

Tensor matmul(const Tensor& a, const Tensor& b, bool transpose_a, bool transpose_b) {
  return run(plain_product(a, b, transpose_a, transpose_b), a.dtype(), contiguous(a), contiguous(b),
             {});
}

Tensor linear_forward(const Tensor& input, const Tensor& weight, const Tensor& bias,
                      Activation activation) {
  const Tensor matrix = as_weight_matrix(weight);
  SHERD_CHECK(input.rank() >= 1 && input.dim(-1) == matrix.dim(1),
              "linear: input {} does not fit weight {} (out, in)", input.describe(),
              weight.describe());
  SHERD_CHECK(
      !bias.defined() || (bias.shape() == Shape{weight.dim(0)} && bias.dtype() == weight.dtype()),
      "linear: bias {} does not fit weight {}", bias.describe(), weight.describe());
  const Tensor rows = as_matrix(input);
  Product product;
  product.m = rows.dim(0);
  product.n = weight.dim(0);
  product.k = matrix.dim(1);
  product.transpose_b = true;
  product.bias = bias.defined();
  product.activation = activation;
  return run(product, rows.dtype(), rows, matrix, bias.defined() ? contiguous(bias) : bias)
      .reshape(with_last(input.shape(), weight.dim(0)));
}

Tensor linear_backward_input(const Tensor& grad_output, const Tensor& weight) {
  const Tensor rows = as_matrix(grad_output);
  const Tensor matrix = as_weight_matrix(weight);
  return matmul(rows, matrix).reshape(with_last(grad_output.shape(), matrix.dim(1)));
}

Tensor linear_backward_weight(const Tensor& grad_output, const Tensor& input, const Tensor& out) {
  const Tensor grads = as_matrix(grad_output), rows = as_matrix(input);
  const Tensor place = out.defined() ? as_weight_matrix(out) : out;
  SHERD_CHECK(!out.defined() || out.is_contiguous(), "linear_backward_weight: {} is not contiguous",
              out.describe());
  const Tensor matrix = run(plain_product(grads, rows, true, false), compute_dtype(rows.dtype()),
                            grads, rows, {}, place);
  return out.defined() ? out : matrix;
}

Tensor linear_backward_bias(const Tensor& grad_output) {
  const Tensor rows = as_matrix(grad_output);
  Context& context = rows.context();
  const Tensor out = Tensor::empty(context, {rows.dim(1)}, compute_dtype(rows.dtype()));
  dispatch_floating(rows.dtype(), "linear_backward_bias", [&](auto zero) {
    using T = decltype(zero);
    using A = arguments::acc_t<T>;
    const bool on_cuda = context.target() == Device::cuda;
    const std::int64_t m = rows.dim(0), n = rows.dim(1);
    const Tensor scratch = workspace(context, on_cuda ? cuda::column_sum_workspace_bytes<T>(m, n)
                                                      : cpu::column_sum_workspace_bytes<T>(m, n));
    record_kernel("column_sum", rows, out);
    if (context.is_meta()) return;
    auto* const partial = static_cast<A*>(workspace_data(scratch));
    if (on_cuda) {
      cuda::column_sum<T>(context.compute_stream(), m, n, rows.data<T>(), out.data<A>(), partial);
    } else {
      cpu::column_sum<T>(context.threads(), m, n, rows.data<T>(), out.data<A>(), partial);
    }
  });
  return out;
}

double measure_matmul_rate(Context& context, DType dtype, std::int64_t size, int repeats) {
  using Clock = std::chrono::steady_clock;
  const Tensor a = full(context, {size, size}, dtype, 0.5);
  const Tensor b = full(context, {size, size}, dtype, 0.25);
  matmul(a, b);
  context.compute_stream().synchronize();
  double best = 0.0;
  for (int i = 0; i < repeats; ++i) {
    const auto start = Clock::now();
    matmul(a, b);
    context.compute_stream().synchronize();
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    const auto n = static_cast<double>(size);
    best = std::max(best, 2.0 * n * n * n / seconds);
  }
  return best;
}

}  // namespace sherd
