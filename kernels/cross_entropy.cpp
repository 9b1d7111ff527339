// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/cross_entropy.h>

#include <sherd/kernels/cpu/cross_entropy.h>
#include <sherd/kernels/cuda/cross_entropy.h>
#include <sherd/kernels/dispatch.h>
#include <sherd/kernels/elementwise.h>

namespace sherd {
namespace {

void check_target(const Tensor& logits, const CrossEntropyTarget& target) {
  SHERD_CHECK(logits.rank() == 2 && logits.dim(1) > 0,
              "cross_entropy: expected logits [rows, classes], got {}", logits.describe());
  SHERD_CHECK(target.label_smoothing >= 0.0 && target.label_smoothing <= 1.0,
              "cross_entropy: label smoothing must be in [0, 1], got {}", target.label_smoothing);
  SHERD_CHECK(target.labels.defined() != target.probabilities.defined(),
              "cross_entropy: give either labels or probabilities");
  if (target.probabilities.defined()) {
    SHERD_CHECK(target.probabilities.shape() == logits.shape() &&
                    target.probabilities.dtype() == compute_dtype(logits.dtype()),
                "cross_entropy: probabilities {} do not fit logits {}",
                target.probabilities.describe(), logits.describe());
    return;
  }
  SHERD_CHECK(target.labels.dtype() == DType::i64 && target.labels.shape() == Shape{logits.dim(0)},
              "cross_entropy: labels {} do not fit logits {}", target.labels.describe(),
              logits.describe());
  if (logits.context().device() == Device::cpu) check_labels(target.labels, logits.dim(1));
}

CrossEntropyTarget contiguous_target(const CrossEntropyTarget& target) {
  const auto gapless = [](const Tensor& x) { return x.defined() ? contiguous(x) : x; };
  return {gapless(target.labels), gapless(target.probabilities), target.label_smoothing};
}

template <typename T>
arguments::CrossEntropy<T> arguments_of(const Tensor& logits, const CrossEntropyTarget& target) {
  arguments::CrossEntropy<T> p;
  p.rows = logits.dim(0);
  p.classes = logits.dim(1);
  p.logits = logits.data<T>();
  if (target.labels.defined()) p.labels = target.labels.data<std::int64_t>();
  if (target.probabilities.defined())
    p.soft_targets = target.probabilities.data<arguments::acc_t<T>>();
  p.smoothing = static_cast<arguments::acc_t<T>>(target.label_smoothing);
  return p;
}

}  // namespace

CrossEntropyOutput cross_entropy_forward(const Tensor& logits, const CrossEntropyTarget& given) {
  const CrossEntropyTarget target = contiguous_target(given);
  check_target(logits, target);
  const Tensor x = contiguous(logits);
  Context& context = x.context();
  const DType dtype = compute_dtype(x.dtype());
  const CrossEntropyOutput out{Tensor::empty(context, {x.dim(0)}, dtype),
                               Tensor::empty(context, {x.dim(0)}, dtype)};
  record_kernel("cross_entropy_forward", x);
  if (context.is_meta()) return out;
  dispatch_floating(x.dtype(), "cross_entropy", [&](auto zero) {
    using T = decltype(zero);
    using A = arguments::acc_t<T>;
    const auto p = arguments_of<T>(x, target);
    A* const row_loss = out.row_loss.data<A>();
    A* const lse = out.lse.data<A>();
    if (context.target() == Device::cuda) {
      cuda::cross_entropy_forward<T>(context.compute_stream(), p, row_loss, lse);
    } else {
      cpu::cross_entropy_forward<T>(context.threads(), p, row_loss, lse);
    }
  });
  return out;
}

Tensor cross_entropy_backward(const Tensor& grad_loss, const Tensor& logits,
                              const CrossEntropyTarget& given, const Tensor& lse, double factor) {
  const CrossEntropyTarget target = contiguous_target(given);
  check_target(logits, target);
  check_statistic("cross_entropy_backward", lse, {logits.dim(0)}, logits.dtype());
  SHERD_CHECK(grad_loss.numel() == 1 && is_floating(grad_loss.dtype()),
              "cross_entropy_backward: the loss's gradient must be a number, got {}",
              grad_loss.describe());
  const Tensor x = contiguous(logits);
  Context& context = x.context();
  const Tensor out = Tensor::empty(context, x.shape(), x.dtype());
  const bool on_cuda = context.target() == Device::cuda;
  const DType dtype = compute_dtype(x.dtype());
  const Tensor loss = on_cuda && grad_loss.dtype() != dtype ? cast(grad_loss, dtype) : grad_loss;
  record_kernel("cross_entropy_backward", x, out);
  if (context.is_meta()) return out;
  dispatch_floating(x.dtype(), "cross_entropy_backward", [&](auto zero) {
    using T = decltype(zero);
    using A = arguments::acc_t<T>;
    if (on_cuda) {
      return cuda::cross_entropy_backward<T>(context.compute_stream(), arguments_of<T>(x, target),
                                             lse.data<A>(), loss.data<A>(), static_cast<A>(factor),
                                             nullptr, out.data<T>());
    }
    const A scale = static_cast<A>(grad_loss.item()) * static_cast<A>(factor);
    cpu::cross_entropy_backward<T>(context.threads(), arguments_of<T>(x, target), lse.data<A>(),
                                   scale, nullptr, out.data<T>());
  });
  return out;
}

void check_labels(const Tensor& labels, std::int64_t classes) {
  SHERD_CHECK(labels.dtype() == DType::i64 && labels.rank() == 1,
              "check_labels: expected labels i64 [rows], got {}", labels.describe());
  const Tensor all = contiguous(labels);
  Context& context = all.context();
  const std::int64_t rows = all.numel();
  std::int64_t bad = -1;
  if (computes_on_cuda(all)) {
    const Tensor found = workspace(context, sizeof bad);
    cuda::first_bad_label(context.compute_stream(), rows, classes, all.data<std::int64_t>(),
                          static_cast<std::int64_t*>(workspace_data(found)));
    found.copy_to_host(&bad, sizeof bad);
  } else {
    bad = cpu::first_bad_label(rows, classes, all.data<std::int64_t>());
  }
  if (bad < 0) return;
  std::int64_t label = 0;
  all.slice(0, bad, bad + 1).copy_to_host(&label, sizeof label);
  fail("cross_entropy: label {} of row {} is outside [0, {})", label, bad, classes);
}

namespace {

std::int64_t count_correct_on_cuda(const Tensor& logits, const Tensor& labels) {
  Context& context = logits.context();
  Stream& stream = context.compute_stream();
  const std::int64_t rows = logits.dim(0);
  const Tensor predicted = Tensor::empty(context, {rows}, DType::i64, MemoryCategory::workspace);
  const Tensor count = Tensor::empty(context, {1}, DType::i64, MemoryCategory::workspace);
  dispatch_floating(logits.dtype(), "count_correct", [&](auto zero) {
    using T = decltype(zero);
    cuda::argmax_rows<T>(stream, rows, logits.dim(1), logits.data<T>(),
                         predicted.data<std::int64_t>());
  });
  cuda::count_equal(stream, rows, predicted.data<std::int64_t>(), labels.data<std::int64_t>(),
                    count.data<std::int64_t>());
  return count.to_vector<std::int64_t>()[0];
}

}  // namespace

std::int64_t count_correct(const Tensor& logits, const Tensor& labels) {
  check_target(logits, {labels, {}, 0.0});
  const Tensor x = contiguous(logits), gapless_labels = contiguous(labels);
  if (x.device() == Device::cuda) {
    check_labels(gapless_labels, x.dim(1));
    return count_correct_on_cuda(x, gapless_labels);
  }
  const std::int64_t rows = x.dim(0);
  std::vector<std::int64_t> predicted(static_cast<std::size_t>(rows));
  dispatch_floating(x.dtype(), "count_correct", [&](auto zero) {
    using T = decltype(zero);
    cpu::argmax_rows<T>(x.context().threads(), rows, x.dim(1), x.data<T>(), predicted.data());
  });
  return cpu::count_equal(rows, predicted.data(), gapless_labels.data<std::int64_t>());
}

}  // namespace sherd
