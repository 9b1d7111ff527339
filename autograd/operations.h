// SPDX-License-Identifier: Apache-2.0
// The differentiable operations. Each computes through kernels/ and records a node on the context's
// current tape when one of its inputs is on it. Shapes: B batch, N tokens, D features, H heads.
#pragma once

#include <sherd/autograd/variable.h>
#include <sherd/kernels/activation.h>
#include <sherd/kernels/cross_entropy.h>
#include <sherd/kernels/tokens.h>

#include <string>

namespace sherd {

SHERD_API Variable add(const Variable& a, const Variable& b);  // same shape
SHERD_API Variable scale(const Variable& x, double factor);
SHERD_API Variable cast(const Variable& x, DType dtype);
SHERD_API Variable reshape(const Variable& x, const Shape& shape);
SHERD_API Variable permute(const Variable& x, std::initializer_list<int> order);

SHERD_API Variable matmul(const Variable& a, const Variable& b);  // [m, k] [k, n]
// input [..., K], weight [N, K] or [N, ...] with K elements in its other dimensions (a
// convolution's kernel), bias [N] or an empty Variable → [..., N]
SHERD_API Variable linear(const Variable& input, const Variable& weight, const Variable& bias);
SHERD_API Variable activate(const Variable& input, Activation activation);
// activate(linear(...)), whose backward takes the bias' gradient along with the activation's.
SHERD_API Variable linear(const Variable& input, const Variable& weight, const Variable& bias,
                          Activation activation);
// The same for evaluation: in one product where there is no tape. The library's activation rounds
// differently from activate(), so training must not mix the two.
SHERD_API Variable linear_activation(const Variable& input, const Variable& weight,
                                     const Variable& bias, Activation activation);

// Over the last dimension; weight and bias [D].
SHERD_API Variable layer_norm(const Variable& input, const Variable& weight, const Variable& bias,
                              double eps);
// {a + b, layer_norm(a + b)}, in one pass over memory.
struct SumAndNorm {
  Variable sum, norm;
};
SHERD_API SumAndNorm add_layer_norm(const Variable& a, const Variable& b, const Variable& weight,
                                    const Variable& bias, double eps);

// query [B, N, H, D], key and value [B, M, H, D] → [B, N, H, D]
SHERD_API Variable attention(const Variable& query, const Variable& key, const Variable& value,
                             double scale);
// qkv [B, N, 3*H*D] as one projection gives it (q, then k, then v, head by head) → [B, N, H*D]
SHERD_API Variable attention_packed(const Variable& qkv, std::int64_t heads, double scale);

// Mean over rows (weighted by 1 / `rows_total`, or by the row count when that is 0): a scalar. The
// total differs from the row count when one optimizer step is split over several forward passes.
SHERD_API Variable cross_entropy(const Variable& logits, const CrossEntropyTarget& target,
                                 std::int64_t rows_total = 0);

SHERD_API Variable patchify(const Variable& images, const PatchSize& patch);
// linear(patchify(images, patch), weight, bias), which keeps the images for backward, not the
// patches: a convolution whose kernel [D, C, ph, pw] (or [D, C, pt, ph, pw]) equals its stride.
SHERD_API Variable patch_embed(const Variable& images, const Variable& weight, const Variable& bias,
                               const PatchSize& patch);
SHERD_API Variable assemble_tokens(const Variable& patches, const Variable& class_token,
                                   const Variable& position);  // class_token may be empty
SHERD_API Variable select_token(const Variable& tokens, std::int64_t index);
SHERD_API Variable mean_tokens(const Variable& tokens, std::int64_t first);
SHERD_API Variable sum(const Variable& x);  // of all elements: a scalar

// Random numbers are keyed by the context's seed and random position and by `name`, the layer's.
// x's first dimension runs over samples.
SHERD_API Variable dropout(const Variable& x, double drop, const std::string& name);
// residual + x with whole samples of x dropped (stochastic depth).
SHERD_API Variable add_drop_path(const Variable& residual, const Variable& x, double drop,
                                 const std::string& name);

}  // namespace sherd
