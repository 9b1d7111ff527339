// SPDX-License-Identifier: Apache-2.0
// One pass, one vector of each array a thread: four or five loads under way at once.
#include <sherd/kernels/cuda/optimizers.h>
#include <sherd/kernels/cuda/pack.h>
#include <sherd/kernels/cuda/rounding.h>

#include <cmath>

namespace sherd::cuda {
namespace {

using arguments::AdamWFactors;

constexpr int kThreads = 256;

template <int N, typename Rounded, typename T>
__device__ __forceinline__ void adamw_update(const AdamWArgs<T>& p, const AdamWFactors<T>& f,
                                             std::int64_t i) {
  const Pack<T, N> grad = load<N>(p.grad + i);
  // All elements of a vector are of one part: these begin at multiples of its size.
  const T decay = p.parts.decays_at(i) ? f.decay : T(1);
  Pack<T, N> param = load<N>(p.param + i), exp_avg = load<N>(p.exp_avg + i),
             exp_avg_sq = load<N>(p.exp_avg_sq + i);
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const T g = grad.at[k] * f.grad_scale;
    const T decayed = param.at[k] * decay;
    const T m = exp_avg.at[k] * f.beta1 + g * f.rest1;
    const T v = exp_avg_sq.at[k] * f.beta2 + (g * f.rest2) * g;
    const T denominator = std::sqrt(v) / f.correction2 + f.eps;
    exp_avg.at[k] = m;
    exp_avg_sq.at[k] = v;
    param.at[k] = decayed - m * f.step / denominator;
  }
  store<N>(p.exp_avg + i, exp_avg);
  store<N>(p.exp_avg_sq + i, exp_avg_sq);
  store<N>(p.param + i, param);
  if constexpr (!std::is_same_v<Rounded, T>) {
    auto* const to = static_cast<Rounded*>(p.rounded) + i;
    if constexpr (N == 1) {  // g++ 12 does not compile the other form of it
      *to = Convert<Rounded>{}(param.at[0]);
    } else {
      Pack<Rounded, N> rounded;
#pragma unroll
      for (int k = 0; k < N; ++k) rounded.at[k] = Convert<Rounded>{}(param.at[k]);
      store<N>(to, rounded);
    }
  }
}

// Rounded: bf16 or f16 where a rounded copy is asked for, else T.
template <int V, typename Rounded, typename T>
__global__ void __launch_bounds__(kThreads)
    adamw_kernel(VectorRange range, AdamWArgs<T> p, AdamWFactors<T> factors) {
  if (p.current != nullptr) factors = adamw_factors(p, *p.current);
  const std::int64_t vector = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (vector < range.vectors) adamw_update<V, Rounded>(p, factors, range.head + vector * V);
  if (blockIdx.x > 0) return;
  const std::int64_t i = single_element<V>(range, threadIdx.x);
  if (i >= 0) adamw_update<1, Rounded>(p, factors, i);
}

template <int N, typename T>
__device__ __forceinline__ void sgd_update(const SgdArgs<T>& p, T grad_scale, T lr, T momentum,
                                           T decay, std::int64_t i) {
  const Pack<T, N> grad = load<N>(p.grad + i);
  Pack<T, N> param = load<N>(p.param + i), buffer;
  if (p.momentum_buffer != nullptr) buffer = load<N>(p.momentum_buffer + i);
#pragma unroll
  for (int k = 0; k < N; ++k) {
    T g = grad.at[k] * grad_scale;
    if (decay != 0) g = g + param.at[k] * decay;
    if (p.momentum_buffer != nullptr) {
      buffer.at[k] = buffer.at[k] * momentum + g;
      g = p.nesterov ? g + buffer.at[k] * momentum : buffer.at[k];
    }
    param.at[k] = param.at[k] - g * lr;
  }
  if (p.momentum_buffer != nullptr) store<N>(p.momentum_buffer + i, buffer);
  store<N>(p.param + i, param);
}

template <int V, typename T>
__global__ void __launch_bounds__(kThreads)
    sgd_kernel(VectorRange range, SgdArgs<T> p, T grad_scale, T lr, T momentum, T decay) {
  const std::int64_t vector = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (vector < range.vectors)
    sgd_update<V>(p, grad_scale, lr, momentum, decay, range.head + vector * V);
  if (blockIdx.x > 0) return;
  const std::int64_t i = single_element<V>(range, threadIdx.x);
  if (i >= 0) sgd_update<1>(p, grad_scale, lr, momentum, decay, i);
}

dim3 grid_of(const VectorRange& range) {
  return {static_cast<unsigned>(std::max<std::int64_t>(1, ceil_div(range.vectors, kThreads)))};
}

template <typename Rounded, typename T>
void adamw_rounding_to(Stream& stream, std::int64_t n, const AdamWArgs<T>& p) {
  constexpr int V = kVectorOf<T>;
  int head = elements_before_vectors<V>(p.param, p.grad, p.exp_avg, p.exp_avg_sq,
                                        static_cast<const Rounded*>(p.rounded));
  if (p.parts.count > 0 && head > 0) head = -1;  // vectors would straddle parts
  const VectorRange range = head < 0 ? vector_range<1>(n, 0) : vector_range<V>(n, head);
  const auto kernel = head < 0 ? adamw_kernel<1, Rounded, T> : adamw_kernel<V, Rounded, T>;
  launch(kernel, grid_of(range), dim3(kThreads), 0, native(stream), range, p,
         adamw_factors(p, p.scalars));
}

}  // namespace

template <typename T>
void adamw(Stream& stream, std::int64_t n, const AdamWArgs<T>& args) {
  if (n == 0) return;
  if (args.rounded == nullptr) return adamw_rounding_to<T>(stream, n, args);
  if (args.rounded_type == DType::bf16) return adamw_rounding_to<bf16>(stream, n, args);
  adamw_rounding_to<f16>(stream, n, args);
}

template <typename T>
void sgd(Stream& stream, std::int64_t n, const SgdArgs<T>& p) {
  if (n == 0) return;
  constexpr int V = kVectorOf<T>;
  const int head = elements_before_vectors<V>(p.param, p.grad, p.momentum_buffer);
  const VectorRange range = head < 0 ? vector_range<1>(n, 0) : vector_range<V>(n, head);
  const auto kernel = head < 0 ? sgd_kernel<1, T> : sgd_kernel<V, T>;
  launch(kernel, grid_of(range), dim3(kThreads), 0, native(stream), range, p,
         static_cast<T>(p.grad_scale), static_cast<T>(p.lr), static_cast<T>(p.momentum),
         static_cast<T>(p.weight_decay));
}

template void adamw<double>(Stream&, std::int64_t, const AdamWArgs<double>&);
template void adamw<float>(Stream&, std::int64_t, const AdamWArgs<float>&);
template void sgd<double>(Stream&, std::int64_t, const SgdArgs<double>&);
template void sgd<float>(Stream&, std::int64_t, const SgdArgs<float>&);

}  // namespace sherd::cuda
