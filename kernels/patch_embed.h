// SPDX-License-Identifier: Apache-2.0
// Patch embedding: a convolution whose kernel equals its stride. On cuda its kernels read patches
// where they lie in the images; elsewhere the matrix of patches is scratch memory of a product.
#pragma once

#include <sherd/kernels/tokens.h>
#include <sherd/runtime/tensor.h>

namespace sherd {

// images [B, C, T, H, W] (or [B, C, H, W], T = 1), weight [D, K] or [D, ...] with K = C*pt*ph*pw
// elements in its other dimensions, bias [D] or undefined, all of one type → [B, count, D]
SHERD_API Tensor patch_embed_forward(const Tensor& images, const Tensor& weight, const Tensor& bias,
                                     const PatchSize& patch);
// grad_output [B, count, D] → [D, K] of fp32 (fp64 for fp64); or `out` where one is given to be
// written (=): of that type, contiguous, [D, K] or [D, ...]
SHERD_API Tensor patch_embed_backward_weight(const Tensor& grad_output, const Tensor& images,
                                             const PatchSize& patch, const Tensor& out = {});

}  // namespace sherd
