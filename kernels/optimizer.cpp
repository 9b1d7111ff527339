// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/optimizer.h>

#include <sherd/kernels/cpu/optimizers.h>
#include <sherd/kernels/cuda/optimizers.h>
#include <sherd/kernels/dispatch.h>

#include <cmath>

namespace sherd {
namespace {

template <typename Body>
void dispatch_master(const Tensor& parameter, const Body& body) {
  return parameter.dtype() == DType::f64 ? body(double{}) : body(float{});
}

// Optimizers keep their state and master weights in full precision.
void check_span(const char* operation, const Tensor& parameter, const Tensor& other) {
  SHERD_CHECK(parameter.dtype() == DType::f32 || parameter.dtype() == DType::f64,
              "{}: parameters must be fp32 or fp64, got {}", operation, parameter.describe());
  check_same(operation, parameter, other);
  SHERD_CHECK(parameter.is_contiguous() && other.is_contiguous(),
              "{}: parameter {} and its state must be contiguous", operation, parameter.describe());
  SHERD_CHECK(
      parameter.device() == other.device(),
      "{}: parameter {} lies in the memory of {}, its gradient or state in that of {}; they "
      "are updated where they lie together",
      operation, parameter.describe(), name_of(parameter.device()), name_of(other.device()));
}

arguments::AdamWScalars scalars_of(const AdamWStep& step) {
  const auto steps = static_cast<double>(step.step);
  return {step.lr, 1.0 - std::pow(step.beta1, steps), std::sqrt(1.0 - std::pow(step.beta2, steps)),
          step.grad_scale};
}

}  // namespace

std::vector<double> adamw_scalars(const AdamWStep& step) {
  const arguments::AdamWScalars scalars = scalars_of(step);
  static_assert(sizeof scalars == kAdamWScalars * sizeof(double));
  return {scalars.lr, scalars.bias_correction1, scalars.sqrt_bias_correction2, scalars.grad_scale};
}

void adamw_update(const Tensor& parameter, const Tensor& grad, const Tensor& exp_avg,
                  const Tensor& exp_avg_sq, const AdamWStep& step, const Tensor& scalars,
                  std::span<const AdamWPart> parts, const Tensor& rounded) {
  using arguments::DecayParts;
  if (parts.size() > DecayParts::kMost) {  // as many as a launch takes, then the rest
    const std::int64_t cut = parts[DecayParts::kMost].begin, end = parameter.numel();
    const auto part = [&](std::int64_t from, std::int64_t to, std::span<const AdamWPart> of) {
      const auto slice = [&](const Tensor& x) { return x.defined() ? x.slice(0, from, to) : x; };
      adamw_update(slice(parameter), slice(grad), slice(exp_avg), slice(exp_avg_sq), step, scalars,
                   of, slice(rounded));
    };
    std::vector<AdamWPart> rest(parts.begin() + DecayParts::kMost, parts.end());
    for (AdamWPart& later : rest) later.begin -= cut;
    part(0, cut, parts.first(DecayParts::kMost));
    return part(cut, end, rest);
  }
  for (const Tensor* other : {&grad, &exp_avg, &exp_avg_sq}) {
    check_span("adamw_update", parameter, *other);
  }
  if (scalars.defined()) {
    SHERD_CHECK(
        scalars.dtype() == DType::f64 && scalars.shape() == Shape{kAdamWScalars} &&
            scalars.is_contiguous() && scalars.device() == parameter.device(),
        "adamw_update: expected scalars f64 [{}] where the parameter lies ({}), got {} ({})",
        kAdamWScalars, name_of(parameter.device()), scalars.describe(), name_of(scalars.device()));
  }
  DecayParts decay;
  for (const AdamWPart& part : parts) {
    SHERD_CHECK(
        part.begin % DecayParts::kUnit == 0 && part.begin < parameter.numel() &&
            (decay.count == 0 ? part.begin == 0
                              : part.begin / DecayParts::kUnit > decay.begin[decay.count - 1]),
        "adamw_update: parts of {} begin at ascending multiples of {}, got {}",
        parameter.describe(), DecayParts::kUnit, part.begin);
    if (part.decays) decay.decays |= std::uint64_t{1} << decay.count;
    decay.begin[decay.count++] = static_cast<std::uint32_t>(part.begin / DecayParts::kUnit);
  }
  if (rounded.defined()) {
    SHERD_CHECK((rounded.dtype() == DType::bf16 || rounded.dtype() == DType::f16) &&
                    rounded.shape() == parameter.shape() && rounded.is_contiguous() &&
                    rounded.device() == parameter.device(),
                "adamw_update: {} rounded to {}: expected as many bf16 or fp16 beside it",
                parameter.describe(), rounded.describe());
    rounded.storage().mark_modified();
  }
  for (const Tensor* written : {&parameter, &exp_avg, &exp_avg_sq}) {
    written->storage().mark_modified();
  }
  Context& context = parameter.context();
  record_kernel(rounded.defined() ? "adamw_rounded" : "adamw", parameter, parameter, grad, exp_avg,
                exp_avg, exp_avg_sq, exp_avg_sq, rounded);
  if (context.is_meta()) return;
  dispatch_master(parameter, [&](auto zero) {
    using T = decltype(zero);
    arguments::AdamWArgs<T> args;
    args.parts = decay;
    if (rounded.defined()) {
      args.rounded = rounded.raw_data();
      args.rounded_type = rounded.dtype();
    }
    args.param = parameter.data<T>();
    args.grad = grad.data<T>();
    args.exp_avg = exp_avg.data<T>();
    args.exp_avg_sq = exp_avg_sq.data<T>();
    args.beta1 = step.beta1;
    args.beta2 = step.beta2;
    args.eps = step.eps;
    args.weight_decay = step.weight_decay;
    args.scalars = scalars_of(step);
    if (scalars.defined())
      args.current = reinterpret_cast<const arguments::AdamWScalars*>(scalars.data<double>());
    SHERD_RUN_KERNEL(parameter, adamw<T>, parameter.numel(), args);
  });
}

void sgd_update(const Tensor& parameter, const Tensor& grad, const Tensor& momentum_buffer,
                const SgdStep& step) {
  check_span("sgd_update", parameter, grad);
  if (step.momentum != 0.0) {
    check_span("sgd_update", parameter, momentum_buffer);
    momentum_buffer.storage().mark_modified();
  }
  parameter.storage().mark_modified();
  Context& context = parameter.context();
  const Tensor momentum = step.momentum != 0.0 ? momentum_buffer : Tensor();
  record_kernel("sgd", parameter, parameter, grad, momentum, momentum);
  if (context.is_meta()) return;
  dispatch_master(parameter, [&](auto zero) {
    using T = decltype(zero);
    arguments::SgdArgs<T> args;
    args.param = parameter.data<T>();
    args.grad = grad.data<T>();
    if (step.momentum != 0.0) args.momentum_buffer = momentum_buffer.data<T>();
    args.lr = step.lr;
    args.momentum = step.momentum;
    args.weight_decay = step.weight_decay;
    args.nesterov = step.nesterov;
    args.grad_scale = step.grad_scale;
    SHERD_RUN_KERNEL(parameter, sgd<T>, parameter.numel(), args);
  });
}

}  // namespace sherd
