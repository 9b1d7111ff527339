// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sherd/kernels/arguments/tokens.h>

namespace sherd {

class Stream;

namespace cuda {

using arguments::acc_t;
using arguments::AssembleTokens;
using arguments::AssembleTokensBackward;
using arguments::TokenShape;

template <typename T>
void assemble_tokens(Stream& stream, const AssembleTokens<T>& p);

template <typename T>
void assemble_tokens_backward(Stream& stream, const AssembleTokensBackward<T>& p);

// out[b] = mean of in[b, t] over t >= skip; '=' [batch, dim]. skip < tokens.
template <typename T>
void mean_tokens(Stream& stream, const TokenShape& s, std::int64_t skip, const T* in, T* out);
// grad_in '=' grad_out / (tokens - skip), zero for the skipped tokens.
template <typename T>
void mean_tokens_backward(Stream& stream, const TokenShape& s, std::int64_t skip, const T* grad_out,
                          T* grad_in);

// out[b] = in[b, token]; '=' [batch, dim].
template <typename T>
void select_token(Stream& stream, const TokenShape& s, std::int64_t token, const T* in, T* out);
// grad_in '=' grad_out at the token, zero elsewhere.
template <typename T>
void select_token_backward(Stream& stream, const TokenShape& s, std::int64_t token,
                           const T* grad_out, T* grad_in);

}  // namespace cuda
}  // namespace sherd
