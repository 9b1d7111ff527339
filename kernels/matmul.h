// SPDX-License-Identifier: Apache-2.0
// Matrix products. fp32 and bf16 run in oneDNN where the build has it, else in Eigen; fp64 always
// in Eigen; fp16 (and bf16 without oneDNN) computes in fp32 and rounds once. Sums are fp32 for all
// three, and the gradients of a weight and of a bias keep them so.
//
// Note [Matrix products and threads]
// Unlike every other kernel, a product may add in another order with another thread count, so
// results are reproducible bit for bit at a given thread count, which is logged and stored with a
// run.
#pragma once

#include <sherd/kernels/activation.h>
#include <sherd/runtime/tensor.h>

namespace sherd {

// op(a) [m, k] times op(b) [k, n], where op transposes if asked; both of rank 2, same type.
SHERD_API Tensor matmul(const Tensor& a, const Tensor& b, bool transpose_a = false,
                        bool transpose_b = false);

// activation(input weightᵀ + bias): input [..., K], weight [N, K] or [N, ...] with K elements in
// its other dimensions, bias [N] or undefined → [..., N]. Bias and activation are applied inside
// the product where the library can.
SHERD_API Tensor linear_forward(const Tensor& input, const Tensor& weight, const Tensor& bias,
                                Activation activation = Activation::none);
// grad_output [..., N], weight [N, K] or [N, ...] → [..., K]
SHERD_API Tensor linear_backward_input(const Tensor& grad_output, const Tensor& weight);
// grad_output [..., N], input [..., K] → [N, K] of fp32 (fp64 for fp64); or `out` where one is
// given to be written (=): of that type, contiguous, [N, K] or [N, ...]
SHERD_API Tensor linear_backward_weight(const Tensor& grad_output, const Tensor& input,
                                        const Tensor& out = {});
// grad_output [..., N] → [N] of fp32 (fp64 for fp64), summed over fixed blocks of rows
SHERD_API Tensor linear_backward_bias(const Tensor& grad_output);

// The best rate, in FLOP/s, of `repeats` square products of this size: what a training step's rate
// is compared with.
SHERD_API double measure_matmul_rate(Context& context, DType dtype, std::int64_t size, int repeats);

}  // namespace sherd
