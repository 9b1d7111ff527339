// SPDX-License-Identifier: Apache-2.0
// Attention by cuDNN 9.16 or later, an alternative to the kernels of attention.h and a peer to
// measure them against. bf16 and f16, head dimensions that are multiples of 8, of at most 128, or
// on some GPUs 256; every view's address and strides multiples of 16 bytes. What else a cuDNN or a
// GPU lacks is seen when a plan is made for it, and is an Error. In builds without cuDNN every call
// but the first three is one.
//
// A plan is made on the first call with a shape and strides and kept with the context; that takes
// up to seconds. Bits may differ from those of attention.h, and from one batch size, GPU or cuDNN
// to another, not from run to run: see Note [Attention as cuDNN knows it], also for the workspace
// of backward.
#pragma once

#include <sherd/kernels/arguments/attention.h>
#include <sherd/runtime/context.h>

#include <string>

namespace sherd::cuda {

using arguments::AttentionShape;
using arguments::AttentionView;

bool cudnn_attention_built();
// Of the library that is loaded: "9.19.0"; "none" in a build without cuDNN.
std::string cudnn_version();
// Why cuDNN cannot compute forward and backward of this on the context's GPU, as the end of a
// sentence; empty where it can. Makes the plans of gapless views [B, N, H, D].
std::string cudnn_attention_refuses(Context& context, const AttentionShape& shape, DType dtype);

// The following for T = bf16 and f16, with the views of the calls that they are for.

template <typename T>
std::size_t cudnn_attention_forward_workspace_bytes(Context& context, const AttentionShape& shape,
                                                    AttentionView<const T> q,
                                                    AttentionView<const T> k,
                                                    AttentionView<const T> v,
                                                    AttentionView<T> output);

template <typename T>
std::size_t cudnn_attention_backward_workspace_bytes(
    Context& context, const AttentionShape& shape, AttentionView<const T> grad_output,
    AttentionView<const T> q, AttentionView<const T> k, AttentionView<const T> v,
    AttentionView<const T> output, AttentionView<T> grad_q, AttentionView<T> grad_k,
    AttentionView<T> grad_v);

// On the context's compute stream. output '=', lse '=' [batch, heads, queries]: the natural
// logarithm of each row's sum of exponentials of scaled scores, as everywhere in this tree.
template <typename T>
void cudnn_attention_forward(Context& context, const AttentionShape& shape,
                             AttentionView<const T> q, AttentionView<const T> k,
                             AttentionView<const T> v, AttentionView<T> output, float* lse,
                             void* workspace);

// grad_q, grad_k and grad_v '='. They must not be the memory of an input.
template <typename T>
void cudnn_attention_backward(Context& context, const AttentionShape& shape,
                              AttentionView<const T> grad_output, AttentionView<const T> q,
                              AttentionView<const T> k, AttentionView<const T> v,
                              AttentionView<const T> output, const float* lse,
                              AttentionView<T> grad_q, AttentionView<T> grad_k,
                              AttentionView<T> grad_v, void* workspace);

}  // namespace sherd::cuda
