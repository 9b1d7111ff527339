// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/elementwise.h>

#include <sherd/kernels/cpu/elementwise.h>
#include <sherd/kernels/cpu/strided_copy.h>
#include <sherd/kernels/dispatch.h>

#include <algorithm>

namespace sherd {
namespace {

void check_row_scale(const char* operation, const Tensor& x, const Tensor& row_scale) {
  SHERD_CHECK(x.rank() >= 1 && row_scale.shape() == Shape{x.dim(0)} &&
                  row_scale.dtype() == compute_dtype(x.dtype()),
              "{}: {} does not fit {}", operation, row_scale.describe(), x.describe());
}

// Both contiguous, of any floating types; x may hold u8.
void convert(const char* operation, const Tensor& x, const Tensor& out) {
  Context& context = x.context();
  if (context.is_meta()) return;
  dispatch_floating(out.dtype(), operation, [&](auto to_zero) {
    using To = decltype(to_zero);
    if (x.dtype() == DType::u8) {
      cpu::cast<std::uint8_t, To>(context.threads(), x.numel(), x.data<std::uint8_t>(),
                                  out.data<To>());
      return;
    }
    dispatch_floating(x.dtype(), operation, [&](auto from_zero) {
      using From = decltype(from_zero);
      cpu::cast<From, To>(context.threads(), x.numel(), x.data<From>(), out.data<To>());
    });
  });
}

}  // namespace

void fill(const Tensor& out, double value) {
  SHERD_CHECK(out.is_contiguous(), "fill: {} is not contiguous", out.describe());
  out.storage().mark_modified();
  Context& context = out.context();
  if (context.is_meta()) return;
  dispatch_floating(out.dtype(), "fill", [&](auto zero) {
    using T = decltype(zero);
    cpu::fill<T>(context.threads(), out.numel(), static_cast<cpu::acc_t<T>>(value), out.data<T>());
  });
}

Tensor full(Context& context, const Shape& shape, DType dtype, double value,
            MemoryCategory category) {
  const Tensor out = Tensor::empty(context, shape, dtype, category);
  fill(out, value);
  return out;
}

Tensor add(const Tensor& a, const Tensor& b) {
  check_same("add", a, b);
  const Tensor x = contiguous(a), y = contiguous(b);
  Context& context = x.context();
  const Tensor out = Tensor::empty(context, x.shape(), x.dtype());
  if (context.is_meta()) return out;
  dispatch_floating(x.dtype(), "add", [&](auto zero) {
    using T = decltype(zero);
    cpu::add<T>(context.threads(), x.numel(), x.data<T>(), y.data<T>(), out.data<T>());
  });
  return out;
}

void add_inplace(const Tensor& sum, const Tensor& x) {
  check_same("add_inplace", sum, x);
  SHERD_CHECK(sum.is_contiguous(), "add_inplace: {} is not contiguous", sum.describe());
  const Tensor from = contiguous(x);
  sum.storage().mark_modified();
  Context& context = sum.context();
  if (context.is_meta()) return;
  dispatch_floating(sum.dtype(), "add_inplace", [&](auto zero) {
    using T = decltype(zero);
    cpu::add_inplace<T>(context.threads(), sum.numel(), from.data<T>(), sum.data<T>());
  });
}

Tensor scale(const Tensor& x, double factor) {
  const Tensor from = contiguous(x);
  Context& context = from.context();
  const Tensor out = Tensor::empty(context, from.shape(), from.dtype());
  if (context.is_meta()) return out;
  dispatch_floating(from.dtype(), "scale", [&](auto zero) {
    using T = decltype(zero);
    cpu::scale<T>(context.threads(), from.numel(), from.data<T>(),
                  static_cast<cpu::acc_t<T>>(factor), out.data<T>());
  });
  return out;
}

Tensor cast(const Tensor& x, DType dtype, MemoryCategory category) {
  const Tensor from = contiguous(x);
  const Tensor out = Tensor::empty(from.context(), from.shape(), dtype, category);
  convert("cast", from, out);
  return out;
}

void copy(const Tensor& out, const Tensor& x) {
  SHERD_CHECK(out.shape() == x.shape() && (out.dtype() == x.dtype() ||
                                           (is_floating(out.dtype()) && is_floating(x.dtype()))),
              "copy: expected one shape, and one type or floating ones, got {} and {}",
              out.describe(), x.describe());
  SHERD_CHECK(out.is_contiguous(), "copy: {} is not contiguous", out.describe());
  out.storage().mark_modified();
  Context& context = x.context();
  if (out.dtype() != x.dtype()) return convert("copy", contiguous(x), out);
  if (context.is_meta() || x.numel() == 0) return;
  cpu::StridedView view;
  view.rank = x.rank();
  std::ranges::copy(x.shape().dims(), view.size.begin());
  view.stride = x.strides();
  cpu::strided_copy(context.threads(), view, size_of(x.dtype()), x.raw_data(), out.raw_data());
}

Tensor clone(const Tensor& x, MemoryCategory category) {
  const Tensor out = Tensor::empty(x.context(), x.shape(), x.dtype(), category);
  copy(out, x);
  return out;
}

Tensor contiguous(const Tensor& x) {
  return x.is_contiguous() ? x : clone(x);
}

Tensor add_scaled_rows(const Tensor& a, const Tensor& b, const Tensor& row_scale) {
  check_same("add_scaled_rows", a, b);
  check_row_scale("add_scaled_rows", b, row_scale);
  const Tensor x = contiguous(a), y = contiguous(b);
  Context& context = x.context();
  const Tensor out = Tensor::empty(context, x.shape(), x.dtype());
  if (context.is_meta() || x.numel() == 0) return out;
  dispatch_floating(x.dtype(), "add_scaled_rows", [&](auto zero) {
    using T = decltype(zero);
    cpu::add_scaled_rows<T>(context.threads(), x.dim(0), x.numel() / x.dim(0), x.data<T>(),
                            y.data<T>(), row_scale.data<cpu::acc_t<T>>(), out.data<T>());
  });
  return out;
}

Tensor scale_rows(const Tensor& x, const Tensor& row_scale) {
  check_row_scale("scale_rows", x, row_scale);
  const Tensor from = contiguous(x);
  Context& context = from.context();
  const Tensor out = Tensor::empty(context, from.shape(), from.dtype());
  if (context.is_meta() || from.numel() == 0) return out;
  dispatch_floating(from.dtype(), "scale_rows", [&](auto zero) {
    using T = decltype(zero);
    cpu::scale_rows<T>(context.threads(), from.dim(0), from.numel() / from.dim(0), from.data<T>(),
                       row_scale.data<cpu::acc_t<T>>(), out.data<T>());
  });
  return out;
}

}  // namespace sherd
