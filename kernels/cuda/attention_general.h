// SPDX-License-Identifier: Apache-2.0
// Attention without tensor cores: any type, any strides, head dimensions up to 256; see
// attention.h.
#pragma once

#include <sherd/kernels/cuda/attention.h>

namespace sherd::cuda::attention {

template <typename T>
void general_forward(Stream& stream, const AttentionShape& shape, AttentionView<const T> q,
                     AttentionView<const T> k, AttentionView<const T> v, AttentionView<T> output,
                     acc_t<T>* lse);

// `delta` [batch, heads, queries] is scratch.
template <typename T>
void general_backward(Stream& stream, const AttentionShape& shape,
                      AttentionView<const T> grad_output, AttentionView<const T> q,
                      AttentionView<const T> k, AttentionView<const T> v,
                      AttentionView<const T> output, const acc_t<T>* lse, AttentionView<T> grad_q,
                      AttentionView<T> grad_k, AttentionView<T> grad_v, acc_t<T>* delta);

// The size of a grid of `blocks` for each head of each sample; throws where CUDA has no such grid.
// (Messages are made in attention_limits.cpp: nvcc cannot read their formatting.)
unsigned grid_blocks(const AttentionShape& shape, std::int64_t blocks);
[[noreturn]] void fail_head_dim(std::int64_t head_dim);

}  // namespace sherd::cuda::attention
