// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/reduce.h>

#include <sherd/kernels/cpu/parallel.h>
#include <sherd/kernels/cpu/reduce.h>
#include <sherd/kernels/cuda/reduce.h>
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
    using A = arguments::acc_t<T>;
    const bool on_cuda = computes_on_cuda(from);
    const std::int64_t n = from.numel();
    const Tensor scratch = workspace(
        context, on_cuda ? cuda::reduce_workspace_bytes<T>(n) : cpu::reduce_workspace_bytes<T>(n));
    record_kernel("sum", from);
    if (context.is_meta()) return;
    A* const partial = static_cast<A*>(workspace_data(scratch));
    if (on_cuda) {
      cuda::sum<T>(context.compute_stream(), n, from.data<T>(), static_cast<A>(factor),
                   out.data<A>(), partial);
    } else {
      *out.data<A>() =
          cpu::sum<T>(context.threads(), n, from.data<T>(), partial) * static_cast<A>(factor);
    }
  });
  return out;
}

void add_sum_of_squares(const Tensor& x, ExactSum& total) {
  const Tensor from = contiguous(x);
  if (computes_on_cuda(from)) {
    SquareSum squares(from.context());
    squares.add(from);
    return total.merge(squares.read());
  }
  record_kernel("sum_of_squares", from);
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

SquareSum::SquareSum(Context& context) {
  if (context.target() != Device::cuda) return;
  words_ = Tensor::zeros(context, {ExactSum::kWords}, DType::i64, MemoryCategory::workspace);
}

void SquareSum::add(const Tensor& x) {
  const Tensor from = contiguous(x);
  if (!computes_on_cuda(from)) return add_sum_of_squares(from, total_);
  record_kernel("sum_of_squares", from);
  if (from.context().is_meta()) return;
  dispatch_floating(x.dtype(), "add_sum_of_squares", [&](auto zero) {
    using T = decltype(zero);
    cuda::add_square_words<T>(from.context().compute_stream(), from.numel(), from.data<T>(),
                              words_.data<std::int64_t>());
  });
}

ExactSum SquareSum::read() const {
  ExactSum total = total_;
  if (!words_.defined()) return total;
  if (words_.context().is_meta()) {
    words_.context().compute_stream().record().wait();  // as the copy to the host does
    return total;
  }
  ExactSum::Words words;
  words_.copy_to_host(words.data(), sizeof words);
  total.merge(ExactSum::from_words(words));
  return total;
}

std::int64_t first_non_finite(const Tensor& x) {
  const Tensor from = contiguous(x);
  Context& context = from.context();
  const bool on_cuda = computes_on_cuda(from);
  const Tensor found = workspace(context, on_cuda ? sizeof(std::int64_t) : 0);
  std::int64_t index = -1;
  if (context.is_meta()) return index;
  dispatch_floating(from.dtype(), "first_non_finite", [&](auto zero) {
    using T = decltype(zero);
    if (on_cuda) {
      cuda::first_non_finite<T>(context.compute_stream(), from.numel(), from.data<T>(),
                                static_cast<std::int64_t*>(workspace_data(found)));
      found.copy_to_host(&index, sizeof index);
    } else {
      index = cpu::first_non_finite<T>(context.threads(), from.numel(), from.data<T>());
    }
  });
  return index;
}

}  // namespace sherd
