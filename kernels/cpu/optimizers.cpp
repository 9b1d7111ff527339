// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/cpu/elementwise.h>
#include <sherd/kernels/cpu/optimizers.h>
#include <sherd/kernels/cpu/vector_loop.h>

namespace sherd::cpu {
namespace {

// Rounded: bf16 or f16 where a rounded copy is asked for, else T.
template <typename T, typename Rounded>
void adamw_rounding_to(int threads, std::int64_t n, const AdamWArgs<T>& args) {
  T* const param = args.param;
  const T* const grad = args.grad;
  T* const exp_avg = args.exp_avg;
  T* const exp_avg_sq = args.exp_avg_sq;
  auto* const rounded = static_cast<Rounded*>(args.rounded);
  const arguments::AdamWFactors<T> f =
      arguments::adamw_factors(args, args.current != nullptr ? *args.current : args.scalars);
  parallel_vectors<T>(threads, n, [=](std::int64_t i, int count) {
    const Vec<T> g = load<T>(grad + i, count) * f.grad_scale;
    const Vec<T> p = load<T>(param + i, count) * f.decay;
    const Vec<T> m = load<T>(exp_avg + i, count) * f.beta1 + g * f.rest1;
    const Vec<T> v = load<T>(exp_avg_sq + i, count) * f.beta2 + (g * f.rest2) * g;
    const Vec<T> denominator = vsqrt(v) / f.correction2 + f.eps;
    const Vec<T> updated = p - m * f.step / denominator;
    store<T>(exp_avg + i, m, count);
    store<T>(exp_avg_sq + i, v, count);
    store<T>(param + i, updated, count);
    if constexpr (!std::is_same_v<Rounded, T>) {
      if constexpr (std::is_same_v<T, float>) {
        store<Rounded>(rounded + i, updated, count);
      } else {
        T numbers[kLanes<T>];
        store<T>(numbers, updated);
        cast<T, Rounded>(1, count, numbers, rounded + i);
      }
    }
  });
}

}  // namespace

template <typename T>
void adamw(int threads, std::int64_t n, const AdamWArgs<T>& args) {
  using arguments::DecayParts;
  const DecayParts& parts = args.parts;
  for (int i = 0; i < parts.count; ++i) {
    const std::int64_t begin = DecayParts::kUnit * parts.begin[i];
    const std::int64_t end = i + 1 < parts.count ? DecayParts::kUnit * parts.begin[i + 1] : n;
    AdamWArgs<T> part = args;
    part.parts.count = 0;
    part.param += begin;
    part.grad += begin;
    part.exp_avg += begin;
    part.exp_avg_sq += begin;
    if (part.rounded != nullptr) part.rounded = static_cast<bf16*>(part.rounded) + begin;
    if ((parts.decays >> i & 1) == 0) part.weight_decay = 0;
    adamw(threads, end - begin, part);
  }
  if (parts.count > 0) return;
  if (args.rounded == nullptr) return adamw_rounding_to<T, T>(threads, n, args);
  if (args.rounded_type == DType::bf16) return adamw_rounding_to<T, bf16>(threads, n, args);
  adamw_rounding_to<T, f16>(threads, n, args);
}

template <typename T>
void sgd(int threads, std::int64_t n, const SgdArgs<T>& args) {
  T* const param = args.param;
  const T* const grad = args.grad;
  T* const buffer = args.momentum_buffer;
  const T grad_scale = static_cast<T>(args.grad_scale);
  const T lr = static_cast<T>(args.lr);
  const T momentum = static_cast<T>(args.momentum);
  const T decay = static_cast<T>(args.weight_decay);
  const bool nesterov = args.nesterov;
  parallel_vectors<T>(threads, n, [=](std::int64_t i, int count) {
    const Vec<T> p = load<T>(param + i, count);
    Vec<T> g = load<T>(grad + i, count) * grad_scale;
    if (decay != 0) g = g + p * decay;
    if (buffer != nullptr) {
      const Vec<T> b = load<T>(buffer + i, count) * momentum + g;
      store<T>(buffer + i, b, count);
      g = nesterov ? g + b * momentum : b;
    }
    store<T>(param + i, p - g * lr, count);
  });
}

template void adamw<double>(int, std::int64_t, const AdamWArgs<double>&);
template void adamw<float>(int, std::int64_t, const AdamWArgs<float>&);
template void sgd<double>(int, std::int64_t, const SgdArgs<double>&);
template void sgd<float>(int, std::int64_t, const SgdArgs<float>&);

}  // namespace sherd::cpu
