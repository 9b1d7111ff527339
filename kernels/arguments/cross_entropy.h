// SPDX-License-Identifier: Apache-2.0
// Softmax cross-entropy over the rows of contiguous logits [rows, classes] of T = double, float,
// bf16 or f16, computed in the arithmetic type.
#pragma once

#include <sherd/kernels/arguments/types.h>

namespace sherd::arguments {

// Targets are either class indices, each in [0, classes), or probabilities. Label smoothing s
// (Szegedy et al., 2016) makes a target t into (1 - s) t + s / classes, as PyTorch does.
template <typename T>
struct CrossEntropy {
  std::int64_t rows = 0;
  std::int64_t classes = 0;
  const T* logits = nullptr;
  const std::int64_t* labels = nullptr;    // [rows], or null and
  const acc_t<T>* soft_targets = nullptr;  // [rows, classes]
  acc_t<T> smoothing = 0;
};

}  // namespace sherd::arguments
