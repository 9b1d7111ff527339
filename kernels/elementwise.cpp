// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/elementwise.h>

#include <sherd/kernels/cpu/elementwise.h>
#include <sherd/kernels/cpu/strided_copy.h>
#include <sherd/kernels/cuda/elementwise.h>
#include <sherd/kernels/cuda/strided_copy.h>
#include <sherd/kernels/dispatch.h>

#include <algorithm>

namespace sherd {
namespace {

void check_row_scale(const char* operation, const Tensor& x, const Tensor& row_scale) {
  SHERD_CHECK(x.rank() >= 1 && row_scale.shape() == Shape{x.dim(0)} &&
                  row_scale.dtype() == compute_dtype(x.dtype()),
              "{}: {} does not fit {}", operation, row_scale.describe(), x.describe());
}

// Note [Kernels that reach both memories]
// A GPU's kernels read and write the pinned memory of the host beside it. So what has one tensor
// here and one there runs on the GPU, every element crosses the bus once, and no bytes are set
// aside for it. The host does not wait: whoever computes with the tensor in its memory later does,
// when it asks for the address (Storage::data).
bool on_gpu(const Tensor& a, const Tensor& b) {
  return a.device() == Device::cuda || b.device() == Device::cuda;
}
// After work on the compute stream over both.
void record_host_use(const Tensor& a, const Tensor& b) {
  if (!is_beside_gpu(a) && !is_beside_gpu(b)) return;
  const Event used = a.context().compute_stream().record();
  for (const Tensor* x : {&a, &b}) {
    if (is_beside_gpu(*x)) x->storage().record_use(used);
  }
}

// Of a kernel from x to out, one of which may lie in the host's memory.
void record_move(std::string_view name, const Tensor& x, const Tensor& out) {
  if (is_beside_gpu(x) == is_beside_gpu(out)) return record_kernel(name, x, out);
  if (Schedule* const schedule = x.context().schedule()) {
    schedule->add({.kind = Work::Kind::copy,
                   .name = is_beside_gpu(x) ? "copy_to_device" : "copy_to_host",
                   .dtype = x.dtype(),
                   .bytes = std::max(bytes_of(x), bytes_of(out))});
  }
}

template <typename From, typename To>
void convert_elements(const Tensor& x, const Tensor& out) {
  Context& context = x.context();
  if (on_gpu(x, out)) {
    cuda::cast(context.compute_stream(), x.numel(), static_cast<const From*>(x.raw_address()),
               static_cast<To*>(out.raw_address()));
    record_host_use(x, out);
  } else {
    cpu::cast(context.threads(), x.numel(), static_cast<const From*>(x.raw_data()),
              static_cast<To*>(out.raw_data()));
  }
}

// Both contiguous, of any floating types; x may hold u8.
void convert(const char* operation, const Tensor& x, const Tensor& out) {
  record_move("cast", x, out);
  if (x.context().is_meta()) return;
  dispatch_floating(out.dtype(), operation, [&](auto to_zero) {
    using To = decltype(to_zero);
    if (x.dtype() == DType::u8) return convert_elements<std::uint8_t, To>(x, out);
    dispatch_floating(x.dtype(), operation,
                      [&](auto from_zero) { convert_elements<decltype(from_zero), To>(x, out); });
  });
}

// Of one type; x may be strided.
void copy_elements(const Tensor& x, const Tensor& out) {
  arguments::StridedView view;
  for (int d = 0; d < x.rank(); ++d) append(view, x.dim(d), x.stride(d));
  const std::size_t size = size_of(x.dtype());
  Context& context = x.context();
  if (!on_gpu(x, out))
    return cpu::strided_copy(context.threads(), view, size, x.raw_data(), out.raw_data());
  cuda::strided_copy(context.compute_stream(), view, size, x.raw_address(), out.raw_address());
  record_host_use(x, out);
}

}  // namespace

void fill(const Tensor& out, double value) {
  SHERD_CHECK(out.is_contiguous(), "fill: {} is not contiguous", out.describe());
  out.storage().mark_modified();
  Context& context = out.context();
  record_kernel("fill", out);
  if (context.is_meta()) return;
  dispatch_floating(out.dtype(), "fill", [&](auto zero) {
    using T = decltype(zero);
    SHERD_RUN_KERNEL(out, fill<T>, out.numel(), static_cast<cpu::acc_t<T>>(value), out.data<T>());
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
  record_kernel("add", x, y, out);
  if (context.is_meta()) return out;
  dispatch_floating(x.dtype(), "add", [&](auto zero) {
    using T = decltype(zero);
    SHERD_RUN_KERNEL(out, add<T>, x.numel(), x.data<T>(), y.data<T>(), out.data<T>());
  });
  return out;
}

void add_inplace(const Tensor& sum, const Tensor& x) {
  check_same("add_inplace", sum, x);
  SHERD_CHECK(sum.is_contiguous(), "add_inplace: {} is not contiguous", sum.describe());
  const Tensor from = x.is_contiguous() ? x : contiguous(x);
  sum.storage().mark_modified();
  Context& context = sum.context();
  record_kernel("add_inplace", sum, sum, from);
  if (context.is_meta()) return;
  dispatch_floating(sum.dtype(), "add_inplace", [&](auto zero) {
    using T = decltype(zero);
    if (!on_gpu(sum, from)) {
      cpu::add_inplace(context.threads(), sum.numel(), from.data<T>(), sum.data<T>());
      return;
    }
    cuda::add_inplace(context.compute_stream(), sum.numel(),
                      static_cast<const T*>(from.raw_address()),
                      static_cast<T*>(sum.raw_address()));
    record_host_use(sum, from);
  });
}

Tensor scale(const Tensor& x, double factor) {
  const Tensor from = contiguous(x);
  Context& context = from.context();
  const Tensor out = Tensor::empty(context, from.shape(), from.dtype());
  record_kernel("scale", from, out);
  if (context.is_meta()) return out;
  dispatch_floating(from.dtype(), "scale", [&](auto zero) {
    using T = decltype(zero);
    SHERD_RUN_KERNEL(out, scale<T>, from.numel(), from.data<T>(),
                     static_cast<cpu::acc_t<T>>(factor), out.data<T>());
  });
  return out;
}

Tensor cast(const Tensor& x, DType dtype, MemoryCategory category) {
  const Tensor from = x.is_contiguous() ? x : contiguous(x);
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
  if (out.dtype() != x.dtype()) {
    convert("copy", x.is_contiguous() ? x : contiguous(x), out);
  } else if (x.numel() > 0) {
    record_move(x.is_contiguous() ? "copy" : "strided_copy", x, out);
    if (!x.context().is_meta()) copy_elements(x, out);
  }
}

Tensor clone(const Tensor& x, MemoryCategory category) {
  const Tensor out = Tensor::empty(x.context(), x.shape(), x.dtype(), category);
  copy(out, x);
  return out;
}

Tensor contiguous(const Tensor& x) {
  return x.is_contiguous() && !is_beside_gpu(x) ? x : clone(x);
}

Tensor add_scaled_rows(const Tensor& a, const Tensor& b, const Tensor& row_scale) {
  check_same("add_scaled_rows", a, b);
  check_row_scale("add_scaled_rows", b, row_scale);
  const Tensor x = contiguous(a), y = contiguous(b), factors = contiguous(row_scale);
  Context& context = x.context();
  const Tensor out = Tensor::empty(context, x.shape(), x.dtype());
  record_kernel("add_scaled_rows", x, y, out);
  if (context.is_meta() || x.numel() == 0) return out;
  dispatch_floating(x.dtype(), "add_scaled_rows", [&](auto zero) {
    using T = decltype(zero);
    SHERD_RUN_KERNEL(out, add_scaled_rows<T>, x.dim(0), x.numel() / x.dim(0), x.data<T>(),
                     y.data<T>(), factors.data<cpu::acc_t<T>>(), out.data<T>());
  });
  return out;
}

Tensor scale_rows(const Tensor& x, const Tensor& row_scale) {
  check_row_scale("scale_rows", x, row_scale);
  const Tensor from = contiguous(x), factors = contiguous(row_scale);
  Context& context = from.context();
  const Tensor out = Tensor::empty(context, from.shape(), from.dtype());
  record_kernel("scale_rows", from, out);
  if (context.is_meta() || from.numel() == 0) return out;
  dispatch_floating(from.dtype(), "scale_rows", [&](auto zero) {
    using T = decltype(zero);
    SHERD_RUN_KERNEL(out, scale_rows<T>, from.dim(0), from.numel() / from.dim(0), from.data<T>(),
                     factors.data<cpu::acc_t<T>>(), out.data<T>());
  });
  return out;
}

}  // namespace sherd
