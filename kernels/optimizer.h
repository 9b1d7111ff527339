// SPDX-License-Identifier: Apache-2.0
// Optimizer updates, in place on flat spans: an element gets the same bits wherever a shard is cut.
// They are computed where the parameter lies: spans in the host's memory beside a GPU by the host.
#pragma once

#include <sherd/runtime/tensor.h>

#include <span>
#include <vector>

namespace sherd {

// AdamW (Loshchilov and Hutter, 2019), in PyTorch's order of operations.
struct AdamWStep {
  double lr, beta1, beta2, eps, weight_decay;
  std::int64_t step;        // 1 for the first update
  double grad_scale = 1.0;  // multiplies the gradient first (clipping, loss scale)
};
// All contiguous, same number of elements and type (fp32 or fp64). With `scalars`, an f64 tensor
// [kAdamWScalars] beside the parameter, what changes from step to step is read from there when the
// update runs, and those members of `step` are ignored: a captured update is replayed so.
//
// With `parts`, the tensors are flat shards, one stretch of a parameter after the other: only parts
// that say so decay, and all are updated at once. With `rounded`, bf16 or fp16 beside the
// parameter, the new values are rounded to it in the same pass.
struct AdamWPart {
  std::int64_t begin;  // ascending from 0, multiples of 16
  bool decays;
};
SHERD_API void adamw_update(const Tensor& parameter, const Tensor& grad, const Tensor& exp_avg,
                            const Tensor& exp_avg_sq, const AdamWStep& step,
                            const Tensor& scalars = {}, std::span<const AdamWPart> parts = {},
                            const Tensor& rounded = {});
// What must stand in `scalars`: it depends on lr, the betas, step and grad_scale.
inline constexpr std::int64_t kAdamWScalars = 4;
SHERD_API std::vector<double> adamw_scalars(const AdamWStep& step);

struct SgdStep {
  double lr, momentum, weight_decay;
  bool nesterov;
  double grad_scale = 1.0;
};
// momentum_buffer starts as zeros; it is undefined when step.momentum is 0.
SHERD_API void sgd_update(const Tensor& parameter, const Tensor& grad,
                          const Tensor& momentum_buffer, const SgdStep& step);

}  // namespace sherd
