// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/random.h>

#include <sherd/kernels/cpu/dropout.h>
#include <sherd/kernels/cpu/random_fill.h>
#include <sherd/kernels/cuda/dropout.h>
#include <sherd/kernels/dispatch.h>
#include <sherd/kernels/elementwise.h>
#include <sherd/runtime/cuda/device.h>

#include <algorithm>
#include <vector>

namespace sherd {
namespace {

// Elements of a GPU's tensor at a time.
constexpr std::int64_t kPiece = std::int64_t{1} << 20;

// fill(T* to, count, first_index) computes on the CPU for a GPU too: initial weights have the same
// bits on every device, which two devices' elementary functions would not give. It is done once.
template <typename Fill>
void fill_random(const char* operation, const Tensor& out, std::int64_t first_index,
                 const Fill& fill) {
  SHERD_CHECK(out.is_contiguous(), "{}: {} is not contiguous", operation, out.describe());
  out.storage().mark_modified();
  if (out.context().is_meta()) return;
  const auto first = static_cast<std::uint64_t>(first_index);
  const std::int64_t n = out.numel();
  dispatch_floating(out.dtype(), operation, [&](auto zero) {
    using T = decltype(zero);
    if (out.device() == Device::cpu) return fill(out.data<T>(), n, first);
    std::vector<T> piece(static_cast<std::size_t>(std::min(n, kPiece)));
    for (std::int64_t begin = 0; begin < n; begin += kPiece) {
      const std::int64_t count = std::min(kPiece, n - begin);
      fill(piece.data(), count, first + static_cast<std::uint64_t>(begin));
      cuda::copy(out.context().compute_stream(), out.data<T>() + begin, piece.data(),
                 static_cast<std::size_t>(count) * sizeof(T));
    }
  });
}

}  // namespace

void fill_uniform(const Tensor& out, double low, double high, const RandomStream& stream,
                  std::int64_t first_index) {
  fill_random("fill_uniform", out, first_index,
              [&](auto* to, std::int64_t count, std::uint64_t first) {
                cpu::fill_uniform(out.context().threads(), count, to, stream, first, low, high);
              });
}

void fill_normal(const Tensor& out, double mean, double std, const RandomStream& stream,
                 std::int64_t first_index) {
  fill_random("fill_normal", out, first_index,
              [&](auto* to, std::int64_t count, std::uint64_t first) {
                cpu::fill_normal(out.context().threads(), count, to, stream, first, mean, std);
              });
}

void fill_truncated_normal(const Tensor& out, double mean, double std, double low, double high,
                           const RandomStream& stream, std::int64_t first_index) {
  fill_random("fill_truncated_normal", out, first_index,
              [&](auto* to, std::int64_t count, std::uint64_t first) {
                cpu::fill_truncated_normal(out.context().threads(), count, to, stream, first,
                                           {mean, std, low, high});
              });
}

Tensor dropout(const Tensor& input, double drop, const RandomStream& stream,
               std::int64_t first_index) {
  const Tensor x = contiguous(input);
  Context& context = x.context();
  const Tensor out = Tensor::empty(context, x.shape(), x.dtype());
  record_kernel("dropout", x, out);
  if (context.is_meta()) return out;
  dispatch_floating(x.dtype(), "dropout", [&](auto zero) {
    using T = decltype(zero);
    SHERD_RUN_KERNEL(x, dropout<T>, x.numel(), x.data<T>(), out.data<T>(), 1.0 - drop, stream,
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
