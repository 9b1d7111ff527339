// SPDX-License-Identifier: Apache-2.0
// Optimizer steps over contiguous spans of n elements of T = double or float. Each works in place,
// and gives an element the same bits wherever the span is cut. Hyperparameters are doubles; what
// PyTorch computes from them in Python's doubles is computed in doubles here too, then rounded to
// T.
#pragma once

#include <sherd/kernels/arguments/types.h>

namespace sherd::arguments {

// What changes from step to step.
struct AdamWScalars {
  double lr = 0;
  double bias_correction1 = 1;       // 1 - beta1^step, the first step being 1
  double sqrt_bias_correction2 = 1;  // sqrt(1 - beta2^step)
  double grad_scale = 1;
};

// Parts of a flat span, one after the other, of which some have no weight decay: one launch updates
// all parameters of a shard. Part i begins at element kUnit * begin[i].
struct DecayParts {
  static constexpr int kMost = 64;
  static constexpr std::int64_t kUnit = 16;  // FlatLayout's alignment
  int count = 0;                             // 0: one part that decays
  std::uint32_t begin[kMost] = {};           // ascending from 0
  std::uint64_t decays = 0;                  // bit i: part i does

  constexpr bool decays_at(std::int64_t element) const {
    if (count == 0) return true;
    const auto unit = static_cast<std::uint32_t>(element / kUnit);
    int low = 0, high = count;  // the part is in [low, high)
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (begin[middle] <= unit) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return (decays >> low & 1) != 0;
  }
};

// AdamW (Loshchilov and Hutter, 2019) in PyTorch's order of operations, with g = grad_scale * grad:
//   param *= 1 - lr weight_decay
//   exp_avg = beta1 exp_avg + (1 - beta1) g;  exp_avg_sq = beta2 exp_avg_sq + (1 - beta2) g g
//   param -= (lr / bias_correction1) exp_avg / (sqrt(exp_avg_sq) / sqrt_bias_correction2 + eps)
template <typename T>
struct AdamWArgs {
  T* param = nullptr;
  const T* grad = nullptr;
  T* exp_avg = nullptr;
  T* exp_avg_sq = nullptr;
  // Optional '=' the new parameters rounded to rounded_type, bf16 or f16.
  void* rounded = nullptr;
  DType rounded_type = DType::bf16;
  double beta1 = 0;
  double beta2 = 0;
  double eps = 0;
  double weight_decay = 0;
  DecayParts parts;
  AdamWScalars scalars;
  // Optional, read instead of `scalars` where the kernel runs: a captured CUDA graph is replayed
  // with other values.
  const AdamWScalars* current = nullptr;
};

// The factors of the update in T.
template <typename T>
struct AdamWFactors {
  T grad_scale, decay, beta1, rest1, beta2, rest2, eps, step, correction2;
};
template <typename T>
constexpr AdamWFactors<T> adamw_factors(const AdamWArgs<T>& args, const AdamWScalars& scalars) {
  return {static_cast<T>(scalars.grad_scale),
          static_cast<T>(1 - scalars.lr * args.weight_decay),
          static_cast<T>(args.beta1),
          static_cast<T>(1 - args.beta1),
          static_cast<T>(args.beta2),
          static_cast<T>(1 - args.beta2),
          static_cast<T>(args.eps),
          static_cast<T>(scalars.lr / scalars.bias_correction1),
          static_cast<T>(scalars.sqrt_bias_correction2)};
}

// Stochastic gradient descent as PyTorch has it (no dampening), with g = grad_scale * grad:
//   g += weight_decay param;  momentum_buffer = momentum momentum_buffer + g
//   g = nesterov ? g + momentum momentum_buffer : momentum_buffer;  param -= lr g
template <typename T>
struct SgdArgs {
  T* param = nullptr;
  const T* grad = nullptr;
  T* momentum_buffer = nullptr;  // null: no momentum; zeros before the first step
  double lr = 0;
  double momentum = 0;
  double weight_decay = 0;
  double grad_scale = 1;
  bool nesterov = false;
};

}  // namespace sherd::arguments
