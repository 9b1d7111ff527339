// SPDX-License-Identifier: Apache-2.0
// Scaled dot-product attention, softmax(scale * q k^T) v, for T = double, float, bf16 or f16,
// without a matrix of all queries by all keys: queries and keys are taken in blocks, the backward
// pass computes the probabilities again from `lse`, the logarithm of each row's sum of exponentials
// (Dao et al., FlashAttention, 2022; online softmax: Milakov and Gimelshein, 2018).
#pragma once

#include <sherd/kernels/arguments/types.h>

namespace sherd::arguments {

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

}  // namespace sherd::arguments
