// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/cpu/optimizers.h>
#include <sherd/kernels/cpu/vector_loop.h>

namespace sherd::cpu {
template <typename T>
void adamw(int threads, std::int64_t n, const AdamWArgs<T>& args) {
  T* const param = args.param;
  const T* const grad = args.grad;
  T* const exp_avg = args.exp_avg;
  T* const exp_avg_sq = args.exp_avg_sq;
  const T grad_scale = static_cast<T>(args.grad_scale);
  const T decay = static_cast<T>(1 - args.lr * args.weight_decay);
  const T beta1 = static_cast<T>(args.beta1), rest1 = static_cast<T>(1 - args.beta1);
  const T beta2 = static_cast<T>(args.beta2), rest2 = static_cast<T>(1 - args.beta2);
  const T eps = static_cast<T>(args.eps);
  const T step = static_cast<T>(args.lr / args.bias_correction1);
  const T correction2 = static_cast<T>(args.sqrt_bias_correction2);
  parallel_vectors<T>(threads, n, [=](std::int64_t i, int count) {
    const Vec<T> g = load<T>(grad + i, count) * grad_scale;
    const Vec<T> p = load<T>(param + i, count) * decay;
    const Vec<T> m = load<T>(exp_avg + i, count) * beta1 + g * rest1;
    const Vec<T> v = load<T>(exp_avg_sq + i, count) * beta2 + (g * rest2) * g;
    const Vec<T> denominator = vsqrt(v) / correction2 + eps;
    store<T>(exp_avg + i, m, count);
    store<T>(exp_avg_sq + i, v, count);
    store<T>(param + i, p - m * step / denominator, count);
  });
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
