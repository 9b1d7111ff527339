// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/cross_entropy.h>

#include <sherd/kernels/cpu/cross_entropy.h>
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
  if (logits.context().is_meta()) return;
  const std::int64_t* labels = target.labels.data<std::int64_t>();
  const std::int64_t bad = cpu::first_bad_label(logits.dim(0), logits.dim(1), labels);
  SHERD_CHECK(bad < 0, "cross_entropy: label {} of row {} is outside [0, {})", labels[bad], bad,
              logits.dim(1));
}

CrossEntropyTarget contiguous_target(const CrossEntropyTarget& target) {
  const auto gapless = [](const Tensor& x) { return x.defined() ? contiguous(x) : x; };
  return {gapless(target.labels), gapless(target.probabilities), target.label_smoothing};
}

template <typename T>
cpu::CrossEntropy<T> arguments_of(const Tensor& logits, const CrossEntropyTarget& target) {
  cpu::CrossEntropy<T> p;
  p.rows = logits.dim(0);
  p.classes = logits.dim(1);
  p.logits = logits.data<T>();
  if (target.labels.defined()) p.labels = target.labels.data<std::int64_t>();
  if (target.probabilities.defined()) p.soft_targets = target.probabilities.data<cpu::acc_t<T>>();
  p.smoothing = static_cast<cpu::acc_t<T>>(target.label_smoothing);
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
  if (context.is_meta()) return out;
  dispatch_floating(x.dtype(), "cross_entropy", [&](auto zero) {
    using T = decltype(zero);
    cpu::cross_entropy_forward<T>(context.threads(), arguments_of<T>(x, target),
                                  out.row_loss.data<cpu::acc_t<T>>(),
                                  out.lse.data<cpu::acc_t<T>>());
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
  if (context.is_meta()) return out;
  dispatch_floating(x.dtype(), "cross_entropy_backward", [&](auto zero) {
    using T = decltype(zero);
    using A = cpu::acc_t<T>;
    const A scale = static_cast<A>(grad_loss.item()) * static_cast<A>(factor);
    cpu::cross_entropy_backward<T>(context.threads(), arguments_of<T>(x, target), lse.data<A>(),
                                   scale, nullptr, out.data<T>());
  });
  return out;
}

std::int64_t count_correct(const Tensor& logits, const Tensor& labels) {
  check_target(logits, contiguous_target({labels, {}, 0.0}));
  const Tensor x = contiguous(logits), gapless_labels = contiguous(labels);
  const std::int64_t rows = x.dim(0);
  std::vector<std::int64_t> predicted(static_cast<std::size_t>(rows));
  dispatch_floating(x.dtype(), "count_correct", [&](auto zero) {
    using T = decltype(zero);
    cpu::argmax_rows<T>(x.context().threads(), rows, x.dim(1), x.data<T>(), predicted.data());
  });
  return cpu::count_equal(rows, predicted.data(), gapless_labels.data<std::int64_t>());
}

}  // namespace sherd
