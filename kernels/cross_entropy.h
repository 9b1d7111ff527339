// SPDX-License-Identifier: Apache-2.0
// Softmax cross-entropy. Targets are class labels, smoothed as PyTorch does it, (1 - s) one_hot + s
// / classes, or probabilities ("soft targets", as mixup makes them). Computed in fp32 (fp64 for
// fp64).
#pragma once

#include <sherd/runtime/tensor.h>

namespace sherd {

struct CrossEntropyTarget {
  Tensor labels = {};            // i64 [rows], or undefined
  Tensor probabilities = {};     // [rows, classes] of fp32 (fp64 for fp64 logits), or undefined
  double label_smoothing = 0.0;  // for labels
};

struct CrossEntropyOutput {
  Tensor row_loss;  // [rows], fp32 (fp64 for fp64)
  Tensor lse;       // [rows], log-sum-exp of the logits
};

// logits [rows, classes]
SHERD_API CrossEntropyOutput cross_entropy_forward(const Tensor& logits,
                                                   const CrossEntropyTarget& target);
// grad_logits = (softmax - target) * grad_loss[0] * factor
SHERD_API Tensor cross_entropy_backward(const Tensor& grad_loss, const Tensor& logits,
                                        const CrossEntropyTarget& target, const Tensor& lse,
                                        double factor);

// How many rows have their largest logit at the label (ties: the lowest index; NaN: never right).
SHERD_API std::int64_t count_correct(const Tensor& logits, const Tensor& labels);

}  // namespace sherd
