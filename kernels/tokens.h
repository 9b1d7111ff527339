// SPDX-License-Identifier: Apache-2.0
// Rearrangements of a Vision Transformer: images to patches, patches to tokens, tokens to a
// feature.
#pragma once

#include <sherd/runtime/tensor.h>

namespace sherd {

// A patch's extent over (frames, height, width).
struct PatchSize {
  std::int64_t frames = 1, height = 1, width = 1;
};

// images [B, C, T, H, W] (or [B, C, H, W], T = 1) → patches [B, count, C*pt*ph*pw], whose columns
// have the order of a convolution's flattened weight, so that patch embedding is a matrix product.
SHERD_API Tensor patchify(const Tensor& images, const PatchSize& patch);
// The inverse permutation, which is also the gradient.
SHERD_API Tensor unpatchify(const Tensor& patches, const Shape& images, const PatchSize& patch);

// concat(class_token, patches) + position: patches [B, N, D], class_token [1, 1, D] or undefined,
// position [1, N (+1), D] → [B, N (+1), D]
SHERD_API Tensor assemble_tokens(const Tensor& patches, const Tensor& class_token,
                                 const Tensor& position);
struct TokenGradients {
  Tensor patches;
  Tensor class_token, position;  // of fp32 (fp64 for fp64)
};
SHERD_API TokenGradients assemble_tokens_backward(const Tensor& grad_output, bool has_class_token);

// tokens [B, N, D] → [B, D]: token `index`, or the mean of the tokens from `first` on.
SHERD_API Tensor select_token(const Tensor& tokens, std::int64_t index);
SHERD_API Tensor select_token_backward(const Tensor& grad_output, std::int64_t count,
                                       std::int64_t index);
SHERD_API Tensor mean_tokens(const Tensor& tokens, std::int64_t first);
SHERD_API Tensor mean_tokens_backward(const Tensor& grad_output, std::int64_t count,
                                      std::int64_t first);

}  // namespace sherd
