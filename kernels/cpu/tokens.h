// SPDX-License-Identifier: Apache-2.0
// Token sequences of a ViT, contiguous [batch, tokens, dim] of T = double, float, bf16 or f16:
// putting the class token in front, adding positions, and pooling. Sums over the batch or over
// tokens run in order of the index, so they do not depend on the thread count.
#pragma once

#include <sherd/kernels/cpu/simd.h>

namespace sherd::cpu {

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
void assemble_tokens(int threads, const AssembleTokens<T>& p);

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
template <typename T>
void assemble_tokens_backward(int threads, const AssembleTokensBackward<T>& p);

struct TokenShape {
  std::int64_t batch = 0;
  std::int64_t tokens = 0;
  std::int64_t dim = 0;
};

// out[b] = mean of in[b, t] over t >= skip; '=' [batch, dim]. skip < tokens.
template <typename T>
void mean_tokens(int threads, const TokenShape& s, std::int64_t skip, const T* in, T* out);
// grad_in '=' grad_out / (tokens - skip), zero for the skipped tokens.
template <typename T>
void mean_tokens_backward(int threads, const TokenShape& s, std::int64_t skip, const T* grad_out,
                          T* grad_in);

// out[b] = in[b, token]; '=' [batch, dim].
template <typename T>
void select_token(int threads, const TokenShape& s, std::int64_t token, const T* in, T* out);
// grad_in '=' grad_out at the token, zero elsewhere.
template <typename T>
void select_token_backward(int threads, const TokenShape& s, std::int64_t token, const T* grad_out,
                           T* grad_in);

}  // namespace sherd::cpu
