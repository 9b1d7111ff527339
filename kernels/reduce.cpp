// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/reduce.h>

#include <sherd/kernels/cpu/parallel.h>
#include <sherd/kernels/cpu/reduce.h>
#include <sherd/kernels/dispatch.h>
#include <sherd/kernels/elementwise.h>

namespace sherd {
namespace {

constexpr std::int64_t kParallelSum = 65536;  // elements from which threads pay

}  // namespace

Tensor sum(const Tensor& x, double factor) {
  const Tensor from = contiguous(x);
  Context& context = from.context();
  const Tensor out = Tensor::empty(context, {}, compute_dtype(from.dtype()));
  dispatch_floating(from.dtype(), "sum", [&](auto zero) {
    using T = decltype(zero);
    using A = cpu::acc_t<T>;
    const Tensor scratch = workspace(context, cpu::reduce_workspace_bytes<T>(from.numel()));
    if (context.is_meta()) return;
    const A total = cpu::sum<T>(context.threads(), from.numel(), from.data<T>(),
                                static_cast<A*>(workspace_data(scratch)));
    *out.data<A>() = total * static_cast<A>(factor);
  });
  return out;
}

void add_sum_of_squares(const Tensor& x, ExactSum& total) {
  const Tensor from = contiguous(x);
  if (from.context().is_meta()) return;
  dispatch_floating(from.dtype(), "add_sum_of_squares", [&](auto zero) {
    using T = decltype(zero);
    // The total does not depend on the cut, so each thread takes a part and the parts are merged.
    const std::int64_t n = from.numel();
    const T* values =
        from.data<T>();  // before the threads: it throws where there is nothing to read
    const int parts = n < kParallelSum ? 1 : from.context().threads();
    std::vector<ExactSum> partial(static_cast<std::size_t>(parts));
    cpu::parallel_tasks(parts, parts, [&](std::int64_t part) {
      const std::int64_t begin = n * part / parts, end = n * (part + 1) / parts;
      partial[static_cast<std::size_t>(part)].add_squares(values + begin, end - begin);
    });
    for (const ExactSum& part : partial) total.merge(part);
  });
}

std::int64_t first_non_finite(const Tensor& x) {
  const Tensor from = contiguous(x);
  if (from.context().is_meta()) return -1;
  std::int64_t index = -1;
  dispatch_floating(from.dtype(), "first_non_finite", [&](auto zero) {
    using T = decltype(zero);
    index = cpu::first_non_finite<T>(from.context().threads(), from.numel(), from.data<T>());
  });
  return index;
}

}  // namespace sherd
