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

// logits [rows, classes]. A label that is not in [0, classes) is an error; on cuda, where to look
// would be to wait for the device in every step, it makes its row's loss and gradient NaN, and
// check_labels is for who finds one.
SHERD_API CrossEntropyOutput cross_entropy_forward(const Tensor& logits,
                                                   const CrossEntropyTarget& target);
// grad_logits = (softmax - target) * grad_loss[0] * factor
SHERD_API Tensor cross_entropy_backward(const Tensor& grad_loss, const Tensor& logits,
                                        const CrossEntropyTarget& target, const Tensor& lse,
                                        double factor);

// Throws where a label (i64) is not in [0, classes), and says which. Waits for the device.
SHERD_API void check_labels(const Tensor& labels, std::int64_t classes);

// How many rows have their largest logit at the label (ties: the lowest index; NaN: never right).
// Checks the labels, and waits for the device.
SHERD_API std::int64_t count_correct(const Tensor& logits, const Tensor& labels);

}  // namespace sherd
