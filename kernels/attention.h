// SPDX-License-Identifier: Apache-2.0
// Scaled dot-product attention, softmax(scale q kᵀ) v for each batch entry and head. The matrix of
// scores exists only for a block of query rows of one head at a time (the idea of FlashAttention,
// Dao et al., 2022): forward keeps the log-sum-exp of each row and backward recomputes the rest.
//
// On cuda ContextOptions::attention says whose kernels compute it. What cuDNN cannot do is an
// Error. Its workspace is known on the GPU alone: on a meta context that stands for one, cuDNN's
// attention is an Error too, so a step with it runs but cannot be planned.
#pragma once

#include <sherd/runtime/tensor.h>

namespace sherd {

struct AttentionOutput {
  Tensor output;  // [B, N, H, D], contiguous
  Tensor lse;     // [B, H, N], fp32 (fp64 for fp64)
};

// query [B, N, H, D]; key, value [B, M, H, D]; views with a contiguous last dimension are read in
// place.
SHERD_API AttentionOutput attention_forward(const Tensor& query, const Tensor& key,
                                            const Tensor& value, double scale);

// Writes (=) into grad_query, grad_key, grad_value: tensors or views shaped like query, key, value,
// in storage that no input has.
SHERD_API void attention_backward(const Tensor& grad_output, const Tensor& query, const Tensor& key,
                                  const Tensor& value, const AttentionOutput& forward, double scale,
                                  const Tensor& grad_query, const Tensor& grad_key,
                                  const Tensor& grad_value);

// Throws, and says what to change, where these kernels are not for this device or not in this
// build: cuDNN's need -Dcudnn and compute on cuda alone.
SHERD_API void require_attention(AttentionKernels kernels, Device device);

}  // namespace sherd
