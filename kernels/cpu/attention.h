// SPDX-License-Identifier: Apache-2.0
// Scaled dot-product attention, softmax(scale * q k^T) v, for T = double, float, bf16 or f16,
// without a matrix of all queries by all keys: queries and keys are taken in blocks, the backward
// pass computes the probabilities again from `lse`, the logarithm of each row's sum of exponentials
// (Dao et al., FlashAttention, 2022; online softmax: Milakov and Gimelshein, 2018). Arithmetic is
// acc_t<T>; only what is stored is rounded to T.
//
// Heads of one sample are independent tasks, each computed wholly by one thread, so results do not
// depend on the thread count.
#pragma once

#include <sherd/kernels/cpu/simd.h>

#include <cstddef>
#include <cstdint>

namespace sherd::cpu {

// Element (sample b, token n, head h, channel d) is data[b * batch_stride + n * token_stride +
// h * head_stride + d], so queries, keys and values may be views of one packed [B, N, 3, H, D].
template <typename T>
struct AttentionView {
  T* data = nullptr;
  std::int64_t batch_stride = 0;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;
};

// All sizes at least 1. Queries and keys may differ in number (attention pooling).
struct AttentionShape {
  std::int64_t batch = 1;
  std::int64_t heads = 1;
  std::int64_t queries = 1;
  std::int64_t keys = 1;
  std::int64_t head_dim = 1;
  double scale = 1;  // usually 1 / sqrt(head_dim)
};

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
