// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/random.h>

#include <sherd/kernels/cpu/dropout.h>
#include <sherd/kernels/cpu/random_fill.h>
#include <sherd/kernels/dispatch.h>
#include <sherd/kernels/elementwise.h>

namespace sherd {
namespace {

template <typename Fill>
void fill_random(const char* operation, const Tensor& out, const Fill& fill) {
  SHERD_CHECK(out.is_contiguous(), "{}: {} is not contiguous", operation, out.describe());
  out.storage().mark_modified();
  if (!out.context().is_meta()) dispatch_floating(out.dtype(), operation, fill);
}

}  // namespace

void fill_uniform(const Tensor& out, double low, double high, const RandomStream& stream,
                  std::int64_t first_index) {
  fill_random("fill_uniform", out, [&](auto zero) {
    using T = decltype(zero);
    cpu::fill_uniform<T>(out.context().threads(), out.numel(), out.data<T>(), stream,
                         static_cast<std::uint64_t>(first_index), low, high);
  });
}

void fill_normal(const Tensor& out, double mean, double std, const RandomStream& stream,
                 std::int64_t first_index) {
  fill_random("fill_normal", out, [&](auto zero) {
    using T = decltype(zero);
    cpu::fill_normal<T>(out.context().threads(), out.numel(), out.data<T>(), stream,
                        static_cast<std::uint64_t>(first_index), mean, std);
  });
}

void fill_truncated_normal(const Tensor& out, double mean, double std, double low, double high,
                           const RandomStream& stream, std::int64_t first_index) {
  fill_random("fill_truncated_normal", out, [&](auto zero) {
    using T = decltype(zero);
    cpu::fill_truncated_normal<T>(out.context().threads(), out.numel(), out.data<T>(), stream,
                                  static_cast<std::uint64_t>(first_index), {mean, std, low, high});
  });
}

Tensor dropout(const Tensor& input, double drop, const RandomStream& stream,
               std::int64_t first_index) {
  const Tensor x = contiguous(input);
  Context& context = x.context();
  const Tensor out = Tensor::empty(context, x.shape(), x.dtype());
  if (context.is_meta()) return out;
  dispatch_floating(x.dtype(), "dropout", [&](auto zero) {
    using T = decltype(zero);
    cpu::dropout<T>(context.threads(), x.numel(), x.data<T>(), out.data<T>(), 1.0 - drop, stream,
                    static_cast<std::uint64_t>(first_index));
  });
  return out;
}

Tensor drop_path_scale(Context& context, std::int64_t rows, DType dtype, double drop,
                       const RandomStream& stream, std::int64_t first_sample) {
  const Tensor ones = full(context, {rows}, compute_dtype(dtype), 1.0);
  return dropout(ones, drop, stream, first_sample);
}

}  // namespace sherd
