// SPDX-License-Identifier: Apache-2.0
// Attention on the CPU. Arithmetic is acc_t<T>; only what is stored is rounded to T. Heads of one
// sample are independent tasks, each computed wholly by one thread, so results do not depend on the
// thread count.
#pragma once

#include <sherd/kernels/arguments/attention.h>
#include <sherd/kernels/cpu/simd.h>

#include <cstddef>
#include <cstdint>

namespace sherd::cpu {

using arguments::AttentionShape;
using arguments::AttentionView;

// Bytes at `workspace` that the calls below overwrite: per thread O((queries + keys) * head_dim).
template <typename T>
std::size_t attention_workspace_bytes(const AttentionShape& shape, int threads, bool backward);

// output '=', lse '=' [batch, heads, queries].
template <typename T>
void attention_forward(const AttentionShape& shape, AttentionView<const T> q,
                       AttentionView<const T> k, AttentionView<const T> v, AttentionView<T> output,
                       acc_t<T>* lse, void* workspace, int threads);

// grad_q, grad_k and grad_v '='. They may be the memory of q, k and v: a head's inputs are read
// before its gradients are written.
template <typename T>
void attention_backward(const AttentionShape& shape, AttentionView<const T> grad_output,
                        AttentionView<const T> q, AttentionView<const T> k,
                        AttentionView<const T> v, AttentionView<const T> output,
                        const acc_t<T>* lse, AttentionView<T> grad_q, AttentionView<T> grad_k,
                        AttentionView<T> grad_v, void* workspace, int threads);

}  // namespace sherd::cpu
