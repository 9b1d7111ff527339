// SPDX-License-Identifier: Apache-2.0
// Token sequences of a ViT, contiguous [batch, tokens, dim] of T = double, float, bf16 or f16:
// putting the class token in front, adding positions, and pooling. Sums over the batch or over
// tokens run in order of the index, so they depend on nothing else.
#pragma once

#include <sherd/kernels/arguments/types.h>

namespace sherd::arguments {

// out = concat(cls, patches) + pos.
template <typename T>
struct AssembleTokens {
  std::int64_t batch = 0;
  std::int64_t patch_tokens = 0;
  std::int64_t dim = 0;
  const T* patches = nullptr;  // [batch, patch_tokens, dim]
  const T* cls = nullptr;      // [dim], or null: no class token
  const T* pos = nullptr;      // [tokens, dim] with tokens = patch_tokens + (cls ? 1 : 0); null: 0
  T* out = nullptr;            // '=' [batch, tokens, dim]
};

template <typename T>
struct AssembleTokensBackward {
  std::int64_t batch = 0;
  std::int64_t patch_tokens = 0;
  std::int64_t dim = 0;
  bool has_cls = false;
  const T* grad_out = nullptr;   // [batch, tokens, dim]
  T* grad_patches = nullptr;     // '=' optional
  acc_t<T>* grad_cls = nullptr;  // '=' optional; the sum over the batch
  acc_t<T>* grad_pos = nullptr;  // '=' optional; the sum over the batch
};

struct TokenShape {
  std::int64_t batch = 0;
  std::int64_t tokens = 0;
  std::int64_t dim = 0;
};

}  // namespace sherd::arguments
